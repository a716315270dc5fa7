//! The type of a file, as `st_mode`, inode records and directory entries tell it.

/// File types, as in `st_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory: names of inodes.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A character device.
    Char,
    /// A block device.
    Block,
}

impl FileKind {
    /// The `S_IFMT` bits.
    pub fn mode_bits(self) -> u32 {
        match self {
            Self::Fifo => 0o010_000,
            Self::Char => 0o020_000,
            Self::Dir => 0o040_000,
            Self::Block => 0o060_000,
            Self::File => 0o100_000,
            Self::Symlink => 0o120_000,
            Self::Socket => 0o140_000,
        }
    }
    /// From a whole `st_mode`.
    pub fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o010_000 => Self::Fifo,
            0o020_000 => Self::Char,
            0o040_000 => Self::Dir,
            0o060_000 => Self::Block,
            0o100_000 => Self::File,
            0o120_000 => Self::Symlink,
            0o140_000 => Self::Socket,
            _ => return None,
        })
    }
    /// As `d_type` of getdents(2): the file type bits of a mode, shifted right by 12.
    pub fn d_type(self) -> u8 {
        (self.mode_bits() >> 12) as u8
    }
}
