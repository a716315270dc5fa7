#!/usr/bin/env python3
"""Devices that come to a volume, are drained and leave it, while the daemon or the command is killed.

usage: devices_killed.py [ROUNDS]    default 200; DEVICE_SEED=N replays the choices of a run

Each round adds a second device to a volume, or fills, drains or removes the one that it has, mounted beside a writer that syncs
files, every third time unmounted, and kills the daemon, or the command, with -9 at a random moment. Then: fsck finds nothing;
the volume is with the device or without it, as what it says of itself tells; every synced file is as it was; the same change
goes on to its end, and fsck finds nothing again. Exit code 1 after a failure; the commands stand in target/device-kill.log.
"""

import json
import subprocess
import sys
import time

sys.dont_write_bytecode = True
import kill_rounds  # noqa: E402
from fslib import Failed, is_running, run, wait_for  # noqa: E402
from kill_rounds import Writer, all_there  # noqa: E402

MIB = 1 << 20
FIRST = 96 * MIB
MORE = 64 * MIB


class Pair:
    """A volume on one device or on two."""

    def __init__(self, own):
        self.own = own
        self.second = own.image.with_suffix(".second")
        # seconds that a command took lately: a program's start alone takes long on a busy machine
        self.took = {}

    def wait(self, changing, what, rng):
        """Until a random moment of a command, or its end every third time: then all that it did is durable."""
        begin = time.monotonic()
        limit = 20 if rng.randrange(3) == 0 else rng.uniform(0, self.took.get(what, 0.3))
        while changing.poll() is None and time.monotonic() < begin + limit:
            time.sleep(0.001)
        if changing.poll() == 0:
            self.took[what] = time.monotonic() - begin

    def command(self, *args, ok=(0,)):
        return run(self.own.binary, "--log", "error", *args, ok=ok)

    def paths(self):
        """The devices that hold something of the volume."""
        code, _ = self.command("probe", self.second, ok=None)
        return [self.own.image, self.second] if code == 0 else [self.own.image]

    def members(self):
        """How many devices the volume has, by its own word."""
        _, text = self.command("info", "--json", *self.paths())
        return len(json.loads(text)["devices"])

    def fsck(self, when):
        kill_rounds.fsck(self.own, when, *self.paths()[1:])

    def mount(self):
        run(self.own.binary, "mount", "-o", "cache=through", *self.paths(), self.own.mnt, timeout=60)
        wait_for(f"{self.own.mnt} mounted", self.own.alive, 10)

    def umount(self):
        self.own.umount()


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
            pair.umount()
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
        writer = Writer(top)
        time.sleep(rng.uniform(0, 0.02))
    if what == "fill":
        with open(own.mnt / "filler", "wb") as out:
            for _ in range(rng.randrange(40, 120)):
                try:
                    out.write(rng.randbytes(MIB))
                except OSError:
                    break
        changing = subprocess.Popen(["true"])
    else:
        changing = subprocess.Popen(
            [own.binary, *arguments(pair, what, place)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        pair.wait(changing, what, rng)
    returned = changing.poll() == 0 and what != "fill"
    if online:
        own.kill9()
        changing.wait()
        synced.update(writer.synced())
        run("umount", "-l", own.mnt, ok=None)
    else:
        changing.kill()
        changing.wait()
        wait_for("end of the command", lambda: not is_running(changing.pid), 10)
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
    pair.umount()
    if what != "fill":
        to_the_end(pair, what, synced)
    pair.mount()
    all_there(own, synced)
    # the volume is no larger than the devices that it has
    if len(synced) > 3000:
        for name in synced:
            (own.mnt / name).unlink()
        synced.clear()
    pair.umount()
    pair.fsck("afterwards")
    return now != before


def rounds(own, count, seed):
    """The rounds; how many left the change done."""
    pair, synced = Pair(own), set()
    own.mkfs("--domains", "2", "--group-size", "4M")
    pair.second.unlink(missing_ok=True)
    try:
        return kill_rounds.in_turn(count, seed, lambda rng, number: one_round(pair, rng, number, synced))
    finally:
        own.force_down()
        pair.second.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(kill_rounds.main("device", rounds, 1 << 30, FIRST, "{} with the change done after the kill, {} without"))
