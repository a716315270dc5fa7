//! libFuzzer target: see `braidfs_fuzz::journal`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| braidfs_fuzz::journal::run(data));
