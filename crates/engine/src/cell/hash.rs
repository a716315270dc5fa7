//! The keyed hash that orders a directory.

use braidfs_format::dentry::{HASH_MAX, HASH_PROBES};
use siphasher::sip::SipHasher13;
use std::hash::Hasher;

/// Position of `name` in a directory: SipHash-1-3 under the volume's key, 63 bits, above the cookies of `.` and `..`.
/// Keyed so that nobody can aim names at one bucket.
pub fn name_hash(key: &[u8; 16], name: &[u8]) -> u64 {
    let mut h = SipHasher13::new_with_key(key);
    h.write(name);
    (h.finish() >> 1).clamp(3, HASH_MAX - HASH_PROBES)
}
