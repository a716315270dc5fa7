"""What is asked of the volume as a whole: label, UUID, freezing, swap files; and mounts with other user numbers."""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct

import fslib
from fslib import Failed, Skipped, in_child, run
from mount_tests.common import LIBC, as_nobody, as_user, check, daemon_only, must, refused, root_only, same
from mount_tests.flags import ACL, answer, fallocate, with_fd
from mount_tests.helpers import small_volume

GETFSLABEL, SETFSLABEL, GETFSUUID = 0x81009431, 0x41009432, 0x80111500
FIFREEZE = 0xC0045877


def ioctl(path, number, data):
    fd = os.open(path, os.O_RDONLY)
    try:
        return fcntl.ioctl(fd, number, data)
    finally:
        os.close(fd)


def get_label(path):
    return ioctl(path, GETFSLABEL, b"\0" * 256).split(b"\0")[0].decode()


def drop_sys_admin():
    """Takes CAP_SYS_ADMIN from the calling thread, for good."""
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    LIBC.capget(header, data)
    words = list(struct.unpack("6I", data.raw))
    words[0] &= ~(1 << 21)
    words[1] &= ~(1 << 21)
    if LIBC.capset(header, struct.pack("6I", *words)):
        raise OSError(ctypes.get_errno(), "capset")


def set_label(path, text):
    ioctl(path, SETFSLABEL, text.encode().ljust(256, b"\0"))


@check
def label(volume, top):
    """FS_IOC_SETFSLABEL by root: told at once, by any file, and after a crash; on the device in both superblocks."""
    root_only()
    old = get_label(volume.mnt)
    path = top / "f"
    path.write_bytes(b"")
    path.chmod(0o644)
    try:
        set_label(path, "größer 1")
        same((get_label(volume.mnt), get_label(path)), ("größer 1",) * 2, "the label")
        with refused(errno.EINVAL):
            set_label(top, "x" * 64)
        same(as_nobody(lambda: answer(lambda: set_label(path, "mine"))), "EPERM", "by an ordinary user")
        same(as_nobody(lambda: get_label(path)), "größer 1", "read by an ordinary user")
        if isinstance(volume, fslib.BraidFs):
            by_command = (str(volume.binary), "label")
            same(run(*by_command, volume.mnt)[1], "größer 1\n", "the label by our command")
            same(as_nobody(lambda: run(*by_command, volume.mnt, "mine", ok=None))[0], 1, "set by an ordinary user")
            run(*by_command, volume.image, "by its device")
            same(get_label(path), "by its device", "the label that was set by the device's name")
            run(*by_command, volume.mnt, "größer 1")
            volume.kill9()
            volume.force_down()
            with open(volume.image, "rb") as image:
                blocks = image.read(4096), image.seek(-4096, os.SEEK_END) and image.read(4096)
            must(all("größer 1".encode() in block for block in blocks), "not in both superblocks")
            same(volume.fsck("-f", "-n")[0], 0, "fsck after the crash")
            volume.mount("ro")
            same(get_label(volume.mnt), "größer 1", "the label after a crash")
            with refused(errno.EROFS):
                set_label(volume.mnt, "no")
            volume.umount()
            volume.mount()
        else:
            volume.cold()
        same(get_label(volume.mnt), "größer 1", "the label after a remount")
    finally:
        set_label(volume.mnt, old)


@check
def root_without_capabilities(volume, _top):
    """User 0 of a container is no administrator of the system that it shares: what an ioctl asks for needs CAP_SYS_ADMIN."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount()
        bare = ("setpriv", "--bounding-set=-sys_admin", v.binary)
        for args in (
            ("resize", v.mnt, "80M"), ("label", v.mnt, "mine"), ("quota", "set", "--user", "7", "--space", "1M", v.mnt),
            ("tenant", "create", v.mnt / "t"), ("defrag", v.mnt), ("upgrade", v.mnt), ("quota", "report", v.mnt),
        ):
            code, text = run(*bare, *args, ok=None)
            expected = args[1] == "report"
            must((code == 0) == expected, f"{args[0]} without CAP_SYS_ADMIN: exit code {code}, said {text!r}")
        said = in_child(lambda: (drop_sys_admin(), answer(lambda: set_label(v.mnt, "mine")))[1], 30)
        same(said, "EPERM", "the label by ioctl")
        same((get_label(v.mnt), (v.mnt / "t").exists()), ("", False), "label, tenant")
        run(v.binary, "label", v.mnt, "ours")
        same(get_label(v.mnt), "ours", "label by root")


@check
def what_the_kernel_answers_itself(volume, top):
    """The kernel asks no FUSE server for a UUID or a freeze: if it begins to, the documentation is wrong."""
    daemon_only(volume)
    root_only()
    same(answer(lambda: ioctl(top, GETFSUUID, b"\0" * 17)), "ENOTTY", "FS_IOC_GETFSUUID")
    with refused(errno.EOPNOTSUPP):
        ioctl(top, FIFREEZE, b"\0" * 4)


@check
def swap_files(volume, top):
    """A swap file is refused, and nothing is changed by the attempt: blocks of a file move."""
    daemon_only(volume)
    root_only()
    if not fslib.have("mkswap"):
        raise Skipped("no mkswap")
    path = top / "swap"
    with open(path, "wb") as file:
        fallocate(file.fileno(), 0, 0, 8 << 20)
        file.write(bytes(8 << 20))
    path.chmod(0o600)
    fslib.run("mkswap", path)
    if LIBC.swapon(os.fsencode(path), 0) == 0:
        LIBC.swapoff(os.fsencode(path))
        raise Failed("a swap file was taken")
    same(errno.errorcode[ctypes.get_errno()], "EINVAL", "swapon")
    path.write_bytes(b"still a file")


# Mounts with other user numbers: those from 0 to 1999 on the volume are 10000 to 11999 there.
SHIFT, COUNT = 10000, 2000
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
CLONE_NEWUSER, AT_EMPTY_PATH, MOUNT_ATTR_IDMAP = 0x10000000, 0x1000, 0x100000


def syscall(*arguments):
    result = LIBC.syscall(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@contextlib.contextmanager
def user_namespace():
    """A descriptor of one with the map."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        failed = LIBC.unshare(CLONE_NEWUSER)
        os.write(ready[1], b"x" if failed else b".")
        os.close(go[1])
        os.read(go[0], 1)
        os._exit(0)
    try:
        if os.read(ready[0], 1) != b".":
            raise Skipped("no user namespaces here")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"0 {SHIFT} {COUNT}")
        fd = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
        yield fd
        os.close(fd)
    finally:
        for end in (*ready, *go):
            os.close(end)
        os.waitpid(child, 0)


@contextlib.contextmanager
def idmapped(source, target):
    """`source` on `target` with the map, in a mount namespace of this process' own."""
    target.mkdir()
    if LIBC.unshare(0x20000) or LIBC.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None):
        raise Skipped("no mount namespaces here")
    with user_namespace() as userns:
        tree = syscall(SYS_OPEN_TREE, -100, os.fsencode(source), 1)
        attr = struct.pack("4Q", MOUNT_ATTR_IDMAP, 0, 0, userns)
        try:
            syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attr, ctypes.c_size_t(len(attr)))
        except OSError as error:
            if not fslib.linux_from(6, 12):
                raise Skipped(f"this kernel has no idmapped FUSE mounts: {error}") from None
            raise Failed(f"the mount cannot be idmapped: {error}") from None
        syscall(SYS_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), 4)
        os.close(tree)
        try:
            yield
        finally:
            LIBC.umount2(os.fsencode(target), 2)


@check
def idmapped_mounts(volume, top):
    """Owners, permissions, ACLs and privileges through a mount that shifts user numbers."""
    root_only()
    plain, there = top / "tree", volume.image.parent / "idmapped"
    plain.mkdir()
    plain.chmod(0o777)

    def ids(path):
        info = os.lstat(path)
        return info.st_uid, info.st_gid

    def body():
        private, suid = plain / "private", plain / "suid"
        private.write_bytes(b"x" * 5000)
        private.chmod(0o600)
        os.chown(private, 5, 5)
        with idmapped(plain, there):
            same(ids(there / "private"), (SHIFT + 5, SHIFT + 5), "owner in the mount")
            reads = with_fd(os.O_RDONLY)
            same(as_user(SHIFT + 5, lambda: answer(lambda: reads(there / "private"))), "ok", "its owner there")
            same(as_user(5, lambda: answer(lambda: reads(there / "private"))), "EACCES", "number 5 there")

            def make():
                with open(there / "made", "wb") as file:
                    file.write(b"x" * 5000)
                os.mkdir(there / "dir")
                os.symlink("x", there / "link")
                os.mkfifo(there / "fifo")
                os.link(there / "made", there / "linked")
                os.rename(there / "made", there / "renamed")
                os.setxattr(there / "renamed", "user.x", b"x")
                os.close(os.open(there, os.O_TMPFILE | os.O_RDWR))
                os.truncate(there / "renamed", 100)
                os.utime(there / "renamed", (5, 5))

            as_user(SHIFT + 7, make)
            for name in ("renamed", "dir", "link", "fifo", "linked"):
                same(ids(there / name), (SHIFT + 7, SHIFT + 7), f"owner of {name} in the mount")
                same(ids(plain / name), (7, 7), f"owner of {name} on the volume")
            os.chown(there / "renamed", SHIFT + 8, SHIFT + 9)
            same(ids(plain / "renamed"), (8, 9), "owner on the volume after chown in the mount")
            same(answer(lambda: os.chown(there / "renamed", 3, 3)), "EOVERFLOW", "chown to what the mount has no number for")
            same(answer(lambda: (there / "by-root").write_bytes(b"")), "EOVERFLOW", "a file of whom it has no number for")
            # an ACL entry for user 1000, as the mount sees it
            acl = ACL.replace(struct.pack("<HHI", 2, 4, 1000), struct.pack("<HHI", 2, 4, SHIFT + 1000))
            as_user(SHIFT + 5, lambda: os.setxattr(there / "private", "system.posix_acl_access", acl))
            same(os.getxattr(plain / "private", "system.posix_acl_access"), ACL, "the ACL on the volume")
            same(as_user(SHIFT + 1000, lambda: answer(lambda: reads(there / "private"))), "ok", "who the ACL names")
            for who, change, want in (
                (SHIFT + 11, with_fd(os.O_WRONLY, lambda fd: fallocate(fd, 0, 0, 9000)), 0o777),
                (SHIFT + 11, with_fd(os.O_WRONLY, lambda fd: os.write(fd, b"x")), 0o777),
                (0, with_fd(os.O_WRONLY, lambda fd: fallocate(fd, 0, 0, 9000)), 0o6777),
                (0, with_fd(os.O_WRONLY, lambda fd: os.write(fd, b"x")), 0o6777),
            ):
                suid.unlink(missing_ok=True)
                suid.write_bytes(b"x")
                os.chown(suid, 5, 5)
                suid.chmod(0o6777)
                os.stat(there / "suid")
                as_user(who, lambda: change(there / "suid"))  # noqa: B023
                same((there / "suid").stat().st_mode & 0o7777, want, f"mode after a change by {who} in the mount")

    in_child(body, 50)
