#!/usr/bin/env python3
"""How much of the demo's copy and removal of many small files is the way to a server and back.

    scripts/small-files.py [--rounds N] [--bind CPU] [--also DIR]...

In turns, each on a file system just made: ext4; braidfs by /dev/fuse and by io_uring, with the default and with
private,cache=through; and each further directory (of another server's mount, for comparison, such as one that does
nothing). Steps and input are those of `make demo`: cp -a --parents of some 17,000 files, then a mount with cold caches
(not of a further directory), then rm -rf. Root. Prints medians and ranges in seconds, and as a share of ext4's in the same round.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys

sys.dont_write_bytecode = True
import demo  # noqa: E402
import fslib  # noqa: E402

OURS = {
    "braidfs, /dev/fuse": ["transport=dev"],
    "braidfs, /dev/fuse, private,cache=through": ["transport=dev", "private", "cache=through"],
    "braidfs, io_uring": ["transport=ring"],
    "braidfs, io_uring, private,cache=through": ["transport=ring", "private", "cache=through"],
}
STEPS = ("copy", "rm")


class Also:
    """A directory that somebody else mounted."""

    def __init__(self, top):
        self.mnt = top

    def settle(self):
        fslib.run("sync", "-f", self.mnt)

    def cold(self):
        pass

    def force_down(self):
        pass


class Ours(fslib.BraidFs):
    """braidfs with options that stay the same when it is mounted again."""

    options = ()

    def mount(self, *options):
        with fslib.rings(True) if "transport=ring" in self.options else contextlib.nullcontext():
            super().mount(*self.options, *options)


def steps(volume, work, cpu):
    """Seconds of both."""
    found = []
    for function, cold in ((demo.step_copy, False), (demo.step_remove, True)):

        def step(volume, work, function=function):
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
            return function(volume, work)

        seconds, _ = demo.measure(volume, step, cold, work)
        found.append(seconds)
    return found


def one(space, name, also, work, turn, cpu):
    """A round of one of them."""
    if name in also:
        return steps(Also(also[name]), work, cpu)
    if name == "ext4":
        volume = space.ext4(f"v{turn}", demo.SIZE)
    else:
        volume = Ours(space.dir, f"v{turn}", demo.SIZE, fslib.braidfs_binary())
        volume.options = OURS[name]
        space.volumes.append(volume)
    try:
        volume.mkfs()
        volume.mount()
        if not volume.sync_commits():
            raise fslib.Failed("syncfs does not reach a braidfs here (docs/crash-contract.md): its time would be without the commit")
        return steps(volume, work, cpu)
    finally:
        volume.force_down()
        volume.image.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bind", type=int, metavar="CPU", help="cp and rm run on this one")
    parser.add_argument("--also", type=pathlib.Path, action="append", default=[], metavar="DIR")
    args = parser.parse_args()
    why = fslib.why_no_rings() or fslib.why_no_ext4()
    if not fslib.IS_ROOT or why:
        sys.exit(f"small-files: {why or 'needs root'}")
    also = {str(top): top for top in args.also}
    names, found, turn = ["ext4", *OURS, *also], {}, 0
    try:
        fslib.build()
        with fslib.Workspace(need_bytes=8 << 30) as space:
            work = demo.Work(space.dir)
            for n in range(args.rounds):
                for name in names:
                    turn += 1
                    found.setdefault(name, []).append(one(space, name, also, work, turn, args.bind))
                    print(f"round {n + 1}: {name}: " + ", ".join(f"{s} {t:.2f} s" for s, t in zip(STEPS, found[name][-1])), flush=True)
    except (subprocess.SubprocessError, fslib.Failed) as error:
        sys.exit(f"small-files: {error}")
    print(f"\n{len(work.files)} files, {work.bytes >> 20} MiB\n\n| | " + " | ".join(f"{s}, s | of ext4's" for s in STEPS) + " |")
    print("|---|" + "---:|" * 2 * len(STEPS))
    for name in names:
        cells = []
        for i in range(len(STEPS)):
            mine = [r[i] for r in found[name]]
            share = [m / e[i] for m, e in zip(mine, found["ext4"])]
            cells += [f"{statistics.median(v):.2f} ({min(v):.2f}–{max(v):.2f})" for v in (mine, share)]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
