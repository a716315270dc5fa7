"""A volume is mounted once, by whatever name of its devices; the message says how to have it at another place."""

import contextlib
import json
import os
import threading

from fslib import BraidFs, run
from mount_tests.common import check, daemon_only, must, root_only, same
from mount_tests.helpers import loop_device, refuses, silent, small_volume


@contextlib.contextmanager
def place(v):
    other = v.image.with_suffix(".other")
    other.mkdir()
    try:
        yield other
    finally:
        run("umount", other, ok=None)
        other.rmdir()


@check
def by_any_name(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, place(v) as other:
        hard, soft = v.image.with_suffix(".hard"), v.image.with_suffix(".soft")
        os.link(v.image, hard)
        soft.symlink_to(v.image)
        try:
            v.mount()
            (v.mnt / "f").write_text("x")
            with loop_device(v.image) as device:
                for name in (v.image, hard, soft, device):
                    for options in "rw", "ro", "rw,fuseblk=never":
                        refuses(32, (f"mounted on {v.mnt}", f"mount --bind {v.mnt} {other}"),
                                v.binary, "mount", "-o", options, name, other)
                    refuses(32, (f"mounted on {v.mnt} already",), v.binary, "mount", name, v.mnt)
                    refuses(8, ("in use",), v.binary, "fsck", "-f", name)
            same((v.mnt / "f").read_text(), "x", "content")
            run("mount", "--bind", v.mnt, other)
            same((other / "f").read_text(), "x", "content at the other place")
            # the volume stays open for the other one: nothing to wait for
            silent(v.binary, "umount", "--timeout", "5", v.mnt)
            (other / "f").write_text("y")
            silent(v.binary, "umount", other)
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
        finally:
            hard.unlink()
            soft.unlink()


@check
def by_two_loop_devices(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, place(v) as other:
        with loop_device(v.image) as first, loop_device(v.image) as second:
            for options in "rw", "ro":
                silent(v.binary, "mount", "-o", options, first, v.mnt)
                refuses(32, (f"mounted on {v.mnt}",), v.binary, "mount", first, other)
                refuses(32, (f"mounted on {v.mnt}",), v.binary, "mount", second, other)
                refuses(32, (f"mounted on {v.mnt}",), v.binary, "mount", v.image, other)
                # of a device that is mounted read-only the kernel would show the first mount
                refuses(32, (f"mounted on {v.mnt}",), v.binary, "mount", "-o", "ro", first, other)
                must(not os.path.ismount(other), "mounted all the same")
                v.umount()


@check
def parts_of_one_image_are_apart(volume, _top):
    """Two volumes in one image file, each behind a loop device of its own."""
    daemon_only(volume)
    root_only()
    size = 64 << 20
    whole = BraidFs(volume.image.parent, "whole", 2 * size, volume.binary)
    with open(whole.image, "wb") as file:
        file.truncate(2 * size)
    try:
        with loop_device(whole.image, "--sizelimit", size) as first, \
                loop_device(whole.image, "--offset", size) as second, \
                loop_device(whole.image, "--offset", size // 2, "--sizelimit", size) as across, place(whole) as other:
            for device in first, second:
                run(volume.binary, "mkfs", "-q", device)
            silent(volume.binary, "mount", first, whole.mnt)
            silent(volume.binary, "mount", second, other)
            (whole.mnt / "a").write_text("a")
            (other / "b").write_text("b")
            refuses(1, ("in use",), volume.binary, "mkfs", "--force", across)
            silent(volume.binary, "umount", other)
            silent(volume.binary, "umount", whole.mnt)
            for device in first, second:
                same(run(volume.binary, "fsck", "-f", "-n", device, ok=None)[0], 0, "exit code of fsck")
    finally:
        whole.force_down()
        whole.image.unlink()


@check
def in_use_is_explained(volume, _top):
    """Who meets a mounted image is told where it is mounted and what to do; what asks the server finds it."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("transport=dev", "commit=300")
        to_do = f"is in use: mounted on {v.mnt}: `braidfs umount {v.mnt}` first"
        for code, *command in ((1, "mkfs", "-f", v.image), (8, "fsck", "-f", v.image), (1, "ls", v.image),
                               (1, "image", "export", v.image, "/dev/null"), (1, "scrub", v.image)):
            refuses(code, (to_do,), v.binary, *command)
        must(f'"mountpoint": "{v.mnt}"' in run(v.binary, "stats", "--json", v.image)[1], "stats of the image finds its mount")
        # its directory is in the journal alone
        run(v.binary, "tenant", "create", v.mnt / "new")
        text = run(v.binary, "info", v.image)[1]
        must("tenant new" in text and "WARN" not in text, f"info of a volume with a new tenant: {text}")
        # whoever asks for something that cannot be is not told that it is busy
        refuses(1, (f"tenant {v.mnt}: there is no tenant nosuch",), v.binary, "tenant", "mount", v.mnt, "nosuch", v.mnt)
        refuses(1, ("web: there is a tenant new already",), v.binary, "tenant", "create", "--name", "new", v.mnt / "web")
        (v.mnt / "web").mkdir()
        text = run(v.binary, "quota", "set", "--directory", v.mnt / "web", "--space", "1M", v.mnt)[1]
        must(f"directory {v.mnt}/web (project " in text, text)
        text = run(v.binary, "quota", "report", v.mnt)[1]
        must(f"directory {v.mnt}/web (project " in text and "user root" in text, text)


@check
def info_of_a_mounted_volume(volume, _top):
    """Reads, says that it is as of the last checkpoint, holds under load, changes nothing."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("commit=1")
        text = run(v.binary, "info", v.image)[1]
        must(f"in use      yes, mounted on {v.mnt}: as of the last checkpoint" in text, f"said {text!r}")
        stop = threading.Event()

        def load():
            n = 0
            while not stop.is_set():
                (v.mnt / f"f{n % 500}").write_bytes(bytes(n % 50_000))
                if n % 20 == 0:
                    fd = os.open(v.mnt, os.O_RDONLY)
                    os.fsync(fd)
                    os.close(fd)
                n += 1

        thread = threading.Thread(target=load)
        thread.start()
        try:
            with loop_device(v.image) as device:
                for name in [v.image, device] * 6:
                    report = json.loads(run(v.binary, "info", "--json", name)[1])
                    must(report["in_use"] and report["mounted_on"] == str(v.mnt), f"{report}")
                    must(len(report["domain"]) == 2 and all(d["failed"] is None for d in report["domain"]), f"{report}")
                    for what in "super", "bat", "domain:1", "group:0", "node:1":
                        code, text = run(v.binary, "dump", what, name, ok=None)
                        must(code == 0 and "as of its last checkpoint" in text, f"dump {what}: {code} {text!r}")
        finally:
            stop.set()
            thread.join()
        v.umount()
        report = json.loads(run(v.binary, "info", "--json", v.image)[1])
        must(not report["in_use"] and report["mounted_on"] is None, f"{report}")
        used = report["space"]["inodes"] - report["space"]["inodes_free"]
        must(used > 100, f"{used} inodes")
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def right_after_an_unmount(volume, _top):
    """The kernel keeps the claim on a device for a moment after an unmount: who mounts just then waits for it, but not for
    ever."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, loop_device(v.image) as device:
        claim = os.open(device, os.O_RDONLY | os.O_EXCL)
        try:
            same(run(v.binary, "mount", device, v.mnt, ok=None)[0], 32, "a claim that stays: exit code")
        finally:
            os.close(claim)
        claim = os.open(device, os.O_RDONLY | os.O_EXCL)
        ends = threading.Timer(0.3, os.close, [claim])
        ends.start()
        same(run(v.binary, "mount", device, v.mnt, ok=None)[0], 0, "a claim of 0.3 s: exit code")
        ends.join()
        v.umount()
