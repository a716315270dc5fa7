"""Requests that wait for pages which a device does not deliver, and those of others, which must not wait for them."""

import contextlib
import mmap
import os
import signal

from fslib import fork_for, in_child, wait_for
from mount_tests.common import NOBODY, check, must, root_only, same, write_synced
from mount_tests.guard import state, threads_named
from mount_tests.nbd import over_nbd

PATIENCE = 20


@contextlib.contextmanager
def children_of(user, works):
    """Children that do these at once, as that user. All have ended well when the block has."""

    def become(work):
        def body(_pipe):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            work()
        return body

    children = [fork_for(become(work)) for work in works]
    try:
        yield [pid for pid, _ in children]
    finally:
        codes = []
        for pid, pipe in children:
            os.close(pipe)
            codes.append(os.waitpid(pid, 0)[1])
    same(codes, [0] * len(codes), f"how children of user {user} ended")


def first_byte(path):
    with open(path, "rb", buffering=0) as file:
        same(file.read(1), b"x", "what is read")


def seek_data(path):
    with open(path, "rb", buffering=0) as file:
        same(os.lseek(file.fileno(), 0, os.SEEK_DATA), 0, "where its data begins")


def free_after(path):
    """What `df` shows of a volume right after a file was removed that somebody has."""
    held = os.open(path, os.O_PATH)
    path.unlink()
    free = os.statvfs(path.parent).f_bfree
    os.close(held)
    return free


def write_directly(path):
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        return os.pwrite(fd, mmap.mmap(-1, 4096), 0)
    finally:
        os.close(fd)


def waiting_helpers(server):
    return [t for t in threads_named(server, "fuse-helper") if state(server, t) == "D"]


@check(seconds=120)
def who_waits_for_pages_keeps_nobody_else_waiting(volume, _top):
    """LSEEK of a file has the kernel drop its pages, and waits for the lock of one that is being read. There was one thread for all
    that waits so: others' LSEEKs, direct writes, and `df` after a removal waited, too, for as long as the device took."""
    root_only()
    with over_nbd(volume, parameters="lease=off&timeout=100") as v:
        v.mount()
        cold = [v.mnt / f"cold{n}" for n in range(4)]
        removed = [v.mnt / f"removed{n}" for n in range(10)]
        for path in cold + removed:
            write_synced(path, b"x" * (1 << 16))
        v.umount()
        v.mount("transport=dev", "threads=12", "commit=300")
        other = v.mnt / "other"
        for path in cold + removed:
            os.stat(path)
        other.write_bytes(b"x" * 4096)
        # made now: a new inode may need the device
        (v.mnt / "direct").touch()
        (server,) = v.daemons()
        os.kill(v.server, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            readers = stack.enter_context(children_of(NOBODY, [lambda path=path: first_byte(path) for path in cold]))
            # before the children are waited for
            stack.callback(os.kill, v.server, signal.SIGCONT)
            wait_for("pages that are being read", lambda: all(state(pid, pid) == "D" for pid in readers), PATIENCE)
            stack.enter_context(children_of(NOBODY, [lambda path=path: seek_data(path) for path in 3 * cold]))
            stack.callback(os.kill, v.server, signal.SIGCONT)
            wait_for("a helper that waits for a page", lambda: waiting_helpers(server), PATIENCE)
            for path in removed:
                must(in_child(lambda path=path: free_after(path), PATIENCE) > 0, "blocks are free")
            in_child(lambda: seek_data(other), PATIENCE)
            same(in_child(lambda: write_directly(v.mnt / "direct"), PATIENCE), 4096, "bytes written directly")
            must(waiting_helpers(server), "those who came first wait still")
