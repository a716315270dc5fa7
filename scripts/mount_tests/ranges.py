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
import random
import struct

from fslib import Ext4

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
