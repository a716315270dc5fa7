"""Access times by the mount's mode, and change times of inode flags."""

import os
import stat
import time

import fslib
from fslib import Skipped
from mount_tests.common import check, daemon_only, must, root_only, same, write_synced
from mount_tests.flags import NOATIME, set_flags
from mount_tests.helpers import small_volume

DAY = 24 * 3600


def remount(volume, *options):
    volume.umount()
    volume.mount(*options)


def aged(path, atime, mtime):
    """Gives the times in seconds before now, without following a link."""
    now = time.time()
    os.utime(path, (now - atime, now - mtime), follow_symlinks=False)


def read_all(path):
    """Reads an object as its kind is read, in a way that reaches the daemon."""
    kind = os.lstat(path).st_mode
    if stat.S_ISLNK(kind):
        os.readlink(path)
    elif stat.S_ISDIR(kind):
        os.listdir(path)
    else:
        path.read_bytes()


def noted(volume, options, age):
    """Which objects' access times a read renews that they had `age` seconds ago, after a change two days ago."""
    top = volume.mnt / "atimes"
    objects = {"file": top / "file", "directory": top / "dir", "link": top / "link", "flagged": top / "flagged"}
    top.mkdir()
    for name in ("file", "flagged"):
        objects[name].write_bytes(b"x" * 5000)
    objects["directory"].mkdir()
    (objects["directory"] / "in").touch()
    objects["link"].symlink_to("target")
    set_flags(objects["flagged"], NOATIME)
    for path in objects.values():
        aged(path, age, 2 * DAY)
    # from the device, and with change times that lie in the past, too
    remount(volume, *options)
    before = {name: os.lstat(path).st_atime_ns for name, path in objects.items()}
    time.sleep(0.02)
    for path in objects.values():
        read_all(path)
    found = {name for name, path in objects.items() if os.lstat(path).st_atime_ns > before[name]}
    for name, path in objects.items():
        now = os.lstat(path).st_atime
        must(name not in found or abs(now - time.time()) < 30, f"access time of {name}: {now}")
    kept = {name: os.lstat(path).st_atime_ns for name, path in objects.items()}
    remount(volume, *options)
    same({name: os.lstat(path).st_atime_ns for name, path in objects.items()}, kept, "access times after a remount")
    set_flags(objects["flagged"], 0)
    for name in ("file", "flagged", "link"):
        objects[name].unlink()
    (objects["directory"] / "in").unlink()
    objects["directory"].rmdir()
    top.rmdir()
    return found


@check
def access_times(volume, _top):
    """Reads that reach the daemon: of a file, a directory, a symbolic link."""
    daemon_only(volume)
    all_kinds = {"file", "directory", "link"}
    try:
        same(noted(volume, ("strictatime",), 60), all_kinds, "strictatime")
        same(noted(volume, ("relatime",), 3 * DAY), all_kinds, "relatime, older than the last change")
        same(noted(volume, ("noatime",), 3 * DAY), set(), "noatime")
        same(noted(volume, ("strictatime", "nodiratime"), 60), {"file", "link"}, "strictatime, nodiratime")
    finally:
        remount(volume)


@check
def access_times_are_not_written_again(volume, top):
    """With relatime the second read changes nothing; with O_NOATIME none does."""
    daemon_only(volume)
    path = top / "f"
    path.write_bytes(b"x" * 5000)
    aged(path, 3 * DAY, 3 * DAY)
    volume.cold()
    path.read_bytes()
    first = path.stat().st_atime_ns
    must(first > time.time_ns() - 30 * 10**9, "the first read is not noted")
    os.utime(path, ns=(time.time_ns(), 5))
    second = path.stat().st_atime_ns
    # relatime looks at the change time, too: it must not be newer
    time.sleep(0.02)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pread(fd, 100, 0)
    os.close(fd)
    third = path.stat().st_atime_ns
    time.sleep(0.02)
    volume.cold()
    path.read_bytes()
    must(path.stat().st_atime_ns in (second, third), "noted although it is newer than the last change")
    aged(path, 3 * DAY, 3 * DAY)
    volume.cold()
    before = path.stat().st_atime_ns
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
    os.pread(fd, 100, 0)
    os.close(fd)
    same(path.stat().st_atime_ns, before, "access time after a read with O_NOATIME")
    (top / "d").mkdir()
    (top / "d" / "in").touch()
    for listed in os.listdir, lambda fd: [e.stat() for e in os.scandir(fd)]:
        aged(top / "d", 3 * DAY, 3 * DAY)
        volume.cold()
        before = (top / "d").stat().st_atime_ns
        fd = os.open(top / "d", os.O_RDONLY | os.O_DIRECTORY | os.O_NOATIME)
        listed(fd)
        os.close(fd)
        same((top / "d").stat().st_atime_ns, before, "access time after a listing with O_NOATIME")


@check
def a_write_to_a_part_of_a_page_is_no_read(volume, top):
    """The kernel reads the rest of the page before: for who cannot read the file that is not noted."""
    daemon_only(volume)
    path = top / "f"
    path.write_bytes(b"x" * 5000)
    aged(path, 3 * DAY, 3 * DAY)
    volume.cold()
    before = path.stat().st_atime_ns
    with open(os.open(path, os.O_WRONLY), "wb", buffering=0) as file:
        file.write(b"part")
        os.fsync(file.fileno())
    same(path.stat().st_atime_ns, before, "access time after a write")
    same(path.read_bytes()[:5], b"partx", "content")


@check
def times_of_what_is_written_back_later(volume, top):
    """Modification and change time are those of the `write`, however much later the kernel writes the pages back, by a sync that does
    not wait between data and times, and whatever it forgets after that."""
    fds = [os.open(top / f"{n}", os.O_WRONLY | os.O_CREAT, 0o644) for n in range(16)]
    try:
        for fd in fds:
            os.write(fd, b"x" * (2 << 20))
        shown = [os.fstat(fd) for fd in fds]
        time.sleep(0.1)
        fslib.run("sync", "-f", top)
        time.sleep(0.1)
    finally:
        for fd in fds:
            os.close(fd)
    volume.cold()
    for n, was in enumerate(shown):
        now = os.stat(top / f"{n}")
        same((now.st_mtime_ns, now.st_ctime_ns), (was.st_mtime_ns, was.st_ctime_ns), f"mtime, ctime of {n}")


def kinds(top):
    """A file, one that is open for writing, a directory."""
    file, held, directory = top / "file", top / "held", top / "dir"
    for path in (file, held):
        path.write_bytes(b"x")
    directory.mkdir()
    return file, held, directory


def chattr(path):
    fslib.run("chattr", "+A", path)


@check
def flags_change_the_change_time(volume, top):
    """chattr raises ctime: at once, after a remount, and with an fsync also where the daemon dies."""
    root_only()
    if not fslib.have("chattr"):
        raise Skipped("no chattr")
    file, held, directory = kinds(top)
    fd = os.open(held, os.O_WRONLY)
    try:
        for path in (file, held, directory):
            os.setxattr(path, "user.x", b"x")  # the kernel keeps the change time that it makes for this
        before = {path: path.stat().st_ctime_ns for path in (file, held, directory)}
        time.sleep(0.05)
        for path in (file, held, directory):
            chattr(path)
        # of a file that is held open, a FUSE kernel tells the time that it knows
        told = [file, directory] if isinstance(volume, fslib.BraidFs) else [file, held, directory]
        for path in told:
            fslib.wait_for(f"newer ctime of {path.name}", lambda: path.stat().st_ctime_ns > before[path], 3)  # noqa: B023
        shown = {path: path.stat().st_ctime_ns for path in told}
        os.write(fd, b"y")
    finally:
        os.close(fd)
    volume.cold()
    for path in (file, directory):
        same(path.stat().st_ctime_ns, shown[path], f"ctime of {path.name} after a remount")
    must(held.stat().st_ctime_ns > before[held], "ctime of the open file after a remount")


@check
def a_reader_that_comes_between_hides_no_change_time(volume, _top):
    """The kernel does not let go of a file that somebody has open, or is just looking at: the close of that shows the time, and a
    later try."""
    daemon_only(volume)
    root_only()
    if not fslib.linux_from(6, 18):
        raise Skipped("before Linux 6.18 it is not shown")
    with small_volume(volume, "flags", 512 << 20) as v:
        v.mount("fileflags")
        file = v.mnt / "f"
        file.write_bytes(b"x")
        for turn in range(20):
            os.setxattr(file, "user.x", str(turn).encode())  # the kernel keeps the change time that it makes for this
            before = file.stat().st_ctime_ns
            time.sleep(0.02)
            set_flags(file, NOATIME * (turn % 2))
            reader = os.open(file, os.O_RDONLY)
            time.sleep(0.02)
            held = time.monotonic()
            path = os.open(file, os.O_PATH)  # holds the name as somebody's stat does that takes its time; no open for the daemon
            os.close(reader)
            time.sleep(0.02)
            os.close(path)
            if time.monotonic() - held > 0.3:
                continue  # the daemon tries again for half a second only
            fslib.wait_for(f"newer ctime, turn {turn}", lambda: file.stat().st_ctime_ns > before, 3)  # noqa: B023
        v.umount()


@check
def change_time_of_flags_survives_a_crash(volume, top):
    daemon_only(volume)
    root_only()
    file, directory = top / "file", top / "dir"
    directory.mkdir()
    write_synced(file, b"x")
    before = {path: path.stat().st_ctime_ns for path in (file, directory)}
    time.sleep(0.05)
    for path in (file, directory):
        chattr(path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    volume.kill9()
    volume.force_down()
    volume.mount()
    for path in (file, directory):
        must(path.stat().st_ctime_ns > before[path], f"ctime of {path.name} is lost")
        same("A" in fslib.run("lsattr", "-d", path)[1].split()[0], True, "the flag")
