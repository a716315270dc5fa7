"""Rounds in which a daemon is killed: files that were synced before, what must hold of them afterwards, and the program."""

import errno
import hashlib
import itertools
import os
import random
import subprocess
import sys
import time

import fslib
from fslib import Failed, run, wait_for


def content(name):
    return hashlib.sha256(str(name).encode()).digest() * 700


class Writer:
    """A child that writes and syncs files below `top`, a directory right below a mount point, until that gives an error: before
    the kill one of `allowed`, after it also what a dead server gives. It tells `s` for each file, and at the end the error."""

    # files that all of them synced
    total = 0

    def __init__(self, top, *allowed):
        self.top, self.allowed, self.told = top, allowed, b""
        self.pid, self.pipe = fslib.fork_for(self.write)

    def write(self, pipe):
        try:
            for number in itertools.count(1):
                data = content(f"{self.top.name}/f{number}")
                fd = os.open(f"{self.top}/f{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                if os.write(fd, data) < len(data):
                    raise OSError(errno.ENOSPC, "a short write")
                os.fsync(fd)
                os.close(fd)
                os.write(pipe, b"s")
        except OSError as error:
            os.write(pipe, f"e{error.errno}".encode())

    def judge(self, *more):
        """What it has told by now: no error but those allowed and `more`."""
        number = self.told.partition(b"e")[2]
        if number and int(number) not in (*self.allowed, *more):
            name = errno.errorcode.get(int(number), int(number))
            raise Failed(f"a writer in {self.top.name} got {name} {'after' if more else 'before'} the kill")

    def before_the_kill(self):
        """The daemon lives: it has met no error but one that is allowed."""
        os.set_blocking(self.pipe, False)
        try:
            while piece := os.read(self.pipe, 1 << 16):
                self.told += piece
        except BlockingIOError:
            pass
        os.set_blocking(self.pipe, True)
        self.judge()

    def synced(self):
        """Waits for the child, whose daemon is dead; the names of the files that it synced, from the mount point on."""
        with os.fdopen(self.pipe, "rb") as told:
            self.told += told.read()
        _, status = os.waitpid(self.pid, 0)
        if status:
            raise Failed(f"a writer in {self.top.name} ended with {os.waitstatus_to_exitcode(status)}: the log says of what")
        self.judge(*fslib.dead())
        files = self.told.count(b"s")
        Writer.total += files
        return {f"{self.top.name}/f{n + 1}" for n in range(files)}


class Change:
    """A command that changes a volume, and is killed."""

    # seconds that each kind took lately: a program's start alone takes long on a busy machine
    took = {}

    def __init__(self, own, *words):
        self.own = own
        self.process = subprocess.Popen([own.binary, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.begin = time.monotonic()

    def wait(self, kind, rng, one_in):
        """Until a random moment of it, or its end once in so many times: then all that it did is durable."""
        limit = 20 if rng.randrange(one_in) == 0 else rng.uniform(0, self.took.get(kind, 0.3))
        while self.process.poll() is None and time.monotonic() < self.begin + limit:
            time.sleep(0.001)
        if self.has_ended():
            self.took[kind] = time.monotonic() - self.begin

    def has_ended(self):
        """Whether it did what it was to do; with 4 something stays where it is, as the journal of a tenant."""
        return self.process.poll() in (0, 4)

    def kill_daemon(self, synced, writers):
        """kill -9 of the daemon that it asks; `synced` gets what was synced until then. Whether it had ended."""
        for writer in writers:
            writer.before_the_kill()
        ended = self.has_ended()
        self.own.kill9()
        self.process.wait()
        for writer in writers:
            synced |= writer.synced()
        run("umount", "-l", self.own.mnt, ok=None)
        return ended

    def kill(self):
        """kill -9 of the command, which does it by itself. Whether it had ended."""
        ended = self.has_ended()
        self.process.kill()
        self.process.wait()
        return ended


class Pair:
    """A volume on an image file, and maybe on a second one beside it."""

    def __init__(self, own):
        self.own = own
        self.second = own.image.with_suffix(".second")

    def paths(self):
        """The devices that hold something of the volume."""
        return [self.own.image, self.second]

    def fsck(self, when):
        fsck(self.own, when, *self.paths()[1:])

    def mount(self, options):
        run(self.own.binary, "mount", "-o", options, *self.paths(), self.own.mnt, timeout=60)
        wait_for(f"{self.own.mnt} mounted", self.own.alive, 10)

    def rounds(self, count, seed, one_round):
        """[`in_turn`] of `one_round(pair, rng, number, names of synced files)`, and no mount or second file is left over."""
        synced = set()
        try:
            return in_turn(count, seed, lambda rng, number: one_round(self, rng, number, synced))
        finally:
            self.own.force_down()
            self.second.unlink(missing_ok=True)


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
    while code and "in use" in text and time.monotonic() < end:
        time.sleep(0.05)
        code, text = look()
    if code:
        raise Failed(f"fsck {when}: exit code {code}: {text.strip()[-300:]}")


def in_turn(count, seed, one_round):
    """`one_round(rng, number)`, `count` times: how many left the change done. What fails says which round of which seed; rounds in
    which nothing was synced have shown nothing."""
    rng, new, before = random.Random(seed), 0, Writer.total
    for number in range(count):
        try:
            new += one_round(rng, number)
        except (Failed, OSError) as error:
            raise Failed(f"round {number} of seed {seed}: {error}") from None
    if Writer.total == before:
        raise Failed(f"no file was synced in {count} rounds of seed {seed}")
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
