"""Mount profiles: nobody gets into a private mount, what it does not have it refuses; writes that go to the server at once."""

import contextlib
import errno
import mmap
import os
import stat
import time

from filling import fill_in_turn
from fslib import Failed, in_child, run
from mount_tests.common import (
    NOBODY, as_nobody, check, daemon_only, handle_of, must, refused, root_only, same,
)
from mount_tests.flags import ACL
from mount_tests.helpers import helpers_of, refuses, shown, small_volume
from mount_tests.volume import idmapped

ACL_NAME = "system.posix_acl_access"
SYS_ADMIN_ACCESS = "/sys/module/fuse/parameters/allow_sys_admin_access"


@contextlib.contextmanager
def mounted(volume, *options, size=64 << 20):
    """A small volume mounted so; checked at the end."""
    daemon_only(volume)
    root_only()
    with small_volume(volume, size=size) as v:
        v.mount(*options)
        yield v
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


def remounted(v, *options):
    v.umount()
    v.mount(*options)


@check
def a_private_mount_is_private(volume, _top):
    with mounted(volume, "private") as v:
        system = shown(v)[1]
        must("user_id=0" in system and not system & {"default_permissions", "allow_other"}, f"options {system}")
        (v.mnt / "open").write_bytes(b"for all")
        (v.mnt / "program").write_bytes(b"#!/bin/sh\n")
        for name in ("open", "program", "."):
            (v.mnt / name).chmod(0o777)
        fd = os.open(v.mnt, os.O_RDONLY)
        held = os.open(v.mnt / "program", os.O_RDONLY)

        def tries():
            for what in (
                lambda: os.listdir(v.mnt), lambda: os.listdir(fd), lambda: os.stat(v.mnt / "open"),
                lambda: os.open(v.mnt / "open", os.O_RDONLY), lambda: os.open("open", os.O_RDONLY, dir_fd=fd),
                lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd), lambda: os.unlink("open", dir_fd=fd),
                lambda: os.chdir(fd), lambda: os.access("open", os.R_OK, dir_fd=fd) or os.stat("open", dir_fd=fd),
                lambda: os.execve(f"/proc/self/fd/{held}", ["x"], {}), lambda: os.statvfs(v.mnt) and os.stat("open", dir_fd=fd),
            ):
                with refused(errno.EACCES):
                    what()

        as_nobody(tries)
        # also who has root's user but not its group
        same(run("setpriv", "--regid", NOBODY, "--clear-groups", "ls", v.mnt, ok=None)[0], 2, "exit code of ls in another group")
        os.close(held)
        os.close(fd)
        same((v.mnt / "open").read_bytes(), b"for all", "content for who mounted it")


@check
def a_private_mount_keeps_modes_and_owners(volume, _top):
    """They count again when it is mounted for all."""
    with mounted(volume, "private") as v:
        (v.mnt / "mine").write_bytes(b"x")
        (v.mnt / "theirs").write_bytes(b"x")
        (v.mnt / "mine").chmod(0o600)
        os.chown(v.mnt / "theirs", NOBODY, NOBODY)
        (v.mnt / "dir").mkdir(0o700)
        os.umask(0o027)
        (v.mnt / "masked").touch(0o666)
        v.mnt.chmod(0o755)
        remounted(v)
        mode = lambda name: stat.S_IMODE((v.mnt / name).stat().st_mode)  # noqa: E731
        same([mode(n) for n in ("mine", "dir", "masked")], [0o600, 0o700, 0o640], "modes")
        same(as_nobody((v.mnt / "theirs").read_bytes), b"x", "content for the owner")

        def tries():
            for name in ("mine", "dir/x"):
                with refused(errno.EACCES):
                    os.stat(v.mnt / name) if "/" in name else os.open(v.mnt / name, os.O_RDONLY)

        as_nobody(tries)


@check
def what_would_let_others_in_is_refused(volume, _top):
    daemon_only(volume)
    root_only()
    helper = helpers_of(volume) / "mount.braidfs"
    with small_volume(volume) as v:
        for option in ("allow_other", "acl", "default_permissions", "X-mount.idmap=/proc/self/ns/user"):
            for options in (f"private,{option}", f"{option},private", f"rw,{option},cache=through,private"):
                refuses(1, ("private", option.split("=", maxsplit=1)[0], "leave one"), helper, v.image, v.mnt, "-o", options)
        must(not v.mount_entry(), "it is mounted all the same")
        # the kernel's parameter is everybody's: one that only this mount sees
        yes = v.image.with_suffix(".yes")
        yes.write_text("Y\n")
        script = f"mount --bind {yes} {SYS_ADMIN_ACCESS} && {volume.binary} mount -o private {v.image} {v.mnt}"
        code, text = run("unshare", "--mount", "sh", "-c", f"{script}; code=$?; umount {v.mnt} 2>&-; exit $code", ok=None)
        must(code == 32 and "CAP_SYS_ADMIN" in text and SYS_ADMIN_ACCESS in text, f"exit code {code}: {text}")
        yes.unlink()
        v.mount("private")
        # a remount changes none of it, and must not fail for what stands in fstab
        run(helper, v.image, v.mnt, "-o", "remount,ro,private,allow_other")
        must("allow_other" not in shown(v)[1] and "ro" in shown(v)[1], f"options {shown(v)}")
        v.umount()


@check
def a_private_mount_is_not_exported_nor_mapped(volume, _top):
    """An NFS server has root's ids when it looks at files for others."""
    with mounted(volume) as v:
        (v.mnt / "f").touch()
        handle_of(v.mnt / "f")
        remounted(v, "private")
        (v.mnt / "f").stat()
        with refused(errno.EOPNOTSUPP):
            handle_of(v.mnt / "f")

        def tries():
            with idmapped(v.mnt, v.image.parent / "private-idmapped"):
                pass

        try:
            # in a mount namespace of its own
            in_child(tries, 30)
        except Failed as error:
            must("Invalid argument" in str(error), f"idmapped: {error}")
        else:
            raise Failed("it was mounted with other user numbers")


@check
def attributes_of_a_private_mount(volume, _top):
    with mounted(volume) as v:
        file = v.mnt / "f"
        file.write_bytes(b"x")
        os.setxattr(file, "user.kept", b"1")
        os.setxattr(file, ACL_NAME, ACL)
        remounted(v, "private")
        for call in (
            lambda: os.getxattr(file, "user.kept"), lambda: os.setxattr(file, "user.new", b"2"),
            lambda: os.removexattr(file, "user.kept"), lambda: os.setxattr(file, ACL_NAME, ACL), lambda: os.listxattr(file),
        ):
            with refused(errno.EOPNOTSUPP):
                call()
        remounted(v, "private,user_xattr")
        same(os.listxattr(file), ["user.kept"], "names of attributes")
        same(os.getxattr(file, "user.kept"), b"1", "an attribute")
        os.setxattr(file, "user.new", b"2")
        for call in (
            lambda: os.getxattr(file, ACL_NAME), lambda: os.setxattr(file, ACL_NAME, ACL),
            lambda: os.removexattr(file, ACL_NAME),
        ):
            with refused(errno.EOPNOTSUPP):
                call()
        remounted(v)
        same(sorted(os.listxattr(file)), [ACL_NAME, "user.kept", "user.new"], "names of attributes, all of them")
        same(os.getxattr(file, ACL_NAME), ACL, "the ACL")


@check
def privileges_go_with_writes_without_writeback(volume, _top):
    with mounted(volume, "cache=through") as v:
        path = v.mnt / "suid"
        path.write_bytes(b"x")
        for who, want in ((lambda f: f(), 0o4777), (as_nobody, 0o777)):
            path.chmod(0o4777)
            with open(path, "r+b", buffering=0) as file:
                who(lambda: file.write(b"y"))  # noqa: B023
            same(stat.S_IMODE(path.stat().st_mode), want, "mode after a write")
            os.setxattr(path, "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
            with open(path, "r+b", buffering=0) as file:
                who(lambda: file.write(b"z"))  # noqa: B023
            same(os.listxattr(path), [], "capabilities after a write")


@check
def a_chown_takes_privileges_of_all_but_directories(volume, _top):
    """As on ext4: of FIFOs, sockets and devices, too."""
    root_only()
    with mounted(volume, "cache=through") as v:
        kinds = {"file": stat.S_IFREG, "fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "device": stat.S_IFCHR}
        for name, kind in kinds.items():
            os.mknod(v.mnt / name, kind | 0o600, os.makedev(1, 3))
        (v.mnt / "dir").mkdir()
        for name in (*kinds, "dir"):
            path = v.mnt / name
            path.chmod(0o6755)
            os.chown(path, NOBODY, -1)
            same(oct(path.stat().st_mode & 0o7777), oct(0o6755 if name == "dir" else 0o755), f"mode of a {name} after chown")


@check
def a_chown_that_names_nobody_takes_privileges(volume, top):
    """Of neither a user nor a group; but of what is left of a set-uid program after a write by root nothing more."""
    root_only()
    daemon_only(volume)
    kinds = {"file": stat.S_IFREG, "fifo": stat.S_IFIFO, "device": stat.S_IFCHR}
    for name, kind in kinds.items():
        os.mknod(top / name, kind | 0o600, os.makedev(1, 3))
    (top / "dir").mkdir()
    for name in (*kinds, "dir"):
        path = top / name
        path.chmod(0o6755)
        os.chown(path, -1, -1)
        volume.cold()
        same(oct(path.stat().st_mode & 0o7777), oct(0o6755 if name == "dir" else 0o755), f"mode of a {name} after chown")
    path = top / "file"
    path.chmod(0o6755)
    os.setxattr(path, "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    with open(path, "r+b") as file:
        file.write(b"by root")
    same((oct(path.stat().st_mode & 0o7777), os.listxattr(path)), (oct(0o6755), []), "mode and attributes after a write")


@check
def writes_through_are_seen_everywhere(volume, _top):
    """By write, append, map and past the cache, mixed; sizes, holes and times as they must be."""
    for options in ("cache=through", "private,cache=through"):
        with mounted(volume, options, size=256 << 20) as v:
            path, want = v.mnt / "f", bytearray(200_000)
            fd = os.open(path, os.O_CREAT | os.O_RDWR)
            os.ftruncate(fd, len(want))
            view = mmap.mmap(fd, len(want))
            direct = os.open(path, os.O_RDWR | os.O_DIRECT)
            page = mmap.mmap(-1, 4096)
            for n in range(300):
                at = n * 617 % (len(want) - 5000)
                piece = bytes([n % 255 + 1]) * (n % 4096 + 1)
                match n % 4:
                    case 0:
                        os.pwrite(fd, piece, at)
                    case 1:
                        view[at : at + len(piece)] = piece
                    case 2:
                        view.flush()
                        at, piece = at // 4096 * 4096, bytes([n % 255 + 1]) * 4096
                        page[:] = piece
                        same(os.pwrite(direct, page, at), 4096, "bytes written past the cache")
                    case 3:
                        with open(path, "r+b", buffering=0) as other:
                            other.seek(at)
                            other.write(piece)
                want[at : at + len(piece)] = piece
                same(os.pread(fd, len(piece) + 100, at), bytes(want[at : at + len(piece) + 100]), f"read after step {n}")
                same(view[at : at + 50], bytes(want[at : at + 50]), f"the map after step {n}")
            before = os.fstat(fd)
            time.sleep(0.02)  # the server's clock goes in steps
            appender = os.open(path, os.O_WRONLY | os.O_APPEND)
            for n in range(50):
                os.write(appender, b"line %d\n" % n)
                want += b"line %d\n" % n
                same(os.fstat(fd).st_size, len(want), "size after an append")
            after = os.fstat(fd)
            must(after.st_mtime_ns > before.st_mtime_ns and after.st_blocks >= before.st_blocks, "times of appends")
            sparse = os.open(v.mnt / "sparse", os.O_CREAT | os.O_RDWR)
            os.pwrite(sparse, b"x", 1 << 20)
            same(os.lseek(sparse, 0, os.SEEK_DATA), 1 << 20, "the first data of a sparse file")
            for each in (fd, direct, appender, sparse):
                os.close(each)
            view.close()
            remounted(v, options)
            same(path.read_bytes(), bytes(want), "content after a remount")


@check(seconds=120)
def full_at_the_write_without_writeback(volume, _top):
    """ENOSPC comes with the very write, of several writers and in small pieces, and what was taken is kept."""
    for options in ("cache=through", "private,cache=through"):
        with mounted(volume, options, size=160 << 20) as v:
            files = [open(v.mnt / f"f{n}", "wb", buffering=0) for n in range(3)]
            written = fill_in_turn(files, [bytes([n + 1]) * 50_000 for n in range(3)])
            must(sum(written) > 90 << 20, f"full after only {sum(written) >> 20} of 160 MiB")
            for n, file in enumerate(files):
                os.fsync(file.fileno())
                file.close()
            remounted(v, options)
            for n, size in enumerate(written):
                data = (v.mnt / f"f{n}").read_bytes()
                must(size <= len(data) < size + 50_000 and not data.strip(bytes([n + 1])), f"content of f{n}")
                (v.mnt / f"f{n}").unlink()
            (v.mnt / "after").write_bytes(b"y" * (8 << 20))


@check
def immutable_without_writeback(volume, _top):
    """A descriptor from before `chattr +i` is refused, as on ext4; one for appending from before `+a` is not."""
    with mounted(volume, "cache=through", "fileflags") as v:
        for flag, opened, want in (("+i", os.O_WRONLY, "EPERM"), ("+a", os.O_WRONLY | os.O_APPEND, "ok")):
            path = v.mnt / f"f{flag}"
            path.write_bytes(b"before")
            fd = os.open(path, opened)
            run("chattr", flag, path)
            try:
                os.write(fd, b"after")
                got = "ok"
            except OSError as error:
                got = errno.errorcode[error.errno]
            same(got, want, f"write after chattr {flag}")
            os.close(fd)
            run("chattr", flag.replace("+", "-"), path)
            same(path.read_bytes(), b"beforeafter" if want == "ok" and opened & os.O_APPEND else b"before", "content")
