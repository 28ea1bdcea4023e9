//! libFuzzer's way into `targets::hello`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::hello(data));
