"""Append-only and immutable inodes: every operation on both, against what ext4 answers.

The tables were taken from ext4 of Linux 6.18 by the same functions (`BRAIDFS_SUT=ext4` runs the checks there). A braidfs
guards such inodes on a mount with `fileflags`, and on every mount of a volume that has had some: so these checks have
volumes of their own, and the one of all others stays without.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import time

import fslib
from mount_tests.common import (
    CHECK_SECONDS, LIBC, NOBODY, as_nobody, check, daemon_only, must, renameat2, root_only, same,
)
from mount_tests.helpers import crash, small_volume

GETFLAGS, SETFLAGS = 0x80086601, 0x40086602
IMMUTABLE, APPEND, NOATIME = 0x10, 0x20, 0x80
PUNCH, ZERO, KEEP = 2, 0x10, 1


def get_flags(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return struct.unpack("I", fcntl.ioctl(fd, GETFLAGS, b"\0" * 4))[0]
    finally:
        os.close(fd)


def set_flags(path, flags):
    """The flags that users set; others, as ext4's for extents, stay."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        old = struct.unpack("I", fcntl.ioctl(fd, GETFLAGS, b"\0" * 4))[0]
        fcntl.ioctl(fd, SETFLAGS, struct.pack("I", old & ~(IMMUTABLE | APPEND | NOATIME) | flags))
    finally:
        os.close(fd)


def fallocate(fd, mode, offset, length):
    if LIBC.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def answer(function):
    """The errno's name, or "ok"."""
    try:
        function()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]


def guarding(function):
    """Runs a check on a mount that guards flagged inodes."""

    @functools.wraps(function)
    def run(volume, top):
        if not isinstance(volume, fslib.BraidFs):
            return function(volume, top)
        with small_volume(volume, "guarded", 512 << 20) as own:
            own.mount("fileflags")
            inner = own.mnt / "top"
            inner.mkdir()
            # some of what is refused leaves descriptors open
            fslib.in_child(lambda: function(own, inner), CHECK_SECONDS)
            own.umount()
            same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")

    return run


def with_fd(flags, function=lambda fd: None):
    def run(path):
        fd = os.open(path, flags)
        try:
            function(fd)
        finally:
            os.close(fd)

    return run


def map_and_store(fd):
    with mmap.mmap(fd, 4096) as view:
        view[0:1] = b"m"


def donor_into(flags):
    """copy_file_range into the file."""

    def run(path):
        source, fd = os.open(path.parent / "donor", os.O_RDONLY), os.open(path, flags)
        try:
            os.copy_file_range(source, fd, 100, 0, 0)
        finally:
            os.close(fd)
            os.close(source)

    return run


def by_nobody(function):
    """As the user nobody, who may write the object and does not own it."""

    def run(path):
        name = as_nobody(lambda: answer(lambda: function(path)))
        if name != "ok":
            raise OSError(getattr(errno, name), name)

    return run


ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, perm, who) for tag, perm, who in
    [(1, 6, 0xffffffff), (2, 4, 1000), (4, 4, 0xffffffff), (0x10, 6, 0xffffffff), (0x20, 4, 0xffffffff)]
)

# cap_net_raw, permitted
CAPABILITY = struct.pack("<5I", 0x02000000, 1 << 13, 0, 0, 0)

NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2


def utimens(path, atime, mtime):
    """Each time a pair of seconds and nanoseconds."""
    spec = struct.pack("4q", *atime, *mtime)
    if LIBC.utimensat(-100, os.fsencode(path), spec, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# Of any object.
COMMON = {
    "chmod": lambda p: os.chmod(p, 0o700),
    "chown": lambda p: os.chown(p, 1, -1),
    "chgrp": lambda p: os.chown(p, -1, 1),
    "touch": lambda p: os.utime(p),
    "touch by nobody": by_nobody(os.utime),
    "utimes": lambda p: os.utime(p, (1, 2)),
    "atime alone": lambda p: utimens(p, (1, 5), (0, OMIT)),
    "mtime alone": lambda p: utimens(p, (0, OMIT), (1, 5)),
    "mtime now": lambda p: (time.sleep(0.02), utimens(p, (0, OMIT), (0, NOW))),
    "both now": lambda p: utimens(p, (0, NOW), (0, NOW)),
    "setxattr": lambda p: os.setxattr(p, "user.new", b"v"),
    "replace xattr": lambda p: os.setxattr(p, "user.old", b"v"),
    "removexattr": lambda p: os.removexattr(p, "user.old"),
    "trusted xattr": lambda p: os.setxattr(p, "trusted.new", b"v"),
    "getxattr": lambda p: os.getxattr(p, "user.old"),
    "set acl": lambda p: os.setxattr(p, "system.posix_acl_access", ACL),
    "remove acl": lambda p: os.removexattr(p, "system.posix_acl_access"),
    "rename": lambda p: os.rename(p, p.with_name("elsewhere")),
    "rename into": lambda p: os.rename(p, p.parent / "dir" / "moved"),
    "exchange": lambda p: renameat2(p, p.with_name("other"), 2),
    "exchange with": lambda p: renameat2(p.with_name("other"), p, 2),
}

FILE = COMMON | {
    "open to read": with_fd(os.O_RDONLY),
    "open to write": with_fd(os.O_WRONLY),
    "open both": with_fd(os.O_RDWR),
    "open to append": with_fd(os.O_WRONLY | os.O_APPEND),
    "open O_TRUNC": with_fd(os.O_WRONLY | os.O_TRUNC),
    "open append and trunc": with_fd(os.O_WRONLY | os.O_APPEND | os.O_TRUNC),
    "open O_CREAT": with_fd(os.O_WRONLY | os.O_CREAT),
    "append": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"x")),
    "pwrite by an appender": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: os.pwrite(fd, b"x", 0)),
    "map shared": with_fd(os.O_RDWR | os.O_APPEND, map_and_store),
    "ftruncate": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: os.ftruncate(fd, 10)),
    "ftruncate longer": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: os.ftruncate(fd, 100000)),
    "truncate": lambda p: os.truncate(p, 10),
    "truncate longer": lambda p: os.truncate(p, 100000),
    "fallocate": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: fallocate(fd, 0, 0, 65536)),
    "fallocate keep": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: fallocate(fd, KEEP, 0, 65536)),
    "punch": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: fallocate(fd, PUNCH | KEEP, 0, 4096)),
    "zero": with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: fallocate(fd, ZERO, 0, 4096)),
    "copy_file_range": donor_into(os.O_WRONLY),
    "copy_file_range by an appender": donor_into(os.O_WRONLY | os.O_APPEND),
    "link": lambda p: os.link(p, p.with_name("second")),
    "unlink": lambda p: os.unlink(p),
    "rename over": lambda p: os.rename(p.with_name("other"), p),
    "fsync": with_fd(os.O_RDONLY, os.fsync),
}


def tmpfile_in(path):
    os.close(os.open(path, os.O_TMPFILE | os.O_RDWR, 0o600))


def tmpfile_linked(path):
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        if LIBC.linkat(fd, b"", -100, os.fsencode(path / "linked"), 0x1000):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)


DIRECTORY = COMMON | {
    "create": lambda p: os.close(os.open(p / "new", os.O_CREAT | os.O_WRONLY)),
    "create by nobody": by_nobody(lambda p: os.close(os.open(p / "new", os.O_CREAT | os.O_WRONLY))),
    "open what is there": lambda p: os.close(os.open(p / "in", os.O_CREAT | os.O_WRONLY)),
    "mkdir": lambda p: os.mkdir(p / "new"),
    "symlink": lambda p: os.symlink("x", p / "new"),
    "mknod": lambda p: os.mknod(p / "new", 0o010600),
    "O_TMPFILE": tmpfile_in,
    "link of a O_TMPFILE": tmpfile_linked,
    "link into": lambda p: os.link(p.parent / "donor", p / "new"),
    "unlink in": lambda p: os.unlink(p / "in"),
    "rmdir in": lambda p: os.rmdir(p / "sub"),
    "rename in": lambda p: os.rename(p / "in", p / "other-name"),
    "rename out": lambda p: os.rename(p / "in", p.parent / "out"),
    "rename from outside": lambda p: os.rename(p.parent / "donor", p / "in-too"),
    "rename over in": lambda p: os.rename(p.parent / "donor", p / "in"),
    "exchange in": lambda p: renameat2(p / "in", p / "in2", 2),
    "exchange with outside": lambda p: renameat2(p / "in", p.parent / "donor", 2),
    "write in": lambda p: (p / "in").write_text("more"),
    "chmod in": lambda p: os.chmod(p / "in", 0o640),
    "list": lambda p: os.listdir(p),
    "rmdir": lambda p: os.rmdir(p),
}


def new_file(stage):
    path = stage / "object"
    path.write_bytes(b"x" * 10000)
    path.chmod(0o666)
    os.setxattr(path, "user.old", b"old")
    return path


def new_directory(stage):
    path = stage / "object"
    path.mkdir()
    path.chmod(0o777)
    os.setxattr(path, "user.old", b"old")
    for name in ("in", "in2"):
        (path / name).write_text("in")
    (path / "sub").mkdir()
    return path


def clear(top):
    """Takes all flags off a tree, so that it can be removed."""
    for where, names, files in os.walk(top, topdown=False):
        for name in names + files:
            path = os.path.join(where, name)
            if os.path.isdir(path) or os.path.isfile(path):
                set_flags(path, 0)


def answers(top, make, operations, flags):
    """What each operation answers for a fresh object with these flags."""
    found = {}
    for number, (name, operation) in enumerate(operations.items()):
        stage = top / str(number)
        stage.mkdir()
        stage.chmod(0o777)
        (stage / "dir").mkdir()
        (stage / "other").write_text("other")
        (stage / "donor").write_bytes(b"d" * 200)
        path = make(stage)
        set_flags(path, flags)
        found[name] = answer(lambda: operation(path))
        clear(stage)
    return found


def compare(top, make, operations, flags, refused_ones):
    root_only()
    try:
        found = answers(top, make, operations, flags)
    finally:
        clear(top)
    want = dict.fromkeys(operations, "ok") | refused_ones
    wrong = [f"{name}: {found[name]} instead of {want[name]}" for name in operations if found[name] != want[name]]
    must(not wrong, "; ".join(wrong))


def eperm(*names):
    return dict.fromkeys(names, "EPERM")


# What both flags refuse of any object.
GUARDED = eperm(
    "chmod", "chown", "chgrp", "utimes", "atime alone", "mtime alone", "mtime now", "setxattr", "replace xattr",
    "removexattr", "trusted xattr", "set acl", "remove acl", "rename", "rename into", "exchange", "exchange with",
)
TOUCHES = eperm("touch", "touch by nobody", "both now")
# Of a file: names, and its content but for its end.
KEPT_FILE = eperm(
    "open to write", "open both", "open O_TRUNC", "open append and trunc", "open O_CREAT", "ftruncate", "ftruncate longer",
    "truncate", "truncate longer", "punch", "zero", "copy_file_range", "link", "unlink", "rename over",
)
# Of a directory: names that are there.
KEPT_NAMES = eperm(
    "unlink in", "rmdir in", "rename in", "rename out", "rename over in", "exchange in", "exchange with outside", "rmdir"
)


@check
@guarding
def append_only_file(volume, top):
    # mmap(2) refuses by the kernel's own flag of the inode (mm/mmap.c), which FUSE never sets, and tells nobody
    mapped = "ok" if isinstance(volume, fslib.BraidFs) else "EACCES"
    appender = {"map shared": mapped, "copy_file_range by an appender": "EBADF"}
    compare(top, new_file, FILE, APPEND, GUARDED | KEPT_FILE | appender)


@check
@guarding
def immutable_file(_volume, top):
    more = eperm(
        "open to append", "append", "pwrite by an appender", "map shared", "fallocate", "fallocate keep",
        "copy_file_range by an appender",
    )
    compare(top, new_file, FILE, IMMUTABLE, GUARDED | TOUCHES | KEPT_FILE | more)


@check
@guarding
def append_only_directory(_volume, top):
    compare(top, new_directory, DIRECTORY, APPEND, GUARDED | KEPT_NAMES)


@check
@guarding
def immutable_directory(_volume, top):
    more = eperm(
        "create", "create by nobody", "mkdir", "symlink", "mknod", "O_TMPFILE", "link of a O_TMPFILE", "link into",
        "rename from outside",
    )
    compare(top, new_directory, DIRECTORY, IMMUTABLE, GUARDED | TOUCHES | KEPT_NAMES | more)


@check
def objects_without_flags(_volume, top):
    """The same operations where nothing is refused: else the tables above would prove little."""
    for name in ("files", "directories"):
        (top / name).mkdir()
    compare(top / "files", new_file, FILE, 0, {"copy_file_range by an appender": "EBADF"})
    compare(top / "directories", new_directory, DIRECTORY, 0, {"rmdir": "ENOTEMPTY"})


@check
@guarding
def flags_are_for_who_may(_volume, top):
    """Only CAP_LINUX_IMMUTABLE sets or clears them, the owner sets others, nobody else any."""
    path = new_file(top)
    other = by_nobody(lambda p: set_flags(p, NOATIME))
    same(answer(lambda: other(path)), "EPERM", "chattr +A by another user")
    os.chown(path, NOBODY, -1)
    same(answer(lambda: other(path)), "ok", "chattr +A by the owner")
    for flag in (APPEND, IMMUTABLE):
        same(answer(lambda: by_nobody(lambda p: set_flags(p, flag))(path)), "EPERM", "chattr by the owner")
        set_flags(path, flag)
        same(answer(lambda: by_nobody(lambda p: set_flags(p, 0))(path)), "EPERM", "clearing by the owner")
        set_flags(path, 0)


@check
def flags_by_the_number_of_32_bit_programs(_volume, top):
    """The kernel hands it on without a look at who asks, where a program of 64 bits gives it: nobody has it."""
    path = new_file(top)

    def by_number(number):
        def ask(p):
            fd = os.open(p, os.O_RDONLY)
            try:
                fcntl.ioctl(fd, number, struct.pack("I", NOATIME))
            finally:
                os.close(fd)

        return answer(lambda: by_nobody(ask)(path)), answer(lambda: ask(path))

    before = get_flags(path)
    for number in (0x80046601, 0x40046602):
        same(by_number(number), ("ENOTTY", "ENOTTY"), f"ioctl {number:#x}")
    same(get_flags(path), before, "flags")


@check
@guarding
def writes_through_an_old_descriptor(volume, top):
    """What was open for writing before `chattr +i`: further writes are refused, what was taken before is written."""
    root_only()
    for mode in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND):
        path = top / f"f{mode}"
        path.write_bytes(b"a" * 5000)
        fd = os.open(path, mode)
        try:
            os.lseek(fd, 0, os.SEEK_END)
            os.write(fd, b"before")
            set_flags(path, IMMUTABLE)
            for what in (
                lambda: os.write(fd, b"after"),
                lambda: os.pwrite(fd, b"after", 0),
                lambda: os.writev(fd, [b"af", b"ter"]),
                lambda: os.ftruncate(fd, 0),
                lambda: fallocate(fd, 0, 0, 65536),
                lambda: fallocate(fd, PUNCH | KEEP, 0, 4096),
                lambda: os.utime(fd),
            ):
                same(answer(what), "EPERM", "through a descriptor from before")
            # the other uses of the descriptor go on
            os.lseek(fd, 0, os.SEEK_END)
            if mode & os.O_RDWR:
                same(os.pread(fd, 8192, 0), b"a" * 5000 + b"before", "read through it, across the end")
            os.fsync(fd)
            os.sync()
            set_flags(path, 0)
            os.pwrite(fd, b"again", 0)
        finally:
            os.close(fd)
        want = b"a" * 5000 + b"beforeagain" if mode & os.O_APPEND else b"again" + b"a" * 4995 + b"before"
        same(path.read_bytes(), want, "the content")
    run_sync(volume)


def run_sync(volume):
    """syncfs of the mount must not tell of an error."""
    fd = os.open(volume.mnt, os.O_RDONLY)
    try:
        if LIBC.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)


@check
@guarding
def what_was_taken_is_written(volume, top):
    """Data and times that the kernel holds when a file becomes immutable reach the volume; no sync tells of an error."""
    root_only()
    path, mapped = top / "f", top / "mapped"
    path.write_bytes(b"a" * 100000)
    mapped.write_bytes(b"a" * 8192)
    fd, map_fd = os.open(path, os.O_RDWR), os.open(mapped, os.O_RDWR)
    view = mmap.mmap(map_fd, 8192)
    view[0:1] = b"b"
    os.pwrite(fd, b"b" * 90000, 0)
    for p in (path, mapped):
        set_flags(p, IMMUTABLE)
    if isinstance(volume, fslib.BraidFs):
        view[4096:4097] = b"c"  # ext4 ends the process with SIGBUS; FUSE is not asked
        view.flush()
    os.fsync(fd)
    os.fsync(map_fd)
    run_sync(volume)
    view.close()
    os.close(fd)
    os.close(map_fd)
    run_sync(volume)
    volume.cold()
    same(path.read_bytes(), b"b" * 90000 + b"a" * 10000, "what was written before")
    same(mapped.read_bytes()[0:1], b"b", "what was stored into the map before")
    if isinstance(volume, fslib.BraidFs):
        same(mapped.read_bytes()[4096:4097], b"c", "what was stored into the map after")
    for p in (path, mapped):
        same(get_flags(p) & IMMUTABLE, IMMUTABLE, "the flag after a remount")
        set_flags(p, 0)


@check
def privileges_go_with_the_content(_volume, top):
    """fallocate, punch, zero, copies, writes and truncation by a user without CAP_FSETID take set-uid and set-gid."""
    root_only()
    path, donor = top / "f", top / "donor"
    donor.write_bytes(b"d" * 10000)
    donor.chmod(0o644)
    top.chmod(0o777)
    changes = {
        "fallocate": lambda fd: fallocate(fd, 0, 0, 65536),
        "fallocate keep": lambda fd: fallocate(fd, KEEP, 0, 65536),
        "punch": lambda fd: fallocate(fd, PUNCH | KEEP, 0, 4096),
        "zero": lambda fd: fallocate(fd, ZERO, 0, 4096),
        "write": lambda fd: os.write(fd, b"x"),
        "ftruncate": lambda fd: os.ftruncate(fd, 100),
        "copy_file_range": lambda fd: with_fd(os.O_RDONLY, lambda d: os.copy_file_range(d, fd, 5000, 0, 0))(donor),
    }
    wrong = []
    for name, change in changes.items():
        # without group execute, set-gid is no privilege, and stays where the group itself writes
        for owner, mode, stripped in (
            (NOBODY, 0o6777, 0o777), (NOBODY, 0o2767, 0o2767), (NOBODY, 0o4711, 0o711),
            (0, 0o6777, 0o777), (0, 0o6666, 0o666), (0, 0o2676, 0o676), (0, 0o4667, 0o667),
        ):
            for who, run, want in (("nobody", by_nobody, stripped), ("root", lambda f: f, mode)):
                path.unlink(missing_ok=True)
                path.write_bytes(b"x" * 10000)
                os.chown(path, owner, owner)
                path.chmod(mode)
                os.stat(path)  # the kernel knows the mode now
                run(with_fd(os.O_RDWR, change))(path)
                shown = os.stat(path).st_mode & 0o7777
                if shown != want:
                    wrong.append(f"{name} of {mode:o} of {owner} by {who}: {shown:o}")
    # a new owner or group has no privilege, nor has who is not of the group that the file had
    for who, run, want in (("nobody", by_nobody, 0o644), ("root", lambda f: f, 0o2644)):
        os.chown(path, NOBODY, 1)
        path.chmod(0o2644)
        run(lambda p: os.chown(p, -1, NOBODY))(path)
        shown = os.stat(path).st_mode & 0o7777
        if shown != want:
            wrong.append(f"chgrp by {who}: {shown:o}")
    must(not wrong, "; ".join(wrong))
    path.unlink()
    path.write_bytes(b"x" * 10000)
    path.chmod(0o666)
    for name, change in changes.items():
        os.setxattr(path, "security.capability", CAPABILITY)
        by_nobody(with_fd(os.O_RDWR, change))(path)
        same(answer(lambda: os.getxattr(path, "security.capability")), "ENODATA", f"file capabilities after {name}")


@check
def capabilities_stay_that_are_set_after_the_write(_volume, top):
    """Who writes sets them before the kernel has written its pages back, and before it closes the file."""
    root_only()
    path = new_file(top)
    for _ in range(2):
        fd = os.open(path, os.O_RDWR)
        os.write(fd, b"program")
        os.setxattr(fd, "security.capability", CAPABILITY)
        os.fsync(fd)
        same(os.getxattr(path, "security.capability"), CAPABILITY, "file capabilities after a sync")
        os.close(fd)
        same(os.getxattr(path, "security.capability"), CAPABILITY, "file capabilities after a close")
        fd = os.open(path, os.O_RDWR)
        os.write(fd, b"another")
        os.close(fd)
        same(answer(lambda: os.getxattr(path, "security.capability")), "ENODATA", "file capabilities after a write")


@check
@guarding
def a_refused_change_takes_no_privileges(_volume, top):
    root_only()
    path = new_file(top)
    os.setxattr(path, "security.capability", CAPABILITY)
    for flag in (APPEND, IMMUTABLE):
        set_flags(path, flag)
        for change in (lambda p: os.truncate(p, 5), lambda p: os.chown(p, 1, 1)):
            same(answer(lambda: change(path)), "EPERM", "change of a guarded file")  # noqa: B023
        set_flags(path, 0)
        same(os.getxattr(path, "security.capability"), CAPABILITY, "file capabilities after a refused change")


@check
def flags_need_a_mount_that_guards_them(volume, _top):
    """Without `fileflags` chattr +a and +i say EOPNOTSUPP; a volume that has had such files guards them on every mount."""
    root_only()
    if not isinstance(volume, fslib.BraidFs):
        raise fslib.Skipped("of braidfs only")
    with small_volume(volume, "guarded", 512 << 20) as own:
        own.mount()
        path = new_file(own.mnt)
        for flag in (APPEND, IMMUTABLE):
            same(answer(lambda: set_flags(path, flag)), "ENOTSUP", "chattr")  # noqa: B023
            same(answer(lambda: set_flags(own.mnt, flag)), "ENOTSUP", "chattr of a directory")  # noqa: B023
        set_flags(path, NOATIME)
        same(get_flags(path), NOATIME, "flags")
        own.umount()
        own.mount("fileflags")
        set_flags(path, IMMUTABLE)
        # no sync: that there are such files is durable before the first one is
        own.kill9()
        own.force_down()
        own.mount()
        set_flags(path, IMMUTABLE)
        same(answer(lambda: with_fd(os.O_WRONLY)(path)), "EPERM", "open for writing on an ordinary mount")
        set_flags(path, APPEND)
        with_fd(os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"more"))(path)
        same(path.stat().st_size, 10004, "size")
        set_flags(path, 0)
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
@guarding
def append_only_whatever_the_descriptor_says(_volume, top):
    """O_APPEND can be taken off a descriptor where the kernel does not know the flag; what is there stays."""
    path = top / "log"
    path.write_bytes(b"first ")
    set_flags(path, APPEND)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    answer(lambda: fcntl.fcntl(fd, fcntl.F_SETFL, 0))
    os.lseek(fd, 0, os.SEEK_SET)
    answer(lambda: os.write(fd, b"FORGED"))
    answer(lambda: os.pwrite(fd, b"FORGED", 2))
    os.lseek(fd, 0, os.SEEK_END)
    os.write(fd, b"second")
    os.close(fd)
    with open(path, "ab") as file:
        file.write(b" third")
    text = path.read_bytes()
    must(text.startswith(b"first ") and text.endswith(b"second third"), f"an append-only file holds {text!r}")
    set_flags(path, 0)


@check
def chattr_of_many_files(volume, top):
    """What the kernel is to forget after chattr is no work that others have to wait for."""
    for n in range(3000):
        (top / f"f{n}").write_bytes(b"x")
    held = [os.open(top / f"f{n}", os.O_RDONLY) for n in range(500)]
    for n in range(3000):
        set_flags(top / f"f{n}", NOATIME)
    began = time.monotonic()
    same(os.lseek(held[7], 0, os.SEEK_DATA), 0, "first data")
    took = time.monotonic() - began
    for fd in held:
        os.close(fd)
    must(took < 2, f"SEEK_DATA took {took:.1f} s after chattr of 3000 files")


@check
def chattr_on_a_sync_mount(volume, _top):
    """It is durable when it returns, as any change there."""
    daemon_only(volume)
    with small_volume(volume, "synchronous") as own:
        own.mount("sync")
        path = own.mnt / "f"
        path.write_bytes(b"x")
        set_flags(path, NOATIME)
        crash(own)
        same(get_flags(path) & NOATIME, NOATIME, "flags after a crash")
