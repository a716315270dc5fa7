//! libFuzzer target: see `braidfs_fuzz::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| braidfs_fuzz::image::run(data));
