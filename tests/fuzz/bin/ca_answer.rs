//! libFuzzer entry point of `targets::ca_answer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::ca_answer(data));
