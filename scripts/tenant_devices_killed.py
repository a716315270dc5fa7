#!/usr/bin/env python3
"""A tenant that is given other devices, and moves there, while the daemon is killed.

usage: tenant_devices_killed.py [ROUNDS]    default 200; TENANT_SET_SEED=N replays the choices of a run

Each round mounts a volume on two devices, fills a part of a tenant, has `braidfs tenant set --devices` move it, now and then with
another limit of space, beside a writer that syncs files in the tenant and one outside, and kills the daemon with -9 at a random
moment. Then: fsck finds nothing; the volume mounts; the tenant may use the devices of before or those of after (of after, where
the command had ended); every synced file is as it was; the server goes on by itself until nothing that can move lies where it
may not, and fsck finds nothing again. Exit code 1 after a failure; the commands stand in target/tenant_set-kill.log.
"""

import errno
import json
import shutil
import sys
import time

sys.dont_write_bytecode = True
import kill_rounds  # noqa: E402
from fslib import Failed, run  # noqa: E402
from kill_rounds import Change, Pair, Writer, all_there  # noqa: E402

MIB = 1 << 20
EACH = 160 * MIB
NAME = "t"
CHOICES = ("0", "1", "0,1", "all")


def numbers(choice):
    """As `tenant show --json` tells them."""
    return None if choice == "all" else [int(n) for n in choice.split(",")]


class TenantsPair(Pair):
    """With a tenant on it."""

    def make(self):
        for path in self.paths():
            with open(path, "wb") as file:
                file.truncate(EACH)
        run(self.own.binary, "mkfs", "--quiet", "--force", "--domains", "2", "--group-size", "4M", *self.paths())

    def show(self):
        _, text = run(self.own.binary, "tenant", "show", "--json", self.own.mnt, NAME)
        return json.loads(text)

    def settle(self):
        """Waits until nothing that can move lies where the tenant may not be."""
        end = time.monotonic() + 60
        while True:
            now = self.show()["elsewhere"]
            if now["bytes"] == 0 and not now["crowded"]:
                return
            if time.monotonic() > end:
                raise Failed(f"after a minute the tenant has {now} elsewhere")
            time.sleep(0.05)


def one_round(pair, rng, number, synced):
    """Gives the tenant other devices, and kills that. Whether it had these afterwards."""
    own = pair.own
    options = rng.choice(("cache=back", "cache=through"))
    pair.mount(options)
    top = own.mnt / NAME
    if not top.exists():
        run(own.binary, "tenant", "create", top)
    before = pair.show()["devices"]
    choice = rng.choice([c for c in CHOICES if numbers(c) != before])
    # what the last rounds left there is written anew
    synced -= {n for n in synced if n.startswith(f"{NAME}/")}
    with open(top / "filler", "wb") as out:
        for _ in range(rng.randrange(1, 24)):
            out.write(rng.randbytes(MIB))
    outside = own.mnt / f"d{number}"
    outside.mkdir()
    # only the tenant has a limit
    writers = [Writer(top, errno.EDQUOT, errno.ENOSPC), Writer(outside)]
    time.sleep(rng.uniform(0, 0.03))
    limit = ["--space", rng.choice(("none", "80M"))] if rng.randrange(3) == 0 else []
    command = ["tenant", "set", *limit, "--devices", choice, own.mnt, NAME]
    changing = Change(own, *command)
    changing.wait("set", rng, 4)
    returned = changing.kill_daemon(synced, writers)
    pair.fsck("of the killed volume")
    pair.mount(options)
    now = pair.show()["devices"]
    if now not in (before, numbers(choice)) or returned and now != numbers(choice):
        raise Failed(f"devices {now}, neither {before} nor {choice}, or the command had ended ({returned})")
    all_there(own, synced)
    pair.settle()
    all_there(own, synced)
    if now != numbers(choice):
        run(own.binary, *command, ok=(0, 4))
        pair.settle()
    if pair.show()["devices"] != numbers(choice):
        raise Failed(f"{choice}, once more: {pair.show()['devices']}")
    all_there(own, synced)
    if number % 4 and outside.exists():
        # the volume is not to be full
        shutil.rmtree(outside)
        synced -= {n for n in synced if n.startswith(f"d{number}/")}
    own.umount()
    pair.fsck("afterwards")
    return now == numbers(choice)


def rounds(own, count, seed):
    """The rounds; how many left the change done."""
    pair = TenantsPair(own)
    pair.make()
    return pair.rounds(count, seed, one_round)


if __name__ == "__main__":
    told = "{} with the devices of after the kill, {} with those of before"
    sys.exit(kill_rounds.main("tenant_set", rounds, 1 << 30, EACH, told))
