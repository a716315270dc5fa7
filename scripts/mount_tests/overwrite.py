"""Overwrites that are synced, on a RAM-backed device: the requests to the server and the device's writes and flushes."""

import json
import os
import pathlib
import time

import fslib
from fslib import run
from mount_tests.common import check, must, same
from mount_tests.fsync import in_memory, opened, overwrite

N = 1000


def asked_of_device(device):
    """Requests to a block device so far that write or only flush, sectors written, and flushes; a write that the kernel follows
    with a flush counts once as the one and once as the other (Documentation/block/stat.rst)."""
    numbers = [int(n) for n in pathlib.Path(f"/sys/block/{pathlib.Path(device).name}/stat").read_text().split()]
    return numbers[4], numbers[6], numbers[15]


def has_rings():
    """Whether the daemon may use io_uring for the device: then a write carries its flush."""
    disabled = pathlib.Path("/proc/sys/kernel/io_uring_disabled")
    return not disabled.exists() or disabled.read_text().strip() == "0"


def requests(fast):
    ops = json.loads(run(fast.binary, "stats", "--json", fast.mnt)[1])["operations"]
    return {op["name"]: op["requests"] for op in ops}


def cost(fast, fd, times=N, sync=os.fsync):
    """Of so many overwrites and syncs: requests by operation; of the device requests, blocks and flushes; its seconds."""
    before, asked = asked_of_device(fast.image), requests(fast)
    _, seconds = overwrite(fd, times, sync)
    now, after = asked_of_device(fast.image), requests(fast)
    asked_of, sectors, flushes = (b - a for a, b in zip(before, now))
    return {k: n - asked.get(k, 0) for k, n in after.items()}, (asked_of, sectors // 8, flushes), seconds * times


def settled(fast, fd):
    """Overwrites until one block is written for each: once where the blocks lie is durable. Nobody says so: that many
    would gain by a commit brings one at once, else the interval does."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        _, (_, blocks, _), seconds = cost(fast, fd, 100)
        # a record with each tick of the clock, and one commit
        if blocks <= 100 + 2 * (seconds * 250 + 1) + 30:
            return
    must(False, f"100 overwrites and fsyncs still take {blocks} blocks")


@check
def an_overwrite_is_written_once(volume, _top):
    """A thousand overwrites and fsyncs: as many blocks and flushes, and a record for each tick of the kernel's clock; a write
    and its flush are one request."""
    with in_memory(volume) as (fast, _bare):
        fd = opened(fast.mnt / "file")
        settled(fast, fd)
        asked, (of_device, blocks, flushes), seconds = cost(fast, fd)
        figures = f"{of_device} requests to the device, {blocks} blocks, {flushes} flushes"
        fslib.log(f"{N} overwrites and fsyncs: {figures} in {seconds:.2f} s; {asked}")
        same((asked["WRITE"], asked["FSYNC"]), (N, N), "requests")
        ticks = seconds * 300 + 10
        # the interval's commits: some writes and two flushes each
        commits = seconds + 2
        must(N <= blocks <= N + 2 * ticks + 40 * commits, f"{blocks} blocks, about {ticks:.0f} ticks")
        must(N <= flushes <= N + ticks + 3 * commits, f"{flushes} flushes")
        most = (N if has_rings() else 2 * N) + 2 * ticks + 20 * commits
        must(N <= of_device <= most, f"{of_device} requests to the device, at most {most:.0f} expected")
        _, (_, blocks, _), seconds = cost(fast, fd, sync=os.fdatasync)
        must(blocks <= N + 40 * (seconds + 2), f"{blocks} blocks of {N} overwrites and fdatasyncs: times are left out")
        os.close(fd)


@check
def a_preallocated_file_is_synced_in_few_steps(volume, _top):
    """What posix_fallocate gave a file is written and synced: the data with its flush, and the record with its own. Once it is
    written, the data alone."""
    with in_memory(volume) as (fast, _bare):
        fd = os.open(fast.mnt / "log", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, N * 4096)
        os.fsync(fd)
        for steps in (2, 1):
            turn = 3 - steps
            run("sync", "-f", fast.mnt)
            before = asked_of_device(fast.image)
            began = time.monotonic()
            for n in range(N):
                os.pwrite(fd, bytes([n % 250 + turn]) * 4096, n * 4096)
                os.fdatasync(fd)
            seconds = time.monotonic() - began
            of_device, _, flushes = (b - a for a, b in zip(before, asked_of_device(fast.image)))
            fslib.log(f"{N} preallocated blocks, each synced, turn {turn}: {of_device} requests, {flushes} flushes, {seconds:.2f} s")
            if not has_rings():
                steps = 2 * steps
            must(of_device <= steps * N + 60 * (seconds + 2), f"{of_device} requests to the device, turn {turn}")
            must(flushes <= steps * N + 20 * (seconds + 2), f"{flushes} flushes, turn {turn}")
        os.close(fd)
        run("umount", fast.mnt)
        fast.mount()
        with open(fast.mnt / "log", "rb") as file:
            must(all(file.read(4096) == bytes([n % 250 + 2]) * 4096 for n in range(N)), "content")


@check
def overwrite_log_never_writes_in_place(volume, _top):
    with in_memory(volume, "overwrite=log") as (fast, _bare):
        fd = opened(fast.mnt / "file")
        time.sleep(1.2)
        _, (_, blocks, flushes), _ = cost(fast, fd)
        os.close(fd)
        must(blocks >= 2 * N and flushes >= N, f"{blocks} blocks, {flushes} flushes of {N} overwrites and fsyncs")
