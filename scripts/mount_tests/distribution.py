"""What a distribution's other parts make of a volume: udev with our rule, lsblk, /dev/disk, fstab over a reboot."""

import contextlib
import fcntl
import os
import pathlib
import signal
import socket
import subprocess

import fslib
from fslib import Skipped, have, run
from mount_tests.common import check, daemon_only, must, root_only, same, write_synced
from mount_tests.helpers import as_installed, loop_device, small_volume

RULE = fslib.ROOT / "dist" / "udev" / "60-braidfs.rules.in"
# Of a namespace's own: what udev writes, and where it puts links.
UDEV_PLACES = [pathlib.Path(p) for p in ("/run/udev", "/dev/disk", "/dev/block", "/etc/udev/rules.d")]
UDEV_ASIDE = (
    "for d in /run/udev /dev/disk /dev/block; do mount -t tmpfs tmpfs $d; done",
    "mkdir /run/udev/data",
)


@contextlib.contextmanager
def udev_places():
    """Makes what is missing of the directories that are mounted over, for one test at a time, and takes it away again."""
    made, root = [], os.open("/", os.O_RDONLY)
    try:
        # a directory that another namespace has mounted over can be removed, and the mount with it
        fcntl.flock(root, fcntl.LOCK_EX)
        for place in [p for last in UDEV_PLACES for p in (*reversed(last.parents), last) if not p.exists()]:
            place.mkdir(exist_ok=True)
            made.append(place)
        yield
    finally:
        for place in reversed(made):
            with contextlib.suppress(OSError):
                place.rmdir()
        os.close(root)


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
        with loop_device(v.image) as device, udev_places():
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
        with loop_device(v.image) as device, udev_places():
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


UNIT = fslib.ROOT / "dist" / "systemd" / "braidfs@.service.in"


class Service:
    """What systemd does with braidfs@.service: its command with a socket for notifications."""

    def __init__(self, v, device=None):
        text = UNIT.read_text()
        of = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] not in "#[")
        must(of["Type"] == "notify" and of["Restart"] == "on-failure", f"the unit: {of}")
        self.not_again = {int(code) for code in of["RestartPreventExitStatus"].split()}
        replaced = {"@BINDIR@/braidfs": str(v.binary), "${OPTIONS}": "noatime", "$DEVICES": str(device or v.image), "%f": str(v.mnt)}
        command = [replaced.get(word, word) for word in of["ExecStart"].split()]
        must(not any("$" in word or "%" in word for word in command), f"a word that this test does not know: {command}")
        self.path = v.image.with_suffix(".notify")
        self.path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.process = subprocess.Popen(command, env=dict(os.environ, NOTIFY_SOCKET=str(self.path)), stderr=subprocess.PIPE, text=True)

    def said(self, seconds):
        """The next notification, None: there was none in time."""
        self.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            return self.socket.recv(4096).decode().split("\n")
        return None

    def ready(self):
        return "READY=1" in (self.said(30) or [])

    def end(self, signum=None):
        """Its exit status; negative: the signal that ended it."""
        if signum:
            self.process.send_signal(signum)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()
            self.socket.close()
            self.path.unlink(missing_ok=True)


@check
def a_service_is_ready_dies_comes_again_and_stops(volume, _top):
    """The unit's own command; that systemd starts again what ended so is its part."""
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mnt.mkdir(exist_ok=True)
        first = Service(v)
        try:
            must(first.ready(), "no READY=1")
            must(os.path.ismount(v.mnt), "ready, and nothing is mounted")
            write_synced(v.mnt / "kept", b"synced")
        finally:
            code = first.end(signal.SIGKILL)
        same(code, -signal.SIGKILL, "how it ended, which is a failure for Restart=on-failure")
        second = Service(v)
        try:
            must(second.ready(), f"started anew, no READY=1: {second.process.poll()}")
            same((v.mnt / "kept").read_bytes(), b"synced", "what was synced before")
        finally:
            code = second.end(signal.SIGTERM)
        same(code, 0, "exit code of a stop, after which it is not started again")
        must(not os.path.exists(v.mnt / "kept") and str(v.mnt) not in pathlib.Path("/proc/self/mounts").read_text(), "still mounted")
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
        none = Service(v, v.image.with_suffix(".missing"))
        code = none.end()
        must(code in none.not_again, f"exit code {code} of a device that is missing, which would be tried again and again")
