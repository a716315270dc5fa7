"""How long the room of a volume takes to be told while files are removed: the kernel tells of their end later."""

import contextlib
import json
import os
import threading
import time

import fslib
from fslib import Failed, run
from mount_tests.common import check, daemon_only, must, same
from mount_tests.helpers import small_volume
from mount_tests.transport import with_rings

TIMES = 300
# Seconds that the server waits at most for what the kernel has yet to tell (crates/fuse/src/lookups.rs): who is kept waiting for a
# file that somebody holds open waits so long each time.
PATIENCE = 0.1


def put_off(v):
    """STATFS that came, and that another thread answered."""
    ops = json.loads(run(v.binary, "stats", "--json", v.mnt)[1])["operations"]
    one = next((o for o in ops if o["name"] == "STATFS"), {"requests": 0, "deferred": 0})
    return one["requests"], one["deferred"]


@contextlib.contextmanager
def removing(top):
    """Files are made and removed all the time; some of the removed stay open for a while."""
    end, error = threading.Event(), []

    def work():
        try:
            held = []
            while not end.is_set():
                for n in range(20):
                    fd = os.open(top / f"f{n}", os.O_CREAT | os.O_RDWR)
                    os.write(fd, b"x" * 5000)
                    os.unlink(top / f"f{n}")
                    held.append(fd)
                while len(held) > 40:
                    os.close(held.pop(0))
            for fd in held:
                os.close(fd)
        except OSError as e:
            error.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    must(not error, f"removing failed: {error}")


def asked_beside(v):
    """Time of a statvfs while files are removed that one in ten does not exceed, in seconds: that of the others is the machine's."""
    took = []
    with removing(v.mnt):
        for _ in range(TIMES):
            began = time.monotonic()
            os.statvfs(v.mnt)
            took.append(time.monotonic() - began)
            time.sleep(0.001)
    return sorted(took)[TIMES // 10]


def right_after(v):
    """What was removed is free again by the time that anybody can ask."""
    size = 8 << 20
    os.statvfs(v.mnt)
    for n in range(20):
        before = os.statvfs(v.mnt).f_bavail
        with open(v.mnt / "big", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        during = os.statvfs(v.mnt).f_bavail
        os.unlink(v.mnt / "big")
        after = os.statvfs(v.mnt).f_bavail
        # A commit in between gives back what the removals before it held.
        must(during <= before - size // 4096 // 2, f"turn {n}: {before - during} blocks taken")
        must(after >= before - 64, f"turn {n}: {before - after} blocks are not back")


@check
def room_beside_removals_by_rings(volume, _top):
    """The thread that got the request fetches what the kernel has to tell: nobody else is asked, but in passing."""
    with with_rings(volume) as v:
        v.mount("transport=ring")
        try:
            asked_beside(v)
            requests, deferred = put_off(v)
            fslib.log(f"{deferred} of {requests} STATFS by another thread")
            must(requests >= TIMES, f"{requests} requests")
            must(deferred <= requests // 4, f"{deferred} of {requests} were answered by another thread")
            right_after(v)
        finally:
            v.umount()


@check
def room_beside_removals_by_the_device(volume, _top):
    """A file that was removed and is still open keeps nobody waiting."""
    daemon_only(volume)
    with small_volume(volume, size=256 << 20) as v:
        v.mount("transport=dev")
        try:
            took = asked_beside(v)
            must(took < PATIENCE, f"{took * 1e3:.1f} ms for the first tenth of all statvfs")
            right_after(v)
        finally:
            v.umount()


@check
def room_with_a_removed_file_open(volume, top):
    """As above, with nothing else going on: the first answer is right, and comes at once, unless the machine is busy each time."""
    best = []
    for n in range(5):
        with open(top / f"f{n}", "wb") as file:
            file.write(b"x" * 100_000)
            file.flush()
            os.fsync(file.fileno())
            os.unlink(top / f"f{n}")
            took = []
            for _ in range(2):
                began = time.monotonic()
                os.statvfs(top)
                took.append(time.monotonic() - began)
        same(os.path.exists(top / f"f{n}"), False, "the file")
        best.append(min(took))
        if best[-1] < PATIENCE:
            return
    raise Failed(f"the first answers took {[f'{t * 1e3:.1f} ms' for t in best]}")
