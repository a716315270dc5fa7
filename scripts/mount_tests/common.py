"""What the mount tests share: how a check is registered, how it fails, and system calls that Python lacks.

Checks of one topic stand in one module of this package, each a function `name(volume, top)` with `@check`: `volume` is a
mounted `fslib.BraidFs`, `top` an empty directory on it. `scripts/test-mount.py` finds the modules by itself.
"""

import contextlib
import ctypes
import errno
import os
import struct

import fslib
from fslib import BraidFs, Failed, Skipped, in_child

CHECK_SECONDS = 60
NOBODY = 65534

CHECKS = []


def check(function=None, *, seconds=CHECK_SECONDS):
    """Registers a check: `@check`, or `@check(seconds=N)` for one that may take longer than others."""

    def register(function):
        function.seconds = seconds
        CHECKS.append(function)
        return function

    return register(function) if function else register


def same(have, want, what):
    if have != want:
        raise Failed(f"{what}: {have!r} instead of {want!r}")


def must(condition, what):
    if not condition:
        raise Failed(what)


@contextlib.contextmanager
def refused(*numbers):
    """The block must fail with one of these errno."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise Failed(f"{error} instead of {'/'.join(errno.errorcode[n] for n in numbers)}") from None
    else:
        raise Failed(f"succeeded instead of {'/'.join(errno.errorcode[n] for n in numbers)}")


def daemon_only(volume):
    if not isinstance(volume, BraidFs):
        raise Skipped("no daemon: not a braidfs")


def root_only():
    if not fslib.IS_ROOT:
        raise Skipped("needs root")


def as_nobody(function):
    """Runs `function` as the user nobody and returns its result."""
    return as_user(NOBODY, function)


def as_user(number, function):
    """Runs `function` as the user, and in the group, of that number and returns its result."""
    root_only()

    def body():
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
        return function()

    return in_child(body, 30)


def serves_a(kind, volume):
    """Whether the server has a thread of that name: it works for somebody who asked for something long."""
    return any(kind in fslib.of_threads(pid, fslib.name_of) for pid in volume.daemons())


def wait_for_scrub(volume):
    """Until the server has begun with a scrub that another process asked for."""
    fslib.wait_for("a scrub", lambda: serves_a("fuse-scrub", volume), 10)


def write_synced(path, data):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


LIBC = ctypes.CDLL(None, use_errno=True)


def renameat2(old, new, flags):
    if LIBC.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def handle_of(path):
    """A file handle, as an NFS server gives it to its clients."""
    handle, mount = ctypes.create_string_buffer(8 + 128), ctypes.c_int()
    struct.pack_into("=Ii", handle, 0, 128, 0)
    if LIBC.name_to_handle_at(-100, os.fsencode(path), handle, ctypes.byref(mount), 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return handle


def open_handle(volume, handle):
    root = os.open(volume.mnt, os.O_RDONLY)
    try:
        fd = LIBC.open_by_handle_at(root, handle, os.O_RDONLY)
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd
    finally:
        os.close(root)
