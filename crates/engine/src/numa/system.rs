//! The kernel's calls. A low-level module, with unsafe code: there is no safe wrapper of `mbind`.

use super::Binder;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::sync::{Arc, OnceLock};

/// Binds by the calls of Linux.
#[derive(Debug)]
pub struct System(());

/// `MPOL_PREFERRED` of `linux/mempolicy.h`: from this node, and from the nearest ones where it has nothing left.
const PREFERRED: libc::c_ulong = 1;
/// Bits of a word of a mask of nodes.
const WORD_BITS: u32 = libc::c_ulong::BITS;

impl System {
    /// The one of the process.
    pub fn get() -> Arc<dyn Binder> {
        static SYSTEM: OnceLock<Arc<System>> = OnceLock::new();
        SYSTEM.get_or_init(|| Arc::new(Self(()))).clone()
    }
}

impl Binder for System {
    fn bind_memory(&self, at: usize, bytes: usize, node: u32) -> io::Result<()> {
        let mut mask = vec![0 as libc::c_ulong; (node / WORD_BITS) as usize + 1];
        mask[(node / WORD_BITS) as usize] = 1 << (node % WORD_BITS);
        // one more: the kernel takes the last bit for the one behind
        let bits = mask.len() as libc::c_ulong * libc::c_ulong::from(WORD_BITS) + 1;
        let flags: libc::c_ulong = 0;
        // SAFETY: the kernel reads `bits - 1` bits of the mask, which is as long; a policy changes nothing of what is in
        // memory, and an address that is no mapping is an error.
        let done = unsafe { libc::syscall(libc::SYS_mbind, at, bytes, PREFERRED, mask.as_ptr(), bits, flags) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn bind_thread(&self, cpus: &[u32]) -> io::Result<()> {
        // what the process may may have changed since the nodes were looked at
        let may = sched_getaffinity(Some(rustix::process::getpid()))?;
        Ok(sched_setaffinity(None, &within(cpus, &may))?)
    }
}

/// Those of these CPUs that the process may use; all that it may where these are none.
fn within(cpus: &[u32], may: &CpuSet) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().map(|c| *c as usize).filter(|c| *c < CpuSet::MAX_CPU && may.is_set(*c)).for_each(|c| set.set(c));
    if set.count() > 0 { set } else { *may }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    /// Node 0 there is on every machine; a kernel without NUMA, or one that does not allow it, says so.
    #[test]
    fn the_kernel_understands_what_it_is_told() {
        let bytes = 4 << 20;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).unwrap()
        };
        let refused = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM));
        let system = System::get();
        match system.bind_memory(at as usize, bytes, 0) {
            Ok(()) => {
                // what it says of the mapping
                let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
                let line = maps.lines().find(|l| l.starts_with(&format!("{:x} ", at as usize)));
                // a kernel without NUMA has no such file
                assert!(line.is_none_or(|l| l.contains("prefer")), "{line:?}");
                let nowhere = system.bind_memory(at as usize, bytes, 1023).unwrap_err();
                assert_eq!(nowhere.raw_os_error(), Some(libc::EINVAL), "a node that is not there");
            }
            Err(e) => assert!(refused(&e), "{e}"),
        }
        // SAFETY: mapped above, and nobody else knows it.
        unsafe { munmap(at, bytes).unwrap() };
    }

    #[test]
    fn no_cpu_is_used_that_the_process_may_not() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|c| set.set(*c));
            set
        };
        let may = set(&[1, 2, 3, 1000]);
        assert_eq!(within(&[0, 2, 3, 4, 70_000], &may), set(&[2, 3]));
        assert_eq!(within(&[0, 4], &may), may);
    }

    #[test]
    fn a_thread_stays_where_the_process_may_run() {
        let all = sched_getaffinity(Some(rustix::process::getpid())).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|c| all.is_set(*c)).unwrap() as u32;
        std::thread::spawn(move || {
            let mine = || sched_getaffinity(None).unwrap();
            System::get().bind_thread(&[first, 1023, 70_000]).unwrap();
            assert_eq!((mine().count(), mine().is_set(first as usize)), (1, true));
            // none that it may use: all of them
            System::get().bind_thread(&[70_000]).unwrap();
            assert_eq!(mine(), all);
        })
        .join()
        .unwrap();
    }
}
