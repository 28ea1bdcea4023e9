//! libFuzzer entry point of `targets::mesh_file`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::mesh_file(data));
