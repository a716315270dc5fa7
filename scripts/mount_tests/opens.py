"""Opening and closing without a request: what a program may notice of that, which is nothing; and how many requests go out."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import pathlib
import random
import stat
import subprocess
import sys
import time

from fslib import IS_ROOT, Failed, Skipped, in_child, run, wait_for
from mount_tests.coherence import run_all
from mount_tests.common import (
    LIBC, NOBODY, as_nobody, check, daemon_only, must, refused, root_only, same, wait_for_scrub,
)
from mount_tests.helpers import small_volume
from mount_tests.requests import Counter

# `make opens` takes more steps than `make mount`.
STEPS = int(os.environ.get("OPENS_STEPS", 30_000))
CACHED_FILES = int(os.environ.get("OPENS_FILES", 10_000))
DROP_CACHES = pathlib.Path("/proc/sys/vm/drop_caches")


@contextlib.contextmanager
def roomy(volume, *options):
    """A mount of its own with so much room that the kernel need not ask before it writes, without rings."""
    daemon_only(volume)
    with small_volume(volume, "opens", 1 << 30) as own:
        own.mount("transport=dev", *options)
        yield own
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


def requests(volume, function):
    """How many requests the server counts meanwhile."""
    counter = Counter(volume)
    counter.since()
    function()
    return sum(max(0, count) for count in counter.since().values())


def per_step(volume, function, steps=1000):
    return requests(volume, lambda: [function(n) for n in range(steps)]) / steps


def touch_open(path, flags=os.O_RDONLY, mode=0o600):
    os.close(os.open(path, flags, mode))


@check
def opening_takes_no_request(volume, _top):
    """Of what the kernel knows; with `opens` it takes two, which shows that they are counted."""
    for options, least, most in ((), 0, 0.05), (("opens",), 1.95, 2.1):
        with roomy(volume, *options) as own:
            (own.mnt / "d").mkdir()
            path = own.mnt / "d" / "f"
            path.write_bytes(b"x" * 5000)
            path.read_bytes()
            for what, name, flags in (
                ("file", path, os.O_RDONLY), ("file for writing", path, os.O_RDWR), ("directory", path.parent, os.O_RDONLY),
            ):
                touch_open(name, flags)
                os.stat(name)
                found = per_step(own, lambda _n: touch_open(name, flags))  # noqa: B023
                must(least <= found <= most, f"{found} requests to open and close a {what}, options {options}")


@check
def creating_takes_one_request(volume, _top):
    """MKNOD, besides the look-up of the name, and the attributes of the directory, which the one before has changed."""
    with roomy(volume) as own:
        directory = own.mnt / "d"
        directory.mkdir()
        # somebody else may have the kernel drop its caches meanwhile: what is wrong three times is wrong
        for turn in range(3):
            first = per_step(own, lambda n: touch_open(directory / f"f{turn}-{n}", os.O_CREAT | os.O_WRONLY))  # noqa: B023
            # of a name that is known to be absent; with O_EXCL the kernel asks again (`fuse_dentry_revalidate`)
            for n in range(1000):
                with refused(errno.ENOENT):
                    os.stat(directory / f"g{turn}-{n}")
            known = per_step(own, lambda n: touch_open(directory / f"g{turn}-{n}", os.O_CREAT | os.O_WRONLY))  # noqa: B023
            if 2.9 <= first <= 3.05 and 1.9 <= known <= 2.05:
                return
        raise Failed(f"{first} requests to create and close a file, {known} where its name is known to be absent")


@check
def creation_as_programs_know_it(_volume, top):
    """open(2) with O_CREAT in all its forms, though it is MKNOD that reaches the daemon."""
    path = top / "f"
    old = os.umask(0o027)
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o777)
        os.mkdir(top / "group", 0o777)
    finally:
        os.umask(old)
    same(stat.S_IMODE(os.fstat(fd).st_mode), 0o750, "mode under a umask")
    os.write(fd, b"text")
    with refused(errno.EEXIST):
        touch_open(path, os.O_CREAT | os.O_EXCL)
    touch_open(path, os.O_CREAT | os.O_RDWR)
    same(path.read_text(), "text", "content after O_CREAT of what is there")
    touch_open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    same((path.stat().st_size, os.fstat(fd).st_size), (0, 0), "size after O_TRUNC")
    os.close(fd)
    with refused(errno.EISDIR):
        touch_open(top, os.O_CREAT | os.O_WRONLY)
    with refused(errno.ENOENT):
        touch_open(top / "absent" / "f", os.O_CREAT | os.O_WRONLY)
    # no permission for anybody, and it is open all the same
    fd = os.open(top / "sealed", os.O_CREAT | os.O_RDWR, 0)
    os.write(fd, b"written")
    same(os.pread(fd, 10, 0), b"written", "content of a file of mode 0")
    os.close(fd)
    os.symlink("target", top / "link")
    touch_open(top / "link", os.O_CREAT | os.O_WRONLY)
    must((top / "target").is_file(), "O_CREAT through a link makes its target")
    with refused(errno.EEXIST):
        touch_open(top / "link", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    if not IS_ROOT:
        return
    os.chown(top / "group", 0, 1234)
    os.chmod(top / "group", 0o2777)
    top.chmod(0o755)
    as_nobody(lambda: touch_open(top / "group" / "of", os.O_CREAT | os.O_WRONLY, 0o666))
    info = (top / "group" / "of").stat()
    same((info.st_uid, info.st_gid), (NOBODY, 1234), "owner and group in a directory with set-gid")
    (top / "others").write_text("x")
    (top / "others").chmod(0o644)

    def forbidden():
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_CREAT | os.O_TRUNC | os.O_WRONLY):
            with refused(errno.EACCES):
                touch_open(top / "others", flags)

    as_nobody(forbidden)
    same((top / "others").read_text(), "x", "content after a refused O_TRUNC")


@check
def truncation_by_open(volume, top):
    """O_TRUNC: the content goes, what the cache held with it; set-uid and capabilities go where the user may not keep them."""
    path = top / "f"
    path.write_bytes(b"old" * 100_000)
    before = path.stat()
    time.sleep(0.02)
    with open(path, "r+b") as other:
        other.write(b"dirty" * 10_000)
        other.flush()
        view = mmap.mmap(other.fileno(), 8192)
        view[4096:4100] = b"maps"
        touch_open(path, os.O_WRONLY | os.O_TRUNC)
        same(os.fstat(other.fileno()).st_size, 0, "size for who had it open")
        same(os.pread(other.fileno(), 10, 0), b"", "content for who had it open")
        view.close()
    after = path.stat()
    must(after.st_mtime_ns > before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns, "times after O_TRUNC")
    same((after.st_size, after.st_blocks // 8), (0, 0), "size and blocks")
    with open(path, "wb") as file:
        file.write(b"new")
    volume.cold() if hasattr(volume, "daemons") else None
    same(path.read_bytes(), b"new", "content")
    if not IS_ROOT:
        return
    top.chmod(0o755)
    for who, run, kept in ("root", lambda f: f(), 0o6777), ("nobody", as_nobody, 0o777):
        path.unlink()
        path.write_bytes(b"x" * 10_000)
        path.chmod(0o6777)
        run(lambda: touch_open(path, os.O_WRONLY | os.O_TRUNC))
        info = path.stat()
        same((info.st_size, stat.S_IMODE(info.st_mode)), (0, kept), f"size and mode after O_TRUNC by {who}")


@check
def an_unlinked_file_is_whole(_volume, top):
    """All that can be done with a file that has no name any more, until the last one closes it."""
    path = top / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, b"abc" * 10_000)
    os.unlink(path)
    os.pwrite(fd, b"x" * 5000, 100_000)
    os.fsync(fd)
    os.fdatasync(fd)
    same((os.fstat(fd).st_nlink, os.fstat(fd).st_size), (0, 105_000), "links and size")
    os.truncate(f"/proc/self/fd/{fd}", 200_000)
    os.posix_fallocate(fd, 0, 300_000)
    view = mmap.mmap(fd, 300_000)
    view[250_000:250_006] = b"mapped"
    view.flush()
    view.close()
    same(os.pread(fd, 6, 250_000), b"mapped", "what was stored through a map")
    if IS_ROOT:
        DROP_CACHES.write_text("3")
    same(os.pread(fd, 6, 29_994), b"abcabc", "content after the caches were dropped")
    copy = os.open(top / "copy", os.O_CREAT | os.O_RDWR, 0o600)
    same(os.copy_file_range(fd, copy, 300_000, 0, 0), 300_000, "bytes copied")
    same(os.pread(copy, 300_000, 0), os.pread(fd, 300_000, 0), "the copy")
    os.close(copy)
    os.fchmod(fd, 0o640)
    if IS_ROOT:
        os.setxattr(fd, "user.a", b"v")
    # others use it, too, and outlive this one
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)

    def child():
        os.close(fd)
        os.lseek(again, 0, os.SEEK_END)
        os.write(again, b"by another")
        return os.pread(again, 3, 0)

    same(in_child(child, 30), b"abc", "content in another process")
    os.close(fd)
    same(os.pread(again, 10, 300_000), b"by another", "what the other wrote")
    same(stat.S_IMODE(os.fstat(again).st_mode), 0o640, "mode")
    os.close(again)
    # created again: another file
    path.write_text("new")
    same(path.read_text(), "new", "content of the next file of the name")


def named(fd, path):
    if LIBC.linkat(-100, os.fsencode(f"/proc/self/fd/{fd}"), -100, os.fsencode(path), 0x400):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@check
def nameless_files(volume, top):
    """O_TMPFILE: written, mapped, given a name or none; what has none is gone with its last descriptor."""
    before = free_inodes(volume)
    fds = [os.open(top, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(20)]
    for n, fd in enumerate(fds):
        os.write(fd, b"%d" % n * 10_000)
        same(os.fstat(fd).st_nlink, 0, "links")
        view = mmap.mmap(fd, 4096)
        view[0:1] = b"m"
        view.close()
    sealed = os.open(top, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)
    with refused(errno.ENOENT):
        named(sealed, top / "sealed")
    os.close(sealed)
    named(fds[7], top / "seven")
    named(fds[7], top / "seven too")
    os.fsync(fds[7])
    for fd in fds:
        os.close(fd)
    same((top / "seven").stat().st_nlink, 2, "links of a file that was named")
    same(sorted(os.listdir(top)), ["seven", "seven too"], "names")
    if hasattr(volume, "daemons"):
        volume.cold()
    same((top / "seven").read_bytes(), b"m" + b"7" * 9999, "content")
    os.unlink(top / "seven")
    os.unlink(top / "seven too")
    wait_for("inodes to be free again", lambda: free_inodes(volume) >= before, 10)


def free_inodes(volume):
    # what else is mounted here may take long to sync
    run("sync", "-f", volume.mnt)
    return os.statvfs(volume.mnt).f_ffree


@check
def holes_of_what_is_not_written_yet(_volume, top):
    """SEEK_DATA and SEEK_HOLE see what only the kernel has."""
    page = 4096
    fd = os.open(top / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 100 * page)
    for turn in range(3):
        os.pwrite(fd, b"x" * page, (10 + turn) * page)
        os.pwrite(fd, b"y" * page, (50 + 2 * turn) * page)
        same(os.lseek(fd, 0, os.SEEK_DATA), 10 * page, "first data")
        same(os.lseek(fd, 10 * page, os.SEEK_HOLE), (11 + turn) * page, "first hole after it")
        same(os.lseek(fd, 20 * page, os.SEEK_DATA), 50 * page, "second data")
        same(os.lseek(fd, (50 + 2 * turn) * page, os.SEEK_HOLE), (51 + 2 * turn) * page, "the hole after the last")
    with refused(errno.ENXIO):
        os.lseek(fd, 90 * page, os.SEEK_DATA)
    same(os.lseek(fd, 0, os.SEEK_END), 100 * page, "the end")
    other = os.open(top / "f", os.O_RDONLY)
    os.pwrite(fd, b"z", 95 * page)
    same(os.lseek(other, 90 * page, os.SEEK_DATA), 95 * page, "data that another descriptor wrote")
    os.close(other)
    os.close(fd)


@check
def programs_that_were_just_written(_volume, top):
    """ETXTBSY for who runs what is open for writing, and for who writes what runs."""
    path = top / "program"
    source = pathlib.Path("/bin/sleep").read_bytes()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o755)
    os.write(fd, source)
    with refused(errno.ETXTBSY):
        subprocess.run([path, "0"], check=True)
    os.close(fd)
    subprocess.run([path, "0"], check=True)
    with subprocess.Popen([path, "60"]) as running:
        time.sleep(0.2)
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            with refused(errno.ETXTBSY):
                touch_open(path, flags)
        os.unlink(path)
        same(running.poll(), None, "end of a program whose file was removed")
        running.kill()


@check
def two_processes_and_one_file(_volume, top):
    """One appends, one rewrites, one truncates by O_TRUNC at times: what is read is of one of them."""
    path, end = top / "f", time.monotonic() + 2
    path.touch()

    def append():
        while time.monotonic() < end:
            with open(path, "ab", buffering=0) as file:
                file.write(b"a" * 512)

    def rewrite():
        while time.monotonic() < end:
            with open(path, "r+b", buffering=0) as file:
                file.write(b"r" * 1000)

    def truncate():
        while time.monotonic() < end:
            touch_open(path, os.O_WRONLY | os.O_TRUNC)
            time.sleep(0.003)

    def read():
        while time.monotonic() < end:
            with open(path, "rb") as file:
                found = set(file.read())
            # zeros: a rewrite or an append that began before the file was cut off
            must(found <= set(b"ar\0"), f"bytes {found}")

    run_all([append, append, rewrite, truncate, read], 2)


@check(seconds=1800)
def random_opens(volume, top):
    """Create, open, read, write, rename, unlink, close at random by three processes, the kernel's inodes dropped at random:
    no answer that ext4 would not give, and nothing left."""
    places = [top / str(n) for n in range(3)]
    for where in places:
        # before: the number of a removed directory is free only after a checkpoint
        where.mkdir()
    before = free_inodes(volume)

    def work(where):
        rand = random.Random(os.getpid())
        # content by name and by descriptor, shared by those that are one file
        names, fds, count = {}, [], 0

        def some_name():
            return rand.choice(list(names))

        def create():
            nonlocal count
            count += 1
            name = f"n{count}"
            fd = os.open(where / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            names[name] = content = bytearray()
            fds.append((fd, content))

        def open_it():
            if names:
                name = some_name()
                trunc = rand.random() < 0.1
                fds.append((os.open(where / name, os.O_RDWR | (os.O_TRUNC if trunc else 0)), names[name]))
                if trunc:
                    names[name].clear()

        def nameless():
            fds.append((os.open(where, os.O_TMPFILE | os.O_RDWR, 0o600), bytearray()))

        def unlink():
            if names:
                name = some_name()
                os.unlink(where / name)
                del names[name]

        def rename():
            if names:
                old, new = some_name(), some_name()
                os.rename(where / old, where / new)
                names[new] = names[old]
                if old != new:
                    del names[old]

        def write():
            if fds:
                fd, content = rand.choice(fds)
                at, data = rand.randrange(len(content) + 1), rand.randbytes(rand.choice((1, 100, 5000)))
                same(os.pwrite(fd, data, at), len(data), "bytes written")
                content[at:at + len(data)] = data

        def read():
            if fds:
                fd, content = rand.choice(fds)
                same(os.pread(fd, 1 << 16, 0), bytes(content[:1 << 16]), "content")
                same(os.fstat(fd).st_size, len(content), "size")

        def close():
            if fds:
                fd, _ = fds.pop(rand.randrange(len(fds)))
                os.close(fd)

        def look():
            same(set(os.listdir(where)), set(names), "names")

        def stat_it():
            if names:
                name = some_name()
                same(os.stat(where / name).st_size, len(names[name]), "size by the name")

        acts = [create] * 4 + [open_it] * 4 + [read] * 4 + [write] * 3 + [close] * 7 + [unlink] * 3 + [rename, stat_it]
        for step in range(STEPS):
            if IS_ROOT and rand.random() < 0.001:
                DROP_CACHES.write_text("2")
            if step % 2000 == 0:
                look()
            rand.choice(acts)() if len(fds) < 200 else close()
            if rand.random() < 0.01:
                nameless()
        for fd, content in fds:
            same(os.pread(fd, len(content) + 1, 0), bytes(content), "content at the end")
            os.close(fd)
        for name, content in names.items():
            same((where / name).read_bytes(), bytes(content), "content by the name at the end")
            os.unlink(where / name)
        return count

    run_all([lambda where=where: work(where) for where in places], 1700)
    same([os.listdir(where) for where in places], [[], [], []], "names left")
    wait_for("inodes to be free again", lambda: free_inodes(volume) >= before, 10)
    if hasattr(volume, "daemons"):
        volume.umount()
        same(volume.fsck("-f", "-n")[0], 0, "exit code of fsck")
        volume.mount()
        wait_for("inodes to be free again after a remount", lambda: free_inodes(volume) >= before, 10)


@check(seconds=600)
def what_was_accepted_is_kept(volume, _top):
    """Many files that the kernel knows, from a time with room; then there is little, and several processes write to all of
    them until ENOSPC: what a `write` took is there, no `fsync` and no `close` tells of an error."""
    daemon_only(volume)
    mib = 1 << 20
    with small_volume(volume, "accepted", 900 * mib) as own:
        own.mount()
        where = own.mnt / "d"
        where.mkdir()
        for n in range(CACHED_FILES):
            touch_open(where / f"f{n}", os.O_CREAT | os.O_WRONLY)
        # all of them are known with their attributes; some are open for writing
        held = {n: os.open(where / f"f{n}", os.O_WRONLY) for n in range(0, CACHED_FILES, CACHED_FILES // 50)}
        for n in range(CACHED_FILES):
            os.stat(where / f"f{n}")
        info = os.statvfs(where)
        fd = os.open(own.mnt / "d" / "filler", os.O_CREAT | os.O_WRONLY, 0o600)
        os.posix_fallocate(fd, 0, info.f_bavail * info.f_frsize - 250 * mib)
        os.close(fd)
        writers = 4

        def write(me):
            """Appends pieces to files of its own until it was refused often; how much each took."""
            rand, taken, full = random.Random(me), {}, 0
            mine = range(me, CACHED_FILES, writers)
            while full < 20:
                n = rand.choice(mine)
                size = rand.choice((4096, 65_536, 300_000))
                piece = bytes([n % 251 + 1]) * size
                fd = held[n] if n in held else os.open(where / f"f{n}", os.O_WRONLY)
                try:
                    done = os.pwrite(fd, piece, taken.get(n, 0))
                    taken[n] = taken.get(n, 0) + done
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    full += 1
                if n not in held:
                    os.close(fd)
            return taken

        tables = [volume.image.parent / f"taken{me}.json" for me in range(writers)]
        run_all([lambda me=me: tables[me].write_text(json.dumps(write(me))) for me in range(writers)], 500)
        for fd in held.values():
            os.fsync(fd)
            os.close(fd)
        fd = os.open(own.mnt, os.O_RDONLY)
        if LIBC.syncfs(fd):
            raise Failed(f"syncfs: {os.strerror(ctypes.get_errno())}")
        os.close(fd)
        taken = {}
        for table in tables:
            taken.update((int(n), size) for n, size in json.loads(table.read_text()).items())
            table.unlink()
        total = sum(taken.values())
        must(total > 150 * mib, f"only {total} bytes were taken")
        own.cold()
        left = os.statvfs(where)
        must(left.f_bavail * left.f_frsize < 40 * mib, f"ENOSPC while df offers {left.f_bavail * left.f_frsize} bytes")
        for n, size in taken.items():
            same((where / f"f{n}").stat().st_size, size, f"size of file {n}")
            data = (where / f"f{n}").read_bytes()
            must(data == bytes([n % 251 + 1]) * size, f"content of file {n}: what a write took is lost")
        # reading goes on where nothing can be written, also across the end of a file
        n = next(iter(taken))
        with open(where / f"f{n}", "rb", buffering=0) as file:
            must(len(file.read(1 << 20)) > 0, "nothing is read on a full volume")
        subprocess.run([sys.executable, "-c", f"open({str(where / f'f{n}')!r}, 'rb').read()"], check=True)
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def scrub_ends_with_who_asked_for_it(volume, _top):
    """The kernel tells of no close: a scrub whose program was killed stops soon, so that another one can begin."""
    daemon_only(volume)
    root_only()
    with roomy(volume) as own:
        for n in range(20):
            (own.mnt / f"f{n}").write_bytes(bytes([n]) * (4 << 20))
        os.sync()
        first = subprocess.Popen([own.binary, "scrub", "--rate", "1M", own.mnt], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        wait_for_scrub(own)
        if first.poll() is not None:
            raise Skipped("the scrub was over at once")
        second = subprocess.run([own.binary, "scrub", own.mnt], capture_output=True, text=True)
        must(second.returncode != 0 and "running already" in second.stderr, f"a second scrub: {second.stderr!r}")
        first.kill()
        first.wait()
        end = time.monotonic() + 15
        while subprocess.run([own.binary, "scrub", own.mnt], capture_output=True).returncode != 0:
            must(time.monotonic() < end, "the scrub of a killed program goes on")
            time.sleep(0.3)
