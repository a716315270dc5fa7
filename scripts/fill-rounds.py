#!/usr/bin/env python3
"""Rounds of filling a mounted volume until ENOSPC and removing: is the space there that `df` offers, and does it come back?

usage: fill-rounds.py [--sizes MIB,...] [--domains N,...] [--writers N,...] [--rounds N]

Each combination on a volume of its own, whose image lies in memory (/dev/shm) where there is room, else where BRAIDFS_TMP
says. In each round the bytes written until ENOSPC must be within 1 % (4 MiB on volumes below 400 MiB) of what `df` of the
directory offered before, and `df` be back to within 0.2 % after the files were removed and a sync; after the last round it
must say the same as after the first. As root; needs /dev/fuse. Default: 64,600,4096 MiB, 1,2,8 domains, 1,4 writers, 10.
"""

import argparse
import os
import shutil
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
from filling import empty, fill, offered  # noqa: E402
from fslib import Failed  # noqa: E402

SMALL = 400 << 20


def numbers(text):
    return [int(part) for part in text.split(",")]


def rounds(volume, args, domains, writers):
    """Runs one combination; prints a line, returns what is wrong."""
    wrong, after_first, worst, worst_back, last = [], None, 0, 0, 0
    volume.mkfs("--domains", str(domains))
    volume.mount()
    top = volume.mnt / "d"
    top.mkdir()
    volume.settle()
    start, total = time.monotonic(), 0
    try:
        for n in range(args.rounds):
            before = offered(top)
            try:
                written = fill(top, writers)
            except Failed as error:
                # told late, at the fsync: what the writers were told of cannot be counted
                wrong.append(f"round {n}: {error}")
                for path in top.iterdir():
                    path.unlink()
                fslib.quiet("sync", "-f", volume.mnt)
                continue
            left = offered(top)
            empty(top, volume.mnt)
            last = offered(top)
            after_first = last if after_first is None else after_first
            total += written
            differs, back = abs(written - before), abs(last - before)
            worst, worst_back = max(worst, differs), max(worst_back, back)
            slack = 4 << 20 if volume.size < SMALL else before // 100
            if differs > slack:
                wrong.append(f"round {n}: {written} bytes written, {before} offered, {left} still offered at ENOSPC")
            if back > before // 500:
                wrong.append(f"round {n}: {before} bytes offered before, {last} afterwards")
        if after_first is not None and last != after_first:
            wrong.append(f"{after_first} bytes offered after the first round, {last} after the last")
        took = time.monotonic() - start
        volume.umount()
        code, text = volume.fsck("-f", "-n")
        if code:
            wrong.append(f"fsck: {code}: {text.strip()[-300:]}")
    finally:
        volume.force_down()
        volume.image.unlink(missing_ok=True)
    print(
        f"{volume.size >> 20:5} MiB {domains:2} domains {writers} writers: {total / args.rounds / (1 << 20):8.1f} MiB a round,"
        f" written and offered differ by {worst / (1 << 20):.2f} MiB at most, df before and after by"
        f" {worst_back / (1 << 10):.0f} KiB, last and first by {abs(last - (after_first or 0)) >> 10} KiB, {took:.0f} s"
        f" {'ok' if not wrong else 'FAILED'}",
        flush=True,
    )
    for why in wrong:
        print(f"      {why}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, default=[64, 600, 4096], metavar="MIB,...")
    parser.add_argument("--domains", type=numbers, default=[1, 2, 8], metavar="N,...")
    parser.add_argument("--writers", type=numbers, default=[1, 4], metavar="N,...")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    need = (max(args.sizes) + 256) << 20
    if "BRAIDFS_TMP" not in os.environ and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2 * need:
        os.environ["BRAIDFS_TMP"] = "/dev/shm"
    failed = 0
    try:
        fslib.build()
        with fslib.Workspace(need_bytes=need) as space:
            for size in args.sizes:
                for domains in args.domains:
                    for writers in args.writers:
                        volume = space.braidfs(f"v{size}-{domains}-{writers}", size << 20)
                        failed += bool(rounds(volume, args, domains, writers))
    except (Failed, OSError) as error:
        print(f"fill-rounds: {error}", file=sys.stderr)
        return 1
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
