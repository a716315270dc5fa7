//! What becomes of each mount option: the table of mount.braidfs(8). [`super::mount_options`] does what it says, and its
//! tests go through it line by line.

/// Who acts on an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Taken by braidfs alone.
    Taken,
    /// The kernel, which it is passed on to.
    Passed,
    /// Taken by braidfs and given to the kernel.
    Both,
    /// Nobody: it is so anyway, or is meant for mount(8), systemd and others.
    Ignored,
    /// It is an error.
    Refused,
}

/// What a remount does with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    /// A remount changes it.
    Changes,
    /// Leaves it as it is.
    Ignored,
    /// Refuses another value than that of the mount.
    Fixed,
    /// Is an error.
    Refused,
}

/// Options that are treated alike.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Names; with `=` and a good value where it has one.
    pub names: &'static [&'static str],
    /// Who acts on them.
    pub how: How,
    /// On a remount.
    pub again: Again,
    /// What they do.
    pub what: &'static str,
}

const fn row(names: &'static [&'static str], how: How, again: Again, what: &'static str) -> Row {
    Row { names, how, again, what }
}

/// All that are known, in the order of the manual page.
pub const TABLE: &[Row] = &[
    row(
        &["ro", "rw"],
        How::Both,
        Again::Changes,
        "Read-only, or writable. A read-only mount writes nothing to the devices, not even to replay a journal; it can \
         become writable by a remount, which then does so.",
    ),
    row(
        &["relatime", "noatime", "strictatime", "norelatime", "nostrictatime", "atime"],
        How::Both,
        Again::Changes,
        "When access times are updated; the default is relatime.",
    ),
    row(&["diratime", "nodiratime"], How::Both, Again::Changes, "Access times of directories, or none."),
    row(
        &["lazytime", "nolazytime"],
        How::Both,
        Again::Changes,
        "Accepted and shown. Times are written with the next commit, as without it.",
    ),
    row(
        &["sync", "async"],
        How::Both,
        Again::Changes,
        "Every change, of data, names or attributes, is durable before the call returns. Slow.",
    ),
    row(
        &["dirsync"],
        How::Both,
        Again::Ignored,
        "Every change of names is durable before the call returns. The kernel changes it on no remount, of any file system.",
    ),
    row(&["suid", "nosuid"], How::Passed, Again::Changes, "Set-user-ID bits count. Only root may say suid."),
    row(&["dev", "nodev"], How::Passed, Again::Changes, "Device files can be opened. Only root may say dev."),
    row(&["exec", "noexec"], How::Passed, Again::Changes, "Programs can be run."),
    row(&["symfollow", "nosymfollow"], How::Passed, Again::Changes, "Symbolic links are followed (Linux 5.10)."),
    row(
        &["allow_other", "noallow_other"],
        How::Passed,
        Again::Ignored,
        "Other users may enter: the default where root mounts; others need user_allow_other in /etc/fuse.conf.",
    ),
    row(
        &["commit=10"],
        How::Taken,
        Again::Changes,
        "Changes are durable after this many seconds at the latest, 1 to 300; 0 is the default: 5, of plain FUSE 1.",
    ),
    row(
        &["data=ordered", "data=journal", "data=writeback"],
        How::Taken,
        Again::Fixed,
        "Order of data and metadata, as in ext4; the default is ordered.",
    ),
    row(
        &["overwrite=auto", "overwrite=log"],
        How::Taken,
        Again::Ignored,
        "auto, the default: an fsync may write changed blocks where they lie, if that costs less, and from then on commits \
         of that file do, too; so a crash may leave some of them old and some new, as on ext4. log: never, except in \
         files that are always overwritten in place (fallocate, chattr +C).",
    ),
    row(
        &["cache=64M"],
        How::Taken,
        Again::Ignored,
        "Memory for data and metadata; by default a quarter of the machine's.",
    ),
    row(
        &["numa=auto", "numa=off"],
        How::Taken,
        Again::Ignored,
        "auto, the default: where the process may use several NUMA nodes, each domain has one of them, in turn, or that of its \
         device where devices are at several nodes. Memory for its pages comes from there first, and background threads that \
         work for it run on its CPUs. off: the kernel decides.",
    ),
    row(
        &["fileflags", "opens"],
        How::Taken,
        Again::Ignored,
        "Append-only and immutable files (chattr +a, +i) can be made, and are guarded. For that the kernel asks for each open \
         of a file or directory and tells of each close; without, neither takes a request. A volume that has, or had, such \
         files is mounted so anyway. Both names mean the same.",
    ),
    row(
        &["cache=back", "cache=through"],
        How::Taken,
        Again::Ignored,
        "back, the default: the kernel collects what programs write. through: it hands on each write at once, which is \
         fewer requests where files are written once and looked at again, and more where they are appended to or \
         overwritten in small pieces.",
    ),
    row(
        &["private", "noprivate"],
        How::Both,
        Again::Ignored,
        "For the mounting user alone, root included, and without checks: no permissions, no access control lists, no \
         extended attributes (but with user_xattr), no export by NFS. Refused with allow_other and whatever else lets \
         others in.",
    ),
    row(
        &["user_xattr", "nouser_xattr"],
        How::Taken,
        Again::Ignored,
        "With private: extended attributes all the same, for one more request with each file that is written. Without \
         private they are always there.",
    ),
    row(
        &["acl", "default_permissions"],
        How::Taken,
        Again::Ignored,
        "The kernel checks permissions and access control lists. It does so anyway, except with private, which refuses these.",
    ),
    row(
        &["discard", "nodiscard"],
        How::Taken,
        Again::Ignored,
        "Whole segments (2 MiB) that become free are discarded (TRIM, hole punch); without, fstrim does that when called.",
    ),
    row(
        &["defrag", "nodefrag"],
        How::Taken,
        Again::Ignored,
        "defrag, the default: files in very many short pieces are made whole in the background, while nothing else goes on and \
         room is plenty. nodefrag: only `braidfs defrag` does that.",
    ),
    row(&["threads=4"], How::Taken, Again::Ignored, "Threads that serve requests; by default one per CPU."),
    row(
        &["fuseblk=auto", "fuseblk=always", "fuseblk=never"],
        How::Taken,
        Again::Ignored,
        "Mount through a block device, so that sync(2) reaches the volume and umount(8) waits until it is closed. auto: \
         where root mounts.",
    ),
    row(
        &["latency=auto", "latency=low", "latency=off"],
        How::Taken,
        Again::Ignored,
        "What is done about the time that wake-ups take, see braidfs-mount(8).",
    ),
    row(
        &["transport=auto", "transport=ring", "transport=dev"],
        How::Taken,
        Again::Ignored,
        "How requests come from the kernel: through io_uring or /dev/fuse, see braidfs-mount(8).",
    ),
    row(
        &["supervise", "supervise=5/600", "nosupervise"],
        How::Taken,
        Again::Ignored,
        "A parent waits for the process that serves the mount and, if it dies, mounts anew at the same place: at most so \
         often within so many seconds (5 and 600 without a value). Files that were open stay dead.",
    ),
    row(
        &["metrics=9100", "metrics=0.0.0.0:9100", "metrics=unix:/run/braidfs.sock"],
        How::Taken,
        Again::Ignored,
        "Where metrics can be fetched as OpenMetrics text (GET /metrics), by anybody who reaches it: a port of this machine \
         alone, an address and a port, or a socket in the file system.",
    ),
    row(
        &["slow=100", "slow=0"],
        How::Taken,
        Again::Ignored,
        "Requests that take longer than so many milliseconds are logged, with where their time went; 0, the default: none are.",
    ),
    row(
        &["log=/var/log/braidfs.log"],
        How::Taken,
        Again::Ignored,
        "Log into this file, a path from / on and not below the mount point, as the option --log-file of \
         braidfs-mount(8). Without it warnings and errors of a mount in the background go to the system's log, as \
         braidfs.",
    ),
    row(
        &["tenant=web"],
        How::Taken,
        Again::Ignored,
        "Mount this tenant by itself, of a volume that is mounted: the device is that of the volume, or its mount point. Of the \
         other options ro, nosuid, nodev and noexec count; else it is as the volume is mounted.",
    ),
    row(
        &["user", "users", "owner", "group"],
        How::Taken,
        Again::Changes,
        "For mount(8), which lets users mount; they imply nosuid and nodev, the first two noexec as well, unless a later \
         option says otherwise. The server then runs as that user, who must be able to read and write the device, \
         and needs fusermount3; it is a plain FUSE mount, which others may enter with allow_other only.",
    ),
    row(&["remount"], How::Taken, Again::Changes, "Change options of what is mounted, see below."),
    row(&["bind"], How::Passed, Again::Changes, "With remount: change the options of this mount point alone."),
    row(
        &["defaults", "nouser", "nousers", "noowner", "nogroup", "loop"],
        How::Ignored,
        Again::Ignored,
        "It is so anyway; an image file gets its loop device by itself.",
    ),
    row(&["loud", "silent", "nomand", "noiversion"], How::Ignored, Again::Ignored, "No effect."),
    row(
        &["nofail"],
        How::Taken,
        Again::Ignored,
        "That a device is not there is no error of mount(8): nothing is mounted, and nothing said.",
    ),
    row(
        &[
            "auto",
            "noauto",
            "_netdev",
            "comment=text",
            "x-systemd.automount",
            "X-mount.mkdir",
            "helper=a",
            "uhelper=a",
            "subtype=a",
        ],
        How::Ignored,
        Again::Ignored,
        "For mount(8), systemd and others: everything that begins with x- or X-.",
    ),
    row(
        &["user_id=0", "group_id=0", "rootmode=40000", "fd=3", "max_read=4096", "blksize=4096"],
        How::Refused,
        Again::Ignored,
        "The kernel's own of FUSE, which mount(8) reads from its table at a remount.",
    ),
    row(&["mand", "iversion"], How::Refused, Again::Refused, "Not supported by FUSE."),
    row(
        &["offset=4096", "sizelimit=4096"],
        How::Refused,
        Again::Refused,
        "A volume begins where its device does. Make a loop device with losetup(8), or use mount(8) with loop, which does.",
    ),
];
