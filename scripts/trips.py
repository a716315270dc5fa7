#!/usr/bin/env python3
"""What a request to the server takes, as its caller sees it: statx(AT_STATX_FORCE_SYNC), one GETATTR each.

    scripts/trips.py [--binary BRAIDFS] [--seconds S] [--rounds N] [--only NAME,...] [-o OPTIONS]
                     [--also DIR]...

For a mount by io_uring and one by /dev/fuse, in turn, and for each further directory (of another file system that asks a
server, for comparison): one client, bound to a CPU or not, two and four; one beside a process that takes all it can get of
its CPU; one beside 64 that write 4 KiB and fsync, on its CPU. Root; volumes are on RAM-backed loop devices. Prints the
median over the rounds of each figure: requests per second of all clients, and p50, p99 and the longest trip in µs.
"""

import argparse
import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import fslib

AT_EMPTY_PATH, AT_STATX_FORCE_SYNC, STATX_SIZE = 0x1000, 0x2000, 0x200
SYNCERS = 64
LIBC = ctypes.CDLL(None, use_errno=True)
FIGURES = struct.Struct("4d")

# name: clients, bound to CPUs, what runs beside them
CELLS = {
    "one": (1, False, None),
    "one-bound": (1, True, None),
    "two-bound": (2, True, None),
    "two": (2, False, None),
    "four": (4, False, None),
    "hog": (1, True, "hog"),
    "fsyncs": (1, True, "fsyncs"),
}


def trips(path, seconds):
    """(per second, p50, p99, longest) of one client."""
    fd = os.open(path, os.O_RDONLY)
    out, empty = ctypes.create_string_buffer(256), b""
    statx, clock, took = LIBC.statx, time.perf_counter_ns, []
    end = clock() + int(seconds * 1e9)
    flags = AT_EMPTY_PATH | AT_STATX_FORCE_SYNC
    began = now = clock()
    while now < end:
        if statx(fd, empty, flags, STATX_SIZE, out):
            raise OSError(ctypes.get_errno(), "statx")
        then, now = now, clock()
        took.append(now - then)
    took.sort()
    n = len(took)
    return n / ((now - began) / 1e9), took[n // 2] / 1e3, took[n * 99 // 100] / 1e3, took[-1] / 1e3


def child(function):
    """Runs it in a process of its own; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the process ends here
            print(f"trips: {error!r}", file=sys.stderr)
        os._exit(0)
    return pid


def bind(cpu):
    os.sched_setaffinity(0, {cpu})


def hog(cpu):
    bind(cpu)
    while True:
        pass


def syncer(path, cpu):
    bind(cpu)
    fd, page = os.open(path, os.O_RDWR | os.O_CREAT), b"x" * 4096
    while True:
        os.pwrite(fd, page, 0)
        os.fsync(fd)


@contextlib.contextmanager
def beside(what, top, cpu):
    """Other processes, as long as it lasts."""
    pids = []
    if what == "hog":
        pids = [child(lambda: hog(cpu))]
    elif what == "fsyncs":
        pids = [child(lambda n=n: syncer(top / f"trips-{n}", cpu)) for n in range(SYNCERS)]
    try:
        if pids:
            time.sleep(0.5)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def measure(top, clients, bound, other, seconds):
    """Of all clients: their sum per second, mean p50, largest p99 and longest trip."""
    path, cpus = top / "trips", sorted(os.sched_getaffinity(0))
    path.write_bytes(b"x")
    with beside(other, top, cpus[0]):
        pipes = []
        for n in range(clients):
            r, w = os.pipe()

            def client(n=n, w=w):
                if bound:
                    bind(cpus[n % len(cpus)])
                trips(path, 0.3)
                os.write(w, FIGURES.pack(*trips(path, seconds)))

            pipes.append((child(client), r))
            os.close(w)
        found = []
        for pid, r in pipes:
            data = os.read(r, FIGURES.size)
            os.close(r)
            os.waitpid(pid, 0)
            found.append(FIGURES.unpack(data))
    rate, p50, p99, longest = zip(*found)
    return sum(rate), statistics.mean(p50), max(p99), max(longest)


@contextlib.contextmanager
def mounted(binary, transport, options, folder):
    """A volume on a RAM-backed loop device."""
    image, top = folder / "image", folder / transport
    with open(image, "wb") as file:
        file.truncate(1 << 30)
    top.mkdir()
    device = fslib.run("losetup", "--find", "--show", image)[1].strip()
    try:
        fslib.run(binary, "mkfs", "--quiet", "--force", device)
        with fslib.rings(True) if transport == "ring" else contextlib.nullcontext():
            fslib.run(binary, "mount", "-o", ",".join([f"transport={transport}", *options]), device, top)
        try:
            yield top
        finally:
            fslib.run("umount", top)
    finally:
        fslib.run("losetup", "--detach", device, ok=None)
        top.rmdir()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, help="default: BRAIDFS_BIN, or the release build")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    parser.add_argument("-o", "--options", action="append", default=[], help="of both mounts")
    parser.add_argument("--also", type=pathlib.Path, action="append", default=[], metavar="DIR")
    return parser.parse_args()


def main():
    args = arguments()
    binary = args.binary or fslib.braidfs_binary()
    why = fslib.why_no_rings()
    if not fslib.IS_ROOT or why:
        sys.exit(f"trips: {why or 'needs root'}")
    cells = {name: CELLS[name] for name in args.only.split(",")}
    found = {}
    folder = pathlib.Path(tempfile.mkdtemp(prefix="trips-", dir="/dev/shm"))
    try:
        for _ in range(args.rounds):
            for transport in ("ring", "dev"):
                with mounted(binary, transport, args.options, folder) as top:
                    for name, cell in cells.items():
                        found.setdefault((name, transport), []).append(measure(top, *cell, args.seconds))
            for top in args.also:
                for name, cell in cells.items():
                    found.setdefault((name, str(top)), []).append(measure(top, *cell, args.seconds))
    except (subprocess.SubprocessError, fslib.Failed) as error:
        sys.exit(f"trips: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'':12}{'':28}{'/s':>10}{'p50':>9}{'p99':>9}{'longest':>10}")
    for (name, where), rounds in sorted(found.items(), key=lambda f: list(cells).index(f[0][0])):
        rate, p50, p99, longest = (statistics.median(figures) for figures in zip(*rounds))
        print(f"{name:12}{where:28}{rate:10.0f}{p50:9.1f}{p99:9.1f}{longest:10.1f}")


if __name__ == "__main__":
    main()
