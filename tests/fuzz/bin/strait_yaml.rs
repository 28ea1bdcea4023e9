//! libFuzzer entry point of `targets::strait_yaml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::strait_yaml(data));
