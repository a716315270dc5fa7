#!/usr/bin/env python3
"""A million files in one directory of a mounted volume, or ten million in a tree, on braidfs and on ext4: what each costs,
by parts of an eighth.

usage: million.py [--tree] [FILES] [SYSTEM...]    default 1000000, of a tree 10000000; systems: braidfs, ext4 (root)

One directory: creates empty files, then removes them as rm(1) does, in the order of their inode numbers. Prints wall time and
the daemon's CPU time per file for each part; then how the last creates compare with the first, and an unlink with one of a
directory that has a tenth of the files. Exit code 1 where the daemon's CPU time grows by more than 1.4 (creates) or 1.2
(unlinks).

A tree: directories of 1,000 files, two levels of them. Beside that: look-ups of one file in a hundred, with nothing cached, when
an eighth is there and when all are; the daemon's memory at the end of each part, of which its cache may be `CACHE`; a mount
after `kill -9` in the middle of creates (of ext4: of a copy of the image); fsck. Exit code 1 where the daemon's CPU time grows by
more than 1.4, its memory is more than what the cache may take and `BESIDE`, or a check finds something. After each part the
kernel is made to forget the inodes that it knows, of the whole machine: it would keep a KiB of each.

`BRAIDFS_TMP` names the directory of the image: one in memory measures the file system and not the disk. A tree of ten
million takes 5 GiB of room and most of an hour.
"""

import os
import pathlib
import random
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
from fslib import Failed, Workspace  # noqa: E402

# An inode per 16 KiB: room for a million and a quarter.
SIZE = 20 << 30
PARTS = 8
CREATES, UNLINKS, LOOKUPS = 1.4, 1.2, 1.4
# Of a tree: files of a directory, directories of one above, of how many files one is looked up.
PER_DIR, DIRS, SPARSE = 1000, 100, 100
# Memory of the daemon: what `cache=` gives it; the process itself and buffers, as in crates/engine/tests/memory.rs; and for
# each file of a part, which the kernel knows until it is made to forget (docs/architecture.md, "counted").
CACHE, BESIDE, KNOWN = 512 << 20, 64 << 20, 40
# Seconds of creates before a crash.
LOAD = 10
TICKS = os.sysconf("SC_CLK_TCK")


def daemon_cpu(volume):
    """CPU time of the daemon so far, seconds; 0 where there is none."""
    spent = 0
    for pid in getattr(volume, "daemons", list)():
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            words = stat.read().rsplit(")", 1)[1].split()
        spent += int(words[11]) + int(words[12])
    return spent / TICKS


def own_cpu():
    spent = os.times()
    return spent.user + spent.system


def part(volume, what, files, each, per=1):
    """Does `each` with all of `files`, each of which stands for `per`; microseconds per file, by the clock, and of CPU time
    of the daemon and of this process with the kernel's work for it."""
    cpu, own, begun = daemon_cpu(volume), own_cpu(), time.monotonic()
    for one in files:
        each(one)
    us = 1e6 / len(files) / per
    wall = (time.monotonic() - begun) * us
    cpu, own = (daemon_cpu(volume) - cpu) * us, (own_cpu() - own) * us
    print(f"{volume.kind:8} {what}: {wall:7.1f} us a file, CPU time: daemon {cpu:6.1f} us, program {own:6.1f} us", flush=True)
    return wall, cpu, own


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


def measure_directory(volume, files):
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


def growth(volume, what, first, last, most):
    """Prints how much more the last part cost; whether of CPU time of the daemon that is at most `most`."""
    ratios = [b / a if a else 0.0 for a, b in zip(first, last)]
    print(f"{volume.kind:8} {what}: last {ratios[0]:.2f} of the first by wall time, "
          f"CPU time: daemon {ratios[1]:.2f}, program {ratios[2]:.2f}", flush=True)  # fmt: skip
    return ratios[1] <= most


class Tree:
    """The files of a volume, and what is measured of them."""

    def __init__(self, volume, files):
        self.volume, self.files = volume, files
        self.options = ["noatime"] + ([f"cache={CACHE}"] if volume.kind == "braidfs" else [])
        self.good, self.idle = True, 0

    def directory(self, number):
        return self.volume.mnt / f"{number // DIRS:03}" / f"{number % DIRS:02}"

    def create(self, number):
        path = self.directory(number)
        path.mkdir(parents=True)
        at = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        for i in range(number * PER_DIR, (number + 1) * PER_DIR):
            os.close(os.open(f"file-{i:08}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=at))
        os.close(at)

    def remove(self, number):
        path = self.directory(number)
        at = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        for i in range(number * PER_DIR, (number + 1) * PER_DIR):
            os.unlink(f"file-{i:08}", dir_fd=at)
        os.close(at)
        path.rmdir()

    def mount(self, what):
        """Mounts it with nothing of it cached; prints what that takes, until the root can be listed."""
        volume = self.volume
        forget(volume.image)
        own, begun = own_cpu(), time.monotonic()
        volume.mount(*self.options)
        os.listdir(volume.mnt)
        wall, cpu = time.monotonic() - begun, daemon_cpu(volume) or own_cpu() - own
        print(f"{volume.kind:8} {what}: {wall:.2f} s, {cpu:.2f} s of CPU time{self.resident()}", flush=True)

    def resident(self):
        """Memory of the daemon, as text, which is kept to its bound."""
        if self.volume.kind != "braidfs":
            return ""
        now, most = memory(self.volume)
        self.idle = self.idle or now
        bound = CACHE + self.idle + BESIDE + KNOWN * self.files // PARTS
        self.good = self.good and now <= bound
        return f", daemon's memory {now >> 20} MiB (at most so far {most >> 20}; bound {bound >> 20})"

    def parts(self, what, each, after_first=None):
        numbers, costs = cut(range(self.files // PER_DIR)), []
        for i, p in enumerate(numbers):
            costs.append(part(self.volume, f"{what} {i + 1}/{PARTS}", p, each, PER_DIR))
            print(f"{self.volume.kind:8} after it{self.resident()}", flush=True)
            let_kernel_forget(self.volume)
            if i == 0 and after_first:
                after_first(p[-1] + 1)
        return growth(self.volume, what, costs[0], costs[-1], CREATES)

    def look_up(self, directories):
        """Looks some files of so many directories up, with nothing cached."""
        self.volume.umount()
        self.mount("mount after an unmount")
        made = directories * PER_DIR
        found = [self.directory(i // PER_DIR) / f"file-{i:08}" for i in random.Random(15).sample(range(made), made // SPARSE)]
        return part(self.volume, f"look-up of {len(found)} of {made}", found, os.stat)

    def fsck(self, what, *flags):
        """Checks the image, which is not mounted; prints time and memory. /usr/bin/time, since of what this process starts
        itself its own memory would count."""
        volume, told = self.volume, self.volume.image.with_suffix(".time")
        forget(volume.image)
        command = ["e2fsck", *flags] if volume.kind == "ext4" else [volume.binary, "fsck", *flags]
        argv = ["/usr/bin/time", "-o", told, "-f", "%e %U %S %M", *command, volume.image]
        code, said = fslib.run(*argv, ok=None, timeout=3600)
        wall, user, system, kib = told.read_text().split()[-4:]
        print(f"{volume.kind:8} fsck {' '.join(flags)} {what}: {wall} s, {float(user) + float(system):.2f} s of CPU time, "
              f"{int(kib) >> 10} MiB, exit code {code}", flush=True)  # fmt: skip
        if code:
            print(said[-2000:])
        self.good = self.good and not code

    def crash(self):
        """Ends it in the middle of creates, and mounts what is there."""
        volume, directories = self.volume, self.files // PER_DIR
        volume.settle()

        def load(_told):
            for number in range(directories, 2 * directories):
                self.create(number)

        pid, reader = fslib.fork_for(load)
        os.close(reader)
        time.sleep(LOAD)
        if volume.kind == "braidfs":
            volume.kill9()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        if volume.kind == "ext4":
            # what the journal has is neither in its place nor gone from it
            os.sync()
            copy = volume.image.with_suffix(".copy")
            fslib.run("cp", "--sparse=always", volume.image, copy, timeout=1800)
            volume.umount()
            copy.replace(volume.image)
        else:
            self.fsck("after a crash", "-f", "-n")
        self.mount("mount after a crash")
        if not self.directory(directories).exists():
            raise Failed("nothing is left of what was made before the crash")
        begun, cpu = time.monotonic(), daemon_cpu(volume)
        for number in range(directories, 2 * directories):
            if not self.directory(number).exists():
                break
            for entry in os.scandir(self.directory(number)):
                os.unlink(entry.path)
            self.directory(number).rmdir()
        print(f"{volume.kind:8} removing what it had made: {time.monotonic() - begun:.1f} s, "
              f"daemon {daemon_cpu(volume) - cpu:.2f} s of CPU time{self.resident()}", flush=True)  # fmt: skip

    def check(self, what):
        self.fsck(what, "-n")
        self.fsck(what, "-f", "-n")

    def measure(self):
        """Whether all stays within its bounds."""
        volume = self.volume
        volume.inodes = self.files + self.files // 5
        volume.mkfs()
        self.mount("mount of an empty volume")
        looked = []
        self.good &= self.parts("create", self.create, lambda made: looked.append(self.look_up(made)))
        looked.append(self.look_up(self.files // PER_DIR))
        self.good &= growth(volume, "look-up", *looked, LOOKUPS)
        volume.umount()
        self.check(f"of {self.files} files")
        self.mount("mount of all files")
        self.crash()
        volume.umount()
        self.check("after that")
        self.mount("mount of all files")
        self.good &= self.parts("unlink", self.remove)
        volume.umount()
        self.check("of what is left")
        return self.good


def memory(volume):
    """Resident memory of the daemon, now and at most, bytes."""
    told = pathlib.Path(f"/proc/{volume.daemon()}/status").read_text()
    words = dict(line.split(":", 1) for line in told.splitlines())
    return tuple(int(words[w].split()[0]) << 10 for w in ("VmRSS", "VmHWM"))


def forget(image):
    """Has the kernel drop what it holds of an image's content."""
    fd = os.open(image, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def let_kernel_forget(volume):
    """Has the kernel forget inodes and names, and waits until the daemon has been told."""
    cpu, begun, now = daemon_cpu(volume), time.monotonic(), -1
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("2")
    while now != (now := daemon_cpu(volume)) and time.monotonic() < begun + 60:
        time.sleep(0.5)
    if now:
        print(f"{volume.kind:8} told to forget them: daemon {now - cpu:.2f} s of CPU time{memory_now(volume)}", flush=True)


def memory_now(volume):
    return f", its memory then {memory(volume)[0] >> 20} MiB"


def main():
    words = sys.argv[1:]
    tree = words[:1] == ["--tree"] and bool(words.pop(0))
    files = int(words.pop(0)) if words and words[0].isdigit() else 10_000_000 if tree else 1_000_000
    systems = words or ["braidfs", "ext4"]
    if tree and (files % (PER_DIR * PARTS) or not fslib.IS_ROOT):
        raise Failed(f"a tree has a multiple of {PER_DIR * PARTS} files, and needs root")
    size = max(files << 12, 1 << 30) if tree else SIZE
    fslib.log_to(fslib.ROOT / "target" / "million.log")
    fslib.build()
    good = True
    with Workspace(size // 4) as space:
        for system in systems:
            why = fslib.why_no_ext4() if system == "ext4" else None
            if why:
                print(f"{system} left out: {why}")
                continue
            volume = space.ext4("ext4", size) if system == "ext4" else space.braidfs("braidfs", size)
            good = (Tree(volume, files).measure() if tree else measure_directory(volume, files)) and good
            volume.force_down()
            volume.image.unlink(missing_ok=True)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"million: {error}")
