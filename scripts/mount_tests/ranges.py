"""Ranges of a file: fallocate's modes, and where its blocks lie.

Collapse, insert and FIEMAP are refused by the kernel's FUSE before the daemon is asked (fs/fuse/file.c and fs/ioctl.c; see
docs/mounted.md). These checks hold the refusals to what programs expect of a file system without them: EOPNOTSUPP, and
nothing changed. When a kernel hands them on, they fail, and the library's operations can be tried here.
"""

import array
import ctypes
import errno
import fcntl
import os
import pathlib
import random
import struct
import tempfile

from fslib import Ext4, run

from mount_tests.common import LIBC, check, must, refused, same

KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 1, 2, 8, 16, 32
FS_IOC_FIEMAP = 0xC020660B
FIBMAP = 1
BLOCK = 4096


def fallocate(fd, mode, offset, length):
    LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if LIBC.fallocate(fd, mode, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@check
def fallocate_collapse_and_insert(volume, top):
    data = random.Random(1).randbytes(10 * BLOCK + 100)
    (top / "f").write_bytes(data)
    fd = os.open(top / "f", os.O_RDWR)
    try:
        if isinstance(volume, Ext4):
            fallocate(fd, COLLAPSE_RANGE, BLOCK, 2 * BLOCK)
            fallocate(fd, INSERT_RANGE, 4 * BLOCK, BLOCK)
            short = data[:BLOCK] + data[3 * BLOCK :]
            want = short[: 4 * BLOCK] + bytes(BLOCK) + short[4 * BLOCK :]
            same(os.pread(fd, 1 << 20, 0) == want, True, "content after a collapse and an insert")
            return
        for mode in (COLLAPSE_RANGE, INSERT_RANGE):
            with refused(errno.EOPNOTSUPP):
                fallocate(fd, mode, BLOCK, BLOCK)
        same(os.pread(fd, 1 << 20, 0) == data, True, "content after what was refused")
        # what programs do then
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, BLOCK, BLOCK)
        fallocate(fd, ZERO_RANGE, 3 * BLOCK, BLOCK)
        volume.settle()
        got = os.pread(fd, 1 << 20, 0)
        same(got[BLOCK : 2 * BLOCK] + got[3 * BLOCK : 4 * BLOCK], bytes(2 * BLOCK), "what was punched and zeroed")
        same(len(got), len(data), "size")
    finally:
        os.close(fd)


@check
def where_blocks_lie(volume, top):
    """FIEMAP and FIBMAP: not there, and refused as such. SEEK_HOLE and SEEK_DATA are."""
    with open(top / "f", "wb") as file:
        file.write(b"x" * BLOCK)
        file.seek(1 << 20)
        file.write(b"y" * BLOCK)
    volume.settle()
    fd = os.open(top / "f", os.O_RDONLY)
    try:
        request = bytearray(struct.pack("=QQIIII", 0, 1 << 62, 0, 0, 0, 0))
        if isinstance(volume, Ext4):
            fcntl.ioctl(fd, FS_IOC_FIEMAP, request)
            must(struct.unpack("=QQIIII", request)[3] == 2, "two extents")
        else:
            with refused(errno.EOPNOTSUPP):
                fcntl.ioctl(fd, FS_IOC_FIEMAP, request)
            block = array.array("i", [0])
            try:
                fcntl.ioctl(fd, FIBMAP, block)
            except OSError as error:
                must(error.errno in (errno.EINVAL, errno.ENOTTY, errno.EPERM), f"FIBMAP: {error}")
            else:
                same(block[0], 0, "block of FIBMAP: a swap file would be written there")
        same(os.lseek(fd, 0, os.SEEK_HOLE), BLOCK, "first hole")
        same(os.lseek(fd, BLOCK, os.SEEK_DATA), 1 << 20, "data behind it")
    finally:
        os.close(fd)


@check
def what_is_written_is_allocated(volume, top):
    """Archivers take a file without blocks for one hole: none has data and no blocks, small, open or just written."""
    made = {}
    for size in (1, 600, 1000, 3000):
        made[f"small-{size}"] = b"d" * size
        (top / f"small-{size}").write_bytes(made[f"small-{size}"])
    fds = []
    for synced in (False, True):
        # as a program has its log: created, written, and never closed
        name = f"open-{synced}"
        made[name] = os.urandom(1 << 20)
        fd = os.open(top / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, made[name])
        if synced:
            os.fsync(fd)
            must(os.fstat(fd).st_blocks * 512 >= 1 << 19, f"{os.fstat(fd).st_blocks} units of 1 MiB that is durable")
        fds.append(fd)
    fd = os.open(top / "island", os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, 8 << 20)
    os.stat(top / "island")
    os.pwrite(fd, b"island", 4 << 20)
    fds.append(fd)
    made["island"] = b"island".rjust((4 << 20) + 6, b"\0").ljust(8 << 20, b"\0")
    try:
        for name in made:
            must((top / name).stat().st_blocks > 0, f"{name} has no blocks")
        archive = volume.image.with_suffix(".tar")
        run("tar", "--sparse", "-cf", archive, "-C", top, *made)
        with tempfile.TemporaryDirectory(dir=volume.image.parent) as out:
            run("tar", "-xf", archive, "-C", out)
            for name, data in made.items():
                must((pathlib.Path(out) / name).read_bytes() == data, f"{name}: the archive has other data")
        archive.unlink()
    finally:
        for fd in fds:
            os.close(fd)
