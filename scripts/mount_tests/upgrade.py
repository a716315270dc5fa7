"""Another program takes a mount over: what is open goes on, under load, and whatever dies or refuses on the way."""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import fslib
from fslib import Failed, Skipped, dead, is_running, run, wait_for
from mount_tests.common import LIBC, NOBODY, as_nobody, check, daemon_only, must, refused, root_only, same, write_synced
from mount_tests.flags import NOATIME, set_flags
from mount_tests.helpers import loop_device, refuses, small_volume
from mount_tests.supervise import both, kill_serving, supervised
from mount_tests.transport import with_rings

# `make upgrade-rounds` asks for more.
ROUNDS = int(os.environ.get("UPGRADE_ROUNDS", "4"))
FAILPOINT = "BRAIDFS_TEST_UPGRADE"
BACK = 32


def upgrade(v, *options, ok=(0,)):
    code, text = run(v.binary, "upgrade", *options, v.mnt, ok=ok, timeout=100)
    return code, text.strip()


def server(v):
    """The one process that serves, once others that are ending have."""
    return v.daemon()


@contextlib.contextmanager
def mounted(volume, *options, size=128 << 20):
    """A small volume, mounted by the device; its log is kept, and the failpoint can be set."""
    daemon_only(volume)
    with small_volume(volume, name="upgraded", size=size) as v:
        log, point = v.image.with_suffix(".log"), v.image.with_suffix(".point")
        env = {"BRAIDFS_LOG_FILE": str(log), FAILPOINT: str(point)}
        os.environ.update(env)
        v.point = point
        try:
            v.mount("transport=dev", *options)
            yield v
        finally:
            for name in env:
                del os.environ[name]
            v.force_down()
            if log.exists():
                fslib.log(log.read_text())
            log.unlink(missing_ok=True)
            point.unlink(missing_ok=True)


def free_inodes(v):
    v.settle()
    return os.statvfs(v.mnt).f_ffree


class Held:
    """Files that are open in every way, and what must be so of them, whoever serves."""

    def __init__(self, top):
        self.top = top
        top.mkdir()
        self.content = random.Random(3).randbytes(300_000)
        self.file = os.open(top / "file", os.O_RDWR | os.O_CREAT, 0o640)
        os.write(self.file, self.content)
        self.gone = os.open(top / "gone", os.O_RDWR | os.O_CREAT)
        os.write(self.gone, b"unlinked, not synced")
        os.unlink(top / "gone")
        self.tmp = os.open(top, os.O_TMPFILE | os.O_RDWR)
        os.write(self.tmp, b"never had a name")
        self.log = os.open(top / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.direct = os.open(top / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        self.block = mmap.mmap(-1, 4096)
        self.shared = os.open(top / "map", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.shared, 64 << 10)
        self.map = mmap.mmap(self.shared, 64 << 10)
        os.mkdir(top / "removed")
        self.removed = os.open(top / "removed", os.O_RDONLY)
        os.rmdir(top / "removed")
        self.path = os.open(top / "file", os.O_PATH)
        (top / "many").mkdir()
        self.names = {f"entry-with-a-long-name-so-that-it-takes-several-calls-{n:05}" for n in range(1500)}
        for name in self.names:
            (top / "many" / name).touch()
        self.listing, self.listed = os.scandir(top / "many"), set()
        fcntl.flock(self.file, fcntl.LOCK_EX)
        fcntl.lockf(self.shared, fcntl.LOCK_EX, 100, 50)
        self.appended, self.round = b"", 0
        self.unlinked = b"unlinked, not synced"

    def between(self):
        """Changes all that is open, and leaves it unsynced."""
        self.round += 1
        n = self.round
        line = f"line {n}\n".encode()
        os.write(self.log, line)
        self.appended += line
        os.pwrite(self.file, line, 1000 * n)
        self.content = self.content[:1000 * n] + line + self.content[1000 * n + len(line):]
        self.unlinked += line
        os.lseek(self.gone, 0, os.SEEK_END)
        os.write(self.gone, line)
        self.map[n * 5000:n * 5000 + len(line)] = line
        self.block[:len(line)] = line
        os.preadv(self.direct, [self.block], 0) if n == 0 else os.pwritev(self.direct, [self.block], n * 4096)
        for _ in range(200):
            entry = next(self.listing, None)
            if entry:
                must(entry.name not in self.listed, f"{entry.name} is listed twice")
                self.listed.add(entry.name)

    def look(self):
        size = len(self.content)
        must(os.pread(self.file, size + 10, 0) == self.content, "the open file")
        same(os.lseek(self.file, 0, os.SEEK_CUR), size, "its offset")
        same(os.pread(self.gone, 10000, 0), self.unlinked, "the unlinked file")
        same(os.fstat(self.gone).st_nlink, 0, "its links")
        same(os.pread(self.tmp, 100, 0), b"never had a name", "the file without a name")
        same((self.top / "log").read_bytes(), self.appended, "what was appended")
        for n in range(1, self.round + 1):
            line = f"line {n}\n".encode()
            same(self.map[n * 5000:n * 5000 + len(line)], line, "the map")
            got = os.preadv(self.direct, [self.block], n * 4096)
            same((got, self.block[:len(line)]), (4096, line), "what was written past the cache")
        same(os.fstat(self.removed).st_nlink, 0, "links of the removed directory")
        same(os.listdir(self.removed), [], "its names")
        same(os.fstat(self.path).st_ino, os.fstat(self.file).st_ino, "the file that is only named")
        for lock in "flock", "lockf":
            must(fslib.in_child(lambda lock=lock: self.is_locked(lock), 20), f"{lock} is lost")

    def is_locked(self, kind):
        try:
            if kind == "flock":
                with open(self.top / "file", "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            else:
                with open(self.top / "map", "r+b") as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 60)
        except (BlockingIOError, PermissionError):
            return True
        return False

    def end(self):
        """All of it ends well: also the file without a name gets one."""
        self.listed.update(entry.name for entry in self.listing)
        same(self.listed, self.names, "names of a listing that was begun before")
        link = LIBC.linkat(-100, f"/proc/self/fd/{self.tmp}".encode(), -100, os.fsencode(self.top / "named"), 0x400)
        same(link, 0, "linkat of the file without a name")
        same((self.top / "named").read_bytes(), b"never had a name", "the file that was given a name")
        for fd in self.file, self.gone, self.tmp, self.log, self.direct, self.shared:
            os.fsync(fd)
        self.map.close()
        for fd in self.file, self.gone, self.tmp, self.log, self.direct, self.shared, self.removed, self.path:
            os.close(fd)


@check(seconds=90)
def what_is_open_goes_on_with_another_program(volume, _top):
    for options in ((), ("fileflags",), ("cache=through",)):
        with mounted(volume, *options) as v:
            held, before = Held(v.mnt / "top"), v.mount_entry()
            servers = {server(v)}
            for _ in range(3):
                held.between()
                upgrade(v)
                held.look()
                servers.add(server(v))
            same(len(servers), 4, "processes that served")
            same(v.mount_entry(), before, "the line of the table of mounts")
            free = free_inodes(v)
            held.end()
            wait_for("what has no name to be gone", lambda: free_inodes(v) > free, 10)
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
            v.mount("transport=dev", *options)
            same((v.mnt / "top" / "file").read_bytes(), held.content, "the file after an unmount")
            same((v.mnt / "top" / "log").read_bytes(), held.appended, "the log after an unmount")


@check
def a_program_file_that_was_replaced(volume, _top):
    """As a package does it: the old program's file is gone when the new one takes over."""
    with mounted(volume) as v:
        old = v.binary
        v.binary = v.image.with_suffix(".bin")
        shutil.copy(old, v.binary)
        v.umount()
        v.mount("transport=dev")
        first = server(v)
        v.binary.unlink()
        shutil.copy(old, v.binary)
        write_synced(v.mnt / "f", b"x")
        code, text = upgrade(v)
        must("served by braidfs" in text and f"process {server(v)}" in text, text)
        must(not is_running(first), "the old process is there when the command has returned")
        must(not os.readlink(f"/proc/{server(v)}/exe").endswith("(deleted)"), "it runs the old file")
        # another one, by its path
        other = v.image.with_suffix(".other")
        shutil.copy(old, other)
        run(old, "upgrade", "-q", "--program", other, v.mnt)
        wait_for("the end of the one before", lambda: not v.daemons(), 10)
        v.binary = other
        server(v)
        same((v.mnt / "f").read_bytes(), b"x", "content")


# PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE of the kernel's flags of a thread: what prctl(2) sets for who writes a file system back
IO_FLUSHER = 0x180000
# As a program does that does not know of it: the flags go on with `exec`.
FORGETFUL = """#!{python}
import ctypes, os, sys
ctypes.CDLL(None).prctl(57, 0, 0, 0, 0)
os.execv({binary!r}, [{binary!r}, *sys.argv[1:]])
"""


@check
def memory_is_not_waited_for_after_an_upgrade(volume, _top):
    """From a program that had not told the kernel that it writes a file system back, too."""
    root_only()
    may = LIBC.prctl(58, 0, 0, 0, 0) >= 0
    os.environ["BRAIDFS_LOG"] = "debug"
    try:
        with mounted(volume) as v:
            forgetful, log = v.image.with_suffix(".sh"), v.image.with_suffix(".log")
            try:
                forgetful.write_text(FORGETFUL.format(python=sys.executable, binary=str(v.binary)))
                forgetful.chmod(0o755)
                upgrade(v, "--program", forgetful)
                if not may:
                    # a container without CAP_SYS_RESOURCE: both processes have asked for it
                    same(log.read_text().count("does not take this process for one that writes"), 2, "refusals")
                stats = fslib.of_threads(server(v), lambda t: (t / "stat").read_text()) if may else ()
                for name, _, rest in (stat.rpartition(")") for stat in stats):
                    flags = int(rest.split()[6])
                    same(flags & IO_FLUSHER, IO_FLUSHER, f"flags {flags:x} of {name}")
            finally:
                forgetful.unlink(missing_ok=True)
    finally:
        del os.environ["BRAIDFS_LOG"]


@check
def who_may_and_what_is_refused(volume, _top):
    with mounted(volume) as v:
        root_only()
        serving = server(v)
        os.chmod(v.mnt, 0o755)

        def by_nobody():
            env = {k: x for k, x in os.environ.items() if k != "BRAIDFS_LOG_FILE"}
            return subprocess.run([v.binary, "upgrade", v.mnt], capture_output=True, text=True, check=False, env=env)

        done = as_nobody(lambda: (lambda d: (d.returncode, d.stderr))(by_nobody()))
        same((done[0], "only root may" in done[1]), (BACK, True), f"as nobody: {done[1]}")
        for program, word in (("/bin/false", "ended without a word"), ("/no/such", "no such file"), ("/etc/passwd", "")):
            code, text = upgrade(v, "--program", program, ok=(BACK,))
            must(word in text, f"{program}: {text}")
        same(server(v), serving, "the process that serves")
        code, text = run(v.binary, "upgrade", v.mnt.parent, ok=(BACK,))
        must("nothing is mounted there" in text, text)
        upgrade(v)
        must(server(v) != serving, "the old process serves")


# Read-only ----------------------------------------------------------------------------------------------------------------


class HeldToRead:
    """What is open of a mount that is read-only, and the bytes of its image, to which nothing is written."""

    def __init__(self, v):
        self.v, self.entry = v, v.mount_entry()
        self.file = os.open(v.mnt / "file", os.O_RDONLY)
        self.dir = os.open(v.mnt / "many", os.O_PATH)
        self.listing = os.scandir(v.mnt / "many")
        self.listed = {next(self.listing).name}
        self.image = self.digest()

    def digest(self):
        with open(self.v.image, "rb") as image:
            return hashlib.file_digest(image, "sha256").hexdigest()

    def look(self, content):
        v = self.v
        same(v.mount_entry(), self.entry, "the line of the table of mounts")
        same(os.pread(self.file, len(content) + 1, 0), content, "the open file")
        same(os.stat("7", dir_fd=self.dir).st_size, 1, "a file of the directory that is only named")
        same((v.mnt / "many" / "8").read_bytes(), b"8", "a file that was not open")
        with refused(errno.EROFS):
            (v.mnt / "new").touch()
        same(self.digest(), self.image, "the image's bytes")

    def end(self):
        self.listed.update(entry.name for entry in self.listing)
        same(self.listed, {f"{n}" for n in range(10)}, "names of a listing that was begun before")
        os.close(self.file)
        os.close(self.dir)


def fill_to_read(v, content):
    (v.mnt / "many").mkdir()
    for n in range(10):
        write_synced(v.mnt / "many" / f"{n}", f"{n}".encode())
    write_synced(v.mnt / "file", content)


def goes_back(v, held, content):
    """What fails on the way leaves the old process as it was."""
    for step in "new-offered kill", "new-given fail", "new-mounted kill":
        v.point.write_text(step)
        upgrade(v, ok=(BACK,))
        must(not v.point.exists(), f"nobody came to {step}")
        held.look(content)


def gets_lock(image, how):
    with open(image, "rb") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@check(seconds=60)
def read_only_by_a_remount(volume, _top):
    content = random.Random(5).randbytes(100_000)
    with mounted(volume) as v:
        root_only()
        fill_to_read(v, content)
        run(v.binary, "mount", "-o", "remount,ro", v.mnt)
        held, serving = HeldToRead(v), {server(v)}
        for _ in range(2):
            upgrade(v)
            serving.add(server(v))
            held.look(content)
        goes_back(v, held, content)
        must(server(v) in serving and len(serving) == 3, "processes that served")
        held.end()
        # its devices are open for writing all the time
        must(not gets_lock(v.image, fcntl.LOCK_SH), "a reader gets the lock")
        run(v.binary, "mount", "-o", "remount,rw", v.mnt)
        write_synced(v.mnt / "file", b"other")
        upgrade(v)
        must(server(v) not in serving, "the old process serves")
        write_synced(v.mnt / "more", b"x")
        same((v.mnt / "file").read_bytes(), b"other", "content")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check(seconds=90)
def mounted_read_only(volume, _top):
    """Of a volume whose journal is to be replayed, which happens in memory only."""
    content = random.Random(6).randbytes(100_000)
    for options in (("ro",), ("ro", "fuseblk=never")):
        with mounted(volume) as v:
            root_only()
            fill_to_read(v, content)
            v.kill9()
            v.mount("transport=dev", *options)
            held, serving = HeldToRead(v), {server(v)}
            held.look(content)
            for _ in range(2):
                upgrade(v)
                serving.add(server(v))
                held.look(content)
                locks = gets_lock(v.image, fcntl.LOCK_SH), gets_lock(v.image, fcntl.LOCK_EX)
                if "fuseblk=never" in options:
                    same(locks, (True, False), "whether a reader and a writer get the lock")
            goes_back(v, held, content)
            must(server(v) in serving and len(serving) == 3, "processes that served")
            held.end()
            serving = server(v)
            run(v.binary, "mount", "-o", "remount,rw", v.mnt)
            write_synced(v.mnt / "f", b"x")
            must("mounted read-only first" in upgrade(v, ok=(BACK,))[1], "writable by a remount")
            run(v.binary, "mount", "-o", "remount,ro", v.mnt)
            must("mounted read-only first" in upgrade(v, ok=(BACK,))[1], "read-only again")
            same(server(v), serving, "the process that serves")
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def not_made_writable_while_it_is_handed_over(volume, _top):
    """Its devices would be opened for writing, while another process has their descriptors as a reader's. Of a block device
    alone: there is no lock on bytes, which would be in the way, too, as the file that the bytes are in has no name."""
    with mounted(volume) as v, contextlib.ExitStack() as stack:
        root_only()
        v.umount()
        other = v.image.with_suffix(".other-name")
        os.link(v.image, other)
        place = stack.enter_context(loop_device(other))
        stack.callback(v.force_down)
        other.unlink()
        run(v.binary, "mount", "-o", "ro,transport=dev,fuseblk=never", place, v.mnt)
        before = server(v)
        v.point.write_text("new-offered stop")
        command = subprocess.Popen([v.binary, "upgrade", "-q", v.mnt], stderr=subprocess.DEVNULL)
        try:
            wait_for_its_stop(v, "the hand-over to begin")
            code, text = run(v.binary, "mount", "-o", "remount,rw", v.mnt, ok=None)
            must(code == BACK and "an upgrade of the mount" in text, f"remounted meanwhile: {code} {text}")
        finally:
            for pid in v.daemons():
                os.kill(pid, signal.SIGCONT)
            command.wait(30)
        same(command.returncode, 0, "exit code of the upgrade")
        must(server(v) != before, "the old process serves")
        run(v.binary, "mount", "-o", "remount,rw", v.mnt)
        write_synced(v.mnt / "f", b"x")


@check
def a_mount_by_rings_is_refused(volume, _top):
    with with_rings(volume) as v:
        v.mount("transport=ring")
        serving = server(v)
        must("io_uring" in upgrade(v, ok=(BACK,))[1], "the reason")
        same(server(v), serving, "the process that serves")


@contextlib.contextmanager
def mounted_by_nobody(volume, options):
    """A small volume that an ordinary user has made and mounted, and what calls our command as that one."""
    root_only()
    daemon_only(volume)
    if not shutil.which("fusermount3"):
        raise Skipped("no fusermount3")
    with small_volume(volume) as v:
        v.mount()
        os.chown(v.mnt, NOBODY, NOBODY)
        v.umount()
        os.chmod(v.image.parent, 0o755)
        os.chown(v.image, NOBODY, NOBODY)
        os.chown(v.mnt, NOBODY, NOBODY)
        call = lambda *argv: as_nobody(lambda: run(v.binary, *argv, timeout=60))  # noqa: E731
        call("mount", "-o", options, v.image, v.mnt)
        try:
            yield v, call
        finally:
            as_nobody(lambda: run("fusermount3", "-u", v.mnt, ok=None))
        wait_for("the end of all its processes", lambda: not v.daemons(), 20)


@check
def a_users_own_mount(volume, _top):
    """By its user, and by root, whom it does not let in."""
    with mounted_by_nobody(volume, "transport=dev") as (v, call):
        first = server(v)
        as_nobody(lambda: write_synced(v.mnt / "f", b"x"))
        call("upgrade", v.mnt)
        second = server(v)
        upgrade(v)
        must(len({first, second, server(v)}) == 3, "processes that served")
        same(os.stat(f"/proc/{server(v)}").st_uid, NOBODY, "user of the process")
        same(as_nobody(lambda: (v.mnt / "f").read_bytes()), b"x", "content")
        # other commands do as root what its user may
        for command in (("stats", v.mnt), ("stats", v.image), ("top", "--batch", "-n", "1", "-d", "0.1", v.mnt), ("label", v.mnt, "own"),
                        ("tenant", "create", v.mnt / "t"), ("tenant", "list", v.mnt), ("quota", "report", v.mnt),
                        ("quota", "set", "--user", "1", "--space", "1M", v.mnt), ("resize", v.mnt), ("scrub", v.mnt),
                        ("defrag", "--check", v.mnt)):
            run(v.binary, *command)
        for code, said, *command in ((1, "not even root: run it as nobody", "device", "rebalance", v.mnt),
                                     (BACK, "not even root, and only root can remount", "mount", "-o", "remount,ro", v.mnt)):
            refuses(code, (said,), v.binary, *command)


@check
def root_on_a_users_own_mount_starts_nothing_as_that_user(volume, _top):
    """A program that ran as the user on root's terminal would be the user's to change. So names are asked for before, or not at all."""
    with mounted_by_nobody(volume, "transport=dev") as (v, _call), small_volume(volume, "other") as other:
        ran = v.image.with_suffix(".ran")
        ran.write_bytes(b"")
        ran.chmod(0o666)
        programs = v.image.with_suffix(".programs")
        programs.mkdir()
        for name in "getent", "id":
            program = programs / name
            program.write_text(f'#!/bin/sh\necho {name} $(/usr/bin/id -u) >> {ran}\nPATH=/usr/bin:/bin exec {name} "$@"\n')
            program.chmod(0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{programs}:{path}"
        try:
            run(v.binary, "quota", "set", "--user", "nobody", "--space", "1M", v.mnt)
            _, said = run(v.binary, "quota", "show", "--group", "root", v.mnt, ok=None)
            _, said = run(v.binary, "quota", "report", v.mnt)
        finally:
            os.environ["PATH"] = path
        must(f"user {NOBODY}: " in said, f"numbers alone: {said}")
        same(ran.read_text().split("\n"), ["id 0", "getent 0", ""], "programs, and as whom they ran")
        other.mount()
        try:
            refuses(1, ("as the same user as",), v.binary, "defrag", "--check", v.mnt, other.mnt)
            refuses(1, ("as the same user as",), v.binary, "defrag", "--check", other.mnt, v.mnt)
            run(v.binary, "defrag", "--check", v.mnt, v.mnt)
        finally:
            other.umount()
            shutil.rmtree(programs)
            ran.unlink()


@check
def options_and_metrics_stay(volume, _top):
    root_only()
    path = volume.image.with_suffix(".metrics")
    with mounted(volume, "noexec", "commit=7", "fileflags", f"metrics=unix:{path}") as v:
        run(v.binary, "mount", "-o", "remount,sync,strictatime", v.mnt)
        (v.mnt / "f").write_bytes(b"x")
        file = v.mnt / "immutable"
        file.write_bytes(b"x")
        writer = os.open(file, os.O_WRONLY)
        before = v.mount_entry()
        run("chattr", "+i", file)
        for _ in range(2):
            upgrade(v)
            same(v.mount_entry(), before, "the line of the table of mounts")
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                must(client.recv(100).startswith(b"HTTP/1.1 200"), "no metrics")
            # a descriptor from before
            with refused(errno.EPERM):
                os.write(writer, b"y")
        (v.mnt / "durable").write_bytes(b"by sync")
        (v.mnt / "f").rename(v.mnt / "g")
        run("chattr", "-i", file)
        v.kill9()
        os.close(writer)
        v.mount()
        same((v.mnt / "durable").read_bytes(), b"by sync", "a change of a mount that was remounted with sync")
        must((v.mnt / "g").exists(), "a rename there")


@check
def nobody_else_gets_the_devices_meanwhile(volume, _top):
    """Locks of an image, and the claim on a block device, from before the first upgrade to behind the last."""
    with mounted(volume) as v:
        for what in "image", "device":
            if what == "device" and not fslib.IS_ROOT:
                continue
            with contextlib.ExitStack() as stack:
                place, flags = v.image, 0
                if what == "device":
                    v.umount()
                    place, flags = stack.enter_context(loop_device(v.image)), os.O_EXCL
                    stack.callback(v.force_down)
                    run(v.binary, "mount", "-o", "transport=dev,fuseblk=never", place, v.mnt)
                got, stop = multiprocessing.Value("i", 0), multiprocessing.Event()
                tries = multiprocessing.Value("i", 0)

                def intrude(place=place, flags=flags, got=got, stop=stop, tries=tries):
                    while not stop.is_set():
                        tries.value += 1
                        try:
                            fd = os.open(place, os.O_RDONLY | flags)
                        except OSError:
                            continue
                        try:
                            if not flags:
                                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                            got.value += 1
                        except BlockingIOError:
                            pass
                        os.close(fd)

                other = multiprocessing.Process(target=intrude)
                other.start()
                try:
                    for _ in range(3):
                        write_synced(v.mnt / "f", b"x")
                        upgrade(v)
                finally:
                    stop.set()
                    other.join()
                must(tries.value > 100, "too few tries")
                same(got.value, 0, f"times that somebody else got the {what}")
                code, text = run(v.binary, "fsck", "-f", place, ok=None)
                must(code == 8 and "in use" in text or "mounted" in text, f"fsck of what is mounted: {code} {text}")


# What fails, and what dies ------------------------------------------------------------------------------------------------

REFUSING = ("new-of-another-version", "new-offered", "new-willing", "old-greeted", "old-closed", "old-given", "new-given",
            "new-mounting", "new-mounted", "old-mounted")
# Who goes on where one is killed.
KILLED = (
    ("old-greeted", "nobody"), ("new-offered", "old"), ("new-willing", "old"), ("old-closed", "nobody"),
    ("old-given", "new"), ("new-given", "old"), ("new-mounting", "old"), ("new-mounted", "old"), ("old-mounted", "new"),
    ("old-told", "new"), ("new-going", "nobody"),
)


@check(seconds=120)
def what_is_refused_changes_nothing(volume, _top):
    with mounted(volume, "fileflags") as v:
        held, serving = Held(v.mnt / "top"), server(v)
        for step in REFUSING:
            held.between()
            v.point.write_text(f"{step} fail")
            text = upgrade(v, ok=(BACK,))[1]
            must(not v.point.exists(), f"nobody came to {step}")
            wanted = "takes hand-over records of versions" if "version" in step else f"fail at {step}"
            must(wanted in text, f"{step}: {text}")
            same(server(v), serving, f"the process that serves after {step}")
            held.look()
            write_synced(v.mnt / "f", step.encode())
        v.point.write_text("new-given stop")
        begun = time.monotonic()
        text = upgrade(v, "--timeout", "1", ok=(BACK,))[1]
        must("said nothing for 1 s" in text and time.monotonic() - begun < 20, text)
        same(server(v), serving, "the process that serves")
        held.look()
        upgrade(v)
        must(server(v) != serving, "the old process serves")
        held.look()
        held.end()
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def what_is_refused_forgets_no_time(volume, _top):
    """Of a file that is written through the kernel tells the time of before at the next rename: it is known as such also after an
    upgrade that was refused."""
    with mounted(volume, "fileflags", size=64 << 20) as v:
        path, moved = v.mnt / "f", v.mnt / "moved"
        path.write_bytes(b"before")
        v.settle()
        fd = os.open(path, os.O_WRONLY)
        time.sleep(0.05)
        begun = time.time_ns() - 10**7
        os.write(fd, b"after")
        v.point.write_text("old-closed fail")
        upgrade(v, ok=(BACK,))
        os.rename(path, moved)
        os.close(fd)
        v.cold()
        must(moved.stat().st_mtime_ns >= begun, f"written after {begun}, and has the time {moved.stat().st_mtime_ns}")


@check(seconds=60)
def flags_that_change_again_and_again_hold_up_no_upgrade(volume, _top):
    """The kernel is to drop a file whose flags have changed, and is asked again where it cannot, as somebody has it open: not
    while an upgrade waits for the end of what is under way."""
    for options in ((), ("fileflags",)):
        with mounted(volume, *options) as v:
            held, other = v.mnt / "held", v.mnt / "other"
            fd = os.open(held, os.O_CREAT | os.O_RDWR)
            other.touch()
            child = os.fork()
            if child == 0:
                try:
                    while True:
                        for path, flags in (held, NOATIME), (other, NOATIME), (held, 0), (other, 0):
                            set_flags(path, flags)
                finally:
                    os._exit(1)
            try:
                time.sleep(0.3)
                serving = server(v)
                upgrade(v)
                must(server(v) != serving, f"{options}: the old process serves")
                same(os.waitpid(child, os.WNOHANG), (0, 0), "the process that changes flags")
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(fd)


@check(seconds=120)
def killed_at_each_step(volume, _top):
    """The old one goes on, or the new one, or all that was open is dead: and what was synced is there."""
    with mounted(volume) as v:
        for step, lives in KILLED:
            fslib.log(f"kill at {step}")
            serving = server(v)
            write_synced(v.mnt / "synced", step.encode())
            held = os.open(v.mnt / "held", os.O_RDWR | os.O_CREAT)
            os.ftruncate(held, 0)
            os.pwrite(held, b"not synced " + step.encode(), 0)
            gone = os.open(v.mnt / "gone", os.O_RDWR | os.O_CREAT)
            os.write(gone, b"unlinked")
            os.unlink(v.mnt / "gone")
            v.point.write_text(f"{step} kill")
            code, text = upgrade(v, ok=(0, BACK))
            must(not v.point.exists(), f"nobody came to {step}")
            if lives == "nobody":
                must(code == BACK and "mount has ended" in text, f"{step}: {code} {text}")
                wait_for("the dead mount", lambda: not v.alive(), 10)
                for fd in held, gone:
                    with refused(*dead()):
                        os.fsync(fd)
                    with contextlib.suppress(OSError):
                        os.close(fd)
                wait_for("the end of all", lambda: not v.daemons(), 10)
                v.mount("transport=dev")
            else:
                same(code, BACK if lives == "old" else 0, f"{step}: exit code with {text}")
                wait_for("the end of the other process", lambda: len(v.daemons()) == 1, 10)
                same(server(v) == serving, lives == "old", f"{step}: the old process goes on")
                same(os.pread(held, 100, 0), b"not synced " + step.encode(), f"{step}: the open file")
                same(os.pread(gone, 100, 0), b"unlinked", f"{step}: the unlinked file")
                os.fsync(held)
                os.close(held)
                os.close(gone)
            same((v.mnt / "synced").read_bytes(), step.encode(), f"{step}: what was synced")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check(seconds=90)
def a_parent_follows_the_new_process(volume, _top):
    with supervised(volume, "supervise=100/3600", "transport=dev") as (v, log):
        point = v.image.with_suffix(".point")
        write_synced(v.mnt / "f", b"x")
        parent, first = both(v)
        for _ in range(3):
            upgrade(v)
        wait_for("the parent to follow", lambda: both(v)[1] not in (None, first), 10)
        must(is_running(parent) and log.read_text().count("it is followed") == 3, "the parent does not follow")
        must(kill_serving(v) == parent, "another parent")
        same((v.mnt / "f").read_bytes(), b"x", "content")
        # one that fails: the old process is looked after as before
        upgrade(v, "--program", "/bin/false", ok=(BACK,))
        kill_serving(v)
        # the old one is killed while the new one is about to take over
        os.environ[FAILPOINT] = str(point)
        try:
            upgrade(v)
            kill_serving(v)
            serving = both(v)[1]
        finally:
            del os.environ[FAILPOINT]
        write_synced(v.mnt / "g", b"y")
        upgrade(v)
        must(both(v)[1] != serving, "not upgraded")
        os.kill(parent, signal.SIGTERM)
        wait_for("the end of both", lambda: not v.daemons(), 20)
        must(not v.mount_entry(), "still mounted")
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def a_parent_follows_where_the_old_process_is_killed(volume, _top):
    daemon_only(volume)
    point = volume.image.with_suffix(".point")
    os.environ[FAILPOINT] = str(point)
    try:
        with supervised(volume, "supervise=100/3600", "transport=dev") as (v, _):
            parent, serving = both(v)
            held = os.open(v.mnt / "held", os.O_RDWR | os.O_CREAT)
            for step, lives in (("old-given", True), ("old-told", True), ("old-closed", False), ("new-going", False)):
                os.pwrite(held, step.encode(), 0)
                os.fsync(held)
                point.write_text(f"{step} kill")
                upgrade(v, ok=(0, BACK))
                must(not point.exists(), f"nobody came to {step}")
                wait_for("another process", lambda old=serving: v.alive() and both(v)[1] not in (None, old), 20)
                must(is_running(parent), f"{step}: the parent has ended")
                serving = both(v)[1]
                if lives:
                    same(os.pread(held, 100, 0)[:len(step)], step.encode(), f"{step}: the open file")
                else:
                    with refused(*dead()):
                        os.fsync(held)
                    with contextlib.suppress(OSError):
                        os.close(held)
                    same((v.mnt / "held").read_bytes()[:len(step)], step.encode(), f"{step}: what was synced")
                    held = os.open(v.mnt / "held", os.O_RDWR)
            os.close(held)
            kill_serving(v)
    finally:
        del os.environ[FAILPOINT]
        point.unlink(missing_ok=True)


# Under load ---------------------------------------------------------------------------------------------------------------


def work(kind, top, number, stop, counts, failures):
    """One process of the load, until it is told to stop; each error, and each wrong byte, is a failure."""
    rand = random.Random(number)
    try:
        LOADS[kind](top / f"{kind}-{number}", rand, stop, counts)
    except BaseException as error:  # noqa: BLE001 (each is a result)
        failures.put(f"{kind} {number}: {type(error).__name__}: {error}")


def files(top, rand, stop, counts):
    """Small files are made, synced, renamed, read, removed."""
    top.mkdir()
    there = {}
    while not stop.is_set():
        name, data = top / f"f{rand.randrange(100)}", rand.randbytes(rand.randrange(20_000))
        part = top / "part"
        with open(part, "wb") as file:
            file.write(data)
            if rand.random() < 0.3:
                file.flush()
                os.fsync(file.fileno())
        os.rename(part, name)
        there[name] = data
        other = rand.choice(list(there))
        must(other.read_bytes() == there[other], f"{other}: other bytes")
        if rand.random() < 0.2:
            os.unlink(other)
            del there[other]
            must(not other.exists(), f"{other}: is back")
        counts[0] += 1
    for name, data in there.items():
        must(name.read_bytes() == data, f"{name}: other bytes at the end")
    same({p.name for p in top.iterdir()}, {p.name for p in there}, "names at the end")


def blocks(top, rand, stop, counts):
    """A file that stays open: random overwrites, cached and direct, reads, fsync."""
    size, block = 4 << 20, 4096
    fd = os.open(top, os.O_RDWR | os.O_CREAT)
    direct = os.open(top, os.O_RDWR | os.O_DIRECT)
    want = bytearray(size)
    os.ftruncate(fd, size)
    buf = mmap.mmap(-1, block)
    while not stop.is_set():
        at, data = rand.randrange(size // block) * block, rand.randbytes(block)
        if rand.random() < 0.3:
            buf[:] = data
            same(os.pwritev(direct, [buf], at), block, "bytes written past the cache")
        else:
            same(os.pwrite(fd, data, at), block, "bytes written")
        want[at:at + block] = data
        if rand.random() < 0.1:
            os.fdatasync(fd)
        at = rand.randrange(size // block) * block
        must(os.pread(fd, block, at) == want[at:at + block], f"other bytes at {at}")
        if rand.random() < 0.02:
            os.lseek(fd, rand.randrange(size), os.SEEK_DATA)
        counts[0] += 1
    must(os.pread(fd, size, 0) == want, "other bytes at the end")
    os.close(fd)
    os.close(direct)


def appends(top, rand, stop, counts):
    """A log: each line is synced, and counted when it is."""
    fd = os.open(top, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    want = b""
    while not stop.is_set():
        line = b"%d %s\n" % (counts[0], rand.randbytes(20).hex().encode())
        os.write(fd, line)
        os.fsync(fd)
        want += line
        counts[0] += 1
    os.close(fd)
    must(top.read_bytes() == want, "other lines")


def trees(top, rand, stop, counts):
    """Directories come, are listed, and go; links; attributes."""
    top.mkdir()
    while not stop.is_set():
        tree = top / f"t{counts[0]}"
        for n in range(10):
            (tree / f"{n}").mkdir(parents=True)
            (tree / f"{n}" / "f").write_bytes(b"%d" % n)
            os.link(tree / f"{n}" / "f", tree / f"l{n}")
        os.chmod(tree / "l3", 0o600)
        os.setxattr(tree / "l4", "user.a", b"b" * rand.randrange(100))
        os.symlink("l5", tree / "s")
        same((tree / "s").read_bytes(), b"5", "through a symbolic link")
        same(len(list(tree.rglob("*"))), 31, "names of a tree")
        same((tree / "l3").stat().st_mode & 0o777, 0o600, "mode")
        shutil.rmtree(tree)
        counts[0] += 1
    same(os.listdir(top), [], "what is left")


def seeks(top, rand, stop, counts):
    """What the helper thread answers, when the kernel has written its pages back: lseek to data, direct writes of cached
    pages."""
    fd = os.open(top, os.O_RDWR | os.O_CREAT)
    direct = os.open(top, os.O_RDWR | os.O_DIRECT)
    buf = mmap.mmap(-1, 4096)
    while not stop.is_set():
        at = rand.randrange(64) << 20
        os.ftruncate(fd, 0)
        os.pwrite(fd, rand.randbytes(20_000), at)
        same(os.lseek(fd, 0, os.SEEK_DATA), at, "where the data begins")
        buf[:] = rand.randbytes(4096)
        same(os.pwritev(direct, [buf], at + 4096), 4096, "bytes written past the cache")
        must(os.pread(fd, 4096, at + 4096) == buf[:], "what was written past the cache")
        counts[0] += 1
    os.close(fd)
    os.close(direct)


LOADS = {"seeks": seeks, "files": files, "blocks": blocks, "appends": appends, "trees": trees}


@contextlib.contextmanager
def loaded(top, each=1):
    """So many processes of each load. Each error and each wrong byte is a failure. How much was done is in what this gives."""
    stop, failures = multiprocessing.Event(), multiprocessing.Queue()
    counts = {(kind, n): multiprocessing.Array("q", 1) for kind in LOADS for n in range(each)}
    load = [multiprocessing.Process(target=work, args=(kind, top, n, stop, counts[kind, n], failures)) for kind, n in counts]
    for process in load:
        process.start()
    done = {}
    try:
        yield done
        # on a busy machine some may not have begun yet
        fslib.wait_for("work of each", lambda: all(c[0] for c in counts.values()) or not failures.empty(), 20)
    finally:
        stop.set()
        # what was done in the block may have failed for what one of them did
        for process in load:
            process.join(60)
        hang = [process for process in load if process.is_alive()]
        for process in hang:
            process.kill()
            process.join()
        if hang:
            raise Failed("a process of the load hangs")
        if not failures.empty():
            raise Failed(failures.get())
    for process in load:
        same(process.exitcode, 0, "exit code of a process of the load")
    done.update({kind: sum(c[0] for (k, _), c in counts.items() if k == kind) for kind in LOADS})
    must(all(done.values()), f"no work was done: {done}")


@check(seconds=90 + 8 * ROUNDS)
def upgraded_under_load(volume, _top):
    rounds = ROUNDS // 2 or 1
    for options in ((), ("fileflags",)):
        with mounted(volume, *options, size=512 << 20) as v:
            longest, servers = 0, set()
            with loaded(v.mnt, 2) as done:
                for _ in range(rounds):
                    time.sleep(0.3)
                    begun = time.monotonic()
                    upgrade(v)
                    longest = max(longest, time.monotonic() - begun)
                    servers.add(server(v))
                time.sleep(0.3)
            same(len(servers), rounds, "processes that served")
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
            print(f"  {rounds} upgrades {' '.join(options)}, none longer than {longest:.1f} s, work done: {done}, no error")


@check
def a_service_manager_is_told_who_serves(volume, _top):
    """A mount in the foreground, as a unit of Type=notify has it: its main process is another one from then on."""
    daemon_only(volume)
    path = volume.image.with_suffix(".notify")
    with small_volume(volume) as v, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(path))
        told.settimeout(20)
        start = subprocess.Popen([v.binary, "mount", "-f", "-o", "transport=dev", v.image, v.mnt], stdin=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, env=dict(os.environ, NOTIFY_SOCKET=str(path)))
        try:
            same(told.recv(100), b"READY=1", "what is told first")
            for _ in range(2):
                upgrade(v)
                same(told.recv(100), f"MAINPID={server(v)}".encode(), "what is told of an upgrade")
            same(start.wait(20), 0, "exit code of the process that handed over")
            v.umount()
        finally:
            start.kill()
            start.wait()
            path.unlink(missing_ok=True)


def on_a_small_disk(v, stack):
    """A directory with room for 32 MiB, and in it a volume of 256 MiB."""
    v.umount()
    full = v.image.with_suffix(".full")
    full.mkdir()
    stack.callback(full.rmdir)
    run("mount", "-t", "tmpfs", "-o", "size=32M", "tmpfs", full)
    stack.callback(run, "umount", full)
    image = full / "image"
    run(v.binary, "mkfs", "-q", "--size", "256M", image)
    return full, image


def fill_up(full):
    """Takes all that is left in such a directory, by the file `fill`."""
    with contextlib.suppress(OSError), open(full / "fill", "wb", buffering=0) as file:
        while True:
            file.write(b"f" * 4096)


def is_stopped(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def wait_for_its_stop(v, what, pids=None):
    """Until one of these processes, or of the daemons, has stopped itself where the file of the failpoint told it to, which it removes
    a moment before: it would miss a SIGCONT until then."""
    wait_for(what, lambda: not v.point.exists() and any(map(is_stopped, pids or v.daemons())), 10)


def tell_while_it_is_handed_over(v, *told):
    """Signals these processes while the new one is stopped, which goes on then."""
    v.point.write_text("new-given stop")
    command = subprocess.Popen([v.binary, "upgrade", v.mnt], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_its_stop(v, "the hand-over to begin")
        for pid in told:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        for pid in v.daemons():
            os.kill(pid, signal.SIGCONT)
        command.wait(30)
    finally:
        command.kill()
        command.wait()
    wait_for("the end of all", lambda: not v.daemons() and not v.mount_entry(), 20)
    same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def a_device_that_takes_nothing_more(volume, _top):
    """An image with holes on a full disk: refused while it is served, and what is there can be read."""
    root_only()
    with mounted(volume) as v, contextlib.ExitStack() as stack:
        full, image = on_a_small_disk(v, stack)
        run(v.binary, "mount", "-o", "transport=dev,commit=300", image, v.mnt)
        stack.callback(v.force_down)
        write_synced(v.mnt / "f", b"x")
        fill_up(full)
        serving = server(v)
        text = upgrade(v, ok=(BACK,))[1]
        must("cannot be made durable" in text, text)
        same(server(v), serving, "the process that serves")
        same((v.mnt / "f").read_bytes(), b"x", "content")
        text = upgrade(v, ok=(BACK,))[1]
        must("read-only after an error" in text and text.endswith("run fsck.braidfs"), text)
        (full / "fill").unlink()
        v.umount()
        same(run(v.binary, "fsck", "-f", "-n", image, ok=None)[0], 0, "exit code of fsck")


@check
def a_volume_that_cannot_be_closed(volume, _top):
    """What was acknowledged since it was made durable cannot be written: no connection goes on without it."""
    root_only()
    with mounted(volume) as v, contextlib.ExitStack() as stack:
        full, image = on_a_small_disk(v, stack)
        options = "transport=dev,commit=300"
        run(v.binary, "mount", "-o", options, image, v.mnt)
        stack.callback(v.force_down)
        write_synced(v.mnt / "f", b"synced")
        file = os.open(v.mnt / "f", os.O_RDWR)
        v.point.write_text("new-offered stop")
        command = subprocess.Popen([v.binary, "upgrade", v.mnt], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            wait_for_its_stop(v, "the new program")
            os.rename(v.mnt / "f", v.mnt / "g")
            for n in range(1000):
                (v.mnt / f"{n:0200}").write_text("x")
            fill_up(full)
            for pid in v.daemons():
                os.kill(pid, signal.SIGCONT)
            text = command.communicate(timeout=60)[1]
        finally:
            command.kill()
            command.wait()
        same(command.returncode, BACK, "exit code of the upgrade")
        must("cannot be closed" in text, text)
        with refused(errno.ENOTCONN, errno.ECONNABORTED):
            os.listdir(v.mnt)
        with refused(errno.ENOTCONN, errno.ECONNABORTED, errno.EIO):
            os.pwrite(file, b"x", 0)
            os.fsync(file)
        with contextlib.suppress(OSError):
            os.close(file)
        wait_for("the end of all", lambda: not v.daemons(), 20)
        (full / "fill").unlink()
        run("umount", "-l", v.mnt, ok=None)
        run(v.binary, "mount", "-o", options, image, v.mnt)
        there = [(v.mnt / name).read_bytes() for name in "fg" if (v.mnt / name).exists()]
        same(there, [b"synced"], "content")
        v.umount()
        same(run(v.binary, "fsck", "-f", "-n", image, ok=None)[0], 0, "exit code of fsck")


@check
def asked_to_end_while_it_is_handed_over(volume, _top):
    """What SIGTERM means that comes while a mount is handed over: whoever serves unmounts."""
    with mounted(volume) as v:
        write_synced(v.mnt / "f", b"x")
        tell_while_it_is_handed_over(v, server(v))
