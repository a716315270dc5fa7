"""A volume with little room, where writers are not ordinary programs, or are many: what was accepted is kept, and only what
does not fit is refused."""

import contextlib
import errno
import mmap
import os
import platform
import struct
import subprocess

from fslib import Failed, Skipped
from mount_tests.common import check, daemon_only, must, root_only, same, write_synced
from mount_tests.helpers import crash, loop_device, small_volume

MIB = 1 << 20
PIECE = 1 << 16


@contextlib.contextmanager
def with_little_room(volume, *options, size=64 * MIB):
    """A volume so small that all writers are watched from the beginning."""
    daemon_only(volume)
    with small_volume(volume, "little", size) as own:
        own.mount(*options)
        yield own
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


def pattern(n):
    return bytes([n % 251 + 1]) * PIECE


@check
def a_kernel_thread_writes(volume, _top):
    """A loop device on a file of the volume: its worker, a kernel thread, writes to the file. What it was not refused is
    there."""
    root_only()
    with with_little_room(volume) as own:
        path = own.mnt / "image"
        with open(path, "wb") as file:
            file.truncate(200 * MIB)
        accepted = []
        with loop_device(path, "--direct-io=off") as device:
            fd = os.open(device, os.O_RDWR | os.O_DIRECT)
            page = mmap.mmap(-1, PIECE)
            try:
                for n in range(200 * MIB // PIECE):
                    page[:] = pattern(n)
                    os.pwritev(fd, [page], n * PIECE)
                    accepted.append(n)
                raise Failed("more was accepted than there is room for")
            except OSError as error:
                must(error.errno in (errno.ENOSPC, errno.EIO), f"{error} of the loop device")
            finally:
                os.close(fd)
        must(len(accepted) * PIECE > 20 * MIB, f"only {len(accepted)} pieces were accepted")
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)
        own.cold()
        with open(path, "rb") as file:
            for n in accepted:
                file.seek(n * PIECE)
                must(file.read(PIECE) == pattern(n), f"piece {n} of {len(accepted)} was accepted and is lost")


def program_of_32_bits(path):
    """Makes a program for i386 that writes pieces of `x` to its standard output until that is refused, at most 200 MiB."""
    base, buffer = 0x0804_8000, 0x0805_0000
    code = (
        b"\xbf" + struct.pack("<I", buffer)  # mov edi, buffer
        + b"\xb9" + struct.pack("<I", PIECE) + b"\xb0x\xfc\xf3\xaa"  # mov ecx, PIECE; mov al, 'x'; cld; rep stosb
        + b"\xbd" + struct.pack("<I", 200 * MIB // PIECE)  # mov ebp, times
        + b"\xb8\x04\x00\x00\x00\xbb\x01\x00\x00\x00"  # again: mov eax, 4 (write); mov ebx, 1
        + b"\xb9" + struct.pack("<I", buffer) + b"\xba" + struct.pack("<I", PIECE) + b"\xcd\x80"  # ...; int 0x80
        + b"\x39\xd0\x75\x03\x4d\x75\xe3"  # cmp eax, edx; jne end; dec ebp; jnz again
        + b"\x31\xdb\xb8\x01\x00\x00\x00\xcd\x80"  # end: exit(0)
    )
    head = 52 + 32
    size = head + len(code)
    elf = struct.pack("<16sHHIIIIIHHHHHH", b"\x7fELF\x01\x01\x01", 2, 3, 1, base + head, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    segment = struct.pack("<IIIIIIII", 1, 0, base, base, size, buffer - base + PIECE, 7, 4096)
    path.write_bytes(elf + segment + code)
    path.chmod(0o755)


@check
def a_program_of_32_bits_writes(volume, _top):
    """Its system calls have other numbers: what `write` took is there."""
    if platform.machine() != "x86_64":
        raise Skipped("no x86_64")
    program = volume.image.parent / "writer32"
    program_of_32_bits(program)
    try:
        with open("/dev/null", "wb") as null:
            subprocess.run([program], stdout=null, check=True)
    except OSError as error:
        raise Skipped(f"no 32-bit programs here: {error}") from None
    with with_little_room(volume) as own:
        path = own.mnt / "f"
        with open(path, "wb") as file:
            subprocess.run([program], stdout=file, check=True)
            taken = os.fstat(file.fileno()).st_size
            must(20 * MIB < taken < 64 * MIB, f"{taken} bytes were taken")
            os.fsync(file.fileno())
        own.cold()
        must(path.read_bytes() == b"x" * taken, "what a write took is lost")
    program.unlink()


@check
def written_through_and_synced(volume, _top):
    """With `fileflags` files opened where there is little room are written through: with O_DSYNC durably, also where somebody
    reads the same pages through the cache."""
    with with_little_room(volume, "fileflags") as own:
        path = own.mnt / "f"
        write_synced(path, b"old." * 1024)
        reader = os.open(path, os.O_RDONLY)
        writer = os.open(path, os.O_RDWR | os.O_DSYNC)
        for word in (b"one.", b"two.", b"last"):
            os.pread(reader, 4096, 0)
            os.pwrite(writer, word * 1024, 0)
        try:
            crash(own)
        finally:
            os.close(reader)
            os.close(writer)
        same(path.read_bytes()[:4], b"last", "content after a crash")


@check
def holes_of_what_is_stored_to_a_map(volume, _top):
    """With `fileflags` files opened where there is little room are written through, and what is stored to a map of them is
    held by the kernel all the same: SEEK_DATA and SEEK_HOLE see it."""
    with with_little_room(volume, "fileflags") as own:
        page = 4096
        fd = os.open(own.mnt / "f", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 100 * page)
        with mmap.mmap(fd, 100 * page) as view:
            view[10 * page] = 1
            same(os.lseek(fd, 0, os.SEEK_DATA), 10 * page, "data")
            view[50 * page] = 1
            reader = os.open(own.mnt / "f", os.O_RDONLY)
            same(os.lseek(reader, 20 * page, os.SEEK_DATA), 50 * page, "data of another descriptor")
            same(os.lseek(reader, 10 * page, os.SEEK_HOLE), 11 * page, "the hole")
            os.close(reader)
        os.close(fd)


@check
def others_take_the_room(volume, _top):
    """With `fileflags`: files that were opened for writing while there was room, in domains whose room is taken by a file of
    another one. What their `write` took is kept."""
    with with_little_room(volume, "fileflags", size=400 * MIB) as own:
        files = []
        for n in range(4):
            (own.mnt / f"d{n}").mkdir()
            files.append(os.open(own.mnt / f"d{n}" / "f", os.O_CREAT | os.O_WRONLY, 0o600))
        info = os.statvfs(own.mnt / "d0")
        filler = os.open(own.mnt / "d0" / "filler", os.O_CREAT | os.O_WRONLY, 0o600)
        os.posix_fallocate(filler, 0, info.f_bavail * info.f_frsize - 8 * MIB)
        os.close(filler)
        taken = []
        for fd in files:
            size = 0
            with contextlib.suppress(OSError):
                while size < 200 * MIB:
                    size += os.pwrite(fd, pattern(size // PIECE), size)
            taken.append(size)
        for fd in files:
            os.fsync(fd)
            os.close(fd)
        own.cold()
        for n, size in enumerate(taken):
            data = (own.mnt / f"d{n}" / "f").read_bytes()
            must(data == b"".join(pattern(i) for i in range(-(-size // PIECE)))[:size], f"what was written to file {n} is lost")


@check(seconds=120)
def allocated_blocks_are_written_on_a_full_volume(volume, _top):
    """Who has blocks by `fallocate` writes to them when nothing else is left, and overwrites them, and it is there."""
    for options in ((), ("fileflags",), ("cache=through",)):
        with with_little_room(volume, *options) as own:
            fd = os.open(own.mnt / "allocated", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, 4 * MIB)
            filler = os.open(own.mnt / "filler", os.O_WRONLY | os.O_CREAT)
            for piece in (MIB, PIECE, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(filler, b"f" * piece)
            os.close(filler)
            for n in (1, 2, 3):
                for at in range(0, 4 * MIB, MIB):
                    same(os.pwrite(fd, bytes([n]) * MIB, at), MIB, f"bytes written at {at}, {options}, time {n}")
                # what was written before is overwritten where it lies, also what was synced
                if n != 1:
                    os.fsync(fd)
            os.close(fd)
            own.cold()
            must((own.mnt / "allocated").read_bytes() == b"\3" * 4 * MIB, f"what was written is not there, {options}")
