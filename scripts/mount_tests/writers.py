"""Writers that do something else as well, on a volume with so little room that each of them is looked at: that holds up
nobody, and takes no room from others."""

import contextlib
import ctypes
import errno
import os
import pathlib
import resource
import select
import signal
import struct

from fslib import Skipped, fork_for, in_child, quiet
from mount_tests.common import LIBC, check, must, root_only, same
from mount_tests.nearly_full import MIB, with_little_room

OPEN, FLUSH, INIT = 14, 25, 26


class Unanswering:
    """A file of a FUSE server of its own, which does not answer when it is closed. The server is a process that ends by itself
    soon: until then nobody can look at who closes the file, neither `ps`."""

    def __init__(self, path):
        self.path = path
        path.touch()
        fuse = os.open("/dev/fuse", os.O_RDWR)
        data = b"fd=%d,rootmode=100600,user_id=0,group_id=0" % fuse
        if LIBC.mount(b"unanswering", os.fsencode(path), b"fuse", 6, data):
            raise OSError(ctypes.get_errno(), "mount")
        self.server, self.closing = fork_for(lambda pipe: serve(fuse, pipe))
        os.close(fuse)

    def is_closing(self):
        """Waits until somebody closes it; False: the server has ended before."""
        return os.read(self.closing, 1) == b"c"

    def holds_up(self):
        return os.waitpid(self.server, os.WNOHANG)[0] == 0

    def end(self):
        """Who waits for it is told of an error."""
        with contextlib.suppress(OSError):
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)
        os.close(self.closing)
        quiet("umount", "-l", self.path)
        self.path.unlink()


def serve(fuse, pipe):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)
    with contextlib.suppress(OSError):
        while True:
            request = os.read(fuse, 1 << 17)
            opcode, unique = struct.unpack_from("=IQ", request, 4)
            if opcode == FLUSH:
                os.write(pipe, b"c")
                continue
            body = {
                INIT: struct.pack("=IIIIHHIIHH8I", 7, 31, 0, 0, 12, 9, 4096, 1, 1, 0, *(0,) * 8),
                OPEN: bytes(16),
            }.get(opcode)
            error = -errno.ENOSYS if body is None else 0
            os.write(fuse, struct.pack("=IiQ", 16 + len(body or b""), error, unique) + (body or b""))


def until_full(path):
    """Appends to a file until that is refused; how much it took."""
    fd, taken = os.open(path, os.O_CREAT | os.O_WRONLY), 0
    try:
        while True:
            taken += os.write(fd, b"f" * MIB)
    except OSError as error:
        must(error.errno == errno.ENOSPC, f"{error} instead of ENOSPC")
    os.fsync(fd)
    os.close(fd)
    return taken


def room(own):
    return os.statvfs(own.mnt).f_bavail * 4096


def leave(own, size):
    """Takes all room but so many bytes."""
    filler = os.open(own.mnt / "filler", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(filler, 0, room(own) - size)
    os.close(filler)


@check(seconds=120)
def a_writer_in_an_execve_that_does_not_end(volume, _top):
    """The process of one who has just written closes, in an `execve`, a file whose server does not answer. Until that ends
    nobody can see what it does; others write on."""
    root_only()
    with with_little_room(volume) as own:
        leave(own, 12 * MIB)
        other, child = Unanswering(volume.image.parent / "unanswering"), 0
        try:
            child = os.fork()
            if child == 0:
                try:
                    os.open(other.path, os.O_RDONLY | os.O_CLOEXEC)
                    os.write(os.open(own.mnt / "f", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC), b"w" * MIB)
                    os.execv("/bin/true", ["true"])
                finally:
                    os._exit(1)
            must(other.is_closing(), "the file is not closed")
            taken = in_child(lambda: until_full(own.mnt / "g"), 60)
            must(other.holds_up(), "others could write only after the execve")
            must(taken >= 8 * MIB, f"only {taken} bytes were taken")
        finally:
            other.end()
            if child:
                os.waitpid(child, 0)
        same(os.stat(own.mnt / "f").st_size, MIB, "what it wrote")


@check
def a_writer_that_waits_elsewhere(volume, _top):
    """A thread has written, and then the same call of it waits for the reader of a pipe: what it wrote counts once."""
    with with_little_room(volume) as own:
        before, (reader, writer) = room(own), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                data = b"w" * (16 * MIB)
                fd = os.open(own.mnt / "f", os.O_CREAT | os.O_WRONLY)
                for target in (fd, writer):
                    os.dup2(target, fd)
                    os.write(fd, data)
            finally:
                os._exit(0)
        try:
            must(select.select([reader], [], [], 30)[0], "it writes to the pipe")
            taken = in_child(lambda: until_full(own.mnt / "g"), 30)
            must(taken > before - 24 * MIB, f"{taken} of {before} bytes were taken beside 16 MiB")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            os.close(writer)


@check
def a_core_that_does_not_fit(volume, _top):
    """The kernel writes a core on behalf of a thread that is in no `write`: not more than there is room for."""
    pattern = pathlib.Path("/proc/sys/kernel/core_pattern").read_text()
    if pattern[0] in "|/":
        raise Skipped(f"cores are not written where a program runs: {pattern.strip()}")
    with with_little_room(volume) as own:
        leave(own, 8 * MIB)
        where = own.mnt / "d"
        where.mkdir()

        def die():
            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
            os.chdir(where)
            memory = bytearray(b"m") * (40 * MIB)
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.abort()
            return memory

        child = os.fork()
        if child == 0:
            try:
                die()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        cores = list(where.iterdir())
        if not cores:
            raise Skipped("no core is written here")
        with open(cores[0], "rb") as core:
            os.fsync(core.fileno())
            must(core.seek(0, os.SEEK_END) >= 2 * MIB, "hardly anything of a core was written")
