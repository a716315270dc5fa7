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
    fn the_progress_descriptor_of_fsck_is_dropped() {
        assert_eq!(rewritten(&["fsck.braidfs", "-a", "-C0", "x"]), ["braidfs", "fsck", "-a", "-C", "x"]);
        assert_eq!(rewritten(&["braidfs", "ls", "-C0"]), ["braidfs", "ls", "-C0"]);
    }
}
