"""Mount options: what is said (nothing), what the kernel is told, what `sync` and `dirsync` promise, errors."""

import ctypes
import mmap
import os
import stat

from fslib import Skipped
from mount_tests.common import LIBC, check, daemon_only, must, renameat2, root_only, same
from mount_tests.flags import NOATIME, get_flags, set_flags
from mount_tests.helpers import as_installed, crash, helpers_of, loop_device, refuses, shown, silent, small_volume

EXCHANGE, WHITEOUT = 2, 4
AT_FDCWD, AT_SYMLINK_FOLLOW = -100, 0x400


@check
def a_mount_says_nothing(volume, _top):
    daemon_only(volume)
    root_only()
    helper = helpers_of(volume) / "mount.braidfs"
    with small_volume(volume) as v:
        for options in ("rw", "ro", "rw,fuseblk=never,noatime", "rw,sync,_netdev,nofail,x-a,X-b=c,comment=d,user,suid"):
            silent(helper, v.image, v.mnt, "-o", options)
            v.umount()
        silent(v.binary, "mount", v.image, v.mnt)
        silent(v.binary, "umount", v.mnt)
        with loop_device(v.image) as device:
            silent(helper, device, v.mnt, "-n", "-o", "rw")
            v.umount()


@check
def options_reach_the_kernel(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("nodiratime", "lazytime", "sync", "dirsync", "nosuid", "nodev", "noexec", "nosymfollow")
        mount, system = shown(v)
        must({"rw", "nosuid", "nodev", "noexec", "nodiratime", "relatime", "nosymfollow"} <= mount, f"options {mount}")
        must({"rw", "sync", "dirsync", "lazytime"} <= system, f"options {system}")
        v.umount()
        v.mount("ro", "noatime")
        mount, system = shown(v)
        must({"ro", "noatime"} <= mount and "ro" in system, f"options {mount} {system}")


def change_names(top):
    """Changes of names only."""
    for name in ("dir", "gone"):
        (top / name).mkdir()
    for name in ("made", "old", "victim"):
        os.close(os.open(top / name, os.O_CREAT | os.O_WRONLY, 0o644))
    os.link(top / "made", top / "dir" / "linked")
    os.symlink("made", top / "symbolic")
    os.mkfifo(top / "fifo")
    os.rename(top / "old", top / "dir" / "new")
    os.unlink(top / "victim")
    os.rmdir(top / "gone")


def one_change_each(a, b):
    """Each kind of a change of names, in two directories of different domains, one after the other."""
    return {
        "open with O_CREAT": lambda: os.close(os.open(a / "made", os.O_CREAT | os.O_WRONLY, 0o644)),
        "mknod of a file": lambda: os.mknod(a / "node", stat.S_IFREG | 0o600),
        "mkfifo": lambda: os.mkfifo(b / "fifo"),
        "mkdir": lambda: (a / "sub").mkdir(),
        "symlink": lambda: os.symlink("made", b / "symbolic"),
        "link": lambda: os.link(a / "made", b / "linked"),
        "link of a file without a name": lambda: name_a_nameless(a, b / "named"),
        "rename": lambda: os.rename(a / "made", a / "renamed"),
        "rename to another directory": lambda: os.rename(a / "node", b / "node"),
        "rename of a directory": lambda: os.rename(a / "sub", b / "sub"),
        "rename back": lambda: os.rename(b / "sub", a / "sub"),
        "rename that replaces": lambda: os.rename(a / "renamed", b / "fifo"),
        "exchange": lambda: renameat2(a / "sub", b / "symbolic", EXCHANGE),
        "rename that leaves a whiteout": lambda: renameat2(b / "node", a / "over", WHITEOUT),
        "unlink of one of two names": lambda: os.unlink(b / "linked"),
        "unlink of the last name": lambda: os.unlink(b / "named"),
        "rmdir": lambda: os.rmdir(b / "symbolic"),
    }


def name_a_nameless(folder, name):
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # os.link does not follow the link in /proc
        if LIBC.linkat(AT_FDCWD, f"/proc/self/fd/{fd}".encode(), AT_FDCWD, os.fsencode(name), AT_SYMLINK_FOLLOW):
            raise OSError(ctypes.get_errno(), "linkat")
    finally:
        os.close(fd)


def names_in(*folders):
    """Type, number and links of everything, by name."""
    all_of = (path for folder in folders for path in (folder, *folder.iterdir()))
    found = ((path, os.lstat(path)) for path in all_of)
    return {str(path): (stat.S_IFMT(a.st_mode), a.st_ino, a.st_nlink) for path, a in found}


def each_is_durable(volume, option):
    """Each change of names is the last one before a crash: nothing comes after it that would take it along."""
    options = option, "commit=300"
    volume.mount()
    a, b = (volume.mnt / name for name in "ab")
    a.mkdir()
    b.mkdir()
    volume.umount()
    volume.mount(*options)
    for what, change in one_change_each(a, b).items():
        before = names_in(a, b)
        change()
        after = names_in(a, b)
        must(after != before, f"{what}: nothing has changed")
        crash(volume, *options)
        same(names_in(a, b), after, f"after {what} on a mount with {option} and a crash: names")


@check
def dirsync_is_durable_at_once(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        each_is_durable(v, "dirsync")


@check
def names_are_durable_at_once_with_sync(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        each_is_durable(v, "sync")


@check
def without_it_they_are_not(volume, _top):
    """The check above can fail. (Plain FUSE: a sync(2) of another process does not reach it.)"""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("commit=300", "fuseblk=never")
        change_names(v.mnt)
        crash(v)
        same(os.listdir(v.mnt), [], "names after a crash")


@check
def sync_is_durable_at_once(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount()
        content = "short", "room", "copy", "held", "open"
        for name in ("mode", "owner", "times", "flags", "attribute", "without", *content):
            (v.mnt / name).write_bytes(b"before" * 1000)
        os.setxattr(v.mnt / "without", "user.a", b"b")
        v.umount()
        v.mount("sync", "commit=300")
        last = [
            lambda: (v.mnt / "written").write_bytes(b"after" * 5000),
            lambda: os.chmod(v.mnt / "mode", 0o751),
            lambda: os.setxattr(v.mnt / "attribute", "user.a", b"b"),
            lambda: os.truncate(v.mnt / "short", 17),
            lambda: copy(v.mnt / "written", v.mnt / "copy"),
            lambda: allocate(v.mnt / "room", 200_000),
            lambda: os.close(os.open(v.mnt / "open", os.O_WRONLY | os.O_TRUNC)),
            lambda: overwrite(v.mnt / "held", b"AFTER", 3000),
            lambda: os.removexattr(v.mnt / "without", "user.a"),
            lambda: os.chown(v.mnt / "owner", 12, 34),
            lambda: os.utime(v.mnt / "times", ns=(10**18 + 1, 10**18 + 2)),
            lambda: set_flags(v.mnt / "flags", NOATIME),
        ]
        # each as the last one before a crash: nothing comes after it that would take it along
        for step in last:
            step()
            crash(v, "sync", "commit=300")
        same((v.mnt / "written").read_bytes(), b"after" * 5000, "a write")
        same((v.mnt / "mode").stat().st_mode & 0o7777, 0o751, "chmod")
        same(os.getxattr(v.mnt / "attribute", "user.a"), b"b", "setxattr")
        same((v.mnt / "short").read_bytes(), b"beforebeforebefor", "truncate")
        same((v.mnt / "copy").read_bytes()[:25000], b"after" * 5000, "copy_file_range")
        same((v.mnt / "room").stat().st_size, 200_000, "fallocate")
        same((v.mnt / "open").stat().st_size, 0, "O_TRUNC")
        same((v.mnt / "held").read_bytes()[3000:3005], b"AFTER", "an overwrite")
        same(os.listxattr(v.mnt / "without"), [], "removexattr")
        owner, times = (v.mnt / "owner").stat(), (v.mnt / "times").stat()
        same((owner.st_uid, owner.st_gid), (12, 34), "chown")
        same((times.st_atime_ns, times.st_mtime_ns), (10**18 + 1, 10**18 + 2), "utimensat")
        same(get_flags(v.mnt / "flags") & NOATIME, NOATIME, "flags")


def copy(source, target):
    with open(source, "rb") as a, open(target, "r+b") as b:
        left = os.fstat(a.fileno()).st_size
        while left:
            left -= os.copy_file_range(a.fileno(), b.fileno(), left)


def allocate(path, size):
    with open(path, "r+b") as file:
        if LIBC.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(size)):
            raise OSError(ctypes.get_errno(), "fallocate")


def overwrite(path, data, at):
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, at)


@check
def direct_writes_with_o_sync_are_durable(volume, _top):
    """Also where the kernel hands them on at once and sends no fsync: on a nearly full volume."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("commit=300")
        write_direct(v.mnt / "f", b"a")
        crash(v)
        same((v.mnt / "f").read_bytes(), b"a" * 4096, "an O_DIRECT | O_DSYNC write")
        v.umount()
        v.mount("commit=300")
        with open(v.mnt / "fill", "wb", buffering=0) as fill:
            try:
                while True:
                    fill.write(bytes(1 << 20))
            except OSError:
                # some room for what follows, and yet little
                fill.truncate(max(0, fill.tell() - (1 << 20)))
        os.sync()
        fd = os.open(v.mnt / "g", os.O_CREAT | os.O_WRONLY | os.O_DSYNC, 0o600)
        os.write(fd, b"b" * 8192)
        os.close(fd)
        crash(v)
        same((v.mnt / "g").read_bytes(), b"b" * 8192, "an O_DSYNC write to a nearly full volume")


def write_direct(path, byte):
    buffer = mmap.mmap(-1, 4096)
    buffer.write(byte * 4096)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_DSYNC, 0o600)
    try:
        same(os.write(fd, buffer), 4096, "bytes written")
    finally:
        os.close(fd)


@check
def wrong_options_are_refused(volume, _top):
    daemon_only(volume)
    root_only()
    helper = helpers_of(volume) / "mount.braidfs"
    with small_volume(volume) as v:
        for option, says in (
            ("nonsense", "unknown"), ("nonsense=1", "unknown"), ("mand", "not supported"), ("offset=512", "losetup"),
            ("commit=x", "seconds"), ("data=fast", "ordered"), ("user_id=0", "leave it out"), ("bind", "mount --bind"),
        ):
            refuses(1, (option, says), helper, v.image, v.mnt, "-o", f"rw,{option}")
        silent(helper, v.image, v.mnt, "-f", "-o", "rw")
        must(not v.mount_entry(), "a fake mount mounted")
        silent(helper, v.image, v.mnt, "-s", "-o", "rw,nonsense")
        must(v.alive(), "a sloppy mount did not mount")
        v.umount()
        refuses(32, ("not a directory",), helper, v.image, v.image, "-o", "rw")


@check
def mount_and_fstab(volume, _top):
    """mount(8), umount(8) and mkfs(8) with the helpers, as they are after `make install`."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        image, mnt, table = v.image, v.mnt, v.image.with_suffix(".fstab")
        table.write_text(f"{image} {mnt} braidfs noatime,nofail,_netdev,x-systemd.x=1,comment=c,commit=7 0 2\n")
        state = f"grep ' {mnt} ' /proc/self/mountinfo"
        code, text = as_installed(
            volume,
            "set -x",
            f"mkfs -t braidfs -q --force {image}",
            f"mount -T {table} -a", f"mount -T {table} -a", f"grep -c ' {mnt} ' /proc/self/mountinfo", state,
            f"echo kept > {mnt}/f", f"mount -T {table} -o remount,ro {mnt}", state, f"umount {mnt}",
            f"mount -t braidfs -o loop,ro {image} {mnt}", f"cat {mnt}/f", f"umount {mnt}",
            f"mount -t braidfs -o noexec -o sync -o rw {image} {mnt}", state, f"umount {mnt}",
            f"fsck -t braidfs -f -T {image}",
        )
        table.unlink()
        if "overlay" in text and code == 32:
            raise Skipped(f"no overlay file system: {text.strip()[-100:]}")
        same(code, 0, f"exit code ({text[-1500:]})")
        said = [line for line in text.splitlines() if line and not line.startswith("+")]
        must(not any("braidfs:" in line for line in said), f"something was said: {said}")
        must(said[0] == "1", f"mounted {said[0]} times by two `mount -a`")
        must("noatime" in said[1] and " - fuseblk.braidfs " in said[1], f"mounted as {said[1]}")
        must(" ro,noatime " in said[2], f"after the remount {said[2]}")
        must(said[3] == "kept", f"content {said[3]!r}")
        must("noexec" in said[4] and "rw,sync" in said[4], f"mounted as {said[4]}")
