//! Files that come to be such that the kernel must ask before each `write`, while it is being told of them: their domain becomes
//! tight, an owner gets a limit, a tenant's writes are limited in a second.
//!
//! Each file that the kernel knows loses its attributes then. But an answer may be under way with attributes that are good for long:
//! it was made before, and waits for a device (`-o sync`), or for its thread's turn. Of an inode that the kernel does not know yet a
//! notification is ENOENT, and nothing afterwards says that these attributes are old. So each answer is looked at when it goes
//! out: whether there has been such a change since it was begun ([`Tight::changes`]). What is between that look and the
//! kernel is told again after a moment: it counts as known by then.

use super::*;
use crate::abi::op;
use crate::connections::{ATTR_VALID_OF_ENTRY, listed_len};

/// After so long a file is told of again that is known, and that the kernel says it does not know.
const AGAIN: [Duration; 3] = [Duration::from_millis(2), Duration::from_millis(20), Duration::from_millis(200)];

impl Tight {
    /// How often files have come to be asked about.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.asked.changes.load(Ordering::SeqCst)
    }

    /// There are more such files from now on; before they are told of.
    pub fn more_are_asked(&self) {
        self.asked.changes.fetch_add(1, Ordering::SeqCst);
    }
}

impl BraidFs {
    /// Tells the kernel once more of files that it did not know, on a thread of its own.
    pub(crate) fn tell_again(&self, files: Vec<WireId>) {
        if files.is_empty() {
            return;
        }
        let Some(channel) = self.connections.main() else { return };
        let tell = move || tell_until_known(files, |id| channel.invalidate(*id, false));
        if let Err(e) = run_aside("fuse-again", tell) {
            tracing::warn!(error = %e, "no thread to tell the kernel once more of files that are asked about");
        }
    }
}

/// After a moment tells of files once more that the kernel did not know, and so on for a while; `tell` says whether it knew the one.
pub(crate) fn tell_until_known(mut files: Vec<WireId>, tell: impl Fn(&WireId) -> bool) {
    for wait in AGAIN {
        if files.is_empty() {
            return;
        }
        std::thread::sleep(wait);
        files.retain(|id| !tell(id));
    }
}

/// The attributes in an answer are good for no time.
pub(crate) fn untimed(opcode: u32, out: &mut Answer) {
    let body = out.body_mut();
    match opcode {
        op::LOOKUP | op::CREATE | op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK | op::TMPFILE => untimed_entry(body),
        op::READDIRPLUS => {
            let mut at = 0;
            while let Some(len) = body.get(at..).and_then(listed_len) {
                untimed_entry(&mut body[at..]);
                at += len;
            }
        }
        // of these the first 8 bytes are how long it is good for
        op::GETATTR | op::SETATTR | op::STATX => body.iter_mut().take(8).for_each(|b| *b = 0),
        _ => {}
    }
}

fn untimed_entry(entry: &mut [u8]) {
    if let Some(valid) = entry.get_mut(ATTR_VALID_OF_ENTRY) {
        valid.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn what_the_kernel_does_not_know_yet_is_told_again() {
        let told = RefCell::new(Vec::new());
        let files = (1..=3).map(|n| WireId::new(InodeNo(n), 1)).collect();
        tell_until_known(files, |id| {
            told.borrow_mut().push(id.ino().0);
            // the second when it is told for the second time, the third never
            id.ino().0 == 1 || id.ino().0 == 2 && told.borrow().iter().filter(|n| **n == 2).count() == 2
        });
        assert_eq!(told.into_inner(), [1, 2, 3, 2, 3, 3]);
    }
}
