#!/usr/bin/env python3
"""Devices that come to a volume, are drained and leave it, while the daemon or the command is killed.

usage: devices_killed.py [ROUNDS]    default 200; DEVICE_SEED=N replays the choices of a run

Each round adds a second device to a volume, or fills, drains or removes the one that it has, mounted beside a writer that syncs
files, every third time unmounted, and kills the daemon, or the command, with -9 at a random moment. Then: fsck finds nothing;
the volume is with the device or without it, as what it says of itself tells; every synced file is as it was; the same change
goes on to its end, and fsck finds nothing again. Exit code 1 after a failure; the commands stand in target/device-kill.log.
"""

import errno
import json
import sys
import time

sys.dont_write_bytecode = True
import kill_rounds  # noqa: E402
from fslib import Failed, run  # noqa: E402
from kill_rounds import Change, Pair, Writer, all_there  # noqa: E402

MIB = 1 << 20
FIRST = 96 * MIB
MORE = 64 * MIB


class OneOrTwo(Pair):
    """A volume on one device or on two."""

    def command(self, *args, ok=(0,)):
        return run(self.own.binary, "--log", "error", *args, ok=ok)

    def paths(self):
        code, _ = self.command("probe", self.second, ok=None)
        return [self.own.image, self.second] if code == 0 else [self.own.image]

    def members(self):
        """How many devices the volume has, by its own word."""
        _, text = self.command("info", "--json", *self.paths())
        return len(json.loads(text)["devices"])

    def mount(self):
        super().mount("cache=through")


def arguments(pair, what, place):
    places = [place] if place == pair.own.mnt else pair.paths()
    if what == "add":
        return ["device", "add", "--quiet", "--force", "--size", str(MORE), *places, pair.second]
    places = places if place == pair.own.mnt else [p for p in places if p != pair.second]
    return ["device", what, "--quiet", *places, pair.second]


def to_the_end(pair, what, gone):
    """The same again, on the unmounted volume; `gone`: names of files that may be removed, which keep the device."""
    for _ in range(3):
        has = pair.members()
        if (what == "add") == (has == 2) and what != "drain":
            # a superblock that a crash left is wiped, too
            if what == "remove" and len(pair.paths()) == 2:
                pair.command(*arguments(pair, what, None))
            return
        code, text = pair.command(*arguments(pair, what, None), ok=(0, 1, 4))
        if code == 0 and what != "remove":
            return
        if code:
            # numbers keep it: nothing new is there once these files are removed
            if what == "drain" and code == 4:
                return
            if "numbers there" not in text or what != "remove":
                raise Failed(f"{what}: {text}")
            pair.mount()
            for name in sorted(gone):
                (pair.own.mnt / name).unlink(missing_ok=True)
            pair.own.umount()
            gone.clear()
    if what != "drain" and pair.members() != (2 if what == "add" else 1):
        raise Failed(f"{what}: three more attempts did not do it: {text.strip()[-300:]}")


def one_round(pair, rng, number, synced):
    """Changes the volume's devices, and kills that. Whether the change was there afterwards."""
    own, before = pair.own, pair.members()
    what = "add" if before == 1 else rng.choice(("fill", "drain", "remove", "remove"))
    online = number % 3 != 2 or what == "fill"
    place = own.mnt if online else None
    if online:
        pair.mount()
        top = own.mnt / f"d{number}"
        top.mkdir()
        # a round may fill it
        writer = Writer(top, errno.ENOSPC)
        time.sleep(rng.uniform(0, 0.02))
    if what == "fill":
        with open(own.mnt / "filler", "wb") as out:
            for _ in range(rng.randrange(40, 120)):
                try:
                    out.write(rng.randbytes(MIB))
                except OSError:
                    break
        changing = Change(own, "--version")
    else:
        changing = Change(own, *arguments(pair, what, place))
        changing.wait(what, rng, 3)
    returned = changing.kill_daemon(synced, [writer]) if online else changing.kill()
    if not pair.second.exists() and before == 2:
        raise Failed("the device's file has gone")
    pair.fsck("of the killed volume")
    now = pair.members()
    if returned and what in ("add", "remove") and now == before:
        raise Failed(f"{what}: {now} devices after the command had ended")
    if what in ("fill", "drain") and now != before:
        raise Failed(f"{what}: {now} devices")
    pair.mount()
    all_there(own, synced)
    (own.mnt / "filler").unlink(missing_ok=True)
    own.umount()
    if what != "fill":
        to_the_end(pair, what, synced)
    pair.mount()
    all_there(own, synced)
    # the volume is no larger than the devices that it has
    if len(synced) > 3000:
        for name in synced:
            (own.mnt / name).unlink()
        synced.clear()
    own.umount()
    pair.fsck("afterwards")
    return now != before


def rounds(own, count, seed):
    """The rounds; how many left the change done."""
    pair = OneOrTwo(own)
    own.mkfs("--domains", "2", "--group-size", "4M")
    pair.second.unlink(missing_ok=True)
    return pair.rounds(count, seed, one_round)


if __name__ == "__main__":
    sys.exit(kill_rounds.main("device", rounds, 1 << 30, FIRST, "{} with the change done after the kill, {} without"))
