"""A mount with a load on it, for pictures of what watches it."""

import contextlib
import os
import subprocess
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = os.environ.get("BRAIDFS_BIN", str(ROOT / "target/release/braidfs"))


def load(top, name, end):
    """Files made, written, synced, read, listed, removed."""
    n = 0
    while not end.is_set():
        n += 1
        path = top / f"{name}-{n % 200}"
        path.write_bytes(os.urandom(6000))
        if n % 3 == 0:
            fd = os.open(path, os.O_RDWR)
            os.fsync(fd)
            os.close(fd)
        if n % 5 == 0:
            os.rename(path, top / f"{name}-kept-{n % 1000}")
        if n % 50 == 0:
            os.listdir(top)
            os.posix_fadvise(fd := os.open(top / "large", os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
            os.read(fd, 1 << 20)
            os.close(fd)


@contextlib.contextmanager
def mounted(*options):
    """A mount of 1 GiB with a tenant, on which three threads work until the end, one of them in the tenant."""
    with tempfile.TemporaryDirectory(prefix="braidfs-watched-", dir="/var/tmp") as work:
        image, mnt = Path(work) / "vol.img", Path(work) / "srv"
        mnt.mkdir()
        subprocess.run([BINARY, "mkfs", "--quiet", "--size", "1G", image], check=True)
        subprocess.run([BINARY, "mount", *(a for o in options for a in ("-o", o)), image, mnt], check=True)
        try:
            subprocess.run([BINARY, "tenant", "create", "--space", "64M", "--inodes", "4000", "--write-bps", "8M", mnt / "web"], check=True, stdout=subprocess.DEVNULL)
            (mnt / "web" / "large").write_bytes(os.urandom(4 << 20))
            (mnt / "large").write_bytes(os.urandom(4 << 20))
            end = threading.Event()
            works = ((mnt, "mail"), (mnt, "news"), (mnt / "web", "page"))
            threads = [threading.Thread(target=load, args=(top, name, end)) for top, name in works]
            for t in threads:
                t.start()
            try:
                yield mnt
            finally:
                end.set()
                for t in threads:
                    t.join()
        finally:
            subprocess.run(["umount", mnt], check=True)
