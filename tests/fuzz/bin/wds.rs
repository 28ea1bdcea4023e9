//! libFuzzer entry point of `targets::wds`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::wds(data));
