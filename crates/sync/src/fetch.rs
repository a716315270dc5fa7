//! Lines that are asked for before they are needed.
//!
//! What an operation changes often lies in no near cache: with a million files in memory, nearly none of their inodes does. A processor
//! goes on past a read that waits, but not far, and not past an atomic access: so a thread that locks such an inode waits, then
//! for the next of its lines, and so on. Who knows early what will be changed asks for all lines of it at once, and works on meanwhile.
//!
//! This is a low-level module with unsafe code.

/// Asks for the lines of `what` to be written, without waiting for them. Not for what may only be read: others lose the lines.
#[inline(always)]
pub fn to_change<T>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        for line in (0..size_of::<T>()).step_by(LINE) {
            let at = std::ptr::from_ref(what).addr() + line;
            // SAFETY: a prefetch reads and writes nothing, whatever the address; processors without this one take it for none at all.
            // (The compiler's own becomes one for reading, as not all of x86-64 have it.)
            unsafe { std::arch::asm!("prefetchw [{at}]", at = in(reg) at, options(nomem, nostack, preserves_flags)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = what;
}

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

#[cfg(test)]
mod tests {
    use super::to_change;

    #[test]
    fn nothing_is_changed() {
        let bytes = [7u8; 300];
        to_change(&bytes);
        to_change(&());
        assert!(bytes.iter().all(|b| *b == 7));
    }
}
