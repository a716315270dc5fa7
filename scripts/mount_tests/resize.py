"""A volume that changes its size, mounted or not."""

import hashlib
import json
import os
import subprocess

import fslib
import resizing
import tenants_killed as killed
from filling import fill_file, offered
from fslib import Failed, run
from mount_tests.common import as_nobody, check, daemon_only, must, root_only, same, serves_a
from mount_tests.space import small

MIB = 1 << 20


def resize(own, place, *size, ok=(0,)):
    return run(own.binary, "resize", place, *size, ok=ok)


@check(seconds=120)
def resize_of_a_full_volume(volume, _top):
    """Filled to ENOSPC, grown while it is mounted, written on; all of it is there afterwards."""
    with small(volume, 2, 64 * MIB) as own:
        first, second = own.mnt / "first", own.mnt / "second"
        before = fill_file(first)
        must(offered(own.mnt) < 4 * MIB, f"df offers {offered(own.mnt)} bytes of a full volume")
        resize(own, own.mnt, "256M")
        same(own.image.stat().st_size, 256 * MIB, "size of the image")
        room = offered(own.mnt)
        must(room > 170 * MIB, f"df offers {room} bytes after growing by 192 MiB")
        more = fill_file(second)
        must(abs(more - room) < 8 * MIB, f"{more} bytes written, {room} offered")
        sums = [hashlib.sha256(f.read_bytes()).digest() for f in (first, second)]
        # by the name of the device, and with all that the file has
        with open(own.image, "r+b") as file:
            file.truncate(300 * MIB)
        _, text = run(own.binary, "resize", "--json", own.image)
        same([json.loads(text)[k] for k in ("mounted", "before", "after")], [True, 256 * MIB, 300 * MIB], "report")
        must(fill_file(own.mnt / "third") > 20 * MIB, "no room after growing to the end of the file")
        own.cold()
        same([hashlib.sha256(f.read_bytes()).digest() for f in (first, second)], sums, "content after a remount")
        same((first.stat().st_size, second.stat().st_size), (before, more), "sizes")


@check
def resize_of_an_unmounted_volume(volume, _top):
    """The same command grows an image that is not mounted; what cannot be is refused, and says why."""
    with small(volume, 2, 64 * MIB) as own:
        (own.mnt / "f").write_bytes(b"x" * 10_000)
        own.umount()
        resize(own, own.image, "+32M")
        same(own.image.stat().st_size, 96 * MIB, "size of the image")
        for size, said in (("1M", "least size"), ("2T", "at most")):
            code, text = resize(own, own.image, size, ok=None)
            must(code == 1 and said in text, f"{size}: exit code {code}: {text}")
            same(own.image.stat().st_size, 96 * MIB, "size of the image")
        same(resize(own, own.image, "much", ok=None)[0], 1, "exit code of a size that is none")
        code, text = resize(own, "/dev/null", ok=None)
        must(code == 1 and text.strip(), f"of no volume: exit code {code}: {text}")
        own.mount()
        same((own.mnt / "f").stat().st_size, 10_000, "size of a file")
        told = os.statvfs(own.mnt)
        must(told.f_blocks * told.f_frsize > 88 * MIB, f"{told.f_blocks} blocks")


@check
def resize_to_a_smaller_size(volume, _top):
    """What lies behind the new end moves; a mount that holds writes back refuses, one that does not does it."""
    daemon_only(volume)
    with small(volume, 2, 64 * MIB) as own:
        keep = own.mnt / "keep"
        keep.write_bytes(os.urandom(4 * MIB))
        resize(own, own.mnt, "256M")
        code, text = resize(own, own.mnt, "96M", ok=None)
        must(code == 1 and "cache=through" in text, f"with a writeback cache: exit code {code}: {text}")
        same(own.image.stat().st_size, 256 * MIB, "size of the image")
        first = own.mnt / "first"
        fill_file(first)
        late = own.mnt / "late"
        first.unlink()
        late.write_bytes(os.urandom(4 * MIB))
        sums = [hashlib.sha256(f.read_bytes()).digest() for f in (keep, late)]
        own.umount()
        code, text = resize(own, own.image, "96M")
        must("made smaller from 256" in text, text)
        same(own.image.stat().st_size, 96 * MIB, "size of the image")
        code, text = own.fsck("-f", "-n")
        same(code, 0, f"fsck: {text}")
        own.mount("cache=through")
        same([hashlib.sha256(f.read_bytes()).digest() for f in (keep, late)], sums, "content")
        # while it is mounted, with a file that is written to meanwhile
        with open(own.mnt / "open", "wb", buffering=0) as out:
            out.write(b"a" * MIB)
            _, text = resize(own, "--json", own.mnt, "80M")
            same([json.loads(text)[k] for k in ("mounted", "before", "after")], [True, 96 * MIB, 80 * MIB], "report")
            out.write(b"b" * MIB)
        same(own.image.stat().st_size, 80 * MIB, "size of the image")
        must(offered(own.mnt) < 80 * MIB, f"df offers {offered(own.mnt)} bytes")
        # full to its end, and nothing of it lies behind that
        fill_file(own.mnt / "rest")
        code, text = resize(own, own.mnt, "68M", ok=None)
        must(code == 1 and text.strip(), f"of a full volume: exit code {code}: {text}")
        own.cold()
        same([hashlib.sha256(f.read_bytes()).digest() for f in (keep, late)], sums, "content after a remount")
        same((own.mnt / "open").read_bytes(), b"a" * MIB + b"b" * MIB, "what was written meanwhile")


@check(seconds=120)
def resize_that_is_killed_stops(volume, _top):
    """Who asked for a smaller size is gone: the volume keeps its size, or has the new one, and the next one finds nobody at work."""
    daemon_only(volume)
    with small(volume, 1, 64 * MIB) as own:
        first, late = own.mnt / "first", own.mnt / "late"
        for _ in range(5):
            resize(own, own.mnt, "512M")
            own.umount()
            own.mount("cache=through")
            first.write_bytes(bytes(300 * MIB))
            late.write_bytes(os.urandom(64 * MIB))
            sum_of = hashlib.sha256(late.read_bytes()).digest()
            first.unlink()
            asked = subprocess.Popen([str(own.binary), "resize", str(own.mnt), "128M"], stderr=subprocess.DEVNULL)
            # a fast one may have ended before it is seen
            fslib.wait_for("work", lambda: serves_a("fuse-device", own) or asked.poll() is not None, 20)  # noqa: B023
            asked.kill()
            asked.wait()
            fslib.wait_for("nobody at work", lambda: not serves_a("fuse-device", own), 20)
            if own.image.stat().st_size == 512 * MIB:
                break
        else:
            raise Failed("nobody stopped what was killed, five times")
        resize(own, own.mnt, "128M")
        same(own.image.stat().st_size, 128 * MIB, "size of the image")
        own.cold()
        same(hashlib.sha256(late.read_bytes()).digest(), sum_of, "content")


@check
def resize_needs_a_writable_mount_and_root(volume, _top):
    daemon_only(volume)
    root_only()
    with small(volume, 1, 64 * MIB) as own:
        code, text = as_nobody(lambda: resize(own, own.mnt, "96M", ok=None))
        must(code == 1, f"nobody may: {text}")
        same(own.image.stat().st_size, 64 * MIB, "size of the image")
        own.umount()
        own.mount("ro")
        code, text = resize(own, own.mnt, "96M", ok=None)
        must(code == 1 and "read-only" in text, f"read-only: exit code {code}: {text}")
        same(own.image.stat().st_size, 64 * MIB, "size of the image")


@check(seconds=120)
def resize_killed(volume, _top):
    """A few rounds of `make resize-kill`."""
    with small(volume, 2, 64 * MIB) as own:
        own.umount()
        resizing.rounds(own, 8, 1)
        own.mount()


@check(seconds=120)
def tenants_killed(volume, _top):
    """A few rounds of `make tenant-kill`."""
    with small(volume, 2, 512 * MIB) as own:
        own.umount()
        killed.rounds(own, 8, 1)
        own.mount()
