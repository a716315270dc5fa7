"""mount -o remount: read-only and back, what makes it busy, what it changes and what it leaves."""

import errno
import hashlib
import json
import os
import shutil
import time

from fslib import run, wait_for
from mount_tests.common import check, daemon_only, must, refused, root_only, same, write_synced
from mount_tests.helpers import crash, helpers_of, loop_device, refuses, shown, silent, small_volume


def remount(v, options):
    """As a user does by hand; says nothing."""
    silent(v.binary, "mount", "-o", f"remount,{options}", v.mnt)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commits(v):
    return sum(d["commits"] for d in json.loads(run(v.binary, "stats", "--json", v.mnt)[1])["domains"])


def clean_copy(v):
    """The image as it is on the disk now is marked clean, and sound."""
    copy = v.image.with_suffix(".copy")
    try:
        run("cp", "--sparse=always", v.image, copy)
        code, text = run(v.binary, "fsck", copy, ok=None)
        must(code == 0 and "clean, not checked" in text, f"not clean on the disk: {text.strip()}")
        same(run(v.binary, "fsck", "-f", "-n", copy, ok=None)[0], 0, "exit code of fsck -f")
    finally:
        copy.unlink(missing_ok=True)


@check
def read_only_and_back(volume, _top):
    daemon_only(volume)
    root_only()
    for options in ("commit=300", "fuseblk=never"), ("commit=300",):
        with small_volume(volume) as v:
            v.mount(*options)
            (v.mnt / "f").write_text("never synced")
            remount(v, "ro")
            must("ro" in shown(v)[0] and "ro" in shown(v)[1], f"shown as {shown(v)}")
            clean_copy(v)
            before = digest(v.image)
            same((v.mnt / "f").read_text(), "never synced", "content")
            for change in (
                lambda: (v.mnt / "g").touch(), lambda: os.unlink(v.mnt / "f"), lambda: os.chmod(v.mnt / "f", 0o600),
                lambda: open(v.mnt / "f", "r+"), lambda: os.setxattr(v.mnt / "f", "user.a", b"b"),
            ):
                with refused(errno.EROFS):
                    change()
            os.sync()
            remount(v, "ro")
            same(digest(v.image), before, "the image, while the mount was read-only")
            remount(v, "rw")
            (v.mnt / "f").write_text("again")
            write_synced(v.mnt / "g", b"synced")
            crash(v)
            same((v.mnt / "g").read_text(), "synced", "content after a crash")
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def read_only_survives_a_kill(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("commit=300")
        (v.mnt / "f").write_text("x" * 100_000)
        remount(v, "ro")
        v.kill9()
        run("umount", v.mnt)
        code, text = v.fsck(unforced=True)
        must(code == 0 and "clean, not checked" in text, f"{text.strip()}")
        v.mount()
        same((v.mnt / "f").read_text(), "x" * 100_000, "content")


@check
def mounted_read_only_then_writable(volume, _top):
    """Also after a crash: what recovery kept in memory is then written."""
    daemon_only(volume)
    root_only()
    for how in (), ("fuseblk=never",):
        with small_volume(volume) as v:
            v.mount("commit=300")
            write_synced(v.mnt / "f", b"synced")
            v.kill9()
            run("umount", v.mnt)
            before = digest(v.image)
            v.mount("ro", *how)
            same((v.mnt / "f").read_text(), "synced", "content")
            same(digest(v.image), before, "the image, while the mount was read-only")
            held = open(v.mnt / "f", encoding="utf-8")
            remount(v, "rw")
            same(held.read(), "synced", "content by a descriptor of before")
            held.close()
            write_synced(v.mnt / "g", b"new")
            crash(v)
            same(((v.mnt / "f").read_text(), (v.mnt / "g").read_text()), ("synced", "new"), "content after a crash")
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def block_devices_change_too(volume, _top):
    daemon_only(volume)
    root_only()
    helper = helpers_of(volume) / "mount.braidfs"
    with small_volume(volume) as v:
        with loop_device(v.image) as device:
            silent(helper, device, v.mnt, "-o", "ro")
            silent(helper, device, v.mnt, "-o", "remount,rw")
            (v.mnt / "f").write_text("x")
            silent(helper, device, v.mnt, "-o", "remount,ro")
            v.umount()
        with loop_device(v.image, "--read-only") as device:
            silent(helper, device, v.mnt, "-o", "ro")
            refuses(32, ("read-only",), helper, device, v.mnt, "-o", "remount,rw")
            must("ro" in shown(v)[1], "a read-only device was made writable")
            same((v.mnt / "f").read_text(), "x", "content")
            v.umount()


@check
def busy_with_open_files(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount()
        ask = (v.binary, "mount", "-o", "remount,ro", v.mnt)
        with open(v.mnt / "f", "w", encoding="utf-8") as file:
            refuses(32, ("busy", "open for writing"), *ask)
            file.write("still writable")
        (v.mnt / "g").touch()
        with open(v.mnt / "g", encoding="utf-8"):
            os.unlink(v.mnt / "g")
            refuses(32, ("busy", "removed"), *ask)
        (v.mnt / "h").touch()
        with open(v.mnt / "f", encoding="utf-8") as reader:
            silent(*ask)
            same(reader.read(), "still writable", "content")


@check
def refused_by_the_server(volume, _top):
    """A tenant is mounted by itself where it is not seen: the server refuses, and all is as it was for the writers."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        point = v.image.with_suffix(".tenant")
        point.mkdir()
        try:
            v.mount("transport=dev")
            run(v.binary, "tenant", "create", v.mnt / "a")
            silent(v.binary, "tenant", "mount", v.mnt, "a", point)
            before = shown(v)
            script = f"umount {point} && exec {v.binary} mount -o remount,ro,noexec {v.mnt}"
            refuses(32, ("a tenant of it is mounted",), "unshare", "--mount", "sh", "-c", script)
            same(shown(v), before, "options")
            (v.mnt / "f").write_text("x")
            run("umount", point)
            remount(v, "ro")
        finally:
            run("umount", "-l", point, ok=None)
            point.rmdir()


@check
def in_use_by_a_reader(volume, _top):
    """Two read-only mounts of one image: neither becomes writable while the other is there."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        other = v.image.with_suffix(".other")
        other.mkdir()
        v.mount("ro")
        try:
            silent(v.binary, "mount", "-o", "ro", v.image, other)
            refuses(32, ("another braidfs process",), v.binary, "mount", "-o", "remount,rw", v.mnt)
            must("ro" in shown(v)[1], f"shown as {shown(v)}")
            same(os.listdir(v.mnt), [], "names")
        finally:
            run(v.binary, "umount", other, ok=None)
            shutil.rmtree(other, ignore_errors=True)
        remount(v, "rw")
        (v.mnt / "f").touch()


@check
def what_else_changes(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("nosuid", "relatime", "commit=300")
        remount(v, "noatime,sync,lazytime,noexec")
        mount, system = shown(v)
        must({"rw", "noatime", "nosuid", "noexec"} <= mount, f"options {mount}")
        must({"rw", "sync", "lazytime"} <= system, f"options {system}")
        (v.mnt / "f").mkdir()
        crash(v)
        must((v.mnt / "f").is_dir(), "sync by a remount is not durable")
        v.umount()
        # plain FUSE: a sync(2) of another process does not reach it
        v.mount("sync", "commit=300", "fuseblk=never")
        remount(v, "async,nolazytime")
        must(not {"sync", "lazytime"} & shown(v)[1], f"options {shown(v)}")
        (v.mnt / "g").mkdir()
        crash(v)
        must(not (v.mnt / "g").exists(), "async by a remount is durable at once")
        v.umount()
        v.mount("commit=300")
        remount(v, "commit=1")
        v.settle()
        before = commits(v)
        (v.mnt / "h").mkdir()
        wait_for("a commit", lambda: commits(v) > before, 30)
        # of the other domain, too
        time.sleep(1)
        crash(v)
        must((v.mnt / "h").is_dir(), "commit= by a remount has no effect")
        v.umount()
        v.mount("data=journal")
        remount(v, "ro")
        refuses(32, ("data mode",), v.binary, "mount", "-o", "remount,rw,data=writeback", v.mnt)
        must("ro" in shown(v)[1], "a refused remount changed something")
        remount(v, "rw,data=journal,cache=64M,threads=2")


@check
def remount_of_a_bind_mount(volume, _top):
    """With `bind` the options of the mount point alone; without it those of the file system, by any mount point."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount()
        (v.mnt / "d").mkdir()
        other = v.image.with_suffix(".other")
        other.mkdir()
        run("mount", "--bind", v.mnt / "d", other)
        try:
            silent(helpers_of(volume) / "mount.braidfs", v.image, other, "-o", "remount,bind,ro")
            with refused(errno.EROFS):
                (other / "f").touch()
            (v.mnt / "d" / "f").touch()
            silent(helpers_of(volume) / "mount.braidfs", v.image, other, "-o", "remount,ro")
            with refused(errno.EROFS):
                (v.mnt / "g").touch()
            clean_copy(v)
        finally:
            run("umount", other)
            other.rmdir()


@check
def only_what_is_mounted(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        refuses(32, ("nothing is mounted",), v.binary, "mount", "-o", "remount,ro", v.mnt)
        refuses(32, ("not braidfs",), v.binary, "mount", "-o", "remount,ro", "/proc")
