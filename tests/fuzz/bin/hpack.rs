//! libFuzzer entry point of `targets::hpack`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    targets::hpack(data);
});
