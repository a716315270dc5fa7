"""Space: what `df` of a directory offers is there, and comes back."""

import contextlib
import ctypes
import errno
import mmap
import os

from filling import empty, fill, offered
from fslib import BraidFs, Failed, run, wait_for
from mount_tests.coherence import Aio
from mount_tests.common import check, daemon_only, must, same

MIB = 1 << 20


@contextlib.contextmanager
def small(volume, domains, size=600 * MIB, *how, options=()):
    """A volume of its own, unmounted and checked at the end."""
    daemon_only(volume)
    own = BraidFs(volume.image.parent, "small", size, volume.binary)
    try:
        own.mkfs("--domains", str(domains), *how)
        own.mount(*options)
        yield own
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")
    finally:
        own.force_down()
        own.image.unlink(missing_ok=True)


@check(seconds=120)
def space_offered_is_there_and_comes_back(volume, _top):
    """ENOSPC comes when df of the directory says next to nothing; after remove and sync df is as before."""
    with small(volume, 2) as own:
        top = own.mnt / "d"
        top.mkdir()
        own.settle()
        first = offered(top)
        for _ in range(2):
            before = offered(top)
            written = fill(top, 1)  # several at a time: scripts/fill-rounds.py
            left = offered(top)
            must(abs(written - before) < before // 100, f"{written} bytes written, {before} offered")
            must(left < before // 100, f"ENOSPC while df offers {left} bytes")
            empty(top, own.mnt)
        must(abs(offered(top) - first) <= first // 500, f"df offers {offered(top)} bytes, {first} at first")


@check
def space_offered_can_be_allocated(volume, _top):
    """fallocate of what df offers succeeds, and of more fails at once."""
    with small(volume, 4) as own:
        top = own.mnt / "d"
        top.mkdir()
        for _ in range(2):
            fd = os.open(top / "f", os.O_CREAT | os.O_RDWR)
            own.settle()
            size = offered(top)
            try:
                os.posix_fallocate(fd, 0, size)
                same(os.fstat(fd).st_size, size, "size")
                must(offered(top) < 4 * MIB, f"df offers {offered(top)} bytes still")
                try:
                    os.posix_fallocate(fd, size, 64 * MIB)
                    must(False, "64 MiB more could be allocated")
                except OSError as error:
                    same(error.errno, errno.ENOSPC, "errno")
                same(os.fstat(fd).st_size, size, "size after a refused fallocate")
            finally:
                os.close(fd)
            empty(top, own.mnt)


@check(seconds=120)
def direct_writes_that_do_not_fit(volume, _top):
    """ENOSPC, never EIO, of one that the daemon did not see coming and whose last requests do not fit; the size stays."""
    for options in ((), ("fileflags",), ("cache=through",)):
        with small(volume, 1, 64 * MIB, options=options) as own, mmap.mmap(-1, 4 * MIB) as data:
            data[:] = os.urandom(len(data))
            # open before room is short: with `fileflags` also written by several requests at once
            path = own.mnt / "f"
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
            (own.mnt / "ballast").write_bytes(bytes(offered(own.mnt) - 3 * MIB))
            own.settle()
            refused = 0
            try:
                for size in range(offered(own.mnt) - MIB // 4, 4 * MIB, MIB // 8):
                    size -= size % 4096
                    for kept in (0, 4096, 10_000):
                        path.write_bytes(bytes(kept))
                        try:
                            done = os.pwritev(fd, [memoryview(data)[:size]], 4096)
                            must(0 < done <= size, f"{options}: {done} bytes of {size}")
                            same(path.read_bytes()[4096 : 4096 + done], data[:done], f"{options}: what was written")
                        except OSError as error:
                            same(error.errno, errno.ENOSPC, f"{options}: errno of {size} bytes")
                            same(path.stat().st_size, kept, f"{options}: size after a refused write")
                            refused += 1
                        os.ftruncate(fd, 0)
            finally:
                os.close(fd)
            # written through, it takes the part that fits
            must(refused or "fileflags" in options, f"{options}: everything fits")


@check(seconds=120)
def asynchronous_direct_writes_that_do_not_fit(volume, _top):
    """Each is written or refused with ENOSPC, also one of which a part fits, and through a handle that is written through: the kernel
    makes EIO of a part there."""
    for options in ((), ("fileflags",), ("cache=through",)):
        with small(volume, 1, 64 * MIB, options=options) as own, mmap.mmap(-1, 2 * MIB) as data:
            data[:] = os.urandom(len(data))
            path = own.mnt / "f"
            refused = 0
            aio, base = Aio(1), ctypes.addressof(ctypes.c_char.from_buffer(data))
            (own.mnt / "ballast").write_bytes(bytes(offered(own.mnt) - 5 * MIB))
            own.settle()
            # opened where there is little room, and as large as it will be, so that nobody waits for the write itself
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
            for size in range(300 * 1024, 1000 * 1024, 100 * 1024):
                os.ftruncate(fd, 0)
                os.ftruncate(fd, 64 * MIB)
                for n in range(60):
                    aio.write(fd, [(n, base, size, n * MIB)])
                    ((_, result),) = aio.results()
                    if result < 0:
                        same(result, -errno.ENOSPC, f"{options}: result of {size} bytes")
                        refused += 1
                        break
                    same(result, size, f"{options}: bytes written")
            os.close(fd)
            must(refused, f"{options}: everything fits")


@check(seconds=120)
def space_goes_from_directory_to_directory(volume, _top):
    """What files in one domain took is there for those of another when they are gone, also where one is written to again."""
    with small(volume, 4) as own:
        dirs = [own.mnt / f"d{n}" for n in range(4)]
        for each in dirs:
            each.mkdir()
        own.settle()
        first = [offered(each) for each in dirs]
        for each, before in zip(dirs, first):
            # while a group changes its owner nobody is told of it
            with contextlib.suppress(Failed):
                wait_for("what was offered", lambda: abs(offered(each) - before) < before // 50, 2)  # noqa: B023
            now = offered(each)
            told = [offered(other) for other in dirs]
            must(abs(now - before) < before // 50, f"{each.name}: {now} bytes offered, {before} at first; {told} in all")
            written = fill(each, 1)
            must(abs(written - now) < now // 50, f"{each.name}: {written} bytes written, {now} offered")
            empty(each, own.mnt)
            # with room again the domain keeps some for what the kernel may hold of it, and lends it to who needs it
            (each / "small").write_bytes(b"x")


@check
def space_for_new_files_elsewhere(volume, _top):
    """Where a directory's domain has no room, new files in it go to domains that have."""
    with small(volume, 4, 128 * MIB) as own:
        top = own.mnt / "d"
        top.mkdir()
        own.settle()
        fill(top, 1)
        for n in range(8):
            (top / f"small{n}").write_bytes(b"x" * MIB)
        run("sync", "-f", own.mnt)
        for n in range(8):
            same((top / f"small{n}").read_bytes(), b"x" * MIB, f"content of file {n}")


def in_pieces(own):
    """Fills a directory with files of 1 MiB and removes three of four: two directories in different domains, what is left by number."""
    full, other = own.mnt / "full", own.mnt / "other"
    for top in full, other:
        top.mkdir()
    own.settle()
    contents = {}
    with contextlib.suppress(OSError):
        for n in range(256):
            contents[n] = os.urandom(4096) * 256
            (full / f"f{n}").write_bytes(contents[n])
    run("sync", "-f", own.mnt)
    for n in list(contents):
        if n % 4 != 1 or n == len(contents) - 1:
            (full / f"f{n}").unlink()
            del contents[n]
    own.settle()
    return full, other, contents


@check(seconds=120)
def groups_in_use_are_emptied_for_another_directory(volume, _top):
    """Three of four files of a full directory go: what they leave lies in pieces, and a file in another domain can have most of it."""
    with small(volume, 2, 256 * MIB) as own:
        full, other, contents = in_pieces(own)
        told, free = offered(other), os.statvfs(own.mnt)
        free = free.f_bfree * free.f_frsize
        must(told < free * 2 // 3, f"{told} bytes offered, {free} free: they do not lie in pieces")
        written = fill(other, 1)
        must(written > told + (free - told) // 2, f"{written} bytes written, {told} offered, {free} free")
        for cold in False, True:
            if cold:
                own.umount()
                own.mount()
            for n, content in contents.items():
                must((full / f"f{n}").read_bytes() == content, f"content of file {n}")
            same((other / "f0").stat().st_size, written, "size of the file that took the room")


@check(seconds=120)
def what_the_cache_holds_for_a_domain_stays_its_room(volume, _top):
    """The kernel holds pages for which there is one free group; a file in another domain cannot take it from them."""
    with small(volume, 2, 384 * MIB, "--group-size", "64M") as own:
        dirs = [own.mnt / "first", own.mnt / "second"]
        for each in dirs:
            each.mkdir()
        own.settle()
        # until one group of 64 MiB is nobody's, and hardly anything else is free
        for n in range(1024):
            offers = [offered(each) for each in dirs]
            if max(offers) < 72 * MIB:
                break
            (dirs[offers.index(max(offers))] / f"f{n}").write_bytes(b"x" * MIB)
            run("sync", "-f", own.mnt)
        piece = os.urandom(4096) * 256
        fd = os.open(dirs[0] / "held", os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            held = 0
            while held < 20 and os.write(fd, piece) == MIB:
                held += 1
            taker = os.open(dirs[1] / "taker", os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                with contextlib.suppress(OSError):
                    for _ in range(12):
                        os.write(taker, piece)
                    os.fsync(taker)
            finally:
                os.close(taker)
            os.fsync(fd)
        finally:
            os.close(fd)
        own.umount()
        own.mount()
        same((dirs[0] / "held").read_bytes(), piece * held, "what was held")
