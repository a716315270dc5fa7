#!/usr/bin/env python3
"""Mount tests: what a mounted braidfs owes to programs and administrators.

usage: test-mount.py [-l] [--ring] [--jobs N] [NAME...]

Only the checks whose name contains one of NAME; -l lists them, --ring has requests come through io_uring (root). With
--jobs N, N of them run at once, each on a volume of its own; with --ring one, whatever N.

Each check runs in a process of its own with a time limit on one volume of several domains, which is mounted again
(or made anew) before the next check when the check left it in another state. Prints ok, FAILED or skipped for each,
at the end those that failed and `N passed, M failed, K skipped`; exit code 1 when one failed, 2 when there is none of such a name.
A server that is dead after a check, and a volume that cannot be mounted then (kept as target/mount-NAME.img), fail that check. Without
/dev/fuse it says so and skips all. What is skipped is noted for the list at the end of `make test`, and with BRAIDFS_NO_SKIP=1 it fails.
Beside another run in the same tree the number of the process stands in the names of logs and images.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib
import io
import itertools
import json
import mmap
import os
import pathlib
import pkgutil
import random
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
import hostile  # noqa: E402
import mount_tests  # noqa: E402
import side_by_side  # noqa: E402
import skipped  # noqa: E402
from filling import fill_in_turn  # noqa: E402
from fslib import BraidFs, Failed, Skipped, in_child, run  # noqa: E402
from mount_tests.helpers import small_volume  # noqa: E402
from mount_tests.common import (  # noqa: E402
    CHECK_SECONDS, CHECKS, NOBODY, as_nobody, check, daemon_only, handle_of, must, open_handle, refused, renameat2, root_only, same,
    wait_for_scrub, write_synced,
)

SIZE = 2 << 30
DOMAINS = "4"

# Files and names -------------------------------------------------------------------------------------------------------


@check
def read_and_write(volume, top):
    data = random.Random(1).randbytes(5_000_001)
    (top / "f").write_bytes(data)
    same(hashlib.sha256((top / "f").read_bytes()).digest(), hashlib.sha256(data).digest(), "content")
    with open(top / "f", "r+b") as file:
        file.seek(1_234_567)
        file.write(b"changed")
        file.truncate(2_000_000)
    volume.cold()
    want = bytearray(data[:2_000_000])
    want[1_234_567:1_234_574] = b"changed"
    same(hashlib.sha256((top / "f").read_bytes()).digest(), hashlib.sha256(want).digest(), "content after a remount")


@check
def ten_thousand_names(volume, top):
    names = {f"name-{n:05}" for n in range(10_000)}
    for name in names:
        os.close(os.open(top / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    listed = os.listdir(top)
    same(len(listed), len(names), "number of names listed")
    same(set(listed), names, "names listed")
    for name in sorted(names)[::2]:
        os.unlink(top / name)
    volume.cold()
    same(set(os.listdir(top)), set(sorted(names)[1::2]), "names after unlinking half of them and a remount")


@check
def listing_while_unlinking(_volume, top):
    for n in range(3000):
        (top / f"n{n}").touch()
    gone = 0
    with os.scandir(top) as entries:
        for entry in entries:
            os.unlink(entry.path)
            gone += 1
    same((gone, os.listdir(top)), (3000, []), "unlinked while listing, left")


@check
def long_names(_volume, top):
    name = "n" * 255
    (top / name).write_text("x")
    same(os.listdir(top), [name], "listing")
    with refused(errno.ENAMETOOLONG):
        (top / (name + "n")).touch()
    odd = os.fsencode(str(top)) + b"/\xff\x01 *\n"
    with open(odd, "wb"):
        pass
    must(b"\xff\x01 *\n" in os.listdir(os.fsencode(str(top))), "a name that is not UTF-8 is not listed")


@check
def hard_links(volume, top):
    (top / "a").write_text("text")
    (top / "dir").mkdir()
    os.link(top / "a", top / "dir" / "b")
    same((top / "a").stat().st_nlink, 2, "nlink")
    same((top / "a").stat().st_ino, (top / "dir" / "b").stat().st_ino, "inode number")
    os.unlink(top / "a")
    volume.cold()
    same((top / "dir" / "b").stat().st_nlink, 1, "nlink after unlink and remount")
    same((top / "dir" / "b").read_text(), "text", "content by the other name")
    same(top.stat().st_nlink, 3, "nlink of a directory with one subdirectory")


@check
def links_between_domains(volume, top):
    """Directories lie in different domains: links and renames between them must work everywhere."""
    dirs = [top / f"d{n}" for n in range(8)]
    for folder in dirs:
        folder.mkdir()
    for n, folder in enumerate(dirs):
        (folder / "f").write_text(str(n))
    for n, folder in enumerate(dirs):
        os.link(folder / "f", dirs[(n + 3) % 8] / f"link{n}")
        os.rename(folder / "f", dirs[(n + 5) % 8] / f"moved{n}")
    (dirs[0] / "sub").mkdir()
    os.rename(dirs[0] / "sub", dirs[1] / "sub")
    volume.cold()
    for n in range(8):
        same((dirs[(n + 3) % 8] / f"link{n}").read_text(), str(n), "content by the link")
        same((dirs[(n + 5) % 8] / f"moved{n}").stat().st_nlink, 2, "nlink of the moved file")
    same((dirs[0].stat().st_nlink, dirs[1].stat().st_nlink), (2, 3), "nlink of the parents of a moved directory")


@check
def renames(_volume, top):
    (top / "a").write_text("a")
    (top / "b").write_text("b")
    with refused(errno.EEXIST):
        renameat2(top / "a", top / "b", 1)  # RENAME_NOREPLACE
    renameat2(top / "a", top / "b", 2)  # RENAME_EXCHANGE
    same(((top / "a").read_text(), (top / "b").read_text()), ("b", "a"), "contents after an exchange")
    os.rename(top / "a", top / "b")
    same(sorted(os.listdir(top)), ["b"], "names after a rename over a file")
    (top / "x" / "y").mkdir(parents=True)
    with refused(errno.EINVAL):
        os.rename(top / "x", top / "x" / "y" / "z")
    (top / "full").mkdir()
    (top / "full" / "f").touch()
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        os.rename(top / "x", top / "full")
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        os.rmdir(top / "full")
    with refused(errno.EISDIR):
        os.rename(top / "b", top / "x")


@check
def unlinked_but_open(volume, top):
    with open(top / "f", "w+b") as file:
        file.write(b"kept" * 100_000)
        os.unlink(top / "f")
        same(os.listdir(top), [], "names")
        file.seek(0)
        same(file.read(), b"kept" * 100_000, "content")
        same(os.fstat(file.fileno()).st_nlink, 0, "nlink")


@check
def symlinks(volume, top):
    for target in ("f", "x" * 4000):
        os.symlink(target, top / "link")
        same(os.readlink(top / "link"), target, "target")
        os.unlink(top / "link")
    os.symlink("../" + top.name + "/f", top / "link")
    (top / "f").write_text("by link")
    same((top / "link").read_text(), "by link", "content through the link")


@check
def special_files(volume, top):
    os.mkfifo(top / "fifo")
    reader = os.open(top / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(top / "fifo", os.O_WRONLY)
    os.write(writer, b"through")
    same(os.read(reader, 100), b"through", "what came through the fifo")
    os.close(reader)
    os.close(writer)
    server = socket.socket(socket.AF_UNIX)
    # A socket's path is short: bind by a relative name.
    os.chdir(top)
    server.bind("sock")
    server.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect("sock")
    must(stat.S_ISSOCK(os.stat("sock").st_mode), "not a socket")
    os.chdir("/")
    if fslib.IS_ROOT:
        os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        same((top / "null").stat().st_rdev, os.makedev(1, 3), "device number")
        os.mknod(top / "block", stat.S_IFBLK | 0o600, os.makedev(259, 70_000))
        same((top / "block").stat().st_rdev, os.makedev(259, 70_000), "device number")


@check
def programs_run(volume, top):
    shutil.copy2("/bin/true", top / "program")
    run(top / "program")
    (top / "script").write_text("#!/bin/sh\nexit 7\n")
    (top / "script").chmod(0o755)
    same(run(top / "script", ok=None)[0], 7, "exit code of a script")


# Data ------------------------------------------------------------------------------------------------------------------


@check
def memory_maps(volume, top):
    path = top / "f"
    path.write_bytes(bytes(3 << 20))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[1_000_000:1_000_007] = b"by mmap"
        file.seek(1_000_000)
        same(file.read(7), b"by mmap", "read() after a store to the map")
        os.pwrite(file.fileno(), b"by write", 2_000_000)
        same(view[2_000_000:2_000_008], b"by write", "the map after write()")
        view.flush()
    volume.cold()
    with open(path, "rb") as file:
        file.seek(1_000_000)
        same(file.read(7), b"by mmap", "content after a remount")


@check
def direct_io(volume, top):
    source = pathlib.Path(volume.image.parent / "direct.in")
    source.write_bytes(random.Random(2).randbytes(8 << 20))
    run("dd", f"if={source}", f"of={top}/f", "bs=1M", "oflag=direct", "status=none")
    run("dd", f"if={top}/f", f"of={source}.back", "bs=256k", "iflag=direct", "status=none")
    run("cmp", source, f"{source}.back")
    run("cmp", source, top / "f")
    source.unlink()
    pathlib.Path(f"{source}.back").unlink()


@check
def appends_of_two_processes(volume, top):
    def append(who):
        fd = os.open(top / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for n in range(2000):
            os.write(fd, f"{who} {n:05}\n".encode())
        os.close(fd)

    pids = []
    for who in "ab":
        pid = os.fork()
        if pid == 0:
            try:
                append(who)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    same([os.waitpid(pid, 0)[1] for pid in pids], [0, 0], "exit codes of the writers")
    lines = (top / "log").read_text().splitlines()
    same(sorted(lines), sorted(f"{w} {n:05}" for w in "ab" for n in range(2000)), "lines")


@check
def locks(volume, top):
    (top / "f").touch()
    with open(top / "f", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        same(run("flock", "-n", top / "f", "true", ok=None)[0], 1, "flock -n while another holds the lock")
        fcntl.flock(file, fcntl.LOCK_UN)
        run("flock", "-n", top / "f", "true")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)

        def other(start):
            with open(top / "f", "r+b") as mine:
                try:
                    fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, start)
                    return True
                except OSError:
                    return False

        same(in_child(lambda: (other(5), other(10)), 20), (False, True), "fcntl locks on (overlapping, disjoint) ranges")


@check
def sparse_50_gib(volume, top):
    path = top / "f"
    with open(path, "wb") as file:
        file.truncate(50 << 30)
        os.pwrite(file.fileno(), b"island", 25 << 30)
        os.pwrite(file.fileno(), b"end", (50 << 30) - 3)
    volume.cold()
    info = path.stat()
    same(info.st_size, 50 << 30, "size")
    must(info.st_blocks * 512 < 1 << 20, f"{info.st_blocks * 512} bytes allocated")
    with open(path, "rb") as file:
        fd = file.fileno()
        same(os.pread(fd, 6, 25 << 30), b"island", "data")
        same(os.pread(fd, 3, (50 << 30) - 3), b"end", "data at the end")
        same(os.pread(fd, 1 << 16, 10 << 30), bytes(1 << 16), "hole")
        data = os.lseek(fd, 0, os.SEEK_DATA)
        must((24 << 30) < data <= (25 << 30), f"SEEK_DATA finds {data}")
        hole = os.lseek(fd, 25 << 30, os.SEEK_HOLE)
        must((25 << 30) < hole <= (26 << 30), f"SEEK_HOLE finds {hole}")


@check
def fallocate_modes(volume, top):
    path = top / "f"
    run("fallocate", "-l", "16M", path)
    same((path.stat().st_size, path.stat().st_blocks >= 32768), (16 << 20, True), "size, allocated")
    with open(path, "r+b") as file:
        file.write(b"x" * (16 << 20))
    run("fallocate", "-p", "-o", "4M", "-l", "8M", path)
    data = path.read_bytes()
    same(data.count(b"x"), 8 << 20, "bytes left after punching a hole")
    same(data[4 << 20 : 12 << 20].count(0), 8 << 20, "zeros in the hole")
    must(path.stat().st_blocks * 512 < 9 << 20, "the hole did not free space")
    run("fallocate", "-n", "-o", "16M", "-l", "4M", path)
    same(path.stat().st_size, 16 << 20, "size after --keep-size")


def small_of(volume, size):
    """Another volume beside it, for a check of its own."""
    return type(volume)(volume.image.parent, "small", size, *([volume.binary] if isinstance(volume, BraidFs) else []))


@check
def full_volume(volume, _top):
    """On a small volume of its own: the error comes at the write; what is deleted can be used again."""
    small = small_of(volume, 128 << 20)
    try:
        small.mkfs()
        small.mount()
        for turn in range(3):
            code, text = run("dd", "if=/dev/zero", f"of={small.mnt}/fill", "bs=64k", ok=None)
            must(code and "No space left" in text, f"turn {turn}: dd ended with {code}: {text.strip()[-80:]}")
            must("error writing" in text, f"turn {turn}: the error did not come at the write: {text.strip()[:80]}")
            written = (small.mnt / "fill").stat().st_size
            must(written > 64 << 20, f"turn {turn}: full after only {written >> 20} of 128 MiB")
            with refused(errno.ENOSPC):
                for n in range(100_000):
                    (small.mnt / f"more{n}").write_bytes(b"x" * 8192)
            run("sync", "-f", small.mnt)
            small.umount()
            small.mount()
            for path in small.mnt.glob("more*"):
                path.unlink()
            (small.mnt / "fill").unlink()
        write_synced(small.mnt / "after", b"y" * (8 << 20))
        small.umount()
        same(small.fsck("-f", "-n")[0], 0, "exit code of fsck")
    finally:
        small.force_down()
        small.image.unlink(missing_ok=True)


@check
def full_under_an_old_writer(volume, _top):
    """Files that were opened while there was room, and so are written through the kernel's cache, are told too."""
    small = small_of(volume, 512 << 20)
    try:
        small.mkfs()
        small.mount()
        piece = os.urandom(64 << 10)
        files = [open(small.mnt / f"f{n}", "wb", buffering=0) for n in range(3)]
        written = fill_in_turn(files, [piece] * 3)
        must(sum(written) > 320 << 20, f"full after only {sum(written) >> 20} of 512 MiB")
        for file in files:
            os.fsync(file.fileno())  # what write() took has a place
            file.close()
        small.umount()
        small.mount()
        for n, size in enumerate(written):
            data = (small.mnt / f"f{n}").read_bytes()
            must(len(data) == size and data == piece * (size // len(piece)) + piece[: size % len(piece)], f"content of f{n}")
        small.umount()
        same(small.fsck("-f", "-n")[0], 0, "exit code of fsck")
    finally:
        small.force_down()
        small.image.unlink(missing_ok=True)


@check
def free_space_is_true(volume, top):
    before = os.statvfs(volume.mnt)
    same(before.f_blocks * before.f_frsize > SIZE * 0.8, True, "statfs knows most of the volume's size")
    write_synced(top / "f", os.urandom(64 << 20))
    during = os.statvfs(volume.mnt)
    used = (before.f_bfree - during.f_bfree) * before.f_frsize
    must((60 << 20) < used < (80 << 20), f"a file of 64 MiB takes {used >> 20} MiB from the free space")
    same(during.f_namemax, 255, "f_namemax")


# Attributes and permissions ----------------------------------------------------------------------------------------------


@check
def extended_attributes(volume, top):
    path = top / "f"
    path.touch()
    values = {f"user.a{n}": os.urandom(n * 6) for n in range(30)}
    for name, value in values.items():
        os.setxattr(path, name, value)
    with refused(errno.EEXIST):
        os.setxattr(path, "user.a3", b"", os.XATTR_CREATE)
    with refused(errno.ENODATA):
        os.setxattr(path, "user.none", b"", os.XATTR_REPLACE)
    with refused(errno.ENODATA):
        os.getxattr(path, "user.none")
    os.removexattr(path, "user.a5")
    del values["user.a5"]
    volume.cold()
    listed = {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}
    same(listed, values, "attributes after a remount")
    if fslib.IS_ROOT:
        os.setxattr(path, "trusted.t", b"1")
        same(os.getxattr(path, "trusted.t"), b"1", "trusted attribute")
        must("trusted.t" in os.listxattr(path), "root is not told of a trusted attribute")
        must("trusted.t" not in as_nobody(lambda: os.listxattr(path)), "a user is told of a trusted attribute")


@check
def access_lists(volume, top):
    if not fslib.have("setfacl"):
        raise Skipped("no setfacl (package acl)")
    path = top / "f"
    path.write_text("secret")
    path.chmod(0o600)
    top.chmod(0o755)
    run("setfacl", "-m", f"u:{NOBODY}:r", path)
    must("user:nobody:r--" in run("getfacl", "-p", path)[1], "the entry is not listed by getfacl")
    run("setfacl", "-d", "-m", f"u:{NOBODY}:rwx", top)
    (top / "sub").mkdir()
    (top / "heir").touch()
    must("default:user:nobody:rwx" in run("getfacl", "-p", top / "sub")[1], "a directory does not inherit the default list")
    must("user:nobody:rwx" in run("getfacl", "-p", top / "heir")[1], "a file does not get the default list")
    same(as_nobody(path.read_text), "secret", "what the user in the list reads")
    run("setfacl", "-b", path)

    def denied():
        with refused(errno.EACCES):
            path.read_text()

    as_nobody(denied)


@check
def permissions(volume, top):
    top.chmod(0o755)
    path = top / "f"
    path.write_text("x")
    path.chmod(0o600)
    (top / "dir").mkdir(mode=0o755)

    def attempt():
        with refused(errno.EACCES):
            path.read_text()
        with refused(errno.EACCES):
            (top / "dir" / "new").touch()
        with refused(errno.EPERM):
            path.chmod(0o777)
        with refused(errno.EACCES):
            os.unlink(path)

    as_nobody(attempt)
    os.chown(path, NOBODY, NOBODY)
    same(as_nobody(path.read_text), "x", "what the owner reads")
    (top / "sticky").mkdir()
    (top / "sticky").chmod(0o1777)
    (top / "sticky" / "mine").touch()

    def sticky():
        with refused(errno.EPERM, errno.EACCES):
            os.unlink(top / "sticky" / "mine")

    as_nobody(sticky)


@check
def write_drops_setuid(volume, top):
    path = top / "f"
    path.write_text("x")
    path.chmod(0o6777)
    top.chmod(0o755)
    as_nobody(lambda: path.write_text("y"))
    same(path.stat().st_mode & 0o6000, 0, "setuid and setgid bits after a write by another user")


@check
def umask_and_setgid_directory(volume, top):
    os.umask(0o027)
    os.close(os.open(top / "f", os.O_CREAT, 0o666))
    same(stat.S_IMODE((top / "f").stat().st_mode), 0o640, "mode under umask 027")
    if fslib.IS_ROOT:
        os.chown(top, 0, 4242)
        top.chmod(0o2775)
        (top / "sub").mkdir()
        info = (top / "sub").stat()
        same((info.st_gid, info.st_mode & stat.S_ISGID), (4242, stat.S_ISGID), "group, setgid of a new directory")


@check
def times(volume, top):
    path = top / "f"
    path.touch()
    os.utime(path, ns=(1_000_000_001, -5_000_000_000 + 7))
    volume.cold()
    info = path.stat()
    same((info.st_atime_ns, info.st_mtime_ns), (1_000_000_001, -5_000_000_000 + 7), "times after a remount")
    os.utime(path, ns=(0, 4_000_000_000_000_000_000))
    same(path.stat().st_mtime_ns, 4_000_000_000_000_000_000, "a time after 2038")
    before = top.stat().st_mtime_ns
    time.sleep(0.05)
    (top / "g").touch()
    must(top.stat().st_mtime_ns > before, "a new name does not change the directory's mtime")


# Mounting ----------------------------------------------------------------------------------------------------------------


@check
def proc_mounts(volume, _top):
    daemon_only(volume)
    _, _, kind, options, *_ = volume.mount_entry()
    must(kind in ("fuse.braidfs", "fuseblk", "fuseblk.braidfs"), f"type {kind}")
    must("rw" in options.split(","), f"options {options}")
    if fslib.IS_ROOT:
        must("allow_other" in options, "no allow_other for root")
    must("default_permissions" in options, "no default_permissions")


@check
def idle_mounts_ask_nothing_of_the_cpus(volume, top):
    """With latency=low CPUs stay awake while requests come; serving threads may go to the client's CPU. After that
    all is as it was."""
    daemon_only(volume)
    root_only()
    volume.umount()
    volume.mount("latency=low", "transport=dev")
    daemon = volume.daemon()

    def leads(link):
        try:
            return os.readlink(link)
        except FileNotFoundError:  # closed since the directory was read
            return None

    def awake():
        return "/dev/cpu_dma_latency" in map(leads, pathlib.Path(f"/proc/{daemon}/fd").iterdir())

    def placed():
        def where(thread):
            number = int(thread.name)
            return os.sched_getscheduler(number), frozenset(os.sched_getaffinity(number))

        return set(fslib.of_threads(daemon, where))

    before = placed()
    same(len(before), 1, "policies and CPUs of the daemon's threads")
    seen, begun = False, time.monotonic()
    while time.monotonic() < begun + (2 if seen else 20):
        for n in range(200):
            (top / f"f{n}").write_bytes(b"x")
        # a busy machine may let it go again before the fsync is done
        seen |= awake()
        # A thread that is started for it stays for other syncs.
        with (top / "f0").open("rb") as f:
            os.fsync(f)
        seen |= awake()
    must(seen, "CPUs may halt although requests come")
    fslib.wait_for("CPUs may halt again", lambda: not awake(), 5)
    fslib.wait_for("threads where they were", lambda: placed() == before, 5)


@check
def killed_and_taken_over(volume, top):
    daemon_only(volume)
    for n in range(200):
        write_synced(top / f"s{n}", f"synced {n}".encode() * 50)
    for n in range(200):
        (top / f"u{n}").write_bytes(f"unsynced {n}".encode() * 50)
    volume.kill9()
    with refused(errno.ENOTCONN, errno.ECONNABORTED, errno.EIO):
        os.listdir(top)
    volume.mount()
    for n in range(200):
        same((top / f"s{n}").read_bytes(), f"synced {n}".encode() * 50, f"synced file s{n}")
    for path in top.glob("u*"):
        want = f"unsynced {path.name[1:]}".encode() * 50
        have = path.read_bytes()
        must(all(a in (b, 0) for a, b in zip(have, want)) and len(have) <= len(want), f"{path.name}: foreign data")
    volume.umount()
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def sync_then_kill(volume, top):
    """After syncfs and after fsync of the directory everything is there. Not every mount hands on syncfs."""
    daemon_only(volume)
    if volume.sync_commits():
        for n in range(300):
            (top / f"f{n}").write_bytes(b"by syncfs" * n)
        run("sync", "-f", top)
    else:
        fslib.log("syncfs does not reach the daemon, each file is synced")
        for n in range(300):
            write_synced(top / f"f{n}", b"by syncfs" * n)
    (top / "dir").mkdir()
    for n in range(50):
        os.rename(top / f"f{n}", top / "dir" / f"f{n}")
    for folder in (top / "dir", top):
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    volume.kill9()
    volume.mount()
    for n in range(300):
        path = top / ("dir" if n < 50 else ".") / f"f{n}"
        same(path.read_bytes(), b"by syncfs" * n, str(path))
        must(n >= 50 or not (top / f"f{n}").exists(), f"f{n} has its old and its new name")


@check
def killed_again_and_again(volume, top):
    daemon_only(volume)
    for turn in range(5):
        for n in range(30):
            write_synced(top / f"{turn}.{n}", os.urandom(100) + bytes([turn]) * 5000)
        volume.kill9()
        volume.mount()
        same(len(os.listdir(top)), (turn + 1) * 30, f"files after kill {turn + 1}")
    volume.umount()
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def umount_keeps_everything(volume, top):
    for n in range(500):
        (top / f"f{n}").write_bytes(bytes([n % 251]) * n * 10)
    volume.umount()
    must(not volume.mount_entry() and not volume.daemons(), "still there after umount")
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")
    volume.mount()
    for n in range(500):
        same((top / f"f{n}").read_bytes(), bytes([n % 251]) * n * 10, f"f{n}")


@check
def handles_of_an_nfs_server(volume, top):
    """They outlive a remount; that of a deleted file is stale and does not open the next file with its number."""
    daemon_only(volume)
    root_only()
    folder, gone = top / "a" / "b", top / "gone"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"by handle")
    gone.write_bytes(b"old")
    of_folder, of_file, of_gone, number = handle_of(folder), handle_of(folder / "file"), handle_of(gone), gone.stat().st_ino
    volume.umount()
    volume.mount()
    with open(open_handle(volume, of_file), "rb") as file:
        same(file.read(), b"by handle", "file by its handle")
    fd = open_handle(volume, of_folder)
    same(os.listdir(fd), ["file"], "directory by its handle")
    os.close(fd)
    gone.unlink()
    with refused(errno.ESTALE):
        open_handle(volume, of_gone)
    volume.umount()
    volume.mount()
    for n in range(3000):
        new = top / f"new{n}"
        new.write_bytes(b"new")
        if new.stat().st_ino == number:
            break
    else:
        raise Failed(f"inode number {number} is not given again")
    with refused(errno.ESTALE):
        open_handle(volume, of_gone)
    of_new = handle_of(new)
    volume.umount()
    volume.mount()
    with refused(errno.ESTALE):
        open_handle(volume, of_gone)
    with open(open_handle(volume, of_new), "rb") as file:
        same(file.read(), b"new", "the next file with that number")


@check
def umount_while_busy(volume, top):
    with open(top / "f", "w"):
        must(run("umount", volume.mnt, ok=None)[0] != 0, "umount of a busy volume succeeded")
    must(volume.alive(), "the volume is gone")


@check
def braidfs_umount(volume, top):
    daemon_only(volume)
    (top / "f").write_text("x")
    run(volume.binary, "umount", volume.mnt)
    must(not volume.mount_entry(), "still mounted")
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck right after `braidfs umount`")


@check
def sigterm(volume, top):
    daemon_only(volume)
    for n in range(100):
        (top / f"f{n}").write_text(str(n))
    for pid in volume.daemons():
        fslib.kill_and_wait(pid, signal.SIGTERM, 20)
    fslib.wait_for("mount point gone after SIGTERM", lambda: not volume.mount_entry(), 10)
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")
    volume.mount()
    same(len(os.listdir(top)), 100, "files")


@check
def second_mount_refused(volume, top):
    daemon_only(volume)
    other = volume.image.parent / "other.mnt"
    other.mkdir(exist_ok=True)
    code, text = run(volume.binary, "mount", volume.image, other, ok=None)
    if not code:
        run("umount", "-l", other, ok=None)
        raise Failed("a second mount of one image succeeded")
    must(text.strip() and "panicked" not in text, f"no clear message: {text!r}")
    must(run(volume.binary, "fsck", "-y", "-f", volume.image, ok=None)[0] == 8, "fsck -y of a mounted volume does not end with 8")
    must(run(volume.binary, "mkfs", "--force", volume.image, ok=None)[0] != 0, "mkfs of a mounted volume succeeded")
    (top / "f").write_text("still works")
    same((top / "f").read_text(), "still works", "the first mount")


@check
def read_only(volume, top):
    (top / "f").write_text("x")
    volume.umount()
    volume.mount("ro")
    must("ro" in volume.mount_entry()[3].split(","), "not shown as ro")
    same((top / "f").read_text(), "x", "content")
    with refused(errno.EROFS):
        (top / "g").touch()
    with refused(errno.EROFS):
        os.unlink(top / "f")
    volume.umount()
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def mount_by_fstab_helper(volume, top):
    """mount -t braidfs runs mount.braidfs from /sbin: here the helper is called as mount(8) calls it."""
    daemon_only(volume)
    root_only()
    helpers = volume.image.parent / "sbin"
    helpers.mkdir(exist_ok=True)
    for name in ("mount.braidfs", "umount.braidfs", "fsck.braidfs", "mkfs.braidfs"):
        with contextlib.suppress(FileExistsError):
            (helpers / name).symlink_to(volume.binary)
    (top / "f").write_text("x")
    volume.umount()
    run(helpers / "fsck.braidfs", "-a", volume.image)
    run(helpers / "mount.braidfs", volume.image, volume.mnt, "-o", "rw,noatime,nodev,_netdev,x-systemd.automount")
    fslib.wait_for("mounted", volume.alive, 10)
    options = volume.mount_entry()[3].split(",")
    must("noatime" in options and "nodev" in options, f"options {options}")
    same((top / "f").read_text(), "x", "content")
    volume.umount()
    code, text = run(helpers / "mount.braidfs", volume.image, volume.mnt, "-o", "rw,nonsense=1", ok=None)
    must(code == 1 and "nonsense" in text, f"an unknown option gives exit code {code}: {text.strip()}")


@check
def bad_mounts(volume, _top):
    """Clear message and exit code, no panic."""
    daemon_only(volume)
    folder = volume.image.parent
    empty, foreign = folder / "empty.img", folder / "foreign.img"
    empty.write_bytes(b"")
    foreign.write_bytes(os.urandom(1 << 20) + bytes(63 << 20))
    target = folder / "bad.mnt"
    target.mkdir(exist_ok=True)
    try:
        for image, mnt in ((empty, target), (foreign, target), (folder / "none.img", target), (volume.image, folder / "none.mnt")):
            code, text = run(volume.binary, "mount", image, mnt, ok=None)
            must(code in (1, 2, 32), f"{image.name} on {mnt.name}: exit code {code}")
            must(text.strip() and "panicked" not in text, f"{image.name} on {mnt.name}: {text!r}")
    finally:
        empty.unlink()
        foreign.unlink()


def hostile_tree(root):
    """{file: what makes its inode hostile}, {name: what it becomes in its directory}; the files are made in `root`, each
    in a directory of its own, so that one does not hide the other."""
    big, names = b"DATA" * 4096, {"x_y": b"x/y", "QQ": b"..", "Q": b".", "n_l": b"n\0l", "up_up_canary": b"../../canary"}
    for n, name in enumerate(names):
        (root / f"name{n}").mkdir()
        (root / f"name{n}" / name).write_bytes(b"inside")
        os.symlink("../../canary", root / f"name{n}" / "link")
    # this one has buckets
    names["up_and_up_canary"] = b"../../canary/../"
    (root / "buckets").mkdir()
    for n in range(200):
        (root / "buckets" / f"a name of middling length {n}").touch()
    (root / "buckets" / "up_and_up_canary").write_bytes(b"inside")
    (root / "circle" / "inner" / "again").mkdir(parents=True)
    # room in the record for what is put there, here and below: the block may be full
    os.setxattr(root / "circle", "user.room", bytes(600))

    def fixed(offset, form, value):
        return lambda i: i.put(offset, form, value)

    def section(kind, make, inline=None):
        def change(i):
            i.sections.pop(hostile.XATTRS, None)
            if inline is not None:
                i.put(45, "B", inline)
                for content in range(hostile.INLINE, hostile.TREE2 + 1):
                    i.sections.pop(content, None)
            i.sections[kind] = make(i)

        return change

    def own(i):
        return struct.pack("<Q", i.node)

    inodes = {
        **{f"size{n}": fixed(16, "<Q", value) for n, value in enumerate((1 << 60, (1 << 63) - 1, (1 << 64) - 1))},
        "size of inline": fixed(16, "<Q", 1 << 60),
        "blocks": fixed(24, "<Q", (1 << 64) - 1),
        "nlink": fixed(12, "<I", (1 << 32) - 1),
        "far": section(hostile.EXTENTS, lambda i: hostile.extent(0, (1 << 48) - 1, 4), 0),
        "long": section(hostile.EXTENTS, lambda i: hostile.extent(0, 600, (1 << 24) - 1), 0),
        "on tables": section(hostile.EXTENTS, lambda i: hostile.extent(0, 0, 4), 0),
        "own leaf": section(hostile.TREE1, lambda i: bytes(6) + own(i), 0),
        "own index": section(hostile.TREE2, lambda i: bytes(6) + own(i), 0),
        "leaves": section(hostile.TREE2, lambda i: b"".join(struct.pack("<Q", n)[:6] + own(i) for n in range(40)), 0),
        "own attributes": section(hostile.XATTR_NODES, lambda i: own(i) * 60),
        "attribute": section(hostile.XATTRS, lambda i: struct.pack("<BI", 6, (1 << 32) - 1) + b"user.a"),
    }
    for name in ("one", "two", *inodes):
        (root / f"of {name}").mkdir()
        (root / f"of {name}" / name).write_bytes(b"short" if "inline" in name else big)
        os.setxattr(root / f"of {name}" / name, "user.room", bytes(600))
    os.symlink("target", root / "of one" / "size of link")
    inodes["size of link"] = fixed(16, "<Q", 1 << 60)
    return inodes, names


def make_hostile(image, inodes, names, what):
    """With `two` it gets the blocks of `one`, with `again` that leads to `circle`, two levels above it, which says so."""
    names = {old.encode(): new for old, new in names.items()}
    seen = hostile.edit(image, lambda i: None, lambda entries: None)
    one, circle, inner = seen[b"one"], seen[b"circle"], seen[b"inner"]

    def on_inode(i):
        if i.name == b"two" and what in ("all", "two"):
            i.sections[hostile.EXTENTS] = one.sections[hostile.EXTENTS]
        if i.name == b"circle" and what in ("all", "again"):
            i.sections.pop(hostile.XATTRS, None)
            i.sections[hostile.LINKS] += hostile.link(inner.node, b"again")
        if i.name in names:
            i.sections[hostile.LINKS] = hostile.link(i.parent, names[i.name])
        inodes.get(os.fsdecode(i.name), lambda i: None)(i)

    def on_entries(entries):
        for e in entries:
            e[4] = names.get(e[4], e[4])
            if e[4] == b"again" and what in ("all", "again"):
                e[1:3] = circle.node, circle.generation

    hostile.edit(image, on_inode, on_entries)


def walk_hostile(small, ok):
    """Whatever the tree is, it can be walked to its end, and nothing in it leads out. `ok`: exit codes of find."""
    _, text = run("find", small.mnt, "-printf", "%p %s %n %l\\n", ok=ok, timeout=20)
    must(small.alive() and "SECRET" not in text, f"after find: {text[-300:]}")
    for argv in (["ls", "-laR", small.mnt], ["du", "-a", small.mnt]):
        code, _ = run(*argv, ok=None, timeout=20)
        must(code >= 0 and small.alive(), f"{argv[0]}: exit code {code}, no longer mounted")
    # a sparse file may be that large: its beginning and its end
    shell = 'for f; do head -c 300000 "$f"; tail -c 30000 "$f"; done'
    _, text = run("find", small.mnt, "-type", "f", "-size", "+0", "-exec", "sh", "-c", shell, "sh", "{}", "+", ok=None)
    must(small.alive() and "SECRET" not in text, "a file shows what lies beside the mount point")
    for path, dirs, files in os.walk(small.mnt):
        must(len(path) < 1000, f"no end: {path}")
        # Python leaves them out, how often they may come
        _, text = run("ls", "-aU1", path, ok=None, timeout=20)
        dots = [line for line in text.splitlines() if line in (".", "..")]
        must(len(dots) == len(set(dots)), f"{path} lists {dots}")
        for name in dirs + files:
            must("/" not in name, f"{path} lists {name}")
            try:
                os.listxattr(os.path.join(path, name), follow_symlinks=False)
            except FileNotFoundError:
                raise Failed(f"{path} lists {name}, which is not there") from None
            except OSError:
                pass


def use_hostile(small, what, canary):
    """Walks it, writes to it, removes all: the daemon lives, stays small and has not touched what lies outside."""
    beside = sorted(os.listdir(small.mnt.parent))
    small.mount()
    walk_hostile(small, (0,) if what == "repaired" else (0, 1))
    for path in sorted(small.mnt.glob("of */*")):
        with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
            file.write(b"over" * 2048)
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                os.pwrite(file.fileno(), b"end", os.fstat(file.fileno()).st_size)
            file.truncate(5)
            os.fsync(file.fileno())
    run("rm", "-rf", *small.mnt.iterdir(), ok=None, timeout=20)
    with contextlib.suppress(OSError):
        write_synced(small.mnt / "new", b"new" * (1 << 20))
    must(small.alive() and small.daemons(), f"{what}: no longer mounted after rm")
    for pid in small.daemons():
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) >> 10
        must(peak < 512, f"{what}: the daemon took {peak} MiB")
    small.umount()
    same(sorted(os.listdir(small.mnt.parent)), beside, f"{what}: files beside the mount point")
    same(canary.read_bytes(), b"SECRET", f"{what}: content of the file beside the mount point")


def fsck_hostile(small, what, codes, *options):
    code, text = small.fsck("-f", *options)
    must(code in codes and "panicked" not in text, f"{what}: exit code {code} of fsck {options}: {text[-300:]}")


def try_hostile(volume, alone):
    daemon_only(volume)
    small = small_of(volume, 64 << 20)
    canary, sound, bad = (small.mnt.parent / name for name in ("canary", "sound.img", "bad.img"))
    try:
        canary.write_bytes(b"SECRET")
        small.mkfs()
        small.mount()
        inodes, names = hostile_tree(small.mnt)
        small.umount()
        fsck_hostile(small, "before", (0,), "-n")
        small.image.rename(sound)
        rounds = [("all", inodes, names)]
        if alone:
            rounds = [("two", {}, {}), ("again", {}, {}), *((n, {n: c}, {}) for n, c in inodes.items())]
            rounds += [(old, {}, {old: new}) for old, new in names.items()]
        for what, some_inodes, some_names in rounds:
            shutil.copyfile(sound, small.image)
            make_hostile(small.image, some_inodes, some_names, what)
            # so large a file may be, without blocks
            fsck_hostile(small, what, (0, 4) if what in ("size0", "size1") else (4,), "-n")
            shutil.copyfile(small.image, bad)
            use_hostile(small, what, canary)
            if what == "all":
                bad.rename(small.image)
            fsck_hostile(small, what, (0, 1), "-y")
            fsck_hostile(small, what, (0,), "-n")
            if what == "all":
                use_hostile(small, "repaired", canary)
                fsck_hostile(small, "repaired", (0,), "-n")
    finally:
        small.force_down()
        for path in (small.image, sound, bad, canary):
            path.unlink(missing_ok=True)


@check
def hostile_image(volume, _top):
    """Metadata made to lead astray, each checksum right: no end of a walk, no crash, no way out of the mount."""
    try_hostile(volume, alone=False)


@check
def hostile_loop_unmounted(volume, _top):
    """A directory that lies in itself: ls -R, cp -r and rm -r of an image come to an end, and say where it is."""
    daemon_only(volume)
    small = small_of(volume, 64 << 20)
    out, sound = small.mnt.parent / "hostile.out", small.mnt.parent / "sound.img"
    try:
        small.mkfs()
        small.mount()
        hostile_tree(small.mnt)
        (small.mnt / "circle/canary").write_text("SECRET")
        small.umount()
        make_hostile(small.image, {}, {}, "again")
        shutil.copyfile(small.image, sound)
        again = "circle/inner/again: a loop of directories"
        for what, argv in (
            ("ls", ("ls", "-R", small.image)),
            ("cp", ("cp", "-r", f"{small.image}:/", out)),
            ("cp inside", ("cp", "-r", f"{small.image}:/circle", f"{small.image}:/one")),
            ("rm", ("rm", "-r", f"{small.image}:/circle")),
        ):
            shutil.copyfile(sound, small.image)
            code, text = run(small.binary, *argv, ok=None, timeout=20)
            must(code == 1 and text.count(again) == 1, f"{what}: exit code {code}: {text[-300:]}")
        must((out / "buckets/up_and_up_canary").read_bytes() == b"inside", "the rest is not copied")
        # the first thing in what is named leads above it, where nothing was named
        shutil.copyfile(sound, small.image)
        code, text = run(small.binary, "rm", "-r", f"{small.image}:/circle/inner", ok=None, timeout=20)
        must(code == 1 and text.count("circle/inner/again: a directory that lies in another one") == 1,
             f"rm below: exit code {code}: {text[-300:]}")
        same(run(small.binary, "cat", f"{small.image}:/circle/canary")[1], "SECRET", "content of a file that was not named")
    finally:
        small.force_down()
        shutil.rmtree(out, ignore_errors=True)
        for path in (small.image, sound):
            path.unlink(missing_ok=True)


@check(seconds=180)
def hostile_pieces(volume, _top):
    """Each of it alone, because a domain that meets damage takes no more writes: so others are removed, too."""
    try_hostile(volume, alone=True)


@check
def scrub_while_in_use(volume, top):
    """Nothing is found under load, and what rots on the device is."""
    daemon_only(volume)
    scrub = [volume.binary, "scrub", "--json", volume.mnt]
    for n in range(300):
        (top / f"file {n}").write_bytes(bytes([n % 256]) * (300 if n % 3 else 20000))
    os.sync()
    writer = subprocess.Popen(
        [sys.executable, "-c", '''
import os, sys, random
top, rand = sys.argv[1], random.Random(5)
while True:
    name = os.path.join(top, f"w{rand.randrange(400)}")
    with open(name, "wb") as file:
        file.write(os.urandom(rand.choice([10, 3000, 50000])))
        if rand.random() < 0.1:
            os.fsync(file.fileno())
    if rand.random() < 0.4:
        os.rename(name, os.path.join(top, f"m{rand.randrange(400)}"))
''', top]
    )
    try:
        for _ in range(6):
            code, text = run(*scrub, ok=None)
            must(code == 0, f"a scrub under load found something: {text[-600:]}")
        must(writer.poll() is None, "the writer failed")
    finally:
        writer.kill()
        writer.wait()
    report = json.loads(text)
    must(report["inodes"] > 300 and report["findings"] == [], f"report {text[-300:]}")

    # One runs at a time, and it goes with who asked for it.
    slow = subprocess.Popen([volume.binary, "scrub", "--rate", "64K", volume.mnt], stdout=subprocess.DEVNULL)
    try:
        # asked sooner, the second could be the first
        wait_for_scrub(volume)
        same(run(*scrub, ok=None)[0], 1, "exit code of a second scrub")
        must(slow.poll() is None, "a slow scrub ended at once")
    finally:
        slow.kill()
        slow.wait()
    fslib.wait_for("a scrub after the first was killed", lambda: run(*scrub, ok=None)[0] == 0, 10)

    # Only root and the owner may.
    if fslib.IS_ROOT:
        same(as_nobody(lambda: run(*scrub, ok=None)[0]), 1, "exit code of a scrub by nobody")

    # Rot in a node block: the one that has the name of a synced file.
    name = b"a name that rots on the device"
    write_synced(top / name.decode(), b"here")
    os.sync()
    with open(volume.image, "r+b", buffering=0) as image, mmap.mmap(image.fileno(), 0) as disk:
        # all copies, older ones included: only the one in use counts
        places, at = [], disk.find(name)
        while at >= 0:
            places.append(at)
            at = disk.find(name, at + 1)
        must(places, "the name is not on the device")
        for place in places:
            disk[place] ^= 1
        disk.flush()
        rotten = name[0] ^ 1
        try:
            code, text = run(*scrub, ok=None)
            same(code, 4, f"exit code of a scrub of a damaged volume ({text[-300:]})")
            must({f["code"] for f in json.loads(text)["findings"]} & {302, 303, 501}, f"findings {text[-600:]}")
        finally:
            # what was written anew meanwhile is left alone
            for place in places:
                if disk[place] == rotten:
                    disk[place] ^= 1
            disk.flush()
    same(run(*scrub, ok=None)[0], 0, "exit code of a scrub after the bits were put right")


@check(seconds=180)
def what_a_check_leaves_behind_is_its_failure(volume, _top):
    """Of this program: a server that died, a volume that is refused."""
    daemon_only(volume)

    def is_fine(_own, _top):
        pass

    def leaves_a_dead_server(own, _top):
        own.kill9()

    def leaves_no_volume(own, _top):
        own.umount()
        os.truncate(own.image, 0)

    chosen = [is_fine, leaves_a_dead_server, leaves_no_volume, is_fine, leaves_a_dead_server]
    for function in chosen:
        function.seconds = 60
    with small_volume(volume, size=256 << 20) as v:
        v.mount()
        with contextlib.redirect_stdout(io.StringIO()):
            counts, failures = run_checks(v, chosen)
    same(counts, {"ok": 2, "FAILED": 3, "skipped": 0}, f"results ({failures})")
    dead = "leaves_a_dead_server: it left a mount that does not answer: the server has died"
    same([f for f in failures if "no_volume" not in f], [dead, dead], "failures")
    kept = kept_image("leaves_no_volume")
    must(kept.exists() and str(kept) in failures[1], f"no image is kept: {failures[1]}")
    kept.unlink()


@check
def fsck_of_a_used_volume(volume, _top):
    """Last: everything that the other checks left behind."""
    volume.umount()
    code, text = volume.fsck("-f", "-n")
    same(code, 0, f"exit code of fsck -f -n ({text.strip()[-200:]})")


# The run -----------------------------------------------------------------------------------------------------------------


# In the names of files below target/: nothing, or who this run is where another one has the names.
OURS = ""


def alone():
    """A file that is locked as long as this run, or one that it forked, lasts; None where another run has it locked."""
    path = fslib.ROOT / "target" / "test-mount.lock"
    path.parent.mkdir(exist_ok=True)
    lock = open(path, "w", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def kept_image(name):
    """Where the image of a volume is kept that the check `name` left so that it cannot be mounted."""
    return fslib.ROOT / "target" / f"mount{OURS}-{name}.img"


def make_ready(volume, before):
    """Mounted, writable, answering: by a remount or, when that fails, on a new volume. What was wrong with how the check `before`
    left it, or None: a mount whose server is dead, a volume that is refused, whose image is kept then."""
    entry, wrong = volume.mount_entry(), None
    if volume.alive():
        if "rw" in entry[3].split(","):
            return None
    elif entry:
        wrong = "it left a mount that does not answer: the server has died"
    volume.force_down()
    try:
        volume.mount()
    except Failed as error:
        volume.force_down()
        kept = kept_image(before)
        run("cp", "--sparse=always", volume.image, kept)
        wrong = f"it left a volume that cannot be mounted ({error}): {kept}"
        fresh(volume)
    if wrong:
        fslib.log(f"{before}: {wrong}")
    return wrong


def fresh(volume):
    volume.mkfs(*(["--domains", DOMAINS] if isinstance(volume, BraidFs) else []))
    volume.mount()


def run_checks(volume, chosen):
    """Runs the checks, as `chosen` yields them; how many passed and were skipped, and what those that failed said."""
    def all_down():
        for each in (volume, small_of(volume, 0)):
            each.force_down()

    counts, failures = {"ok": 0, "FAILED": 0, "skipped": 0}, []

    def show(result, text):
        colour = {"ok": "green", "FAILED": "red", "skipped": "yellow"}[result]
        print(f"{fslib.paint(f'{result:<8}', colour)}{text}", flush=True)

    def ready(before, ended, seconds):
        """For the next check. What was wrong afterwards is a failure of the check before, which had `ended` so."""
        wrong = in_child(lambda: make_ready(volume, before), seconds, all_down)
        if wrong and ended in ("ok", "skipped"):
            counts[ended] -= 1
            counts["FAILED"] += 1
            failures.append(f"{before}: {wrong}")
            show("FAILED", f"{before}: {wrong}")
        elif wrong and ended is None:
            raise Failed(wrong)

    name, result = "nothing", None
    for function in chosen:
        before, ended = name, result
        name, remark, start = function.__name__, "", time.monotonic()
        try:
            ready(before, ended, function.seconds)

            def body():
                top = volume.mnt / name
                shutil.rmtree(top, ignore_errors=True)
                top.mkdir()
                fslib.log(f"--- {name}")
                function(volume, top)

            in_child(body, function.seconds, all_down)
            result = "ok"
        except Skipped as reason:
            result, remark = "FAILED" if skipped.is_failure() else "skipped", f": {reason}"
            skipped.note(f"mount test {name}", str(reason))
            if result == "FAILED":
                failures.append(f"{name}: skipped{remark}")
        except Failed as error:
            result, remark = "FAILED", f": {error}"
            failures.append(name + remark)
        counts[result] += 1
        show(result, f"{name} ({time.monotonic() - start:.1f} s){remark}")
    if result:
        try:
            ready(name, result, CHECK_SECONDS)
        except Failed as error:
            counts["FAILED"] += 1
            failures.append(f"after {name}: {error}")
            show("FAILED", failures[-1])
    return counts, failures


def run_on_a_volume(chosen):
    """Runs the checks on a volume of their own, and returns how they ended and what was cleaned away."""
    with fslib.Workspace(need_bytes=3 << 30) as space:
        volume = space.braidfs("volume", SIZE)
        fresh(volume)
        counts, failures = run_checks(volume, chosen)
    return counts, failures, space.cleaned()


def run_side_by_side(jobs, chosen, log):
    """As `run_on_a_volume` in each of several processes; the last check, of what the others left, in each of them."""
    last = [f for f in chosen if f is fsck_of_a_used_volume]
    shared = [f for f in chosen if f is not fsck_of_a_used_volume]

    def work(worker, taken):
        fslib.log_to(log.with_stem(f"{log.stem}-{worker + 1}"))
        return run_on_a_volume(itertools.chain((shared[n] for n in taken), last))

    ended = side_by_side.shared_out(jobs, len(shared), work)
    if None in ended:
        raise Failed("a process with checks ended before its time")
    totals = {key: sum(counts[key] for counts, _, _ in ended) for key in ended[0][0]}
    return totals, [f for _, failures, _ in ended for f in failures], "; ".join(c for _, _, c in ended)


def all_checks():
    """The checks of this file and of the package's modules; that of what they left behind comes last."""
    for module in pkgutil.iter_modules(mount_tests.__path__):
        importlib.import_module(f"mount_tests.{module.name}")
    return sorted(CHECKS, key=lambda f: f is fsck_of_a_used_volume)


def main(words):
    jobs = 1
    if "--jobs" in words:
        at = words.index("--jobs")
        if words[at + 1:at + 2] and words[at + 1].isdecimal() and 1 <= int(words[at + 1]) <= 64:
            jobs = int(words[at + 1])
            words = words[:at] + words[at + 2:]
        else:
            print("test-mount: --jobs: a number from 1 to 64 is wanted", file=sys.stderr)
            return 2
    unknown = [w for w in words if w.startswith("-") and w not in ("-l", "--ring")]
    if unknown:
        asked = set(unknown) <= {"-h", "--help"}
        print(__doc__.strip() if asked else f"test-mount: {unknown[0]}: no such option, see --help",
              file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    checks = all_checks()
    if "-l" in words:
        print("\n".join(f.__name__ for f in checks))
        return 0
    ring = "--ring" in words
    if ring:
        # some checks turn the kernel's switch off for a while
        jobs = 1
    words = [w for w in words if w != "--ring"]
    chosen = [f for f in checks if not words or any(word in f.__name__ for word in words)]
    if not chosen:
        print(f"test-mount: no check has a name with {' or '.join(words)} in it, -l lists them", file=sys.stderr)
        return 2
    global OURS
    held = alone()
    OURS = "" if held else f"-{os.getpid()}"
    log = fslib.ROOT / "target" / f"test-mount{OURS}.log"
    fslib.log_to(log)
    why, what = None, "MOUNT TEST WAS RUN"
    if os.environ.get("BRAIDFS_SUT") != "ext4" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        why = "/dev/fuse cannot be opened here"
    elif ring:
        why, what = fslib.why_no_rings(), f"{what} WITH IO_URING"
    if why:
        print(f"SKIPPED: {why}, NO {what}", file=sys.stderr)
        skipped.note(f"{len(chosen)} mount tests, all of them", why)
        print(f"0 passed, 0 failed, {len(chosen)} skipped")
        return int(skipped.is_failure())
    fslib.TRANSPORT = "ring" if ring else fslib.TRANSPORT or "dev"
    if ring and fslib.RING_SWITCH.read_text().strip() != "Y":
        print(f"{fslib.RING_SWITCH} is turned on for these tests, and off again", file=sys.stderr)
    try:
        fslib.build()
        with fslib.rings(True) if ring else contextlib.nullcontext():
            counts, failures, cleaned = run_side_by_side(jobs, chosen, log) if jobs > 1 else run_on_a_volume(chosen)
    except (Failed, OSError, subprocess.SubprocessError) as error:
        print(f"test-mount: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    # Once more at the end: of a long log, the end is what is kept.
    for failure in failures:
        print(f"{fslib.paint('FAILED', 'red')}  {failure}")
    print(f"{counts['ok']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    logs = f"{log.with_stem(log.stem + '-*')}" if jobs > 1 else log
    print(f"Log: {logs}. Unmounted and removed: {cleaned}.")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
