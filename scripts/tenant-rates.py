#!/usr/bin/env python3
"""make tenant-rates: rates of tenants of a mounted volume, in real time: the machine has to be quiet.

usage: tenant-rates.py [SECONDS]    default 10, of each case

Programs write and read as fast as they are let: through the kernel's cache and past it, one and eight of them, large and small
pieces, with fsync and without. What they did, and what the volume says that it asked of the device, is within 5 % of the rate; beside
them a neighbour syncs small files, and how long each took is told. Exit code 1 where a rate does not hold, or a byte is not what was
written.
"""

import functools
import json
import mmap
import os
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
from fslib import Failed, run  # noqa: E402

MIB = 1 << 20
SIZE = 3072 * MIB
FILE = 64 * MIB
# not to be overwritten in the cache: that is paid for each time, and written once
LONG = 512 * MIB


def child(begin, until):
    """Runs the work that `begin` gives again and again until that time, in a process of its own; a pipe tells what it did."""

    def again_and_again(pipe):
        try:
            work, done, longest = begin(), 0, 0.0
            while (before := time.monotonic()) < until:
                done += work()
                longest = max(longest, time.monotonic() - before)
            answer = [done, longest]
        except BaseException as error:  # the parent tells it
            answer = [repr(error), 0]
        os.write(pipe, json.dumps(answer).encode())

    return fslib.fork_for(again_and_again)


def ended(pid, reader):
    with os.fdopen(reader, "rb") as told:
        answer = told.read()
    _, status = os.waitpid(pid, 0)
    if status or not answer:
        raise Failed(f"a load ended with {os.waitstatus_to_exitcode(status)}: the log says of what")
    done, longest = json.loads(answer)
    if isinstance(done, str):
        raise Failed(done)
    return done, longest


def writer(top, number, size, direct, sync):
    """Writes a file from its start to its end, again and again."""
    flags = os.O_CREAT | os.O_RDWR | (os.O_DIRECT if direct else 0)
    fd = os.open(top / f"w{number}", flags, 0o600)
    page = mmap.mmap(-1, size)
    page.write(bytes([number + 1]) * size)
    at = 0

    def work():
        nonlocal at
        n = os.pwrite(fd, page, at)
        at = (at + n) % (FILE if sync or direct else LONG)
        if sync:
            os.fdatasync(fd)
        return n

    return work


def reader(top, number, size, direct):
    fd = os.open(top / f"r{number}", os.O_RDONLY | (os.O_DIRECT if direct else 0))
    page, at = mmap.mmap(-1, size), 0

    def work():
        nonlocal at
        if at == 0 and not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        n = os.preadv(fd, [page], at)
        if n != size or page[0] != number + 1 or page[size - 1] != number + 1:
            raise Failed(f"{n} bytes of {size} at {at}: not what was written")
        at = (at + n) % FILE
        return n

    return work


def neighbour(top):
    fd = os.open(top / "other", os.O_CREAT | os.O_WRONLY, 0o600)

    def work():
        os.pwrite(fd, b"x" * 4096, 0)
        os.fdatasync(fd)
        return 1

    return work


def tenant(own):
    _, text = run(own.binary, "tenant", "show", "--json", own.mnt, "t")
    return json.loads(text)["rates"]


def case(own, name, option, rate, works, seconds):
    """`works` at `rate` of `option`, for so long."""
    run(own.binary, "tenant", "set", f"--{option}", f"{rate}/{rate // 10}", own.mnt, "t")
    way = "read" if option.startswith("read") else "written"
    unit = "bytes" if option.endswith("bps") else "requests"
    before, begin = tenant(own)[way], time.monotonic()
    until = begin + seconds
    other = child(lambda: neighbour(own.mnt), until)
    did = sum(ended(*c)[0] for c in [child(w, until) for w in works])
    # what they had begun is theirs, too
    took = time.monotonic() - begin
    syncs, longest = ended(*other)
    os.sync()
    now = tenant(own)[way]
    run(own.binary, "tenant", "set", f"--{option}", "none", own.mnt, "t")
    asked = now[unit] - before[unit]
    kept = asked / took / rate
    called = f"{did / took / MIB:.1f} MiB/s of calls"
    print(
        f"{name}: {100 * kept:.1f} % of the rate, {called}, {now['waits'] - before['waits']} calls waited; "
        f"the neighbour {syncs / took:.0f} fsyncs/s, the longest {1000 * longest:.1f} ms",
        flush=True,
    )
    return abs(kept - 1) <= 0.05


def measure(own, seconds):
    """Names of the cases in which a rate did not hold."""
    own.mkfs("--domains", "2")
    own.mount()
    run(own.binary, "tenant", "create", own.mnt / "t")
    top = own.mnt / "t"
    for n in range(8):
        (top / f"r{n}").write_bytes(bytes([n + 1]) * FILE)
    os.sync()
    write = lambda n, **how: [functools.partial(writer, top, k, **how) for k in range(n)]  # noqa: E731
    read = lambda n, **how: [functools.partial(reader, top, k, **how) for k in range(n)]  # noqa: E731
    cases = [
        ("write through the cache", "write-bps", 16 * MIB, write(1, size=64 << 10, direct=False, sync=False)),
        ("eight of them", "write-bps", 16 * MIB, write(8, size=64 << 10, direct=False, sync=False)),
        ("write past the cache", "write-bps", 16 * MIB, write(1, size=1 << 20, direct=True, sync=False)),
        ("small writes with fsync", "write-iops", 100, write(2, size=4096, direct=False, sync=True)),
        ("read through the cache", "read-bps", 16 * MIB, read(1, size=64 << 10, direct=False)),
        ("eight past it", "read-bps", 16 * MIB, read(8, size=64 << 10, direct=True)),
        ("requests past it", "read-iops", 200, read(2, size=4096, direct=True)),
    ]
    return [name for name, *rest in cases if not case(own, name, *rest, seconds)]


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    fslib.log_to(fslib.ROOT / "target" / "tenant-rates.log")
    try:
        fslib.build()
        with fslib.Workspace(SIZE) as space:
            own = space.braidfs("rates", SIZE)
            wrong = measure(own, seconds)
            own.umount()
            code, text = own.fsck("-f", "-n")
            if code:
                raise Failed(f"fsck: exit code {code}: {text.strip()[-300:]}")
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    if wrong:
        print(f"FAILED: more than 5 % from the rate: {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
