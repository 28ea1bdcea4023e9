//! libFuzzer entry point of `targets::hello`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::hello(data));
