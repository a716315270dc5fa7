#!/usr/bin/env python3
"""Soak: random load on a mounted volume; every few seconds the daemon is killed with -9 and the volume mounted again.

usage: soak.py [SECONDS]    default SOAK_SECONDS, or 60; SOAK_SEED=N replays the choices of a run

Workers, each in directories of its own, create, write, rename, link, truncate, remove and fsync files, and tell what they
are about to do and what is done. After each kill: fsck of the crashed image finds nothing (and in every other round mends
it, as at a boot); the volume mounts; what was synced and not touched since is there, exactly; other files hold, block by
block, something that was written to them, or zeros; nothing that was not removed is gone; no name is there that nobody gave, or
that a synced rename took away, and of a rename not both. Now and then the volume is unmounted instead, checked, and everything
must be there, and nothing else. The trees of earlier rounds stay as they are. The seed is printed with each failure; every command
stands in target/soak.log. Exit code 1 after a failure.
"""

import errno
import hashlib
import os
import pickle
import random
import select
import shutil
import signal
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
from fslib import Failed, Workspace  # noqa: E402

SIZE = 1 << 30
WORKERS = 3
BLOCK = 4096
# Rounds whose files are kept and checked again.
KEPT = 3
LONGEST = 40 * BLOCK


def content(seed, size):
    """What a write puts into a file: every block tells its place and the write."""
    out = bytearray()
    for at in range(0, size, BLOCK):
        out += hashlib.blake2b(f"{seed}:{at}".encode(), digest_size=64).digest() * (BLOCK // 64)
    return bytes(out[:size])


# A worker ---------------------------------------------------------------------------------------------------------------


class Worker:
    """One process with files of its own; `tell` hands each step to the parent before and after it is done."""

    def __init__(self, top, seed, tell):
        self.top, self.rng, self.tell = top, random.Random(seed), tell
        self.dirs = [top]
        self.files = {}
        self.next = 0

    def step(self, name, *args):
        self.tell(("begin", name, *args))
        getattr(self, "do_" + name)(*args)
        self.tell(("end", name, *args))

    def do_mkdir(self, path):
        os.mkdir(path)

    def do_write(self, number, path, seed, size):
        with open(path, "wb") as file:
            file.write(content(seed, size))

    def do_sync(self, number, path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def do_rename(self, number, old, new):
        os.rename(old, new)

    def do_link(self, number, old, new):
        os.link(old, new)

    def do_remove(self, number, path):
        os.unlink(path)

    def name(self):
        self.next += 1
        return os.path.join(self.rng.choice(self.dirs), f"f{self.next}")

    def one(self):
        rng = self.rng
        what = rng.random()
        if what < 0.04 and len(self.dirs) < 12:
            path = os.path.join(rng.choice(self.dirs), f"d{len(self.dirs)}")
            self.step("mkdir", path)
            self.dirs.append(path)
        elif what < 0.35 or not self.files:
            path = self.name()
            number = self.next
            self.step("write", number, path, rng.getrandbits(32), rng.randrange(LONGEST))
            self.files[number] = path
        else:
            number, path = rng.choice(list(self.files.items()))
            if what < 0.5:
                self.step("write", number, path, rng.getrandbits(32), rng.randrange(LONGEST))
            elif what < 0.75:
                self.step("sync", number, path)
            elif what < 0.88:
                new = self.name()
                self.step("rename", number, path, new)
                self.files[number] = new
            elif what < 0.94:
                self.step("link", number, path, self.name())
            else:
                self.step("remove", number, path)
                del self.files[number]

    def run(self):
        while True:
            self.one()


def start(top, seed):
    """Forks a worker below `top`; its pid and the pipe with its steps."""

    def work(pipe):
        def tell(step):
            data = pickle.dumps(step)
            os.write(pipe, len(data).to_bytes(4, "little") + data)

        try:
            Worker(str(top), seed, tell).run()
        except OSError as error:
            tell(("error", error.errno, str(error)))

    return fslib.fork_for(work)


# What must be there -----------------------------------------------------------------------------------------------------


class File:
    """What is known of a file: what was synced, and what was begun since."""

    def __init__(self):
        self.synced = None  # (paths, seed, size)
        self.paths = set()  # names that it may have
        self.sure = set()  # names that it has for certain, were it synced
        self.renames = []  # (old, new): a name is never given twice, so that both are never there
        self.versions = []  # (seed, size): the content may be of any of them
        self.removed = False
        self.touched = False

    def begin(self, step):
        name, args = step[1], step[2:]
        if name == "sync":
            return
        self.touched = True
        if name == "write":
            self.paths.add(args[1])
            self.versions.append((args[2], args[3]))
        elif name in ("rename", "link"):
            self.paths.add(args[2])
            if name == "rename":
                self.renames.append((args[1], args[2]))
        elif name == "remove":
            self.removed = True

    def end(self, step):
        name, args = step[1], step[2:]
        if name == "write":
            self.sure.add(args[1])
        elif name == "rename":
            self.sure.discard(args[1])
            self.sure.add(args[2])
        elif name == "link":
            self.sure.add(args[2])
        elif name == "remove":
            self.sure.discard(args[1])
        elif name == "sync":
            self.synced = (set(self.sure), *self.versions[-1])
            self.paths, self.versions = set(self.sure), self.versions[-1:]
            self.removed = self.touched = False

    def check(self, everything):
        """Compares with the volume. `everything`: it was unmounted, nothing may be lost."""
        if everything and not self.torn:
            self.exactly(self.sure, *self.versions[-1]) if self.versions and self.sure else None
            return
        if self.synced and not self.touched:
            self.exactly(*self.synced)
            return
        found = [p for p in self.paths if os.path.lexists(p)]
        if not found:
            if self.synced and not self.removed:
                raise Failed(f"{sorted(self.synced[0])}: synced, and none of its names is there")
            return
        for path in found:
            self.blocks(path)

    torn = False

    def exactly(self, paths, seed, size):
        want = content(seed, size)
        for path in paths:
            try:
                with open(path, "rb") as file:
                    have = file.read()
            except FileNotFoundError:
                raise Failed(f"{path}: synced, and not there") from None
            if have != want:
                at = next((i for i, (a, b) in enumerate(zip(have, want)) if a != b), min(len(have), len(want)))
                raise Failed(f"{path}: {len(have)} bytes of {len(want)}, differs at byte {at} from what was synced")

    def blocks(self, path):
        """Every block is that of some version, or zeros."""
        with open(path, "rb") as file:
            have = file.read()
        versions = [content(*v) for v in self.versions]
        for at in range(0, len(have), BLOCK):
            piece = have[at : at + BLOCK]
            fits = not any(piece)
            for v in versions:
                part = v[at : at + len(piece)]
                fits = fits or piece == part + bytes(len(piece) - len(part))
            if not fits:
                raise Failed(f"{path}: the block at byte {at} holds what was never written there")


def names_below(top):
    """The paths of all that lies below a directory, with the sizes of files."""
    found = {}
    for folder, folders, files in os.walk(top):
        found |= {os.path.join(folder, name): None for name in folders}
        found |= {path: os.lstat(path).st_size for path in (os.path.join(folder, name) for name in files)}
    return found


class Expected:
    """All files and directories of one worker in one round."""

    def __init__(self, top):
        self.top = str(top)
        self.files = {}
        self.begun, self.made = set(), set()  # directories
        self.last = None
        self.step = None  # the one that has begun and not ended
        self.tree = None  # how it was when the round had ended

    def take(self, step):
        if step[0] == "error":
            self.last = step
            return
        self.step = step if step[0] == "begin" else None
        if step[1] == "mkdir":
            (self.begun if self.step else self.made).add(step[2])
            return
        file = self.files.setdefault(step[2], File())
        if step[0] == "begin":
            file.begin(step)
            file.torn = True
        else:
            file.end(step)
            file.torn = False

    def check(self, everything):
        """Compares files and names with the volume. `everything`: it was unmounted, nothing may be lost, nor come back."""
        for file in self.files.values():
            file.check(everything)
        found = set(names_below(self.top))
        # what the step that has not ended names may be there or not
        either = {word for word in self.step[2:] if isinstance(word, str)} if self.step else set()
        if everything:
            sure = self.made.union(*(f.sure for f in self.files.values()))
            if missing := sure - found - either:
                raise Failed(f"{sorted(missing)}: gone after an unmount")
            known = sure
        else:
            known = self.begun.union(*(f.paths for f in self.files.values()))
        if surplus := found - known - either:
            raise Failed(f"{sorted(surplus)}: there, and nobody made it so, or it was moved away before a sync")
        for old, new in (r for f in self.files.values() for r in f.renames):
            if old in found and new in found:
                raise Failed(f"{old} was renamed to {new}, and both are there")

    def check_again(self):
        """In a later round: what was synced is as it was, and all names are."""
        for file in self.files.values():
            file.check(False)
        found = names_below(self.top)
        if found != self.tree:
            differs = sorted(set(found.items()) ^ set(self.tree.items()), key=str)
            raise Failed(f"{self.top}: it was unmounted, and has changed since: {differs[:10]}")

    def settle(self):
        """After a crash: what was not synced is what is found; later rounds check the content of the rest only."""
        self.tree = names_below(self.top)
        self.files = {n: f for n, f in self.files.items() if f.synced and not f.touched}


def drain(workers, seconds):
    """Keeps the pipes of the workers from filling up; their steps as bytes."""
    end = time.monotonic() + seconds
    data = {reader: b"" for _, reader in workers}
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select(list(data), [], [], left)
        for reader in ready:
            piece = os.read(reader, 1 << 16)
            if not piece:
                time.sleep(min(left, 0.1))
            data[reader] += piece
    return data


# Rounds -----------------------------------------------------------------------------------------------------------------


def soak_round(volume, number, rng, kept):
    """Mounts, loads, kills or unmounts, checks."""
    options = rng.choice([(), ("data=journal",), ("data=writeback",), ("commit=1",)])
    volume.mount(*options)
    workers, expected = [], []
    for w in range(WORKERS):
        top = volume.mnt / f"r{number}w{w}"
        top.mkdir()
        fd = os.open(top, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        workers.append(start(top, rng.getrandbits(64)))
        expected.append(Expected(top))
    unmount = number % 4 == 3
    data = drain(workers, rng.uniform(1.0, 5.0))
    # an error that came before the kill is not the kill's
    for (_, reader), e in zip(workers, expected):
        data[reader] = feed(data[reader], e, (errno.ENOSPC,))
    if unmount:
        for pid, _ in workers:
            os.kill(pid, signal.SIGKILL)
    else:
        volume.kill9()
    for (pid, reader), e in zip(workers, expected):
        end = time.monotonic() + 20
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            piece = os.read(reader, 1 << 16) if select.select([reader], [], [], 0.05)[0] else b""
            data[reader] += piece
        while piece := os.read(reader, 1 << 16):
            data[reader] += piece
        os.close(reader)
        if os.waitstatus_to_exitcode(ended[1]) > 0:
            raise Failed("a worker failed: the log says of what")
        feed(data[reader], e, (errno.ENOSPC,) if unmount else (errno.ENOSPC, *fslib.dead()))
    if unmount:
        volume.umount()
    else:
        volume.force_down()
    # a killed process may keep its files for a moment, until its I/O has ended
    end = time.monotonic() + 20
    while True:
        code, text = volume.fsck("-f", "-n")
        if "is in use" not in text or time.monotonic() > end:
            break
        time.sleep(0.2)
    if code:
        raise Failed(f"fsck after {'umount' if unmount else 'kill -9'}: exit code {code}:\n{text[-2000:]}")
    if number % 2:
        # as at a boot: what it mends a mount must find as it would have without it
        code, text = volume.fsck("-f", "-p")
        if code not in (0, 1):
            raise Failed(f"fsck -p before the mount: exit code {code}:\n{text[-2000:]}")
    volume.mount()
    for e in expected:
        e.check(unmount)
        e.settle()
    for e in (e for _, old in kept for e in old):
        e.check_again()
    kept.append((number, expected))
    tops = {os.path.basename(e.top) for _, all_of_it in kept for e in all_of_it}
    if (have := set(os.listdir(volume.mnt))) != tops:
        raise Failed(f"the root has {sorted(have)} instead of {sorted(tops)}")
    while len(kept) > KEPT:
        gone, _ = kept.pop(0)
        for w in range(WORKERS):
            shutil.rmtree(volume.mnt / f"r{gone}w{w}")
    volume.umount()


def feed(data, expected, allowed):
    """Takes the whole steps of `data`, and returns what is left of it. A worker's error has to be one of `allowed`."""
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            break
        expected.take(pickle.loads(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if expected.last and expected.last[1] not in allowed:
        raise Failed(f"a worker: {expected.last[2]}")
    return data[at:]


def main():
    seconds = float(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SOAK_SECONDS", "60"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().getrandbits(32))
    fslib.log_to(fslib.ROOT / "target" / "soak.log")
    print(f"soak: {seconds:.0f} s, SOAK_SEED={seed}", flush=True)
    fslib.build()
    rng, kept, number, most, begun = random.Random(seed), [], 0, 0, time.monotonic()
    with Workspace(2 * SIZE) as space:
        volume = space.braidfs("soak", SIZE)
        volume.mkfs("--domains", "4")
        while time.monotonic() - begun < seconds:
            try:
                # the round changes `kept` of this process only when it is done, so it runs in it
                soak_round(volume, number, rng, kept)
            except Failed as error:
                image = fslib.ROOT / "target" / f"soak-{seed}.img"
                stacks(volume)
                run_copy(volume, image)
                print(fslib.paint(f"FAILED in round {number}, SOAK_SEED={seed}: {error}", "red"))
                print(f"the image: {image}")
                return 1
            synced = sum(len(e.files) for _, es in kept for e in es)
            most = max(most, synced)
            number += 1
            print(f"round {number}: {synced} synced files checked, {time.monotonic() - begun:.0f} s", flush=True)
    if not most:
        print(fslib.paint(f"FAILED: no file was synced in {number} rounds, SOAK_SEED={seed}", "red"))
        return 1
    print(f"{number} rounds, {(number * 3 + 3) // 4} kills, no failure, SOAK_SEED={seed}")
    return 0


def stacks(volume):
    """What the daemon's threads are doing, into the log: a daemon that does not end is a finding."""
    for pid in volume.daemons():
        if fslib.have("gdb"):
            fslib.run("gdb", "-p", pid, "-batch", "-ex", "thread apply all bt 30", ok=None, timeout=120)


def run_copy(volume, to):
    volume.force_down()
    fslib.run("cp", "--sparse=always", volume.image, to, ok=None)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"soak: {error}")
