//! libFuzzer target: see `braidfs_fuzz::operations`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| braidfs_fuzz::operations::run(data));
