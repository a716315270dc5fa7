"""No reader sees old data: each way of writing against each way of reading, from several processes.

A writer goes through phases. Before each it says for each block of the file which phase it begins, after the call has
returned (of an asynchronous write: after it was reaped) which one it has completed. Each phase has one value that fills
the block. A reader notes which phase is completed, reads, then notes which one has begun: whatever it read must be the
value of a phase between the two.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import random
import signal
import struct
import time

from fslib import Failed, Skipped
from mount_tests.common import LIBC, check, must

BLOCK = 4096
BLOCKS = 16
WRITERS = ("direct", "async", "made_direct", "buffered", "mapped", "copy", "punch", "zero", "truncate")
READERS = ("buffered", "mapped", "direct")
# These leave zeros in every second phase.
ZEROING = ("punch", "zero", "truncate")
# `make coherence` gives each pair longer.
SECONDS = float(os.environ.get("COHERENCE_SECONDS", 0))


class Phases:
    """Which phases of each block have begun, and are completed; shared by processes."""

    def __init__(self, zeroing):
        self.map = mmap.mmap(-1, 2 * 8 * BLOCKS)
        words = (ctypes.c_uint64 * (2 * BLOCKS)).from_buffer(self.map)
        self.words, self.zeroing = words, zeroing

    def begin(self, block, phase):
        self.words[BLOCKS + block] = phase

    def complete(self, block, phase):
        self.words[block] = phase

    def completed(self, block):
        return self.words[block]

    def begun(self, block):
        return self.words[BLOCKS + block]

    def value(self, phase):
        return 0 if self.zeroing and phase % 2 else phase


def content(phase):
    return struct.pack("=Q", phase) * (BLOCK // 8)


def mixed(value, values):
    """Whether a word may be read while it changes from one of these to another: it is not copied in one step."""
    words = [struct.pack("=Q", v) for v in values]
    return all(any(byte == word[n] for word in words) for n, byte in enumerate(struct.pack("=Q", value)))


def aligned(size):
    """Memory for direct I/O."""
    return mmap.mmap(-1, size)


class Aio:
    """Linux asynchronous I/O (libaio's system calls)."""

    NUMBERS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}

    def __init__(self, most=4 * BLOCKS):
        """`most`: writes that are under way at once."""
        if platform.machine() not in self.NUMBERS:
            raise Skipped("the numbers of these system calls are not known here")
        setup, self.getevents, self.submit_call = self.NUMBERS[platform.machine()]
        self.context = ctypes.c_ulong()
        self.call(setup, most, ctypes.byref(self.context))

    @staticmethod
    def call(*args):
        done = LIBC.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
        if done < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return done

    def write(self, fd, writes):
        """`writes`: (tag, address, bytes, offset)."""
        blocks = [ctypes.create_string_buffer(struct.pack(
            "=QIIHhIQQqQII", tag, 0, 0, 1, 0, fd, address, size, offset, 0, 0, 0), 64)
            for tag, address, size, offset in writes]
        table = (ctypes.c_void_p * len(blocks))(*(ctypes.addressof(b) for b in blocks))
        done = self.call(self.submit_call, self.context, len(blocks), table)
        must(done == len(blocks), f"{done} of {len(blocks)} requests submitted")

    def reap(self):
        """The tags of what has been written by now, at least one."""
        tags = []
        for tag, result in self.results():
            must(result > 0, f"an asynchronous write failed: {os.strerror(-result)}")
            tags.append(tag)
        return tags

    def results(self):
        """As `reap`, with what came of each: bytes, or an errno below 0."""
        events = ctypes.create_string_buffer(32 * BLOCKS)
        count = self.call(self.getevents, self.context, 1, BLOCKS, events, None)
        return [(tag, result) for tag, _, result, _ in struct.iter_unpack("=QQqq", events.raw[: 32 * count])]


def fallocate(fd, mode, offset, size):
    if LIBC.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_async(kind, path, phases, end):
    fd = os.open(path, os.O_RDWR | (os.O_DIRECT if kind == "async" else 0))
    if kind == "made_direct":
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
    memory, aio, phase = aligned(BLOCK * BLOCKS), Aio(), 1
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # one at least, however late it begins
    while phase == 1 or time.monotonic() < end:
        phase += 1
        memory[:] = content(phase) * BLOCKS
        for block in range(BLOCKS):
            phases.begin(block, phase)
        # of one block and of several, all under way at once
        step = random.choice((1, 1, 2, 4))
        aio.write(fd, [(b, base + b * BLOCK, step * BLOCK, b * BLOCK) for b in range(0, BLOCKS, step)])
        left = BLOCKS // step
        while left:
            for tag in aio.reap():
                left -= 1
                for block in range(tag, tag + step):
                    phases.complete(block, phase)
    return phase - 1


def write_blocks(kind, path, phases, end):
    """All other writers: a few blocks at a time."""
    flags = os.O_RDWR | (os.O_DIRECT if kind == "direct" else 0)
    fd, memory, phase = os.open(path, flags), aligned(BLOCK * BLOCKS), 1
    view = mmap.mmap(fd, BLOCK * BLOCKS) if kind == "mapped" else None
    source = os.open(f"{path}.source", os.O_RDWR | os.O_CREAT, 0o600) if kind == "copy" else None
    while phase == 1 or time.monotonic() < end:
        phase += 1
        zeros = kind in ZEROING and phase % 2
        first = 0 if kind in ZEROING else random.randrange(BLOCKS)
        count = BLOCKS if kind in ZEROING else random.randint(1, BLOCKS - first)
        offset, size = first * BLOCK, count * BLOCK
        for block in range(first, first + count):
            phases.begin(block, phase)
        memory[:size] = content(phase) * count
        part = memoryview(memory)[:size]
        if zeros and kind == "truncate":
            os.ftruncate(fd, BLOCK // 2)
            os.ftruncate(fd, BLOCK * BLOCKS)
        elif zeros:
            fallocate(fd, 0x3 if kind == "punch" else 0x10, offset, size)
        elif kind == "mapped":
            view[offset : offset + size] = part
        elif kind == "copy":
            os.pwritev(source, [part], offset)
            done = 0
            while done < size:
                done += os.copy_file_range(source, fd, size - done, offset + done, offset + done)
        else:
            must(os.pwritev(fd, [part], offset) == size, "a short write")
        part.release()
        for block in range(first, first + count):
            phases.complete(block, phase)
    return phase - 1


def map_whole(fd):
    """A map of the file for reading, which a truncation under way may refuse at first."""
    while True:
        try:
            return mmap.mmap(fd, BLOCK * BLOCKS, prot=mmap.PROT_READ)
        except ValueError:
            time.sleep(0.001)


def read_blocks(kind, path, phases, end, writer):
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if kind == "direct" else 0))
    memory = aligned(BLOCK * BLOCKS)
    view = map_whole(fd) if kind == "mapped" else None
    # what lies beyond the end meanwhile cannot be read through a map, and half of the first block always stays
    half, blocks = writer == "truncate", 1 if writer == "truncate" and view else BLOCKS
    reads = 0
    while not reads or time.monotonic() < end:
        first = random.randrange(blocks)
        count = random.choice((1, 1, blocks - first))
        low = [phases.completed(b) for b in range(first, first + count)]
        if view:
            data = view[first * BLOCK : (first + count) * BLOCK]
        else:
            with memoryview(memory)[: count * BLOCK] as part:
                size = os.preadv(fd, [part], first * BLOCK)
                data = bytes(part[:size]) + bytes(count * BLOCK - size)
        for n in range(count):
            block = first + n
            skip = BLOCK // 2 if half and block == 0 else 0
            have = data[n * BLOCK + skip : (n + 1) * BLOCK]
            if have == have[:8] * (len(have) // 8):
                values = {struct.unpack("=Q", have[:8])[0]}
            else:
                values = set(struct.unpack(f"={len(have) // 8}Q", have))
            high = phases.begun(block)
            right = {phases.value(p) for p in range(low[n], high + 1)}
            wrong = {value for value in values - right if not mixed(value, right)}
            must(not wrong, f"a {kind} reader saw {sorted(wrong)} in block {block} when phase {low[n]} was completed "
                            f"and {high} had begun")
        reads += 1
    return reads


def run_all(functions, seconds):
    """Each in a process of its own; what they return. The first failure ends all."""
    pids, pipes = {}, []
    try:
        for function in functions:
            out, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    random.seed(os.getpid())
                    os.write(into, str(function()).encode())
                    code = 0
                except BaseException as error:  # whatever it was, the parent tells
                    os.write(into, str(error)[:2000].encode())
                finally:
                    os._exit(code)
            os.close(into)
            pids[pid] = out
            pipes.append(out)
        results, end = [], time.monotonic() + seconds + 30
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                must(time.monotonic() < end, "a process hangs")
                time.sleep(0.01)
            elif pid in pids:
                text = os.read(pids.pop(pid), 4096).decode()
                if status:
                    raise Failed(text or f"a process ended with {status}")
                results.append(text)
        return results
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes:
            os.close(pipe)


def all_did_something(counts):
    """Of what :func:`run_all` returned: who wrote nothing, or read nothing, has judged nothing."""
    must(all(int(count) > 0 for count in counts), f"writes and reads of each process: {', '.join(counts)}")


def hammer(top, writer, readers, seconds):
    path, phases = str(top / f"{writer}-{'-'.join(readers)}"), Phases(writer in ZEROING)
    with open(path, "wb") as file:
        file.write(content(1 if writer not in ZEROING else 0) * BLOCKS)
    for block in range(BLOCKS):
        phases.begin(block, 1)
        phases.complete(block, 1)
    end = time.monotonic() + seconds
    write = write_async if writer in ("async", "made_direct") else write_blocks
    try:
        all_did_something(run_all(
            [lambda: write(writer, path, phases, end)]
            + [lambda kind=kind: read_blocks(kind, path, phases, end, writer) for kind in readers], seconds))
    except Failed as error:
        raise Failed(f"writer {writer}, readers {', '.join(readers)}: {error}") from None
    with open(path, "rb") as file:
        data = file.read()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = aligned(BLOCK * BLOCKS)
    os.preadv(fd, [memory], 0)
    os.close(fd)
    must(memory[:] == data, f"writer {writer}: direct and buffered reads differ in the end")


@check(seconds=200 + int(SECONDS) * 40)
def no_reader_sees_old_data(_volume, top):
    """`make coherence` gives each of the 27 pairs some seconds, `make test` each writer one with all readers."""
    for writer in WRITERS:
        if SECONDS:
            for reader in READERS:
                hammer(top, writer, (reader,), SECONDS)
        hammer(top, writer, READERS, SECONDS or (3 if writer == "async" else 0.7))


@check(seconds=120)
def direct_writes_of_several_processes(_volume, top):
    """Two asynchronous direct writers of one file, each of its own blocks, and buffered readers of all of it."""
    path = str(top / "f")
    with open(path, "wb") as file:
        file.write(content(1) * BLOCKS)
    phases, end = Phases(False), time.monotonic() + max(3, SECONDS)
    for block in range(BLOCKS):
        phases.begin(block, 1)
        phases.complete(block, 1)

    def write(half):
        fd, memory, aio, phase = os.open(path, os.O_RDWR | os.O_DIRECT), aligned(BLOCK * BLOCKS), Aio(), 1
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        mine = range(half * BLOCKS // 2, (half + 1) * BLOCKS // 2)
        while phase == 1 or time.monotonic() < end:
            phase += 1
            memory[:] = content(phase) * BLOCKS
            for block in mine:
                phases.begin(block, phase)
            aio.write(fd, [(b, base + b * BLOCK, BLOCK, b * BLOCK) for b in mine])
            left = len(mine)
            while left:
                for tag in aio.reap():
                    left -= 1
                    phases.complete(tag, phase)
        return phase - 1

    readers = [lambda kind=kind: read_blocks(kind, path, phases, end, "async") for kind in ("buffered", "mapped")]
    all_did_something(run_all([lambda: write(0), lambda: write(1), *readers], 3))


@check(seconds=120)
def many_direct_writes_beside_readers(_volume, top):
    """More direct writes at once than the kernel sends, all of pages that are being read: nobody waits for ever."""
    path, blocks, depth = str(top / "f"), 4096, 1500
    with open(path, "wb") as file:
        file.truncate(blocks * BLOCK)
    end = time.monotonic() + 3

    def write():
        fd, memory, aio = os.open(path, os.O_RDWR | os.O_DIRECT), aligned(BLOCK), Aio()
        context = ctypes.c_ulong()
        aio.call(aio.NUMBERS[platform.machine()][0], depth, ctypes.byref(context))
        aio.context = context
        base, under_way = ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0
        while time.monotonic() < end or under_way:
            if time.monotonic() < end:
                count = min(64, depth - under_way)
                if count:
                    at = [random.randrange(blocks) for _ in range(count)]
                    aio.write(fd, [(b, base, BLOCK, b * BLOCK) for b in at])
                    under_way += count
            if under_way >= depth - 64 or time.monotonic() >= end:
                under_way -= len(aio.reap())

    def read():
        fd = os.open(path, os.O_RDONLY)
        while time.monotonic() < end:
            os.pread(fd, 256 * BLOCK, random.randrange(blocks - 256) * BLOCK)

    run_all([write, read, read], 3)


@check
def stores_beside_a_copy_stay(_volume, top):
    """A copy into one half of a page, a map into the other."""
    path, end = str(top / "f"), time.monotonic() + 1.5
    (top / "source").write_bytes(bytes(BLOCK))
    with open(path, "wb") as file:
        file.write(bytes(2 * BLOCK))

    def store():
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 2 * BLOCK) as view:
            count = 0
            while time.monotonic() < end:
                count += 1
                view[3000:3008] = struct.pack("=Q", count)
                for _ in range(20):
                    have = struct.unpack("=Q", view[3000:3008])[0]
                    must(have == count, f"the map has {have} after {count} was stored")
            return count

    def copy():
        source, fd = os.open(top / "source", os.O_RDONLY), os.open(path, os.O_RDWR)
        while time.monotonic() < end:
            os.copy_file_range(source, fd, 1000, 0, 1000)

    run_all([store, copy], 2)
