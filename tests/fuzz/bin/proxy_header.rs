//! libFuzzer entry point of `targets::proxy_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::proxy_header(data));
