//! libFuzzer target: see `braidfs_fuzz::structures`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| braidfs_fuzz::structures::run(data));
