"""What a distribution's other parts make of a volume: udev with our rule, lsblk, /dev/disk, fstab over a reboot."""

import pathlib

import fslib
from fslib import Skipped, have, run
from mount_tests.common import check, daemon_only, must, root_only, same
from mount_tests.helpers import as_installed, loop_device, small_volume

RULE = fslib.ROOT / "dist" / "udev" / "60-braidfs.rules.in"
# Of a namespace's own: what udev writes, and where it puts links.
UDEV_ASIDE = (
    "mkdir -p /run/udev /dev/disk /dev/block /etc/udev/rules.d",
    "for d in /run/udev /dev/disk /dev/block; do mount -t tmpfs tmpfs $d; done",
    "mkdir /run/udev/data",
)


def rules(v):
    """A directory with the rule, as `make install` writes it, for the program that is tested."""
    folder = v.image.parent / "rules.d"
    folder.mkdir(exist_ok=True)
    text = RULE.read_text().replace("@BINDIR@/braidfs", str(v.binary))
    (folder / RULE.name.removesuffix(".in")).write_text(text)
    return folder


def as_udev_does(v, device):
    """Shell commands that have udev treat an event of `device`."""
    name = pathlib.Path(device).name
    return (*UDEV_ASIDE, f"mount --bind {rules(v)} /etc/udev/rules.d",
            f"udevadm test --action=change /sys/class/block/{name} >{v.image}.udev 2>&1")


def needs_udev():
    root_only()
    if not have("udevadm"):
        raise Skipped("no udevadm here")


def uuid_of(v):
    return dict(line.split("=", 1) for line in run(v.binary, "probe", v.image)[1].splitlines())["UUID"]


@check
def udev_knows_a_volume(volume, _top):
    daemon_only(volume)
    needs_udev()
    with small_volume(volume) as v:
        v.mkfs("--domains", "2", "--force", "--label", "my disk/1")
        with loop_device(v.image) as device:
            code, text = as_installed(
                v, *as_udev_does(v, device), "ls /dev/disk/by-label /dev/disk/by-uuid",
                "echo link: $(readlink -f /dev/disk/by-uuid/*)", f"lsblk --noheadings --pairs -o FSTYPE,UUID,LABEL {device}",
                f"mount -t braidfs UUID={uuid_of(v)} {v.mnt}", f"mountpoint -q {v.mnt}", f"umount {v.mnt}",
            )
            same(code, 0, f"exit code; said {text!r}")
            must("my\\x20disk\\x2f1" in text, f"no link by label: {text!r}")
            must(f"link: {device}\n" in text, f"no link by UUID: {text!r}")
            must(f'FSTYPE="braidfs" UUID="{uuid_of(v)}" LABEL="my' in text, f"lsblk: {text!r}")


@check
def udev_takes_nothing_else_for_a_volume(volume, _top):
    daemon_only(volume)
    needs_udev()
    with small_volume(volume) as v:
        with open(v.image, "r+b") as file:
            file.seek(100)
            file.write(b"\xff")
        with loop_device(v.image) as device:
            code, text = as_installed(v, *as_udev_does(v, device), "ls -R /dev/disk", f"grep -c '^ID_FS' {v.image}.udev || true")
            same(code, 0, f"exit code; said {text!r}")
            must("by-uuid" not in text and text.endswith("\n0\n"), f"a broken superblock is taken for a volume: {text!r}")


@check
def fstab_line_survives_reboots(volume, _top):
    """Three boots: each a mount namespace with daemons of its own. The first ends by an unmount, the second by a crash."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        fstab = v.image.with_suffix(".fstab")
        fstab.write_text(f"{v.image}  {v.mnt}  braidfs  noatime,nofail,x-systemd.mount-timeout=30  0 2\n")
        v.mnt.mkdir(exist_ok=True)

        def boot(*commands):
            code, text = as_installed(v, f"mount --bind {fstab} /etc/fstab", *commands)
            same(code, 0, f"exit code; said {text!r}")
            return text

        boot("fsck -A -T -a", "mount -a", f"mountpoint -q {v.mnt}", f"cp -a {fslib.ROOT}/scripts {v.mnt}/scripts",
             f"echo one >{v.mnt}/f", f"umount {v.mnt}")
        boot("fsck -A -T -a", "mount -a", f"grep -qx one {v.mnt}/f", f"echo two >{v.mnt}/f", f"sync {v.mnt}/f",
             # power off: the daemon is gone without a word; the mount must go with the namespace (docs/mounted.md)
             f"for p in /proc/[0-9]*; do [ \"$(readlink $p/exe)\" = {v.binary} ] || continue",
             f"tr '\\0' '\\n' <$p/cmdline | grep -qxF {v.image} && kill -9 ${{p#/proc/}} || true; done",
             f"umount -l {v.mnt}")
        text = boot("fsck -A -T -a", "mount -a", f"cat {v.mnt}/f", f"diff -r {fslib.ROOT}/scripts {v.mnt}/scripts",
                    f"umount {v.mnt}", "fsck -A -T -f")
        must("two\n" in text, f"what was synced is lost: {text!r}")
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def systemd_checks_before_it_mounts(volume, _top):
    """Of a device in fstab; systemd asks for a check only where it finds fsck.braidfs."""
    daemon_only(volume)
    root_only()
    generator = pathlib.Path("/usr/lib/systemd/system-generators/systemd-fstab-generator")
    if not generator.exists():
        raise Skipped(f"no {generator} here")
    with small_volume(volume) as v:
        units = v.image.with_suffix(".units")
        units.mkdir()
        fstab = units / "fstab"
        fstab.write_text("/dev/sdb  /b  braidfs  noatime  0 2\n")
        code, text = as_installed(v, f"cd {units}", f"SYSTEMD_FSTAB={fstab} {generator} . . .", "cat b.mount")
        same(code, 0, f"exit code; said {text!r}")
        must("Type=braidfs" in text and "Requires=systemd-fsck@dev-sdb.service" in text, f"the unit: {text!r}")
