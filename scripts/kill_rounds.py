"""Rounds in which a daemon is killed: files that were synced before, what must hold of them afterwards, and the program."""

import hashlib
import os
import random
import signal
import sys
import time

import fslib
from fslib import Failed, run


def content(name):
    return hashlib.sha256(str(name).encode()).digest() * 700


class Writer:
    """A child that writes and syncs files below `top`, a directory right below a mount point, until that gives an error."""

    def __init__(self, top):
        self.top = top
        self.pipe, writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sig, signal.SIG_DFL)
            os.close(self.pipe)
            number = 0
            while True:
                number += 1
                fd = os.open(f"{top}/f{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.write(fd, content(f"{top.name}/f{number}"))
                os.fsync(fd)
                os.close(fd)
                os.write(writer, b"s")
        except OSError:
            pass
        finally:
            os._exit(0)

    def synced(self):
        """Waits for the child, whose daemon is dead; the names of the files that it synced, from the mount point on."""
        os.waitpid(self.pid, 0)
        with os.fdopen(self.pipe, "rb") as told:
            return {f"{self.top.name}/f{n + 1}" for n in range(len(told.read()))}


def all_there(own, synced):
    """All those files hold what was written."""
    for name in synced:
        if (own.mnt / name).read_bytes() != content(name):
            raise Failed(f"{name}: synced, and of other content")


def fsck(own, when, *more):
    """fsck of the volume, whose other devices are `more`, finds nothing."""
    look = lambda: run(own.binary, "fsck", "-f", "-n", own.image, *more, ok=None)  # noqa: E731
    code, text = look()
    # requests of a killed process keep its file open, and locked, a little longer than it lives
    end = time.monotonic() + 10
    while code and "in use by another" in text and time.monotonic() < end:
        time.sleep(0.05)
        code, text = look()
    if code:
        raise Failed(f"fsck {when}: exit code {code}: {text.strip()[-300:]}")


def in_turn(count, seed, one_round):
    """`one_round(rng, number)`, `count` times: how many left the change done. What fails says which round of which seed."""
    rng, new = random.Random(seed), 0
    for number in range(count):
        try:
            new += one_round(rng, number)
        except (Failed, OSError) as error:
            raise Failed(f"round {number} of seed {seed}: {error}") from None
    return new


def main(name, rounds, need, size, told):
    """`rounds(volume, count, seed)` as a program's work, as many as its argument says, by a seed that NAME_SEED may give. The
    workspace needs `need` bytes, the volume has `size`; `told` has a place for the number of rounds that left the change done,
    and one for the others. The exit code."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(os.environ.get(f"{name.upper()}_SEED", random.randrange(1 << 32)))
    fslib.log_to(fslib.ROOT / "target" / f"{name}-kill.log")
    try:
        fslib.build()
        with fslib.Workspace(need) as space:
            new = rounds(space.braidfs(name, size), count, seed)
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(f"{count} rounds, seed {seed}: {told.format(new, count - new)}")
    return 0
