"""Discarding: fstrim, the mount option `discard`, mkfs."""

import errno
import fcntl
import os
import random
import struct
import threading
import time

from fslib import Failed, Skipped, have, run

from mount_tests.common import as_nobody, check, daemon_only, must, refused, root_only, same
from mount_tests.helpers import small_volume

FITRIM = 0xC0185879
MIB = 1 << 20


def fitrim(path, start=0, length=(1 << 64) - 1, minimum=0):
    """Bytes trimmed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        request = bytearray(struct.pack("=QQQ", start, length, minimum))
        fcntl.ioctl(fd, FITRIM, request)
        return struct.unpack("=QQQ", request)[1]
    finally:
        os.close(fd)


def used(volume):
    """Bytes that the image takes on its own file system."""
    return volume.image.stat().st_blocks * 512


def removed_file(volume, top, size, name="big"):
    (top / name).write_bytes(random.Random(2).randbytes(size))
    volume.settle()
    before = used(volume)
    os.unlink(top / name)
    volume.settle()
    # once more: what the first one freed by writing metadata anew
    volume.settle()
    return before


@check
def fstrim(volume, top):
    root_only()
    if not have("fstrim"):
        raise Skipped("no fstrim")
    (top / "keep").write_bytes(b"k" * 3_000_000)
    before = removed_file(volume, top, 60 * MIB)
    _, out = run("fstrim", "-v", volume.mnt)
    must("trimmed" in out, f"fstrim says {out!r}")
    must(used(volume) < before - 50 * MIB, f"the image takes {used(volume)} bytes after fstrim, {before} before")
    free = os.statvfs(volume.mnt)
    trimmed = fitrim(top)
    must(trimmed > free.f_bfree * 4096 * 0.98 - 4 * MIB, f"{trimmed} bytes trimmed of {free.f_bfree * 4096} free")
    volume.cold()
    same((top / "keep").read_bytes() == b"k" * 3_000_000, True, "content after a trim")


@check
def fstrim_of_a_part(volume, top):
    root_only()
    same(fitrim(top, 4096, 0), 0, "bytes trimmed of nothing")
    must(0 < fitrim(top, 0, 64 * MIB) <= 64 * MIB, "bytes trimmed of the first 64 MiB")
    with refused(errno.EINVAL):
        fitrim(top, 1 << 50)
    volume.umount()
    volume.mount("ro")
    try:
        with refused(errno.EROFS):
            daemon_only(volume)
            fitrim(volume.mnt)
    finally:
        volume.umount()
        volume.mount()


@check
def fstrim_is_for_root(_volume, top):
    def try_it():
        try:
            fitrim(top)
        except OSError as error:
            return error.errno
        return 0

    top.chmod(0o777)
    same(as_nobody(try_it), errno.EPERM, "errno for another user")


@check(seconds=120)
def fstrim_beside_writers(volume, top):
    """Three threads write files, check and remove them while a fourth trims."""
    root_only()
    stop, wrong = threading.Event(), []

    def write(number):
        rng = random.Random(number)
        have = {}
        try:
            for n in range(40):
                path, data = top / f"{number}-{n}", rng.randbytes(rng.randrange(1, 3 * MIB))
                fd = os.open(path, os.O_CREAT | os.O_WRONLY)
                os.write(fd, data)
                if n % 3 == 0:
                    os.fsync(fd)
                # so that it is read from the volume
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
                have[path] = data
                if len(have) > 5:
                    old = rng.choice(sorted(have))
                    if old.read_bytes() != have.pop(old):
                        raise Failed(f"{old} holds something else")
                    os.unlink(old)
        except (OSError, Failed) as error:
            wrong.append(str(error))
        return have

    def trim():
        while not stop.is_set():
            fitrim(top)

    kept = []
    threads = [threading.Thread(target=lambda n=n: kept.append(write(n))) for n in range(3)]
    trimmer = threading.Thread(target=trim)
    trimmer.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    trimmer.join()
    same(wrong, [], "errors")
    volume.cold()
    for files in kept:
        for path, data in files.items():
            same(path.read_bytes() == data, True, f"content of {path.name} after a remount")


@check
def mount_with_discard(volume, _top):
    daemon_only(volume)
    # of its own: whole segments only are given back, and other checks leave parts of many
    with small_volume(volume, size=256 * MIB) as v:
        v.mount("discard", "commit=1")
        before = removed_file(v, v.mnt, 60 * MIB)
        end = time.monotonic() + 30
        while used(v) > before - 30 * MIB and time.monotonic() < end:
            time.sleep(0.1)
        must(used(v) <= before - 30 * MIB, f"the image takes {used(v)} bytes, {before} with the file")
        v.umount()


@check
def mkfs_discards(volume, _top):
    daemon_only(volume)
    old = volume.image.with_suffix(".old")
    try:
        for option, discards in ((None, True), ("--nodiscard", False)):
            old.write_bytes(b"\xa5" * (64 * MIB))
            options = [option] if option else []
            run(volume.binary, "mkfs", "--quiet", "--force", *options, old)
            takes = old.stat().st_blocks * 512
            must((takes < 8 * MIB) == discards, f"{takes} bytes of 64 MiB after mkfs {option}")
            same(run(volume.binary, "fsck", "-f", "-n", old, ok=None)[0], 0, "exit code of fsck")
    finally:
        old.unlink(missing_ok=True)
