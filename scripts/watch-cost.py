#!/usr/bin/env python3
"""make watch-cost: what watching costs small requests on a mount. The same requests, one way after the other in each round:

off      nothing is counted (BRAIDFS_NOT_COUNTED, for this comparison only)
default  each request is counted, one in 16 is timed
watched  `braidfs top` looks every second: each is timed
metrics  somebody fetches the metrics every second
slow     slow=1000: the clock is read for each

Prints medians of what a request takes, and of the CPU that the server takes for it, with the quartiles of their ratios to
`off` of the same round.

With `--instructions` (make watch-instructions; needs valgrind) the server runs under cachegrind, which counts the
instructions that it executes for a request: nearly the same on a busy machine. Those of the kernel are not among them."""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from counted_server import BINARY, built, counted_server

LOAD = r"""
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void must(int ok) { if (!ok) { perror("load"); exit(1); } }

int main(int argc, char **argv)
{
	long n = atol(argv[3]), round = atol(argv[4]);
	char name[256], block[4096] = {1};
	struct stat st;
	struct timespec a, b;
	must(argc == 5 && chdir(argv[1]) == 0);
	int fd = open("file", O_RDWR | O_CREAT, 0600);
	must(fd >= 0);
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (long i = 0; i < n; i++) {
		/* a name that the kernel has not asked for yet */
		snprintf(name, sizeof name, "n%ld-%ld", round, i);
		if (!strcmp(argv[2], "lookup"))
			must(stat(name, &st) < 0 && errno == ENOENT);
		else if (!strcmp(argv[2], "create"))
			must(mknod(name, S_IFREG | 0600, 0) == 0 && unlink(name) == 0);
		else
			must(pwrite(fd, block, sizeof block, i % 64 * 4096) == 4096 && fdatasync(fd) == 0);
	}
	clock_gettime(CLOCK_MONOTONIC, &b);
	printf("%f\n", (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9);
}
"""
LOADS = {"lookup": 30000, "create": 8000, "sync": 2000}
WAYS = ["off", "default", "watched", "metrics", "slow"]


def cpu_of(pid):
    """Seconds on a CPU, in nanoseconds' resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9


def server_of(mnt):
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            args = (proc / "cmdline").read_bytes().split(b"\0")
            if str(mnt).encode() in args and b"mount" in args:
                return int(proc.name)
    sys.exit(f"watch-cost: nobody serves {mnt}")


@contextlib.contextmanager
def somebody(way, mnt, port):
    """Who looks meanwhile."""
    if way == "watched":
        top = subprocess.Popen([BINARY, "top", "--batch", "-d", "1", str(mnt)], stdout=subprocess.DEVNULL)
        time.sleep(0.3)
        yield
        top.terminate()
        top.wait()
    elif way == "metrics":
        end = threading.Event()

        def fetch():
            while True:
                with socket.create_connection(("127.0.0.1", port)) as s:
                    s.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                    while s.recv(65536):
                        pass
                if end.wait(1):
                    return

        thread = threading.Thread(target=fetch)
        thread.start()
        yield
        end.set()
        thread.join()
    else:
        yield


def measure(mounts, load, rounds):
    took = {load_name: {way: [] for way in WAYS} for load_name in LOADS}
    for n in range(rounds):
        for name, times in LOADS.items():
            # in another order each time
            for way in WAYS[n % len(WAYS) :] + WAYS[: n % len(WAYS)]:
                mnt, pid, port = mounts[way]
                with somebody(way, mnt, port):
                    before = cpu_of(pid)
                    out = subprocess.run([load, mnt, name, str(times), str(n)], check=True, capture_output=True, text=True)
                    cpu = cpu_of(pid) - before
                took[name][way].append((float(out.stdout) / times * 1e6, cpu / times * 1e6))
    return took


def executed(way, work, load, name, times, fetches=1):
    """Instructions of the server from its start to its end, with so many requests of this kind. `metrics`: they are fetched
    once, before the requests: what a fetch costs is by the second, and not by the request (the last row)."""
    address = work / "metrics"
    more = {"slow": ",slow=1000", "metrics": f",metrics=unix:{address}"}.get(way, "")
    with counted_server(work, more, {"BRAIDFS_NOT_COUNTED": "1"} if way == "off" else {}) as counted:
        top = None
        if way == "watched":
            # looks once; each request is timed meanwhile
            top = subprocess.Popen([BINARY, "top", "--batch", "-d", "60", counted.mnt], stdout=subprocess.DEVNULL)
            time.sleep(2)
        elif way == "metrics":
            for _ in range(fetches):
                fetch(address)
        subprocess.run([load, counted.mnt, name, str(times), "0"], check=True, capture_output=True)
        if top:
            top.terminate()
            top.wait()
    return counted.instructions


def fetch(address):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(address))
        s.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b""
        while part := s.recv(65536):
            text += part
    if not text.endswith(b"# EOF\n"):
        sys.exit("watch-cost: the metrics do not end")


def count(work, load):
    few, many, rounds = 200, 2200, 3
    print("| request | way | instructions each | more than off |\n|---|---|---|---|")
    for name in LOADS:
        off = None
        for way in WAYS:
            both = [[executed(way, work, load, name, times) for times in (few, many)] for _ in range(rounds)]
            each = statistics.median(b - a for a, b in both) / (many - few)
            off = each if off is None else off
            print(f"| {name} | {way} | {each:.0f} | {each - off:+.0f} |", flush=True)
    fetched = [executed("metrics", work, load, "lookup", few, fetches) for fetches in (1, 11)]
    print(f"| metrics, fetched once | | {(fetched[1] - fetched[0]) / 10:.0f} | |")


def main():
    instructions = "--instructions" in sys.argv
    rounds = next((int(a) for a in sys.argv[1:] if a.isdigit()), 10)
    with tempfile.TemporaryDirectory(prefix="braidfs-watch-", dir="/var/tmp") as work, contextlib.ExitStack() as stack:
        load = built(Path(work) / "load", LOAD)
        if instructions:
            count(Path(work), load)
            return
        mounts = {}
        for way in WAYS:
            image, mnt = Path(work) / f"{way}.img", Path(work) / way
            mnt.mkdir()
            subprocess.run([BINARY, "mkfs", "--quiet", "--size", "512M", image], check=True)
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            options = {"metrics": f"metrics={port}", "slow": "slow=1000"}.get(way, "rw")
            env = dict(os.environ, **({"BRAIDFS_NOT_COUNTED": "1"} if way == "off" else {}))
            subprocess.run([BINARY, "mount", "-o", options, image, mnt], check=True, env=env)
            stack.callback(subprocess.run, ["umount", mnt], check=True)
            mounts[way] = (mnt, server_of(mnt), port)
        took = measure(mounts, load, rounds)
    print("| request | way | µs each | to off | server's CPU, µs | to off |\n|---|---|---|---|---|---|")
    for name in LOADS:
        for way in WAYS:
            cells = []
            for which in (0, 1):
                values = [t[which] for t in took[name][way]]
                ratios = [t[which] / o[which] for t, o in zip(took[name][way], took[name]["off"])]
                low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                cells += [f"{statistics.median(values):.2f}", f"{middle:.3f} ({low:.3f} to {high:.3f})"]
            print(f"| {name} | {way} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
