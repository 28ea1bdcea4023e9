//! libFuzzer entry point of `targets::identity`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::identity(data));
