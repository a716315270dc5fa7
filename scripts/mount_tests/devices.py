"""Devices that come to a volume, are drained and leave it, mounted or not."""

import contextlib
import hashlib
import json
import os
import shutil

import devices_killed
from filling import fill_file, offered
from fslib import BraidFs, Failed, run, wait_for
from mount_tests.common import as_nobody, check, daemon_only, must, root_only, same
from mount_tests.helpers import small_volume
from mount_tests.supervise import kill_serving, supervised

MIB = 1 << 20


def device(own, *args, ok=(0,)):
    return run(own.binary, "device", *args, ok=ok)


@contextlib.contextmanager
def two(volume, size=64 * MIB):
    """A small volume, made and not mounted, and the path of a second device."""
    daemon_only(volume)
    with small_volume(volume, size=size) as own:
        second = own.image.with_suffix(".second")
        try:
            yield own, second
        finally:
            own.force_down()
            second.unlink(missing_ok=True)


def mounted(own, second, options="cache=through"):
    run(own.binary, "mount", "-o", options, own.image, second, own.mnt, timeout=60)
    wait_for(f"{own.mnt} mounted", own.alive, 10)


@check(seconds=180)
def device_that_comes_and_leaves(volume, _top):
    """Ten rounds of add, fill, drain and remove under a mount: content and df are as before."""
    with two(volume) as (own, second):
        own.mount("cache=through")
        keep = own.mnt / "keep"
        keep.write_bytes(os.urandom(3 * MIB))
        wanted = hashlib.sha256(keep.read_bytes()).digest()
        own.settle()
        before = os.statvfs(own.mnt).f_blocks
        for number in range(10):
            device(own, "add", *(["--force"] if number else ["--size", "48M"]), own.mnt, second)
            must(offered(own.mnt) > 90 * MIB, f"df offers {offered(own.mnt)} bytes with both devices")
            must(fill_file(own.mnt / "big") > 80 * MIB, "no room on the new device")
            (own.mnt / "big").unlink()
            code, text = device(own, "drain", own.mnt, second, ok=(0, 4))
            must(code == 0, f"round {number}: {text}")
            device(own, "remove", own.mnt, second)
            same(hashlib.sha256(keep.read_bytes()).digest(), wanted, "content")
            same(os.statvfs(own.mnt).f_blocks, before, "blocks that df tells of")
            same(run(own.binary, "probe", second, ok=None)[0], 2, "exit code of probe of the removed device")
        # another volume takes it while this one is in use
        run(own.binary, "mkfs", "--quiet", "--force", second)
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def devices_that_are_refused(volume, _top):
    """What holds something, is one of the volume, is in use or too small; a missing one is named."""
    with two(volume) as (own, second):
        own.mount("cache=through")
        second.write_bytes(b"data" + bytes(64 * MIB))
        for place in (own.mnt, own.image):
            code, text = device(own, "add", place, second, ok=None)
            must(code == 1 and "holds data" in text, f"{place}: exit code {code}: {text}")
        code, text = device(own, "add", own.mnt, own.image, ok=None)
        must(code == 1 and "device of this volume already" in text, f"exit code {code}: {text}")
        code, text = device(own, "add", own.mnt, "/dev/null", ok=None)
        must(code == 1 and text.strip(), f"exit code {code}: {text}")
        code, text = device(own, "add", own.mnt, own.mnt / "none", ok=None)
        must(code == 1 and "--size" in text, f"exit code {code}: {text}")
        other = BraidFs(own.image.parent, "other", 64 * MIB, own.binary)
        other.mkfs()
        try:
            code, text = device(own, "add", own.mnt, other.image, ok=None)
            must(code == 1 and "braidfs volume" in text, f"exit code {code}: {text}")
            other.mount()
            code, text = device(own, "add", "--force", own.mnt, other.image, ok=None)
            must(code == 1, f"of a mounted volume: exit code {code}: {text}")
            (other.mnt / "f").write_bytes(b"x")
        finally:
            other.force_down()
            other.image.unlink(missing_ok=True)
        device(own, "add", "--force", own.mnt, second)
        _, text = run(own.binary, "info", "--json", own.image, second)
        same([d["bytes"] for d in json.loads(text)["devices"]], [64 * MIB, second.stat().st_size // 4096 * 4096], "devices")
        own.umount()
        code, text = run(own.binary, "mount", own.image, own.mnt, ok=None)
        must(code != 0 and "missing: device 1 (UUID" in text, f"exit code {code}: {text}")
        mounted(own, second, "cache=back")
        for what in ("drain", "remove"):
            code, text = device(own, what, own.mnt, second, ok=None)
            must(code == 1 and "cache=through" in text, f"{what}: exit code {code}: {text}")
        own.umount()
        device(own, "remove", own.image, second)


@check
def device_that_files_keep(volume, _top):
    """Files that have their numbers on a drained device are told of; once they are copied it leaves."""
    with two(volume, 32 * MIB) as (own, second):
        device(own, "add", "--size", "64M", own.image, second)
        # more than the first device has numbers for, and quicker than by a mount
        files = own.image.with_suffix(".files")
        files.mkdir()
        both = f"{own.image},{second}"
        try:
            for number in range(17_500):
                (files / f"f{number}").write_bytes(b"%d" % number)
            run(own.binary, "cp", "-r", files, f"{both}:/many")
            for number in range(300, 17_500):
                (files / f"f{number}").unlink()
            mounted(own, second)
            code, text = device(own, "drain", "--json", own.mnt, second, ok=(0, 4))
            answer = json.loads(text)
            must(code == 4 and answer["drain"]["inodes"] > 500, f"exit code {code}: {text[:300]}")
            same([path for path, _ in answer["drain"]["told"]], ["/many"], "directories")
            code, text = device(own, "remove", own.mnt, second, ok=None)
            must(code == 1 and "numbers there" in text, f"exit code {code}: {text}")
            own.umount()
            _, text = run(own.binary, "info", own.image, second)
            must("is drained" in text, f"info says nothing of the drain: {text}")
            run(own.binary, "rm", "-r", f"{both}:/many")
            run(own.binary, "cp", "-r", files, f"{both}:/copy")
        finally:
            shutil.rmtree(files, ignore_errors=True)
        mounted(own, second)
        code, text = device(own, "drain", own.mnt, second, ok=(0, 4))
        must(code == 0, f"after the copy: exit code {code}: {text}")
        device(own, "remove", own.mnt, second)
        names = [f"f{n}" for n in range(300)]
        same(sorted(os.listdir(own.mnt / "copy")), sorted(names), "names")
        must(all((own.mnt / "copy" / n).read_bytes() == n[1:].encode() for n in names), "content")
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def devices_need_root(volume, _top):
    root_only()
    with two(volume) as (own, second):
        own.mount("cache=through")
        second.write_bytes(b"")
        os.truncate(second, 64 * MIB)
        second.chmod(0o666)
        code, text = as_nobody(lambda: device(own, "add", own.mnt, second, ok=None))
        must(code == 1, f"nobody may: {text}")
        same(os.statvfs(own.mnt).f_blocks * 4096 < 64 * MIB, True, "no room came")


@check(seconds=120)
def device_of_a_supervised_mount(volume, _top):
    """Who serves after the one that was killed finds the device that came meanwhile."""
    with supervised(volume, "supervise,cache=through") as (own, _log):
        second = own.image.with_suffix(".second")
        try:
            device(own, "add", "--size", "64M", own.mnt, second)
            big = fill_file(own.mnt / "big")
            must(big > 90 * MIB, f"{big} bytes written")
            own.settle()
            kill_serving(own)
            same((own.mnt / "big").stat().st_size, big, "size")
            (own.mnt / "big").unlink()
            own.settle()
            device(own, "remove", own.mnt, second)
            kill_serving(own)
            must(os.statvfs(own.mnt).f_blocks * 4096 < 64 * MIB, "the device has left")
            own.umount()
        except Failed:
            own.force_down()
            raise
        finally:
            second.unlink(missing_ok=True)


@check(seconds=120)
def first_device_of_a_supervised_mount_leaves(volume, _top):
    """The one that was named first is not the volume's any more when the server is killed: the others are, and are mounted."""
    with two(volume) as (own, second):
        own.mount("cache=through")
        (own.mnt / "keep").write_bytes(b"kept")
        device(own, "add", "--size", "48M", own.mnt, second)
        own.umount()
        run(own.binary, "mount", "-o", "supervise,cache=through", second, own.image, own.mnt, timeout=60)
        wait_for(f"{own.mnt} mounted", own.alive, 10)
        device(own, "remove", own.mnt, second)
        kill_serving(own)
        same((own.mnt / "keep").read_bytes(), b"kept", "content")
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check(seconds=180)
def devices_killed_in_rounds(volume, _top):
    """A few rounds of `make device-kill`."""
    daemon_only(volume)
    own = BraidFs(volume.image.parent, "pair", devices_killed.FIRST, volume.binary)
    try:
        devices_killed.rounds(own, 12, 1)
    finally:
        own.force_down()
        own.image.unlink(missing_ok=True)


@check
def device_of_a_volume_with_a_part_elsewhere(volume, _top):
    """A directory of it is shown elsewhere: by its device the whole is meant, and by that directory nothing is wiped."""
    root_only()
    with two(volume) as (own, second):
        own.mount("cache=through")
        (own.mnt / "d").mkdir()
        part = own.image.with_suffix(".part")
        part.mkdir()
        try:
            run("mount", "--bind", own.mnt / "d", part)
            for argv in (("device", "add", "--size", "48M", part, second), ("scrub", part)):
                code, text = run(own.binary, *argv, ok=None)
                must(code == 1 and "a part of the volume is mounted there" in text, f"{argv[0]}: {code}, {text!r}")
            must(not second.exists(), "a device was made")
            device(own, "add", "--size", "48M", own.image, second)
            device(own, "remove", f"{own.image},{second}", second)
            must(f"mounted on {own.mnt}:" in run(own.binary, "info", own.image)[1], "info names the part")
        finally:
            run("umount", "-l", part, ok=None)
            part.rmdir()
