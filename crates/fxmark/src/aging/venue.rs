//! A file system that is made once and then mounted and unmounted again and again, so that nothing stays in any cache.

use crate::error::On;
use crate::fs::{Fs, Kernel};
use crate::sys::{self, Extent};
use crate::target::{Lab, Site, Target};
use crate::worker::Place;
use crate::{Error, Result};
use braidfs_vfs::{FileSystem, OpenHow};
use rustix::fd::AsFd;
use std::ffi::{CStr, CString};

/// What ageing asks of a file system beside operations.
pub trait Aged: Fs {
    /// Bytes that its users could still write, as df(1) offers them.
    ///
    /// # Errors
    /// Of statvfs(3).
    fn available(&self) -> Result<u64> {
        Ok(self.space().on("statvfs", c".")?.available)
    }
    /// Where the blocks of a file lie; none where it does not tell.
    ///
    /// # Errors
    /// Of FIEMAP or of opening the file.
    fn extents(&self, path: &CStr) -> Result<Option<Vec<Extent>>>;
}

impl Aged for Kernel {
    fn extents(&self, path: &CStr) -> Result<Option<Vec<Extent>>> {
        let file = self.open(path, OpenHow::READ).on("open", path)?;
        match sys::extents(file.as_fd()) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => Ok(None),
            done => done.on("FIEMAP", path).map(Some),
        }
    }
}

/// How many pieces files lie in.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Layout {
    /// Files that have data, of those looked at.
    pub files: u64,
    /// Runs of blocks side by side, of all of them.
    pub pieces: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Most pieces of one file.
    pub most: u64,
}

impl Layout {
    fn add(&mut self, extents: &[Extent]) {
        let apart =
            |w: &[Extent]| w[0].physical + w[0].length != w[1].physical || w[0].logical + w[0].length != w[1].logical;
        let pieces = extents.windows(2).filter(|w| apart(w)).count() as u64 + u64::from(!extents.is_empty());
        self.files += u64::from(pieces > 0);
        self.pieces += pieces;
        self.bytes += extents.iter().map(|e| e.length).sum::<u64>();
        self.most = self.most.max(pieces);
    }
    /// Pieces of a file on average.
    pub fn per_file(&self) -> f64 {
        self.pieces as f64 / self.files.max(1) as f64
    }
    /// Bytes of a piece on average.
    pub fn piece_bytes(&self) -> f64 {
        self.bytes as f64 / self.pieces.max(1) as f64
    }
}

/// Of these files; none where the file system does not tell.
pub fn layout<F: Aged>(fs: &F, files: &[CString]) -> Result<Option<Layout>> {
    let mut layout = Layout::default();
    for path in files {
        let Some(extents) = fs.extents(path)? else { return Ok(None) };
        layout.add(&extents);
    }
    Ok(Some(layout))
}

/// Where file systems of one kind stand.
pub trait Venue {
    /// Operations of its file systems.
    type F: Aged;
    /// Mounts it, the first time after making it, and drops the kernel's caches.
    ///
    /// # Errors
    /// It cannot be made or mounted.
    fn open(&mut self) -> Result<Self::F>;
    /// Unmounts it.
    ///
    /// # Errors
    /// It cannot be unmounted.
    fn close(&mut self, fs: Self::F) -> Result<()>;
    /// Pieces of these files while it is not mounted, for those that cannot tell while they are.
    ///
    /// # Errors
    /// It cannot be read.
    fn layout_closed(&self, files: &[CString]) -> Result<Option<Layout>>;
    /// Does a sync make all of it durable?
    fn sync_commits(&self) -> bool;
    /// Bytes written to its device so far; none where it has none of its own.
    fn written(&self) -> Option<u64>;
    /// Is nothing cached after it was opened?
    fn is_cold(&self) -> bool;
    /// The commands that made it.
    fn setup(&self) -> Vec<String>;
}

/// Mounted by the kernel, FUSE included.
pub struct Mounted<'a> {
    lab: &'a Lab,
    target: &'a Target,
    site: Option<Site>,
}

impl<'a> Mounted<'a> {
    /// Not made yet.
    pub fn new(lab: &'a Lab, target: &'a Target) -> Self {
        Self { lab, target, site: None }
    }
}

impl Venue for Mounted<'_> {
    type F = Kernel;

    fn open(&mut self) -> Result<Kernel> {
        sys::drop_caches();
        let site = match &mut self.site {
            Some(site) => {
                self.lab.mount_again(self.target, site)?;
                site
            }
            none => none.insert(self.lab.make(self.target)?),
        };
        match &site.place {
            Place::Dir(at) => Kernel::at(at).map_err(|e| Error::io(format!("opening {}", at.display()), e)),
            Place::Library(_) => Err(Error::Other(format!("{} is not mounted", self.target))),
        }
    }
    fn close(&mut self, fs: Kernel) -> Result<()> {
        drop(fs);
        self.site.as_mut().map_or(Ok(()), Site::unmount)
    }
    #[cfg(feature = "braidfs")]
    fn layout_closed(&self, files: &[CString]) -> Result<Option<Layout>> {
        let device = self.site.as_ref().and_then(|s| s.device.as_ref()).filter(|_| *self.target == Target::Braidfs);
        let Some(device) = device else { return Ok(None) };
        let failed = |e| Error::io(format!("looking at the extents on {}", device.display()), e);
        let library = crate::fs::Library::mount(device).map_err(failed)?;
        let found = layout(&library, files)?;
        library.unmount().map_err(failed)?;
        Ok(found)
    }
    #[cfg(not(feature = "braidfs"))]
    fn layout_closed(&self, _: &[CString]) -> Result<Option<Layout>> {
        Ok(None)
    }
    fn sync_commits(&self) -> bool {
        self.site.as_ref().is_none_or(Site::sync_commits)
    }
    fn written(&self) -> Option<u64> {
        let device = self.site.as_ref()?.device.as_ref()?;
        sys::disk_counters(device).map(|d| d.written_bytes)
    }
    fn is_cold(&self) -> bool {
        !matches!(self.target, Target::Dir(_)) || rustix::process::geteuid().is_root()
    }
    fn setup(&self) -> Vec<String> {
        self.site.as_ref().map_or_else(Vec::new, |s| s.setup.clone())
    }
}

#[cfg(feature = "braidfs")]
pub use in_process::InProcess;

#[cfg(feature = "braidfs")]
mod in_process {
    use super::{Aged, Extent, Layout, Venue};
    use crate::error::On;
    use crate::fs::Library;
    use crate::sys;
    use crate::{Error, Result};
    use braidfs_device::{BLOCK_BYTES, CountDevice};
    use braidfs_vfs::call;
    use std::ffi::{CStr, CString};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    impl Aged for Library {
        fn extents(&self, path: &CStr) -> Result<Option<Vec<Extent>>> {
            let found = self.attr(path, true).and_then(|a| call(self.volume.extents(a.ino))).on("extents", path)?;
            // what has no place of its own lies in the inode
            let place = |place: Option<(usize, u64)>| place.map_or(0, |(_, byte)| byte);
            let all = found.iter().map(|e| Extent { logical: e.offset, physical: place(e.place), length: e.len });
            Ok(Some(all.collect()))
        }
    }

    /// The library in this process, on a device that counts.
    pub struct InProcess {
        device: PathBuf,
        counting: Option<Arc<CountDevice>>,
        /// Bytes that earlier mounts wrote.
        before: u64,
    }

    impl InProcess {
        /// Not made yet, on this device or image.
        pub fn new(device: &Path) -> Self {
            Self { device: device.to_path_buf(), counting: None, before: 0 }
        }
        fn failed(&self, what: &str) -> impl Fn(std::io::Error) -> Error {
            let what = format!("{what} {}", self.device.display());
            move |e| Error::io(what.clone(), e)
        }
        fn bytes(&self) -> u64 {
            self.counting.as_ref().map_or(0, |c| c.counters().write_blocks * BLOCK_BYTES as u64)
        }
    }

    impl Venue for InProcess {
        type F = Library;

        fn open(&mut self) -> Result<Library> {
            sys::drop_caches();
            if self.counting.is_none() {
                Library::format(&self.device).map_err(self.failed("making a volume on"))?;
            }
            self.before += self.bytes();
            // a device is claimed by one at a time
            self.counting = None;
            let device = Library::device(&self.device).map_err(self.failed("opening"))?;
            let counting = Arc::new(CountDevice::new(device));
            self.counting = Some(Arc::clone(&counting));
            Library::mount_on(vec![counting]).map_err(self.failed("mounting"))
        }
        fn close(&mut self, fs: Library) -> Result<()> {
            fs.unmount().map_err(self.failed("unmounting"))
        }
        fn layout_closed(&self, _: &[CString]) -> Result<Option<Layout>> {
            Ok(None)
        }
        fn sync_commits(&self) -> bool {
            true
        }
        fn written(&self) -> Option<u64> {
            Some(self.before + self.bytes())
        }
        fn is_cold(&self) -> bool {
            true
        }
        fn setup(&self) -> Vec<String> {
            let made = format!("braidfs::mkfs::format({}) with the defaults", self.device.display());
            vec![made, "braidfs::Volume::mount with the defaults".into()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_what_lies_side_by_side() {
        let at = |logical, physical, length| Extent { logical, physical, length };
        let mut l = Layout::default();
        // two extents side by side, one elsewhere, one behind it after a hole of the file
        l.add(&[at(0, 100, 10), at(10, 110, 10), at(20, 500, 10), at(40, 510, 10)]);
        l.add(&[]);
        assert_eq!(l, Layout { files: 1, pieces: 3, bytes: 40, most: 3 });
        assert_eq!((l.per_file(), l.piece_bytes()), (3.0, 40.0 / 3.0));
    }
}
