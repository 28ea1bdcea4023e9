//! libFuzzer entry point of `targets::http2`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    targets::http2(data);
});
