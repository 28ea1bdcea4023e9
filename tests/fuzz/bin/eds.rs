//! libFuzzer entry point of `targets::eds`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::eds(data));
