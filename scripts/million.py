#!/usr/bin/env python3
"""A million files in one directory of a mounted volume, on braidfs and on ext4: what each costs, by parts of an eighth.

usage: million.py [FILES] [SYSTEM...]    default 1000000; systems: braidfs, ext4 (root)

Creates empty files, then removes them as rm(1) does, in the order of their inode numbers. Prints wall time and the daemon's
CPU time per file for each part; then how the last creates compare with the first, and an unlink with one of a directory
that has a tenth of the files. `BRAIDFS_TMP` names the directory of the image: one in memory measures the file system and
not the disk. Exit code 1 where the daemon's CPU time grows by more than 1.4 (creates) or 1.2 (unlinks).
"""

import os
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
from fslib import Failed, Workspace  # noqa: E402

# An inode per 16 KiB: room for a million and a quarter.
SIZE = 20 << 30
PARTS = 8
CREATES, UNLINKS = 1.4, 1.2
TICKS = os.sysconf("SC_CLK_TCK")


def daemon_cpu(volume):
    """CPU time of the daemon so far, seconds; 0 where there is none."""
    spent = 0
    for pid in getattr(volume, "daemons", list)():
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            words = stat.read().rsplit(")", 1)[1].split()
        spent += int(words[11]) + int(words[12])
    return spent / TICKS


def part(volume, what, files, each):
    """Does `each` with all of `files`; microseconds per file, by the clock and of the daemon's CPU time."""
    cpu, begun = daemon_cpu(volume), time.monotonic()
    for one in files:
        each(one)
    wall = (time.monotonic() - begun) / len(files) * 1e6
    cpu = (daemon_cpu(volume) - cpu) / len(files) * 1e6
    print(f"{volume.kind:8} {what}: {wall:7.1f} us a file, daemon {cpu:6.1f} us of CPU time", flush=True)
    return wall, cpu


def cut(files):
    step = len(files) // PARTS
    return [files[i * step : (i + 1) * step] for i in range(PARTS)]


def directory(volume, name, files):
    """Fills a directory and empties it; the costs of the parts of both."""
    path = volume.mnt / name
    path.mkdir()
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def create(i):
        os.close(os.open(f"file-{i:07}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=at))

    made = [part(volume, f"create {i + 1}/{PARTS} of {files}", p, create) for i, p in enumerate(cut(range(files)))]
    os.sync() if volume.kind == "ext4" else os.fsync(at)
    found = sorted((e.inode(), e.name) for e in os.scandir(path))
    if len(found) != files:
        raise Failed(f"{len(found)} names listed of {files}")
    gone = [
        part(volume, f"unlink {i + 1}/{PARTS} of {files}", p, lambda f: os.unlink(f[1], dir_fd=at))
        for i, p in enumerate(cut(found))
    ]
    os.close(at)
    path.rmdir()
    return made, gone


def mean(costs, which):
    return sum(c[which] for c in costs) / len(costs)


def measure(volume, files):
    """Whether the daemon's CPU time per file stays within its bounds."""
    volume.mkfs()
    volume.mount("noatime")
    directory(volume, "warm", files // 10)
    _, few = directory(volume, "few", files // 10)
    made, gone = directory(volume, "many", files)
    good = True
    for which, name in enumerate(("wall time", "daemon's CPU time")):
        if mean(few, which) == 0:
            continue
        creates, unlinks = made[-1][which] / made[0][which], mean(gone, which) / mean(few, which)
        print(f"{volume.kind:8} {name}: last creates {creates:.2f} of the first, unlink {unlinks:.2f} of {files // 10} files")
        good = good and (which == 0 or (creates <= CREATES and unlinks <= UNLINKS))
    volume.umount()
    return good


def main():
    words = sys.argv[1:]
    files = int(words.pop(0)) if words and words[0].isdigit() else 1_000_000
    systems = words or ["braidfs", "ext4"]
    fslib.log_to(fslib.ROOT / "target" / "million.log")
    fslib.build()
    good = True
    with Workspace(SIZE // 4) as space:
        for system in systems:
            why = fslib.why_no_ext4() if system == "ext4" else None
            if why:
                print(f"{system} left out: {why}")
                continue
            volume = space.ext4("ext4", SIZE) if system == "ext4" else space.braidfs("braidfs", SIZE)
            good = measure(volume, files) and good
            volume.force_down()
            volume.image.unlink(missing_ok=True)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"million: {error}")
