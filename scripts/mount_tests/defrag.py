"""`braidfs defrag`: a file that was written in pieces is made whole while it is mounted, and while it is read and written."""

import contextlib
import json
import os
import threading

import fslib
from fslib import run
from mount_tests.common import check, must, same
from mount_tests.space import small

BLOCKS = 1500
PAGE = 4096


OPTIONS = ("overwrite=log", "nodefrag")


@contextlib.contextmanager
def to_the_log(volume):
    """A volume on which what is synced goes elsewhere, and nothing is made whole unasked."""
    with small(volume, 1) as own:
        again(own)
        yield own


def again(own):
    own.umount()
    own.mount(*OPTIONS)


def block(n, version):
    return (f"{n} {version}\n".encode() * PAGE)[:PAGE]


def in_pieces(path):
    """Writes a file from its beginning to its end, then each block again in a scattered order, with an fsync every few."""
    with open(path, "wb", buffering=0) as f:
        for n in range(BLOCKS):
            f.write(block(n, 0))
        os.fsync(f.fileno())
        for i in range(BLOCKS):
            n = i * 7919 % BLOCKS
            os.pwrite(f.fileno(), block(n, 1), n * PAGE)
            if i % 20 == 19:
                os.fsync(f.fileno())
        os.fsync(f.fileno())


def holds(path, version):
    with open(path, "rb") as f:
        for n in range(BLOCKS):
            must(f.read(PAGE) == block(n, version), f"block {n} of {path} is another")


def defrag(volume, *args, ok=(0,)):
    return json.loads(run(volume.binary, "defrag", "--json", *args, ok=ok)[1])


@check
def a_file_in_pieces_is_made_whole(volume, _top):
    """By path and by mount point; what is read through the kernel's cache is the same, and times stay."""
    with to_the_log(volume) as own:
        top = own.mnt / "d"
        top.mkdir()
        for name in ("f", "g"):
            in_pieces(top / name)
        os.link(top / "f", top / "f2")
        (top / "to_f").symlink_to("f")
        before = defrag(own, "-c", top)
        fslib.log(f"before: {before}")
        same((before["files"], before["in_pieces"], before["moved"]), (2, 2, 0), "files")
        must(before["before"]["pieces"] > BLOCKS and before["worst"][0]["pieces"] > BLOCKS / 2, f"{before}")
        same(before["after"], before["before"], "a report changes nothing")
        stat = os.stat(top / "f")
        one = defrag(own, top / "f")
        must(one["moved"] > BLOCKS / 2 and one["after"]["pieces"] < BLOCKS / 64, f"{one}")
        all_of_it = defrag(own, own.mnt)
        must(all_of_it["after"]["pieces"] < BLOCKS / 32, f"{all_of_it}")
        now = os.stat(top / "f")
        same((now.st_mtime_ns, now.st_ctime_ns), (stat.st_mtime_ns, stat.st_ctime_ns), "times")
        for _ in range(2):
            for name in ("f", "g"):
                holds(top / name, 1)
            again(own)
        same(defrag(own, "-c", top)["in_pieces"], 0, "files in pieces")


@check
def what_is_written_meanwhile_counts(volume, _top):
    """One writes to the file, one reads it, while it is made whole."""
    with to_the_log(volume) as own:
        path = own.mnt / "busy"
        in_pieces(path)
        errors, ended = [], threading.Event()

        def write():
            try:
                with open(path, "r+b", buffering=0) as f:
                    for n in range(BLOCKS):
                        os.pwrite(f.fileno(), block(n, 2), n * PAGE)
                        if n % 10 == 0:
                            os.fsync(f.fileno())
            finally:
                ended.set()

        def read():
            with open(path, "rb", buffering=0) as f:
                while not ended.is_set():
                    for n in range(0, BLOCKS, 7):
                        if os.pread(f.fileno(), PAGE, n * PAGE) not in (block(n, 1), block(n, 2)):
                            errors.append(f"block {n}")

        threads = [threading.Thread(target=t) for t in (write, read)]
        for t in threads:
            t.start()
        moved = 0
        while not ended.is_set():
            moved += defrag(own, path)["moved"]
        for t in threads:
            t.join()
        same(errors, [], "blocks that are torn")
        must(moved > 0, "nothing was moved")
        holds(path, 2)
        again(own)
        holds(path, 2)


@check
def what_defrag_refuses(volume, _top):
    """Paths of other file systems, what is no file; files that are overwritten in place stay."""
    with to_the_log(volume) as own:
        path = own.mnt / "allocated"
        with open(path, "wb") as f:
            os.posix_fallocate(f.fileno(), 0, 64 * PAGE)
        same(defrag(own, path)["stay"], 1, "files that stay")
        for what in ("/proc", own.mnt / "nothing"):
            code, text = run(own.binary, "defrag", what, ok=None)
            must(code == 1 and "cannot" in text, f"defrag {what}: exit code {code}: {text}")
        os.mkfifo(own.mnt / "fifo")
        same(run(own.binary, "defrag", own.mnt / "fifo", ok=None)[0], 1, "exit code for a pipe")
