"""What takes room though no `write` asked for it (`fallocate`, `copy_file_range`, files that are written through) leaves what
the kernel's cache has accepted."""

import contextlib
import ctypes
import errno
import mmap
import os

from filling import offered
from fslib import Failed
from mount_tests.coherence import BLOCK, Aio
from mount_tests.common import check, must, root_only, same
from mount_tests.nearly_full import with_little_room

MIB = 1 << 20


@contextlib.contextmanager
def no_space_allowed():
    try:
        yield
    except OSError as error:
        same(error.errno, errno.ENOSPC, "errno")


def new(path):
    return os.open(path, os.O_CREAT | os.O_RDWR, 0o600)


def leave(own, room):
    """Takes all that is offered but for so many bytes."""
    fd = new(own.mnt / f"ballast{room}")
    os.posix_fallocate(fd, 0, offered(own.mnt) - room)
    os.close(fd)
    own.settle()


def synced(fd):
    try:
        os.fsync(fd)
    except OSError as error:
        raise Failed(f"what a `write` took is lost: {error} of fsync") from None


def write_all(fd, piece, pieces):
    for n in range(pieces):
        same(os.pwrite(fd, piece, n * MIB), MIB, f"bytes written of MiB {n}")


def is_kept(own, fd, content):
    synced(fd)
    os.close(fd)
    own.cold()
    must((own.mnt / "held").read_bytes() == content, "what a `write` took is lost")


@check(seconds=120)
def allocating_leaves_what_was_accepted(volume, _top):
    """fallocate of all that df offers, which does not know what the kernel holds: refused, and what is left then is had."""
    root_only()
    piece = os.urandom(MIB)
    for options in ((), ("fileflags",)):
        with with_little_room(volume, *options, size=600 * MIB) as own:
            fd, other = new(own.mnt / "held"), new(own.mnt / "other")
            own.settle()
            told = offered(own.mnt)
            write_all(fd, piece, 24)
            with no_space_allowed():
                os.posix_fallocate(other, 0, told)
            must(os.fstat(other).st_size in (0, told), f"{options}: size after fallocate")
            synced(fd)
            if os.fstat(other).st_size == 0:
                os.posix_fallocate(other, 0, offered(own.mnt))
            os.close(other)
            is_kept(own, fd, piece * 24)


@check(seconds=120)
def copying_leaves_what_was_accepted(volume, _top):
    """copy_file_range until there is no space, beside a file that was granted room."""
    piece = os.urandom(MIB)
    for options in ((), ("fileflags",)):
        with with_little_room(volume, *options, size=96 * MIB) as own:
            source = new(own.mnt / "source")
            write_all(source, piece, 8)
            fd = new(own.mnt / "held")
            own.settle()
            leave(own, 24 * MIB)
            copies = [new(own.mnt / f"copy{n}") for n in range(8)]
            write_all(fd, piece, 10)
            for n, other in enumerate(copies):
                done = 0
                with no_space_allowed():
                    while done < 8 * MIB:
                        done += os.copy_file_range(source, other, 8 * MIB - done, done, done)
                same(os.fstat(other).st_size, done, f"size of copy {n}")
                must(os.pread(other, done, 0) == (piece * 8)[:done], f"content of copy {n}")
                os.close(other)
            os.close(source)
            must(offered(own.mnt) < 4 * MIB, f"{options}: {offered(own.mnt)} bytes are left")
            is_kept(own, fd, piece * 10)


def symlinks(top):
    for n in range(10_000):
        os.symlink("x" * 3500, top / f"l{n}")
        yield


def attributes(top):
    for n in range(10_000):
        path = top / f"a{n}"
        os.close(new(path))
        os.setxattr(path, "user.x", b"x" * 3500)
        yield


def directories(top):
    for n in range(100_000):
        os.mkdir(top / f"d{n}")
        yield


def names(top):
    for n in range(100_000):
        one = top / f"one{n // 1000}"
        if n % 1000 == 0:
            os.close(new(one))
        os.link(one, top / f"{n}{'n' * 240}")
        yield


@check(seconds=240)
def making_names_leaves_what_was_accepted(volume, _top):
    """Symbolic links, attributes, directories and hard links until there is no space, beside a file that was granted room."""
    piece = os.urandom(MIB)
    for options in ((), ("fileflags",)):
        for makes in (symlinks, attributes, directories, names):
            with with_little_room(volume, *options, size=96 * MIB) as own:
                fd, made = new(own.mnt / "held"), 0
                own.settle()
                leave(own, 8 * MIB)
                write_all(fd, piece, 6)
                with no_space_allowed():
                    for _ in makes(own.mnt):
                        made += 1
                must(made > 100, f"{options}: no space after only {made} {makes.__name__}")
                is_kept(own, fd, piece * 6)


@check(seconds=240)
def moving_names_leaves_what_was_accepted(volume, _top):
    """Names of few bytes become long ones in another directory, until there is no space, beside a file that was granted room."""
    piece, count = os.urandom(MIB), 16_000
    for options, left, held in ((), 4, 3), (("fileflags",), 8, 6):
        with with_little_room(volume, *options, size=96 * MIB) as own:
            fd, (old, to), moved = new(own.mnt / "held"), (own.mnt / "old", own.mnt / "new"), 0
            old.mkdir()
            to.mkdir()
            for n in range(count):
                os.mknod(old / f"{n}")
            own.settle()
            leave(own, left * MIB)
            write_all(fd, piece, held)
            with no_space_allowed():
                for n in range(count):
                    os.rename(old / f"{n}", to / f"{n}{'n' * 240}")
                    moved += 1
            must(1100 < moved < count, f"{options}: {moved} names moved")
            # what replaces a file needs no room
            for n in range(100):
                os.rename(to / f"{n}{'n' * 240}", to / f"{1000 + n}{'n' * 240}")
            is_kept(own, fd, piece * held)


@check(seconds=120)
def directories_elsewhere_leave_what_was_accepted(volume, _top):
    """Directories go to all domains, also where a file was granted room that is in another directory."""
    piece = os.urandom(MIB)
    for options in ((), ("fileflags",)):
        with with_little_room(volume, *options, size=128 * MIB) as own:
            sides = [own.mnt / "side0", own.mnt / "side1"]
            held = []
            for side in sides:
                side.mkdir()
                held.append(new(side / "held"))
            own.settle()
            leave(own, 16 * MIB)
            for fd in held:
                with no_space_allowed():
                    write_all(fd, piece, 6)
            with no_space_allowed():
                for _ in directories(own.mnt):
                    pass
            for fd in held:
                synced(fd)
                os.close(fd)


@check(seconds=120)
def writing_through_leaves_what_was_accepted(volume, _top):
    """With `fileflags` a file opened when there is little room is written through, beside one that was opened before."""
    piece = os.urandom(MIB)
    with with_little_room(volume, "fileflags", size=400 * MIB) as own:
        fd = new(own.mnt / "held")
        leave(own, 70 * MIB)
        write_all(fd, piece, 6)
        through, done = new(own.mnt / "through"), 0
        with no_space_allowed():
            while done < 200 * MIB:
                done += os.pwrite(through, piece, done)
        os.close(through)
        must(done > 55 * MIB, f"no space after only {done} bytes")
        must(offered(own.mnt) < 4 * MIB, f"{offered(own.mnt)} bytes are left")
        is_kept(own, fd, piece * 6)


@check(seconds=120)
def writes_past_the_cache_do_not_keep_the_cache_from_writing(volume, _top):
    """Asynchronous direct writes of a file that is written through, more than the kernel hands out at a time, of which each lacks
    room beside what the cache is to write back first: that waited behind them for good."""
    count, piece = 1500, os.urandom(MIB)
    with with_little_room(volume, "fileflags", size=400 * MIB) as own:
        fd = new(own.mnt / "held")
        leave(own, 70 * MIB)
        through = os.open(own.mnt / "through", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.ftruncate(through, count * BLOCK)
        leave(own, 14 * MIB)
        write_all(fd, piece, 6)
        memory = mmap.mmap(-1, BLOCK)
        memory[:] = piece[:BLOCK]
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        aio, results = Aio(count), {}
        aio.write(through, [(n, address, BLOCK, n * BLOCK) for n in range(count)])
        while len(results) < count:
            results.update(aio.results())
        must(set(results.values()) <= {BLOCK, -errno.ENOSPC}, f"{set(results.values())} of the writes")
        synced(through)
        had = [n for n, result in results.items() if result == BLOCK]
        must(had, "no write was taken")
        os.close(through)
        is_kept(own, fd, piece * 6)
        content = (own.mnt / "through").read_bytes()
        must(all(content[n * BLOCK : (n + 1) * BLOCK] == piece[:BLOCK] for n in had), "what a `write` took is lost")
