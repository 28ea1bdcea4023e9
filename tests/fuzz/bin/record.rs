//! libFuzzer entry point of `targets::record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    targets::record(data);
});
