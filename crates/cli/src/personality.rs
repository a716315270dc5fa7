//! Which command the program's own name asks for, and the argument forms that mkfs(8), mount(8) and fsck(8) use.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Names that people call by hand, and the commands that they are. `mount.braidfs` takes other arguments, from mount(8).
pub const HELPERS: [(&str, &str); 3] =
    [("mkfs.braidfs", "mkfs"), ("umount.braidfs", "umount"), ("fsck.braidfs", "fsck")];

/// Turns `fsck.braidfs -C0 x` into `braidfs fsck -C x` and so on; an ordinary call stays as it is.
pub fn rewrite(mut args: Vec<OsString>) -> Vec<OsString> {
    let Some(own) = args.first() else { return vec!["braidfs".into()] };
    let name = own.as_bytes().rsplit(|&b| b == b'/').next().unwrap_or_default();
    let command = match name {
        b"mkfs.braidfs" => Some("mkfs"),
        b"mount.braidfs" | b"mount.fuse.braidfs" | b"mount.fuseblk.braidfs" => Some("mount.braidfs"),
        b"umount.braidfs" | b"umount.fuse.braidfs" | b"umount.fuseblk.braidfs" => Some("umount"),
        b"fsck.braidfs" => Some("fsck"),
        _ => None,
    };
    // As of e2fsprogs and util-linux. mkfs(8) has other uses for it where there is more.
    if command.is_some() && matches!(&args[1..], [only] if only == "-V" || only == "--version") {
        return vec!["braidfs".into(), "--version".into()];
    }
    // e2fsck's form: the descriptor by itself
    if name == b"fsck.braidfs" {
        let is_number = |a: &OsString| !a.is_empty() && a.as_bytes().iter().all(u8::is_ascii_digit);
        if let Some(at) = args.windows(2).position(|two| two[0] == "-C" && is_number(&two[1])) {
            args.remove(at + 1);
        }
    }
    if let Some(command) = command {
        args[0] = "braidfs".into();
        args.insert(1, command.into());
    }
    if args.get(1).is_some_and(|c| c == "fsck") {
        // fsck(8) hands `-C` on with the descriptor of its progress pipe; we draw our own bar.
        for arg in &mut args[2..] {
            if arg.as_bytes().strip_prefix(b"-C").is_some_and(|n| !n.is_empty() && n.iter().all(u8::is_ascii_digit)) {
                *arg = "-C".into();
            }
        }
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(args: &[&str]) -> Vec<OsString> {
        rewrite(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn names_choose_commands() {
        assert_eq!(rewritten(&["/sbin/mkfs.braidfs", "x"]), ["braidfs", "mkfs", "x"]);
        assert_eq!(rewritten(&["mount.braidfs", "a", "b"]), ["braidfs", "mount.braidfs", "a", "b"]);
        assert_eq!(rewritten(&["umount.braidfs", "b"]), ["braidfs", "umount", "b"]);
        assert_eq!(rewritten(&["./braidfs", "ls", "x"]), ["./braidfs", "ls", "x"]);
        assert_eq!(rewritten(&[]), ["braidfs"]);
    }

    #[test]
    fn helpers_tell_their_version() {
        for name in ["mkfs.braidfs", "/sbin/mount.braidfs", "umount.braidfs", "fsck.braidfs"] {
            assert_eq!(rewritten(&[name, "-V"]), ["braidfs", "--version"], "{name}");
        }
        assert_eq!(rewritten(&["fsck.braidfs", "-V", "x"]), ["braidfs", "fsck", "-V", "x"]);
    }

    #[test]
    fn the_progress_descriptor_of_fsck_is_dropped() {
        assert_eq!(rewritten(&["fsck.braidfs", "-a", "-C0", "x"]), ["braidfs", "fsck", "-a", "-C", "x"]);
        assert_eq!(rewritten(&["fsck.braidfs", "-C", "0", "-f", "x"]), ["braidfs", "fsck", "-C", "-f", "x"]);
        assert_eq!(rewritten(&["braidfs", "ls", "-C0"]), ["braidfs", "ls", "-C0"]);
    }
}
