//! libFuzzer's way into `targets::wds`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::wds(data));
