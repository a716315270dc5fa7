"""Renames that leave a whiteout, and what is there for them: an overlayfs whose upper directory is on the volume."""

import contextlib
import errno
import os
import pathlib
import shutil
import stat
import tempfile

import fslib
from fslib import Skipped, run
from mount_tests.common import NOBODY, as_nobody, check, must, refused, renameat2, root_only, same

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def is_whiteout(path):
    found = os.lstat(path)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


@check
def renames_with_a_whiteout(volume, top):
    """Between all domains; what is left is as ext4 leaves it."""
    root_only()
    dirs = [top / f"d{n}" for n in range(4)]
    for n, folder in enumerate(dirs):
        folder.mkdir()
        (folder / "f").write_text(str(n))
        (folder / "over").write_text("replaced")
    for n, folder in enumerate(dirs):
        renameat2(folder / "f", dirs[(n + 1) % 4] / "moved", WHITEOUT | NOREPLACE)
    for n, folder in enumerate(dirs):
        renameat2(folder / "moved", folder / "over", WHITEOUT)
        (folder / "sub").mkdir()
        (folder / "sub" / "in").write_text("below")
        renameat2(folder / "sub", dirs[(n + 1) % 4] / "sub2", WHITEOUT)
    volume.cold()
    for n, folder in enumerate(dirs):
        same(sorted(os.listdir(folder)), ["f", "moved", "over", "sub", "sub2"], "names")
        for name in ("f", "moved", "sub"):
            found = os.lstat(folder / name)
            same((found.st_mode, found.st_rdev, found.st_nlink), (stat.S_IFCHR, 0, 1), f"mode, device and links of {name}")
        same((folder / "over").read_text(), str((n - 1) % 4), "content")
        same((folder / "sub2" / "in").read_text(), "below", "content below a directory that moved")
        same(folder.stat().st_nlink, 3, "links of a directory with one subdirectory")
    with refused(errno.EEXIST):
        renameat2(dirs[0] / "over", dirs[1] / "over", WHITEOUT | NOREPLACE)
    with refused(errno.EINVAL):
        renameat2(dirs[0] / "over", dirs[1] / "over", WHITEOUT | EXCHANGE)
    with refused(errno.EISDIR):
        renameat2(dirs[0] / "over", dirs[1] / "sub2", WHITEOUT)
    os.link(dirs[0] / "over", dirs[1] / "second")
    renameat2(dirs[0] / "over", dirs[1] / "second", WHITEOUT)
    must((dirs[0] / "over").is_file(), "a rename onto another name of the file has left a whiteout")


@check
def whiteouts_of_a_user(_volume, top):
    """Who renames owns the whiteout, and needs no privilege for it, nor for one by mknod."""
    root_only()
    top.chmod(0o777)
    (top / "group").mkdir()
    os.chown(top / "group", NOBODY, 77)
    (top / "group").chmod(0o2777)

    def work():
        os.umask(0)
        (top / "f").write_text("mine")
        renameat2(top / "f", top / "g", WHITEOUT)
        (top / "group" / "f").write_text("mine")
        renameat2(top / "group" / "f", top / "group" / "g", WHITEOUT)
        os.mknod(top / "made", stat.S_IFCHR | 0o600, 0)
        with refused(errno.EPERM):
            os.mknod(top / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))

    as_nobody(work)
    for path, group in ((top / "f", NOBODY), (top / "group" / "f", 77), (top / "made", NOBODY)):
        must(is_whiteout(path), f"{path} is no whiteout")
        found = os.lstat(path)
        same((found.st_uid, found.st_gid), (NOBODY, group), f"owners of {path}")
    # of others in a sticky directory neither what moves nor what is replaced may be taken
    top.chmod(0o1777)
    (top / "roots").write_text("")

    def take():
        with refused(errno.EPERM):
            renameat2(top / "roots", top / "taken", WHITEOUT)
        with refused(errno.EPERM):
            renameat2(top / "g", top / "roots", WHITEOUT)

    as_nobody(take)
    must((top / "roots").is_file() and (top / "g").is_file(), "a refused rename has changed something")


@contextlib.contextmanager
def layers(volume, top, options):
    """An overlay whose lower layer is a tmpfs and whose upper one is on the volume. Gives where it can be mounted, the upper layer,
    and a function that mounts it, as a context."""
    root_only()
    kinds = pathlib.Path("/proc/filesystems")
    if "\toverlay\n" not in kinds.read_text():
        run("modprobe", "overlay", ok=None)
        if "\toverlay\n" not in kinds.read_text():
            raise Skipped("the kernel has no overlayfs")
    with tempfile.TemporaryDirectory(dir=volume.image.parent, prefix="layers-") as where:
        lower, merged = pathlib.Path(where, "lower"), pathlib.Path(where, "merged")
        lower.mkdir()
        merged.mkdir()
        upper, work = top / "upper", top / "work"
        upper.mkdir()
        work.mkdir()

        @contextlib.contextmanager
        def mounted():
            layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
            run("mount", "-t", "overlay", "overlay", "-o", ",".join([layers, *options]), merged)
            try:
                yield
            finally:
                run("umount", merged, ok=None)

        run("mount", "-t", "tmpfs", "lower", lower)
        try:
            fill(lower)
            yield merged, upper, mounted
        finally:
            run("umount", "-l", merged, ok=None)
            run("umount", "-l", lower)


def fill(lower):
    """What the lower layer has."""
    for folder in ("dir", "dir/below", "again", "again/deep", "kept", "gone-dir", "renamed-dir"):
        (lower / folder).mkdir()
        for name in ("a", "b", "c"):
            (lower / folder / name).write_text(f"lower {folder}/{name}")
    for name in ("over", "grown", "gone", "moved", "replaced", "linked", "back"):
        (lower / name).write_text(f"lower {name}")
    (lower / "large").write_bytes(b"l" * 3_000_000)


def change(merged, directories_move):
    """What programs do on an overlay."""
    (merged / "new").write_text("new")
    (merged / "over").write_text("upper")
    with open(merged / "grown", "a") as file:
        file.write(" and more")
    with open(merged / "large", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"changed")
        os.fsync(file.fileno())
    os.unlink(merged / "gone")
    with refused(errno.ENOENT):
        os.stat(merged / "gone")
    os.rename(merged / "moved", merged / "dir" / "moved")
    os.rename(merged / "dir" / "a", merged / "replaced")
    # a name that was hidden, taken and hidden again
    os.unlink(merged / "back")
    (merged / "back").write_text("first")
    os.rename(merged / "back", merged / "away")
    (merged / "back").write_text("second")
    os.link(merged / "linked", merged / "dir" / "link")
    os.chmod(merged / "kept" / "b", 0o600)
    os.setxattr(merged / "kept" / "c", "user.k", b"v")
    shutil.rmtree(merged / "gone-dir")
    # an opaque directory: nothing of the lower one shines through
    shutil.rmtree(merged / "again")
    (merged / "again").mkdir()
    (merged / "again" / "only").write_text("this")
    renameat2(merged / "new", merged / "over", EXCHANGE)
    with refused(errno.EEXIST):
        renameat2(merged / "new", merged / "over", NOREPLACE)
    if directories_move:
        os.rename(merged / "renamed-dir", merged / "dir" / "renamed")
    else:
        with refused(errno.EXDEV):
            os.rename(merged / "renamed-dir", merged / "dir" / "renamed")
    for n in range(200):
        (merged / f"many{n}").write_text(str(n))
        os.rename(merged / f"many{n}", merged / "kept" / f"many{n}")


def compare(merged, directories_move):
    """The overlay after :func:`change`."""
    names = {"again", "away", "back", "dir", "grown", "kept", "large", "linked", "new", "over", "replaced"}
    same(set(os.listdir(merged)), names | (set() if directories_move else {"renamed-dir"}), "names")
    same(os.listdir(merged / "again"), ["only"], "names of a directory that was made anew")
    moved = {"b", "below", "c", "link", "moved"} | ({"renamed"} if directories_move else set())
    same(set(os.listdir(merged / "dir")), moved, "names in a directory")
    for name, text in {
        "over": "new", "new": "upper", "grown": "lower grown and more", "replaced": "lower dir/a", "dir/moved": "lower moved",
        "back": "second", "away": "first", "dir/below/b": "lower dir/below/b", "dir/link": "lower linked", "again/only": "this",
        "dir/renamed/c" if directories_move else "renamed-dir/c": "lower renamed-dir/c", "kept/many77": "77",
    }.items():
        same((merged / name).read_text(), text, f"content of {name}")
    large = bytearray(b"l" * 3_000_000)
    large[1_000_000:1_000_007] = b"changed"
    must((merged / "large").read_bytes() == large, "a large file that was changed has other content")
    same((merged / "kept" / "b").stat().st_mode & 0o777, 0o600, "mode")
    same(os.getxattr(merged / "kept" / "c", "user.k"), b"v", "attribute")
    same(len(os.listdir(merged / "kept")), 203, "number of names")


def overlay(volume, top, options, attributes, directories_move):
    """`attributes`: where the overlay keeps what it knows of its directories."""
    with layers(volume, top, options) as (merged, upper, mounted):
        with mounted():
            change(merged, directories_move)
            compare(merged, directories_move)
        for name in ("gone", "moved", "gone-dir", "dir/a"):
            must(is_whiteout(upper / name), f"{name} of the upper layer is no whiteout")
        same(os.getxattr(upper / "again", f"{attributes}.overlay.opaque"), b"y", "the mark of an opaque directory")
        with mounted():
            compare(merged, directories_move)
        volume.cold()
        with mounted():
            compare(merged, directories_move)
            shutil.rmtree(merged / "kept")
            os.rename(merged / "dir" / "moved", merged / "moved")
            same((merged / "moved").read_text(), "lower moved", "content of what was moved back")
        must(is_whiteout(upper / "kept"), "a removed directory is no whiteout")


@check
def an_overlay_above(volume, top):
    overlay(volume, top, ["redirect_dir=on", "metacopy=off"], "trusted", directories_move=True)


@check
def an_overlay_with_attributes_of_users(volume, top):
    overlay(volume, top, ["userxattr"], "user", directories_move=False)


@check
def a_crash_below_an_overlay(volume, top):
    """What was synced through the overlay is there; a name that was hidden shows what is below, or stays hidden."""
    if not isinstance(volume, fslib.BraidFs):
        raise Skipped("no daemon: not a braidfs")
    with layers(volume, top, []) as (merged, _upper, mounted):
        with mounted():
            os.rename(merged / "moved", merged / "dir" / "moved")
            with open(merged / "dir" / "moved", "r+") as file:
                os.fsync(file.fileno())
            os.rename(merged / "gone", merged / "replaced")
        volume.kill9()
        fslib.wait_for("the mount point to be dead", lambda: not volume.alive(), 10)
        volume.mount()
        with mounted():
            same((merged / "dir" / "moved").read_text(), "lower moved", "content of what was synced")
            must(not (merged / "moved").exists(), "a file is there under both names")
            hidden = not (merged / "gone").exists()
            same((merged / "replaced").read_text(), "lower gone" if hidden else "lower replaced", "content of what was replaced")
