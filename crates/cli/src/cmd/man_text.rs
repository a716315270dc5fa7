//! What the manual pages have beside names and options: the help's last part in the sections of man-pages(7), and the text
//! of braidfs(5).

use crate::cmd::man::plain;
use std::fmt::Write;

/// EXIT STATUS, NOTES, EXAMPLES and SEE ALSO of the page of the command `sub` (empty: of `braidfs` itself) that is called
/// `called`, from the part of its help behind the options.
pub fn sections(sub: &str, called: &str, help: &str) -> String {
    let (mut status, mut notes, mut examples) = (String::new(), String::new(), String::new());
    for paragraph in help.split("\n\n") {
        if let Some(codes) = paragraph.strip_prefix("Exit codes:") {
            status =
                codes.trim().trim_end_matches('.').split(", ").fold(String::new(), |out, code| out + &exit_code(code));
        } else if paragraph.starts_with("Example") {
            paragraph.lines().skip(1).for_each(|line| examples += &example(line, sub, called));
        } else {
            notes += &note(paragraph);
        }
    }
    if status.is_empty() {
        status = exit_code("0 it was done") + &exit_code("1 it failed, or wrong usage");
    }
    let mut out = format!(".SH \"EXIT STATUS\"\n{status}");
    for (title, text) in [("NOTES", notes), ("EXAMPLES", examples)] {
        if !text.is_empty() {
            out += &format!(".SH {title}\n{text}");
        }
    }
    out + &format!(".SH \"SEE ALSO\"\n{}\n", see_also(sub, called))
}

/// `16 wrong usage` as a tagged paragraph; what goes on from the code before has no number.
fn exit_code(text: &str) -> String {
    match text.split_once(' ') {
        Some((code, what)) if code.bytes().all(|b| b.is_ascii_digit()) => {
            format!(".TP\n\\fB{code}\\fR\n{}\n", plain(what))
        }
        _ => format!("{}\n", plain(text)),
    }
}

/// `  braidfs ls disk.img    the root`: the command set off, what it does before it.
fn example(line: &str, sub: &str, called: &str) -> String {
    let line = line.trim();
    let (command, what) = line.split_once("  ").unwrap_or((line, ""));
    let what = what.trim();
    let command = match command.strip_prefix(&format!("braidfs {sub} ")) {
        Some(rest) if called != format!("braidfs-{sub}") && !sub.is_empty() => format!("{called} {rest}"),
        _ => command.to_string(),
    };
    let what = if what.is_empty() { String::new() } else { format!("{}:\n", plain(&upper_first(what))) };
    format!(".PP\n{what}.RS 4\n.EX\n{}\n.EE\n.RE\n", plain(&command))
}

fn upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

/// A paragraph: what is indented in it stays as it is.
fn note(paragraph: &str) -> String {
    let mut out = String::from(".PP\n");
    let mut indented = false;
    for line in paragraph.lines() {
        let now = line.starts_with("  ");
        if now != indented {
            out += if now { ".RS 4\n.EX\n" } else { ".EE\n.RE\n" };
            indented = now;
        }
        let text = if now { &line[2..] } else { line };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}", plain(text));
    }
    if indented {
        out += ".EE\n.RE\n";
    }
    out
}

fn see_also(sub: &str, called: &str) -> String {
    let more: &[&str] = match sub {
        "" => &["mkfs.braidfs(8)", "mount.braidfs(8)", "umount.braidfs(8)", "fsck.braidfs(8)", "braidfs-scrub(8)"],
        "mkfs" => &["mount.braidfs(8)", "braidfs-info(8)", "mkfs(8)", "wipefs(8)"],
        "mount" => &["mount.braidfs(8)", "braidfs-umount(8)", "fstab(5)"],
        "umount" => &["mount.braidfs(8)", "umount(8)"],
        "fsck" => &["braidfs-scrub(8)", "fsck(8)", "fstab(5)"],
        "info" => &["braidfs-dump(8)", "braidfs-probe(8)"],
        "probe" => &["braidfs-info(8)", "blkid(8)", "lsblk(8)", "udev(7)"],
        "image" => &["braidfs-dump(8)", "fsck.braidfs(8)"],
        "dump" => &["braidfs-image(8)", "braidfs-info(8)", "fsck.braidfs(8)"],
        "scrub" => &["fsck.braidfs(8)", "systemd.timer(5)"],
        "stats" => &["braidfs-top(8)", "mount.braidfs(8)", "braidfs-bench(8)"],
        "top" => &["braidfs-stats(8)", "mount.braidfs(8)"],
        "bench" => &["braidfs-stats(8)"],
        "label" => &["mkfs.braidfs(8)", "braidfs-probe(8)"],
        "resize" => &["braidfs-device(8)", "braidfs-info(8)"],
        "device" => &["braidfs-resize(8)", "braidfs-info(8)", "braidfs-tenant(8)"],
        "upgrade" => &["mount.braidfs(8)", "braidfs-stats(8)"],
        "defrag" => &["mount.braidfs(8)", "braidfs-dump(8)"],
        "quota" => &["braidfs-tenant(8)"],
        "tenant" => &["mount.braidfs(8)", "braidfs-quota(8)", "braidfs-device(8)"],
        _ => &["braidfs-ls(8)", "braidfs-cat(8)", "braidfs-cp(8)", "braidfs-rm(8)", "braidfs-mkdir(8)"],
    };
    let own = format!("{called}(8)");
    let all = ["braidfs(8)", "braidfs(5)"].into_iter().chain(more.iter().copied()).filter(|page| *page != own);
    all.map(|page| format!("\\fB{}\\fR({}", plain(&page[..page.len() - 3]), &page[page.len() - 2..]))
        .collect::<Vec<_>>()
        .join(",\n")
}

/// Of braidfs(5), from its second line on.
pub const FORMAT_PAGE: &str = r#".SH NAME
braidfs \- a file system of many independent logs braided into one namespace
.SH DESCRIPTION
A braidfs volume is one or more image files or block devices, or exports of NBD servers
(\fInbd://HOST[:PORT][/EXPORT]\fR, \fInbd+unix:///EXPORT?socket=PATH\fR; with the parameters \fItimeout=SECONDS\fR (30),
\fIconnections=N\fR (4) and \fIlease=SECONDS\fR or \fIlease=off\fR (15)). One machine at a time writes a volume.
It is made of \fIdomains\fR: each has its own journal, allocator, node table and cleaner, so that work in one does not wait for
work in another. All of them are one directory tree.
A process in user space serves it through FUSE; no kernel module is needed but \fIfuse\fR.
.SS What survives a crash
After fsync(2) of a file its data, its attributes and every name on its path survive; after fsync(2) of a directory all
changes of its entries so far; after syncfs(2) everything. Without any of them each domain comes back as of a transaction
not older than the commit interval, and a rename is atomic. No stale or foreign data is ever readable. An unmount loses
nothing.
.PP
sync(2) and syncfs(2) reach the server only of a volume that root mounted, which is mounted through a block device
(\fIfuseblk\fR), on Linux 6.18 or newer. A plain FUSE mount commits every second instead.
.SS Mount options
mount.braidfs(8) has the table of all. Those that change what survives or how fast it is:
.TP
\fBcommit=\fR\fIseconds\fR
Changes are durable after this long at the latest.
.TP
\fBdata=ordered\fR, \fBdata=journal\fR, \fBdata=writeback\fR
With \fBordered\fR, the default, and \fBjournal\fR a commit writes data before the metadata that names it; with
\fBwriteback\fR it does not. With \fBjournal\fR no file is overwritten in place: each changes as a whole with its metadata.
.TP
\fBoverwrite=auto\fR, \fBoverwrite=log\fR
Whether an fsync(2) may write changed blocks where they lie, or always writes them elsewhere.
.TP
\fBtransport=auto\fR, \fBtransport=ring\fR, \fBtransport=dev\fR
Whether requests come through io_uring. The kernel has that turned off unless the module is told (see FILES).
.SS Identity
A volume has a UUID, and may have a label of up to 63 bytes; each of its devices has a UUID of its own (UUID_SUB). Where
the udev rule of this package runs, lsblk(8) shows them, and /dev/disk/by\-uuid and /dev/disk/by\-label have links. Of a
volume of several devices all have the same UUID, and a link names any one of them: name such volumes by their devices.
.SS Limits
mkfs.braidfs(8) makes volumes of 32 MiB to 16 TiB. braidfs\-resize(8) makes them as small as what is on them allows, also
below that, and as large as 64 TiB, but no larger than 1024 times their first size. A volume has at most 16 devices
and 256 domains; a name has at most 255 bytes.
.SH FILES
.TP
.I /etc/fstab
A volume on a block device, and one in an image file, which systemd does not check by itself:
.IP
.EX
LABEL=data     /data  braidfs  noatime,x\-systemd.mount\-timeout=1h  0 2
/srv/disk.img  /mnt   braidfs  nofail,x\-systemd.mount\-timeout=1h,x\-systemd.requires=braidfs\-fsck@srv\-disk.img.service  0 0
.EE
.TP
.I /lib/udev/rules.d/60\-braidfs.rules
Has braidfs\-probe(8) asked for each block device.
.TP
.I braidfs\-scrub@.timer
Reads a mounted volume once a week and compares all checksums:
.IP
.EX
systemctl enable \-\-now \(dqbraidfs\-scrub@$(systemd\-escape \-p /data).timer\(dq
.EE
.TP
.I modprobe.d/braidfs.conf
.EX
options fuse enable_uring=Y
.EE
.IP
lets requests come through io_uring, on Linux 6.14 or newer.
.TP
.I /usr/share/doc/braidfs
The documentation that other pages name: mounted.md, remote.md and more, in text. In /usr/local/share where \fBmake install\fR put it.
.SH NOTES
File data has checksums only on volumes made with \fBmkfs.braidfs \-\-data\-checksums\fR; metadata always has.
The format may still change: a volume of another version is refused with a message that names both.
.SH EXAMPLES
.PP
A volume in an image file, used and checked:
.RS 4
.EX
mkfs.braidfs \-\-size 10G /srv/disk.img
mount \-t braidfs /srv/disk.img /mnt
umount /mnt
fsck.braidfs /srv/disk.img
.EE
.RE
.SH "SEE ALSO"
\fBbraidfs\fR(8),
\fBmkfs.braidfs\fR(8),
\fBmount.braidfs\fR(8),
\fBumount.braidfs\fR(8),
\fBfsck.braidfs\fR(8),
\fBfstab\fR(5),
\fBudev\fR(7)
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_put_into_sections() {
        let help = "Exit codes: 0 it does, 2 it does not, for any reason.\n\n\
            Examples:\n  braidfs probe x          the first\n  braidfs probe -a\n\nText.\n  left-as  is\nMore.";
        let text = sections("probe", "probe.braidfs", help);
        assert!(text.starts_with(
            ".SH \"EXIT STATUS\"\n.TP\n\\fB0\\fR\nit does\n.TP\n\\fB2\\fR\nit does not\nfor any reason\n"
        ));
        assert!(
            text.contains(
                ".PP\nThe first:\n.RS 4\n.EX\nprobe.braidfs x\n.EE\n.RE\n.PP\n.RS 4\n.EX\nprobe.braidfs \\-a\n"
            )
        );
        assert!(text.contains(".SH NOTES\n.PP\nText.\n.RS 4\n.EX\nleft\\-as  is\n.EE\n.RE\nMore.\n"), "{text}");
        assert!(text.contains("\\fBblkid\\fR(8)"), "{text}");
        assert!(sections("ls", "braidfs-ls", "").contains("1\\fR\nit failed"));
    }
}
