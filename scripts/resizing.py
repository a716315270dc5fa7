#!/usr/bin/env python3
"""Volumes that change their size while the daemon is killed: the size is the old one or the new one, and what was synced is there.

usage: resizing.py [ROUNDS]    default 200; RESIZE_SEED=N replays the choices of a run

Each round grows a mounted volume while a writer syncs files, and kills the daemon with -9 at a random moment; every fourth
time `braidfs resize` of the unmounted image is killed, and every other of these times it makes the volume smaller. Then:
fsck finds nothing, the volume mounts with one of the two sizes, every synced file is as it was, the same change goes on to its
end (a smaller size as far as it can be had), fsck finds nothing again. The group table needs more blocks for some of the
growths. Exit code 1 after a failure; the commands stand in target/resize-kill.log.
"""

import errno
import json
import os
import re
import sys
import time

sys.dont_write_bytecode = True
import kill_rounds  # noqa: E402
from fslib import Failed, run  # noqa: E402
from kill_rounds import Change, Writer, all_there, fsck  # noqa: E402

MIB = 1 << 20
FIRST = 64 * MIB
# In groups of 4 MiB: 500 of them fill a block of the group table.
LAST = 9000 * MIB


def size_of(own):
    """Bytes of its device that the volume uses."""
    _, text = run(own.binary, "--log", "error", "info", "--json", own.image)
    return json.loads(text)["devices"][0]["bytes"]


def to_the_end(own, size):
    """Changes the size; where a smaller one cannot be had, to the least that is named. That size."""
    for _ in range(8):
        code, text = run(own.binary, "resize", own.image, size, ok=(0, 1))
        if code == 0:
            return size
        least = re.search(r"the least size is (\d+) bytes", text)
        if not least or int(least[1]) <= size:
            raise Failed(f"resize to {size}: {text}")
        size = int(least[1])
    raise Failed(f"resize to {size}, the least size by its word, and it names another one: {text}")


def one_round(own, rng, number, synced):
    """Changes the size by a random piece, and kills it. `synced`: names of files. Whether the size was new."""
    before = size_of(own)
    size = min(before + rng.choice((4, 40, 300, 2100)) * MIB + rng.randrange(1000) * 4096, LAST)
    if number % 8 == 7 and before > FIRST:
        size = rng.randrange(FIRST, before) // 4096 * 4096
    online = number % 4 != 3
    place = own.mnt if online else own.image
    top = own.mnt / f"d{number}"
    if online:
        own.mount()
        top.mkdir()
        # what was made smaller may be full
        writer = Writer(top, errno.ENOSPC)
        time.sleep(rng.uniform(0, 0.02))
    # on-line the answer comes within some ms, of which most are the program's start
    growing = Change(own, "resize", "--quiet", place, str(size))
    time.sleep(rng.uniform(0, 0.03 if size > before else 0.1))
    returned = growing.kill_daemon(synced, [writer]) if online else growing.kill()
    fsck(own, "of the killed volume")
    now = size_of(own)
    if now not in (before, size) or returned and now != size:
        raise Failed(f"{now} bytes: neither {before} nor {size}, or the command had ended (it had: {returned})")
    size = to_the_end(own, size)
    if size_of(own) != size:
        raise Failed(f"{size_of(own)} bytes after resize to {size}, {now} before")
    own.mount()
    all_there(own, synced)
    told = os.statvfs(own.mnt)
    if told.f_blocks * told.f_frsize < size * 0.9:
        raise Failed(f"df tells of {told.f_blocks * told.f_frsize} bytes, {size} there are")
    own.umount()
    fsck(own, "afterwards")
    return now != before


def rounds(own, count, seed):
    """The rounds; how many left the new size."""
    synced = set()

    def one(rng, number):
        if number == 0 or size_of(own) >= LAST:
            own.mkfs("--domains", "2", "--group-size", "4M")
            synced.clear()
        return one_round(own, rng, number, synced)

    return kill_rounds.in_turn(count, seed, one)


if __name__ == "__main__":
    sys.exit(kill_rounds.main("resize", rounds, 2 << 30, FIRST, "{} with the new size after the kill, {} with the old one"))
