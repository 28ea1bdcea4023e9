//! libFuzzer entry point of `targets::objects`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::objects(data));
