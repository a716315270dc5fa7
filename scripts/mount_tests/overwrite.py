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
    """Writes, sectors written and flushes of a block device so far (Documentation/block/stat.rst, where a flush counts as a
    write, too)."""
    numbers = [int(n) for n in pathlib.Path(f"/sys/block/{pathlib.Path(device).name}/stat").read_text().split()]
    return numbers[4] - numbers[15], numbers[6], numbers[15]


def requests(fast):
    ops = json.loads(run(fast.binary, "stats", "--json", fast.mnt)[1])["operations"]
    return {op["name"]: op["requests"] for op in ops}


def cost(fast, fd, times=N, sync=os.fsync):
    """Of so many overwrites and syncs: requests by operation; writes, blocks and flushes of the device; its seconds."""
    before, asked = asked_of_device(fast.image), requests(fast)
    _, seconds = overwrite(fd, times, sync)
    now, after = asked_of_device(fast.image), requests(fast)
    writes, sectors, flushes = (b - a for a, b in zip(before, now))
    return {k: n - asked.get(k, 0) for k, n in after.items()}, (writes, sectors // 8, flushes), seconds * times


def settled(fast, fd):
    """Overwrites until the device is asked for one write each: once where the blocks lie is durable. Nobody says so: that many
    would gain by a commit brings one at once, else the interval does."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        _, (writes, _, _), seconds = cost(fast, fd, 100)
        # a record with each tick of the clock, and one commit
        if writes <= 100 + 2 * (seconds * 250 + 1) + 30:
            return
    must(False, f"100 overwrites and fsyncs still take {writes} writes")


@check
def an_overwrite_is_written_once(volume, _top):
    """A thousand overwrites and fsyncs: as many writes and flushes, and a record for each tick of the kernel's clock."""
    with in_memory(volume) as (fast, _bare):
        fd = opened(fast.mnt / "file")
        settled(fast, fd)
        asked, (writes, blocks, flushes), seconds = cost(fast, fd)
        fslib.log(f"{N} overwrites and fsyncs: {writes} writes, {blocks} blocks, {flushes} flushes in {seconds:.2f} s; {asked}")
        same((asked["WRITE"], asked["FSYNC"]), (N, N), "requests")
        ticks = seconds * 300 + 10
        # the interval's commits: some writes and two flushes each
        commits = seconds + 2
        must(N <= writes <= N + ticks + 12 * commits, f"{writes} writes, about {ticks:.0f} ticks")
        must(blocks <= N + 2 * ticks + 40 * commits, f"{blocks} blocks")
        must(N <= flushes <= N + 3 * commits, f"{flushes} flushes")
        _, (writes, _, _), seconds = cost(fast, fd, sync=os.fdatasync)
        must(writes <= N + 12 * (seconds + 2), f"{writes} writes of {N} overwrites and fdatasyncs: times are left out")
        os.close(fd)


@check
def overwrite_log_never_writes_in_place(volume, _top):
    with in_memory(volume, "overwrite=log") as (fast, _bare):
        fd = opened(fast.mnt / "file")
        time.sleep(1.2)
        _, (writes, _, flushes), _ = cost(fast, fd)
        os.close(fd)
        must(writes >= 2 * N and flushes >= N, f"{writes} writes, {flushes} flushes of {N} overwrites and fsyncs")
