"""How much the kernel may hold back of what was written: more where there is room, and never more than there is."""

import errno
import os
import time

from filling import fill_in_turn, offered
from fslib import Skipped
from mount_tests.common import check, daemon_only, must, root_only, same
from mount_tests.helpers import small_volume
from mount_tests.overwrite import requests

MIB = 1 << 20


def bound(v):
    """What the kernel may hold, bytes."""
    dev = v.mnt.stat().st_dev
    name = f"{os.major(dev)}:{os.minor(dev)}{'-fuseblk' if os.major(dev) else ''}"
    try:
        with open(f"/sys/class/bdi/{name}/max_bytes", encoding="ascii") as file:
            return int(file.read())
    except FileNotFoundError:
        raise Skipped("a kernel without such bounds (before Linux 6.2)") from None


@check
def more_is_held_where_there_is_room(volume, _top):
    daemon_only(volume)
    root_only()
    for size, least, most in ((256 * MIB, 1, 66 * MIB), (2048 * MIB, 100 * MIB, 270 * MIB)):
        with small_volume(volume, size=size) as v:  # of two domains
            v.mount()
            must(least < bound(v) < most, f"of {size} bytes the kernel may hold {bound(v)}")
            v.umount()


@check(seconds=240)
def full_with_much_held(volume, _top):
    """ENOSPC comes at the write also where the kernel may hold much; what was taken is kept."""
    daemon_only(volume)
    root_only()
    for options in ("rw", "fileflags"):
        with small_volume(volume, size=2048 * MIB) as v:
            v.mount(options)
            before = bound(v)
            must(before > 100 * MIB, f"{options}: the kernel may hold only {before}")
            top = v.mnt / "d"  # in one domain
            top.mkdir()
            files = [open(top / f"f{n}", "wb", buffering=0) for n in range(3)]
            piece = os.urandom(MIB)
            written = fill_in_turn(files, [piece] * 3)
            lost = False
            for file in files:
                try:
                    os.fsync(file.fileno())  # what write() took has a place
                except OSError as error:
                    # with OPEN several writers may be told of the last blocks here (docs/mounted.md)
                    must(options == "fileflags" and error.errno == errno.ENOSPC, f"{options}: fsync: {error}")
                    lost = True
                file.close()
            must(sum(written) > 600 * MIB, f"{options}: full after only {sum(written) >> 20} MiB")
            # it is a part of the memory that may be dirty, and grows when others give some back
            must(bound(v) < 24 * MIB, f"{options}: of a full volume the kernel may hold {bound(v)}")
            v.umount()
            v.mount(options)
            for n, size in enumerate([] if lost else written):
                with open(top / f"f{n}", "rb") as file:
                    for at in range(0, size, MIB):
                        must(file.read(MIB) == piece[: size - at], f"{options}: content of f{n} at {at}")
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check(seconds=120)
def little_room_asks_late(volume, _top):
    """With little room the kernel may hold less, so that nobody is asked before a `write` until there is hardly any."""
    daemon_only(volume)
    root_only()
    with small_volume(volume, size=1024 * MIB) as v:
        v.mount()
        top = v.mnt / "d"  # in one domain
        top.mkdir()
        piece = os.urandom(MIB)

        def asked(file):
            """Requests for attributes of 500 overwrites."""
            before = requests(v).get("GETATTR", 0)
            for n in range(500):
                os.pwrite(file.fileno(), piece[:4096], n * 4096 % MIB)
            return requests(v).get("GETATTR", 0) - before

        with open(top / "f", "wb", buffering=0) as file:
            pieces, steps = 0, []
            while not steps or steps[-1][1] < 500:
                must(offered(top) > 8 * MIB, f"nearly full, and the kernel may hold {bound(v)}; who asks: {steps}")
                for _ in range(4):
                    file.write(piece)
                    pieces += 1
                os.fsync(file.fileno())
                if bound(v) < 32 * MIB:
                    time.sleep(0.02)  # a look at the room comes so often
                    file.write(piece)
                    pieces += 1
                    os.fsync(file.fileno())
                    # once more: what was held when the bound went down may not be written back yet
                    steps.append((offered(top) >> 20, min(asked(file) for _ in range(3))))
            must(len([1 for _, n in steps if n < 50]) > 4, f"MiB that are left, how many of 500 writes ask: {steps}")
            written = pieces * MIB + fill_in_turn([file], [piece])[0]
            os.fsync(file.fileno())
        v.cold()
        with open(top / "f", "rb") as file:
            for at in range(0, written, MIB):
                must(file.read(MIB) == piece[: written - at] or at == 0, f"content at {at}")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
