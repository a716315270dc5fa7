"""What is removed and still held: working directories, open directories, O_PATH descriptors; and that it goes in the end."""

import contextlib
import ctypes
import errno
import os
import pathlib
import random
import re
import signal
import stat
import subprocess
import sys
import time

from fslib import Failed, run, wait_for
from mount_tests.coherence import SECONDS as LONG
from mount_tests.coherence import run_all
from mount_tests.common import (
    LIBC, check, daemon_only, handle_of, must, open_handle, refused, renameat2, root_only, same,
)


@contextlib.contextmanager
def working_in(path):
    before = os.open(".", os.O_RDONLY)
    os.chdir(path)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def link_of(path, new):
    """link(2) of what the symbolic link `path` leads to."""
    if LIBC.linkat(-100, os.fsencode(path), -100, os.fsencode(new), 0x400):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_removed_directory(how):
    """`how`: a path that leads there."""
    info = os.stat(how)
    must(stat.S_ISDIR(info.st_mode), "no directory")
    same(info.st_nlink, 0, f"links of the removed directory {how}")
    same(os.listdir(how), [], f"names in the removed directory {how}")
    with refused(errno.ENOENT):
        os.mkdir(os.path.join(how, "new"))
    with refused(errno.ENOENT):
        os.close(os.open(os.path.join(how, "new"), os.O_CREAT | os.O_WRONLY, 0o600))
    with refused(errno.ENOENT):
        os.stat(os.path.join(how, "new"))


@check
def removed_working_directory(volume, top):
    (top / "d" / "e").mkdir(parents=True)
    with working_in(top / "d"):
        os.rmdir(top / "d" / "e")
        os.rmdir(top / "d")
        is_removed_directory(".")
        same(os.stat("..").st_ino, top.stat().st_ino, "inode of `..`")
        code = subprocess.run(["/bin/sh", "-c", "ls -la . && stat . >/dev/null && cd .. && test -d ."], cwd=".",
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
        same(code, 0, "exit code of ls, stat, cd ..")
        os.sync()
        os.chmod(".", 0o711)
        if os.geteuid() == 0:
            os.setxattr(".", "user.a", b"v")
            same(os.getxattr(".", "user.a"), b"v", "attribute of a removed directory")
        same(stat.S_IMODE(os.stat(".").st_mode), 0o711, "mode of a removed directory")
        with refused(errno.ENOENT):
            os.rename(top, "x")
    # removed in a tree that goes at once
    (top / "a" / "b" / "c").mkdir(parents=True)
    with working_in(top / "a" / "b" / "c"):
        for path in ("a/b/c", "a/b", "a"):
            os.rmdir(top / path)
        is_removed_directory(".")
        is_removed_directory("..")
        is_removed_directory("../..")
        same(os.stat("../../..").st_ino, top.stat().st_ino, "inode of `../../..`")


@check
def removed_open_directory(_volume, top):
    (top / "d").mkdir()
    for name in "abc":
        (top / "d" / name).touch()
    fd = os.open(top / "d", os.O_RDONLY)
    same(len(os.listdir(fd)), 3, "names")
    for name in "abc":
        os.unlink(name, dir_fd=fd)
    os.rmdir(top / "d")
    same((os.listdir(fd), os.fstat(fd).st_nlink), ([], 0), "names and links of a removed directory that is open")
    is_removed_directory(f"/proc/self/fd/{fd}")
    os.close(fd)


@check
def removed_but_held_by_path(_volume, top):
    (top / "f").write_text("kept")
    (top / "d").mkdir()
    os.symlink("target", top / "l")
    os.mkfifo(top / "p")
    held = {name: os.open(top / name, os.O_PATH | os.O_NOFOLLOW) for name in "fdlp"}
    inos = {name: os.fstat(fd).st_ino for name, fd in held.items()}
    for name in "flp":
        os.unlink(top / name)
    os.rmdir(top / "d")
    os.sync()
    for n in range(300):
        (top / f"n{n}").touch()
        must(os.stat(top / f"n{n}").st_ino not in inos.values(), "an inode's number was given again while it was held")
    for name, fd in held.items():
        same((os.fstat(fd).st_nlink, os.fstat(fd).st_ino), (0, inos[name]), f"links and number of {name}")
    same(os.readlink("", dir_fd=held["l"]), "target", "target of the removed link")
    is_removed_directory(f"/proc/self/fd/{held['d']}")
    path = f"/proc/self/fd/{held['f']}"
    same(os.stat(path).st_nlink, 0, "links by /proc")
    with open(path, "r+b") as file:
        same(file.read(), b"kept", "content of the removed file")
        file.write(b" and more" * 1000)
    same(len(pathlib.Path(path).read_bytes()), 9004, "bytes, opened once more")
    os.truncate(path, 4)
    os.chmod(path, 0o640)
    os.utime(path, (1, 2))
    same((os.stat(path).st_size, os.stat(path).st_mtime), (4, 2), "size and time")
    with refused(errno.ENOENT):
        link_of(path, top / "again")
    # another name keeps it a file like any other
    (top / "g").touch()
    os.link(top / "g", top / "h")
    fd = os.open(top / "g", os.O_PATH)
    os.unlink(top / "g")
    same(os.fstat(fd).st_nlink, 1, "links of a file with another name")
    for fd in (fd, *held.values()):
        os.close(fd)


@check
def replaced_but_held(_volume, top):
    """Rename over a directory and a file that somebody holds."""
    for name in ("d", "new"):
        (top / name).mkdir()
    (top / "f").write_text("old")
    (top / "newf").write_text("new")
    file = os.open(top / "f", os.O_PATH)
    with working_in(top / "d"):
        os.rename(top / "new", top / "d")
        os.rename(top / "newf", top / "f")
        is_removed_directory(".")
        same(os.stat("..").st_ino, top.stat().st_ino, "inode of `..`")
        same(pathlib.Path(f"/proc/self/fd/{file}").read_text(), "old", "content of the replaced file")
        same((top / "f").read_text(), "new", "content by the name")
        (top / "other").mkdir()
        renameat2(top / "d", top / "other", 2)
    os.close(file)


@check
def nameless_files_get_names(_volume, top):
    fd = os.open(top, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, b"text")
    link_of(f"/proc/self/fd/{fd}", top / "named")
    os.close(fd)
    same((top / "named").read_text(), "text", "content of a file that was named later")


@check
def removed_and_known_by_handle(volume, top):
    """An NFS server's handle: of what is held it opens, of what is gone it does not."""
    root_only()
    daemon_only(volume)
    (top / "f").write_text("kept")
    handle = handle_of(top / "f")
    fd = os.open(top / "f", os.O_PATH)
    os.unlink(top / "f")
    again = open_handle(volume, handle)
    same(os.read(again, 10), b"kept", "content by the handle of a removed file that is held")
    os.close(again)
    os.close(fd)
    with refused(errno.ESTALE):
        open_handle(volume, handle)


@check(seconds=90)
def five_processes_in_one_tree(_volume, top):
    """They create, remove, rename and change into directories; no answer that ext4 would not give."""
    end = time.monotonic() + 4
    expected = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EBUSY}

    def work():
        rand = random.Random(os.getpid())

        def some():
            return os.path.join(top, *(rand.choice("abc") for _ in range(rand.randint(1, 4))))

        acts = [
            lambda: os.makedirs(some(), exist_ok=True), lambda: os.mkdir(some()), lambda: os.rmdir(some()),
            lambda: os.chdir(some()), lambda: os.listdir("."), lambda: os.stat("."), lambda: os.stat(".."),
            lambda: os.mkdir("x"), lambda: os.rmdir("x"), lambda: os.rename(some(), some()),
            lambda: os.close(os.open(some(), os.O_CREAT | os.O_WRONLY, 0o600)), lambda: os.unlink(some()),
            lambda: os.close(os.open(".", os.O_RDONLY)), lambda: os.chmod(".", 0o755), lambda: os.chdir(".."),
        ]
        os.chdir(top)
        count = 0
        while time.monotonic() < end:
            count += 1
            try:
                rand.choice(acts)()
            except OSError as error:
                must(error.errno in expected, f"{error}")
            # a removed directory has no path
            with contextlib.suppress(FileNotFoundError):
                if not os.getcwd().startswith(str(top)):
                    os.chdir(top)
        return count

    run_all([work] * 5, 4)
    os.chdir("/")
    for path, _, _ in os.walk(top):
        os.stat(path)


def free(volume):
    """Bytes and inodes. What else is mounted here may take long to sync."""
    run("sync", "-f", volume.mnt)
    info = os.statvfs(volume.mnt)
    return info.f_bfree * info.f_frsize, info.f_ffree


@check(seconds=300)
def what_was_held_goes(volume, top):
    """Many files listed with their attributes, removed: inodes and space are back, also with the kernel's cache dropped
    between. 100,000 of them with `make coherence`."""
    (top / "warm").mkdir()
    before = free(volume)
    count = 100_000 if LONG else 15_000
    for n in range(count):
        os.close(os.open(top / f"f{n:06}", os.O_CREAT | os.O_WRONLY, 0o600))
    listed = 0
    with os.scandir(top) as entries:
        for entry in entries:
            listed += entry.stat(follow_symlinks=False).st_size == 0 and entry.name != "warm"
    same(listed, count, "files listed")
    if os.geteuid() == 0:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("2")
    for n in range(0, count, 2):
        os.unlink(top / f"f{n:06}")
    held = [os.open(top / f"f{n:06}", os.O_PATH) for n in range(1, 201, 2)]
    for n in range(1, count, 2):
        os.unlink(top / f"f{n:06}")
    for fd in held:
        os.close(fd)
    wait_for("inodes to be free again", lambda: free(volume)[1] >= before[1], 10)
    wait_for("bytes to be free again", lambda: free(volume)[0] >= before[0] - (8 << 20), 10)
    volume.cold()
    wait_for("inodes to be free again after a remount", lambda: free(volume)[1] >= before[1], 10)


@check(seconds=120)
def space_of_what_was_removed(volume, top):
    """Removed, then written anew at once, again and again: no ENOSPC from what the kernel has yet to forget, and df right
    after rm tells the truth."""
    daemon_only(volume)
    info = os.statvfs(top)
    size = info.f_bavail * info.f_frsize // 5 * 3
    piece, start = bytes(1 << 20), None
    for turn in range(3):
        with open(top / "big", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            for _ in range(8):
                file.write(piece)
        with open(top / "big", "rb") as file:
            file.read(1 << 20)
        os.unlink(top / "big")
        os.sync()
        now = os.statvfs(top).f_bavail * info.f_frsize
        start = start or now
        must(now >= start - (32 << 20), f"{start - now} bytes less available after turn {turn}")


@check
def interrupted_look_ups(volume, top):
    """Signals while names are looked up: counts stay right, so that what is removed goes."""
    (top / "warm").touch()
    before = free(volume)
    for n in range(2000):
        (top / f"f{n}").touch()
    program = "import os, sys\nwhile True:\n    for n in range(2000):\n        os.stat(os.path.join(sys.argv[1], f'f{n}'))\n"
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if os.geteuid() == 0:
            pathlib.Path("/proc/sys/vm/drop_caches").write_text("2")
        children = [subprocess.Popen([sys.executable, "-c", program, str(top)]) for _ in range(3)]
        time.sleep(0.3)
        for child in children:
            child.send_signal(random.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM)))
        for child in children:
            child.wait()
    for n in range(2000):
        os.unlink(top / f"f{n}")
    wait_for("inodes to be free again", lambda: free(volume)[1] >= before[1], 10)


@check
def held_at_the_end_of_the_mount(volume, top):
    """A lazy unmount and a killed daemon with things held: the volume is sound, what was held is gone."""
    root_only()
    daemon_only(volume)
    before = free(volume)[1]

    def hold():
        for name in ("d", "e"):
            (top / name).mkdir()
        (top / "f").write_text("held")
        fds = [os.open(top / name, os.O_PATH) for name in ("d", "f")]
        os.rmdir(top / "d")
        os.unlink(top / "f")
        return fds

    for how in ("lazy", "kill"):
        fds = hold()
        os.sync()
        pids = volume.daemons()
        if how == "lazy":
            subprocess.run(["umount", "-l", volume.mnt], check=True)
            same(os.fstat(fds[1]).st_nlink, 0, "links after umount -l")
            same(pathlib.Path(f"/proc/self/fd/{fds[1]}").read_text(), "held", "content after umount -l")
            for fd in fds:
                os.close(fd)
            volume.settle()
            end = time.monotonic() + 20
            while any(os.path.exists(f"/proc/{pid}/fd/0") for pid in pids) and time.monotonic() < end:
                time.sleep(0.05)
        else:
            volume.kill9()
            for fd in fds:
                os.close(fd)
            subprocess.run(["umount", "-l", volume.mnt], check=True)
        code, text = volume.fsck("-f", "-n")
        must(code in (0, 1, 4) and "panicked" not in text, text)
        volume.mount()
        os.rmdir(top / "e")
        # the number of a removed directory is free after a checkpoint
        volume.cold()
        wait_for(f"{how}: inodes to be free again", lambda: free(volume)[1] >= before, 10)
        same(sorted(os.listdir(top)), [], "names")
    volume.umount()
    same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")
    volume.mount()


@check(seconds=120)
def memory_of_what_is_known(volume, top):
    """The daemon keeps a few dozen bytes for an inode that the kernel knows."""
    daemon_only(volume)

    def rss():
        pid = volume.daemon()
        return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text()).group(1)) << 10

    for n in range(20_000):
        os.close(os.open(top / f"f{n}", os.O_CREAT | os.O_WRONLY, 0o600))
    os.sync()
    before = rss()
    for _ in range(5):
        for n in range(20_000):
            os.stat(top / f"f{n}")
    more = rss() - before
    if more > 20_000 * 2000:
        raise Failed(f"{more / 20_000:.0f} bytes more for each inode looked up again")
