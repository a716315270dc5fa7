#!/usr/bin/env python3
"""Tenants that are made, changed and removed while the daemon is killed: each is as before or as after, and what was synced is there.

usage: tenants_killed.py [ROUNDS]    default 200; TENANT_SEED=N replays the choices of a run

Each round makes a tenant, gives one other limits, or removes one, while a writer syncs files in a tenant and one outside, and
kills the daemon with -9 at a random moment. Then: fsck finds nothing; the volume mounts; the tenants are those of before or
those of after the change (of after, where the command had said so); each has as many inodes as there are files below its
root; every synced file is as it was; the same change can be made, and fsck finds nothing again. Exit code 1 after a failure;
the commands stand in target/tenant-kill.log.
"""

import errno
import json
import shutil
import sys
import time

sys.dont_write_bytecode = True
import kill_rounds  # noqa: E402
from fslib import Failed, run  # noqa: E402
from kill_rounds import Change, Writer, all_there, fsck  # noqa: E402

MIB = 1 << 20
SIZE = 512 * MIB
MOST = 6


def tenants(own):
    """Limits by name."""
    _, text = run(own.binary, "tenant", "list", "--json", own.mnt)
    rate = lambda t: t["rates"]["write_iops"] and t["rates"]["write_iops"]["per_second"]  # noqa: E731
    return {t["name"]: (t["space"], t["inodes_max"], t["soft_space"], rate(t)) for t in json.loads(text)}


def options(limits):
    names = ("--space", "--inodes", "--soft-space", "--write-iops")
    return [word for name, n in zip(names, limits) for word in (name, "none" if n is None else str(n))]


def choose(rng, there, number):
    """A change: its arguments but for the mount point, and the tenants after it."""
    limits = (
        rng.choice((None, rng.randrange(2, 64) * MIB)),
        rng.choice((None, rng.randrange(20, 400))),
        rng.choice((None, rng.randrange(1, 3) * MIB)),
        rng.choice((None, rng.randrange(100, 1000))),
    )
    what = "create" if not there else rng.choice(["set", "set", "remove"] + ["create"] * (len(there) < MOST))
    if what == "create":
        name = f"t{number}"
        return ["create", *options(limits)], name, {**there, name: limits}
    name = rng.choice(sorted(there))
    if what == "set":
        return ["set", *options(limits)], name, {**there, name: limits}
    return ["remove"], name, {n: limits for n, limits in there.items() if n != name}


def command(own, change, name):
    places = [own.mnt / name] if change[0] == "create" else [own.mnt, name]
    return ["tenant", *change, *places]


def count_inodes(own, there):
    """What each tenant tells is what lies below its root."""
    for name in there:
        _, text = run(own.binary, "tenant", "show", "--json", own.mnt, name)
        told, found = json.loads(text)["inodes"], 1 + sum(1 for _ in (own.mnt / name).rglob("*"))
        if told != found:
            raise Failed(f"tenant {name} tells of {told} inodes, and has {found}")


def one_round(own, rng, number, there, synced):
    """One change, killed. `there`: the tenants. Those of afterwards, and whether the kill left the change done."""
    change, name, after = choose(rng, there, number)
    own.mount()
    writers = []
    for top in (own.mnt / n for n in [f"d{number}", *rng.sample(sorted(there), min(1, len(there)))]):
        # a tenant's files are written anew
        top.mkdir(exist_ok=True)
        synced -= {n for n in synced if n.startswith(f"{top.name}/")}
        # only tenants have limits
        writers.append(Writer(top, *((errno.EDQUOT, errno.ENOSPC) if top.name in there else ())))
    time.sleep(rng.uniform(0, 0.02))
    changing = Change(own, *command(own, change, name))
    time.sleep(rng.uniform(0, 0.03))
    returned = changing.kill_daemon(synced, writers)
    fsck(own, "of the killed volume")
    own.mount()
    now = tenants(own)
    if now not in (there, after) or returned and now != after:
        raise Failed(f"{change[0]} {name}: {now}, which is neither {there} nor {after}, or it had ended ({returned})")
    done = now == after
    count_inodes(own, now)
    all_there(own, synced)
    if now != after:
        if change[0] == "create" and (own.mnt / name).exists():
            # what was made of it is an ordinary directory
            (own.mnt / name).rmdir()
        run(own.binary, *command(own, change, name))
        if tenants(own) != after:
            raise Failed(f"{change[0]} {name}, once more: {tenants(own)}, not {after}")
    if change[0] == "remove":
        # its domain is another tenant's when it is empty
        shutil.rmtree(own.mnt / name)
        synced -= {n for n in synced if n.startswith(f"{name}/")}
    if number % 4 and (own.mnt / f"d{number}").exists():
        # the volume is not to be full
        shutil.rmtree(own.mnt / f"d{number}")
        synced -= {n for n in synced if n.startswith(f"d{number}/")}
    all_there(own, synced)
    own.umount()
    fsck(own, "afterwards")
    return after, done


def rounds(own, count, seed):
    """The rounds; how many left the change done."""
    own.mkfs("--domains", "2", "--group-size", "4M")
    there, synced = {}, set()

    def one(rng, number):
        nonlocal there
        there, done = one_round(own, rng, number, there, synced)
        return done

    return kill_rounds.in_turn(count, seed, one)


if __name__ == "__main__":
    sys.exit(kill_rounds.main("tenant", rounds, SIZE, SIZE, "{} with the change after the kill, {} without it"))
