"""A small volume of its own, and the helpers of mount(8), for checks about mounting itself."""

import contextlib

import fslib
from fslib import BraidFs, Failed, run

HELPERS = (
    "mkfs.braidfs", "mount.braidfs", "umount.braidfs", "fsck.braidfs", "mount.fuse.braidfs", "mount.fuseblk.braidfs",
    "umount.fuse.braidfs", "umount.fuseblk.braidfs",
)


@contextlib.contextmanager
def small_volume(volume, name="aside", size=64 << 20):
    """A volume beside the one of all checks, made and not mounted; gone afterwards."""
    small = BraidFs(volume.image.parent, name, size, volume.binary)
    small.mkfs("--domains", "2")
    try:
        yield small
    finally:
        small.force_down()
        small.image.unlink(missing_ok=True)


@contextlib.contextmanager
def loop_device(image, *options):
    """A loop device of an image."""
    device = run("losetup", "--find", "--show", *options, image)[1].strip()
    try:
        yield device
    finally:
        run("losetup", "--detach", device, ok=None)


def helpers_of(volume):
    """A directory with the helpers, as `make install` puts them into /sbin."""
    folder = volume.image.parent / "sbin"
    folder.mkdir(exist_ok=True)
    for name in HELPERS:
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(volume.binary)
    return folder


def as_installed(volume, *commands):
    """Runs shell commands where mount(8), umount(8) and mkfs(8) find the helpers: in a mount namespace of their own, so
    that nothing of it is seen outside. Returns (exit code, output)."""
    overlay = f"mount -t overlay overlay -o lowerdir={helpers_of(volume)}:/usr/sbin /usr/sbin"
    # also where a command fails: a daemon that is killed as the last process of a namespace with its mount in it hangs
    # in the kernel for ever (docs/mounted.md)
    unmount = "trap 'set +x; grep -E \" fuse(blk)?[.]braidfs \" /proc/self/mounts | cut -d\" \" -f2 | xargs -r umount -l' EXIT"
    return run("unshare", "--mount", "sh", "-ec", "\n".join([unmount, overlay, *commands]), ok=None)


def silent(*argv):
    """Runs a command that must succeed and say nothing."""
    code, text = run(*argv, ok=None)
    if code or text:
        raise Failed(f"{' '.join(map(str, argv))}: exit code {code}, said {text!r}")


def refuses(code, parts, *argv):
    """Runs a command that must end with `code` and one line that has all of `parts`."""
    got, text = run(*argv, ok=None)
    lines = text.strip().splitlines()
    if got != code or len(lines) != 1 or not all(part in lines[0] for part in parts):
        raise Failed(f"{' '.join(map(str, argv))}: exit code {got} instead of {code}, said {text!r}, wanted {parts}")


def shown(volume):
    """(options of the mount, options of the file system), as the kernel shows them."""
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in reversed(table.read().splitlines()):
            fields = line.split(" ")
            if fields[4] == str(volume.mnt):
                return set(fields[5].split(",")), set(fields[-1].split(","))
    raise Failed(f"{volume.mnt} is not mounted")


def crash(volume, *options):
    """Kills the daemon and mounts again, with these options: what was not durable is lost."""
    volume.kill9()
    fslib.wait_for("the mount point to be dead", lambda: not volume.alive(), 10)
    volume.mount(*options)
