"""Devices that a tenant may use, and the processor time that is spent on it, by the commands on a mount."""

import hashlib
import json
import mmap
import os
import time

import tenant_devices_killed as killed
from filling import fill_file
from fslib import BraidFs, run, wait_for
from mount_tests.common import check, daemon_only, must, same
from mount_tests.devices import mounted, two
from mount_tests.helpers import small_volume

MIB = 1 << 20


def tenant(own, *args, ok=(0,)):
    return run(own.binary, "tenant", *args, ok=ok)


def shown(own, name="web"):
    return json.loads(tenant(own, "show", "--json", own.mnt, name)[1])


@check(seconds=120)
def tenant_that_moves_to_other_devices(volume, _top):
    """Files made on one device move to another and stay what they are; df and ENOSPC are those of the devices."""
    with two(volume) as (own, second):
        run(own.binary, "device", "add", "--size", "96M", own.image, second)
        mounted(own, second, "cache=back")
        top = own.mnt / "web"
        tenant(own, "create", "--devices", own.image, top)
        same(shown(own)["devices"], [0], "devices, by a path")
        room = os.statvfs(top)
        must(room.f_blocks * room.f_frsize < 64 * MIB, f"df below the root tells of {room.f_blocks} blocks")
        (top / "small").write_bytes(b"x" * 100_000)
        first = fill_file(top / "big")
        must(20 * MIB < first < 64 * MIB, f"{first} bytes on the first device")
        (top / "big").write_bytes(b"")
        # the journal stays
        code, text = tenant(own, "set", "--json", "--devices", second, own.mnt, "web", ok=None)
        told, said = json.loads(text[: text.rindex("}") + 1]), text[text.rindex("}") + 1 :]
        must(code == 4 and "1 block group with 0 B, one of them with its journal elsewhere" in said, f"{code}: {said}")
        same((told["devices"], told["elsewhere"]["bytes"], told["elsewhere"]["journal"]), ([1], 0, True), "after the move")
        more = fill_file(top / "big")
        must(more > 70 * MIB, f"{more} bytes on the second device")
        must(fill_file(own.mnt / "other") > 10 * MIB, "no room for others on the first device")
        (own.mnt / "other").unlink()
        os.truncate(top / "big", 20 * MIB)
        wanted = hashlib.sha256((top / "big").read_bytes()).digest()
        own.settle()
        # through the kernel's cache, while it is written
        with open(top / "new", "wb") as out:
            out.write(os.urandom(5 * MIB))
            _, text = tenant(own, "set", "--devices", "0", own.mnt, "web", ok=(0, 4))
            out.write(os.urandom(5 * MIB))
        must("devices 0" in text, text)
        wait_for("the end of the move", lambda: shown(own)["elsewhere"]["bytes"] == 0, 30)
        for wrong, said in (("7", "2 devices"), ("2,x", "x"), ("", "no devices"), ("16", "no devices")):
            code, text = tenant(own, "set", "--devices", wrong, own.mnt, "web", ok=None)
            must(code == 1 and said in text, f"--devices {wrong}: exit code {code}: {text}")
        own.umount()
        code, text = run(own.binary, "device", "drain", own.image, second, own.image, ok=None)
        must(code == 1 and "tenant web may use no other device" in text, f"drain: exit code {code}: {text}")
        mounted(own, second)
        same(hashlib.sha256((top / "big").read_bytes()).digest(), wanted, "content after a remount")
        same((top / "new").stat().st_size, 10 * MIB, "size of what was written meanwhile")
        tenant(own, "set", "--devices", "all", own.mnt, "web")  # nothing is elsewhere: exit code 0
        same((shown(own)["devices"], shown(own)["elsewhere"]["groups"]), (None, 0), "devices")
        own.umount()
        same(run(own.binary, "fsck", "-f", "-n", own.image, second, ok=None)[0], 0, "exit code of fsck")


@check(seconds=60)
def tenant_with_little_serving_time(volume, _top):
    """No more processor time is spent on it than is allowed, and its neighbour is served."""
    daemon_only(volume)
    with small_volume(volume) as own:
        own.mount()
        top = own.mnt / "web"
        tenant(own, "create", "--serving-time", "2%/1%", top)
        for folder in (top, own.mnt):
            (folder / "f").write_bytes(os.urandom(MIB))
        fds = [os.open(folder / "f", os.O_RDONLY | os.O_DIRECT) for folder in (top, own.mnt)]
        own.settle()
        before, begin = shown(own)["serving"], time.monotonic()
        counts = [0, 0]
        page = mmap.mmap(-1, 64 << 10)
        while time.monotonic() < begin + 3:
            for i, fd in enumerate(fds):
                # as many of the neighbour's for each
                for _ in range(1 + 4 * i):
                    counts[i] += os.preadv(fd, [page], counts[i] % MIB)
        lasted = time.monotonic() - begin
        after = shown(own)["serving"]
        for fd in fds:
            os.close(fd)
        used = after["used_seconds"] - before["used_seconds"]
        # the burst, and the last request
        must(used <= 0.02 * lasted * 1.05 + 0.01 + 0.005, f"{used} s in {lasted} s, with 2 %: {after}")
        must(used > 0 and counts[0] > 0, f"{after}, {counts}")
        same(after["processors"], 0.02, "the limit")
        tenant(own, "set", "--serving-time", "none", own.mnt, "web")
        same(shown(own)["serving"]["processors"], None, "the limit")
        own.umount()
        same(own.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check(seconds=180)
def tenant_devices_killed_in_rounds(volume, _top):
    """A few rounds of `make tenant-set-kill`."""
    daemon_only(volume)
    own = BraidFs(volume.image.parent, "moving", killed.EACH, volume.binary)
    try:
        killed.rounds(own, 3, 1)
    finally:
        own.force_down()
        own.image.unlink(missing_ok=True)
