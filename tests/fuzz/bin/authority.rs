//! libFuzzer entry point of `targets::authority`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::authority(data));
