#!/usr/bin/env python3
"""make upgrade-from REV=...: upgrades between this program and that of another revision: there and back, ROUNDS times (default 5), on
a mount with open files in every way (scripts/mount_tests/upgrade.py) and a load whose every error and byte is looked at.

The other program is built in a work tree of its own, with the target directory target/upgrade-from; OLD_BIN=FILE takes one that is
built. REV: the last commit before this one that changed the engine or the front end. Where the two do not understand each other,
that is said, and what is open must go on with the program that served it.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import fslib
from fslib import BraidFs, Failed, run
from mount_tests.common import must, same
from mount_tests.upgrade import BACK, Held, loaded, server

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROUNDS = int(os.environ.get("ROUNDS") or 5)
# What the new program says, or the old one of it, where it does not take what it is offered.
NOT_UNDERSTOOD = ("hand-over records", "takes records of", "unknown field", "newer", "feature", "does not know", "older version")


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], check=True, capture_output=True, text=True).stdout.strip()


def revision():
    """The one that is asked for, or the last one that differs where it counts."""
    rev = os.environ.get("REV") or git("rev-list", "-1", "--skip=1", "HEAD", "--", "crates/engine", "crates/fuse")
    return git("rev-parse", "--verify", f"{rev}^{{commit}}")


def build(rev):
    """The program of a revision, for tests (asserts, order of locks)."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "upgrade-from"
    kept = target / f"braidfs-{rev[:12]}"
    if kept.exists():
        return kept
    tree = pathlib.Path(tempfile.mkdtemp(prefix="braidfs-upgrade-from-"))
    try:
        git("worktree", "add", "--detach", "--force", tree, rev)
        env = dict(os.environ, CARGO_TARGET_DIR=str(target))
        if subprocess.run(["cargo", "build", "--quiet", "-p", "braidfs-cli"], cwd=tree, env=env, check=False).returncode:
            raise Failed(f"revision {rev[:12]} cannot be built")
        shutil.copy2(target / "debug" / "braidfs", kept)
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=False, capture_output=True)
        shutil.rmtree(tree, ignore_errors=True)
    return kept


class Both:
    """A mount, and the two programs that may serve it."""

    def __init__(self, v, binaries):
        self.v, self.binaries, self.refused, self.longest, self.count = v, binaries, {}, 0, 0

    def pid(self):
        """The process that serves, of whichever program."""
        pids = set()
        for binary in self.binaries.values():
            self.v.binary = binary
            pids.update(self.v.daemons())
        return pids

    def to(self, name):
        """Upgrades to that program; False where it is refused for what one of the two does not know."""
        serving, command = self.pid(), self.binaries["this program"]
        begun = time.monotonic()
        code, text = run(command, "upgrade", "--program", self.binaries[name], self.v.mnt, ok=(0, BACK), timeout=100)
        if code == 0:
            self.longest, self.count = max(self.longest, time.monotonic() - begun), self.count + 1
            self.v.binary = self.binaries[name]
            server(self.v)
            return True
        must(any(word in text for word in NOT_UNDERSTOOD), f"to {name}: {text}")
        same(self.pid(), serving, "the process that serves after a refusal")
        self.refused[name] = text.strip()
        return False


def round_trip(binaries, first, options):
    """The program named `first` makes the volume and mounts it."""
    second = next(name for name in binaries if name != first)
    where = pathlib.Path(tempfile.mkdtemp(prefix="braidfs-upgrade-from-", dir=os.environ.get("BRAIDFS_TMP", "/var/tmp")))
    v = BraidFs(where, "v", 512 << 20, binaries[first])
    try:
        v.mkfs("--domains", "2")
        v.mount("transport=dev", *options)
        held, both = Held(v.mnt / "held"), Both(v, binaries)
        with loaded(v.mnt) as done:
            for _ in range(ROUNDS):
                for name in second, first:
                    held.between()
                    both.to(name)
                    held.look()
        held.end()
        both.to(second)
        must((v.mnt / "held" / "file").read_bytes() == held.content, "the file at the end")
        v.umount()
        for binary in binaries.values():
            v.binary = binary
            same(v.fsck("-f", "-n")[0], 0, f"exit code of fsck of {binary}")
        print(f"  mounted by {first}, {' '.join(options) or 'default options'}: {both.count} upgrades, none longer than {both.longest:.1f} s; work done "
              f"meanwhile: {done}; no error")
        for name, why in both.refused.items():
            print(f"  not to {name}, which stays as it was: {why}")
        return both
    finally:
        for binary in binaries.values():
            v.binary = binary
            v.force_down()
        shutil.rmtree(where, ignore_errors=True)


def main():
    if not os.access("/dev/fuse", os.W_OK):
        print("upgrade-from: skipped: /dev/fuse cannot be opened")
        return 0
    this = pathlib.Path(os.environ.get("BRAIDFS_BIN") or ROOT / "target" / "debug" / "braidfs").resolve()
    other = os.environ.get("OLD_BIN")
    rev = "as given" if other else revision()
    print(f"upgrade-from: this program, and {rev if other else git('log', '-1', '--format=%h of %ad: %s', '--date=iso', rev)}")
    binaries = {"the other": pathlib.Path(other).resolve() if other else build(rev), "this program": this}
    if "upgrade" not in run(binaries["the other"], "--help")[1]:
        raise Failed("the other program cannot hand a mount over: it has no `braidfs upgrade`")
    # the other one first, as on a machine that is upgraded
    for first in "the other", "this program":
        for options in ((), ("fileflags",)):
            both = round_trip(binaries, first, options)
            must(both.count or both.refused, "nothing was upgraded")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as why:
        fslib.log(str(why))
        print(f"upgrade-from: {why}", file=sys.stderr)
        sys.exit(1)
