"""Tenants that are mounted by themselves: what is refused at their border, and how a connection ends there."""

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

from fslib import connection, in_child, kill_and_wait, run, stop, wait_for
from mount_tests.common import check, handle_of, must, open_handle, refused, same, write_synced
from mount_tests.flags import NOATIME, get_flags, set_flags
from mount_tests.helpers import refuses, silent
from mount_tests.nbd import over_nbd
from mount_tests.overwrite import requests
from mount_tests.supervise import kill_serving
from mount_tests.tenant_mount import alone, detach, tenants


@contextlib.contextmanager
def beside(v, name="beside"):
    """A directory more, to mount something on."""
    other = v.image.with_suffix(f".{name}")
    other.mkdir()
    try:
        yield other
    finally:
        run("umount", "-l", other, ok=None)
        other.rmdir()


@contextlib.contextmanager
def stopped(*pids, seconds=30):
    """These processes are stopped; they go on afterwards, whatever becomes of this one."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {' '.join(map(str, pids))}"])
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        waker.kill()
        waker.wait()


@check
def one_inside_of_another(volume, _top):
    """Below both borders the root of the inner one would be known over two connections when its own has ended."""
    with tenants(volume) as (v, point), beside(v) as other:
        run(v.binary, "tenant", "create", v.mnt / "a/inner")
        alone(v, point)
        refuses(1, ("inside of tenant a", str(point)), v.binary, "tenant", "mount", v.mnt, "inner", other)
        (point / "inner/f").write_text("x")
        silent("umount", point)
        silent(v.binary, "tenant", "mount", v.mnt, "inner", other)
        refuses(1, ("tenant inner", "inside of it", str(other)), v.binary, "tenant", "mount", v.mnt, "a", point)
        # refused means: as before
        (v.mnt / "a/g").write_text("g")
        same((other / "f").read_text(), "x", "content")
        # one that is moved there while it is mounted
        silent("umount", other)
        silent(v.binary, "tenant", "mount", v.mnt, "b", other)
        os.rename(v.mnt / "b", v.mnt / "a/b")
        refuses(1, ("tenant b", "inside of it"), v.binary, "tenant", "mount", v.mnt, "a", point)
        (other / "f").write_text("y")
        silent("umount", other)
        same((v.mnt / "a/b/f").read_text(), "y", "content")
        alone(v, point)
        same((point / "b/f").read_text(), "y", "content")


@check
def read_only_as_the_volume_is_now(volume, _top):
    """Not as it was when it was mounted: the kernel would take writes that nobody can carry out."""
    with tenants(volume) as (v, point):
        (v.mnt / "a/f").write_text("before")
        run(v.binary, "mount", "-o", "remount,ro", v.mnt)
        alone(v, point)
        with refused(errno.EROFS):
            (point / "f").write_text("after")
        silent("umount", point)
        run(v.binary, "mount", "-o", "remount,rw", v.mnt)
        alone(v, point)
        (point / "f").write_text("after")
        silent("umount", point)
        v.umount()
        v.mount("ro", "transport=dev")
        run(v.binary, "mount", "-o", "remount,rw", v.mnt)
        alone(v, point)
        (point / "f").write_text("once more")
        silent("umount", point)
        same((v.mnt / "a/f").read_text(), "once more", "content")


@check
def flags_are_its_own(volume, _top):
    with tenants(volume) as (v, point):
        alone(v, point)
        with refused(errno.EBUSY):
            set_flags(v.mnt / "a", NOATIME)
        set_flags(point, NOATIME)
        same(get_flags(v.mnt / "a") & NOATIME, NOATIME, "flags over the volume's mount")
        with refused(errno.EBUSY):
            set_flags(v.mnt / "a", 0)
        set_flags(point, 0)


@check
def mounts_in_it_are_seen_from_everywhere(volume, _top):
    """What the kernel forgets it unmounts: also where the volume is shown at another place."""
    with tenants(volume) as (v, point), beside(v) as other:
        (v.mnt / "a/d").mkdir()
        run("mount", "--bind", v.mnt, other)
        run("mount", "-t", "tmpfs", "none", other / "a/d")
        try:
            (other / "a/d/f").write_text("x")
            refuses(1, (f"something is mounted on {other}/a/d",), v.binary, "tenant", "mount", v.mnt, "a", point)
            same((other / "a/d/f").read_text(), "x", "content of what is mounted")
        finally:
            run("umount", other / "a/d", ok=None)
        # the tenant itself elsewhere is no hindrance, and shows what the volume's mount does
        run("umount", other)
        run("mount", "--bind", v.mnt / "a", other)
        alone(v, point)
        with refused(errno.EBUSY):
            os.listdir(other)
        silent("umount", point)
        same(os.listdir(other), ["d"], "listing")


@check
def what_is_mapped_is_in_use(volume, _top):
    with tenants(volume) as (v, point):
        path = v.mnt / "a/f"
        path.write_bytes(bytes(1 << 16))
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 1 << 16)
        stop, failed = threading.Event(), []

        def writes():
            n = 0
            while not stop.is_set():
                n = (n + 1) % 256
                memory[: 1 << 16] = bytes([n]) * (1 << 16)
            failed.append(n)

        thread = threading.Thread(target=writes)
        thread.start()
        try:
            refuses(1, ("in use through the volume's mount",), v.binary, "tenant", "mount", v.mnt, "a", point)
        finally:
            stop.set()
            thread.join()
        memory.close()
        alone(v, point)
        same((point / "f").read_bytes(), bytes([failed[0]]) * (1 << 16), "what was stored to the map")
        # the same the other way round
        with open(point / "f", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 1 << 16)
        memory[:5] = b"map 2"
        must(run("umount", point, ok=None)[0], "unmounted with a file that is mapped")
        memory.close()
        silent("umount", point)
        same(path.read_bytes()[:5], b"map 2", "what was stored to the map")


@check
def by_file_handle(volume, _top):
    with tenants(volume) as (v, point):
        tree = v.mnt / "a"
        (tree / "d").mkdir()
        (tree / "f").write_text("0")
        handles = [handle_of(tree / name) for name in ("f", "d")]
        alone(v, point)
        with open(point / "f", "r+", encoding="utf-8") as file:
            file.write("1")
            file.flush()
            for handle in handles:
                with refused(errno.EBUSY, errno.ESTALE):
                    os.close(open_handle(v, handle))
        # nobody uses it there: who asks has it, and the other one waits for its end
        with contextlib.suppress(OSError):
            fd = open_handle(v, handles[0])
            try:
                same(os.pread(fd, 10, 0), b"1", "content by its handle")
                with refused(errno.EBUSY):
                    (point / "f").read_text()
            finally:
                os.close(fd)
        wait_for("the file", lambda: in_child(lambda: reads(point / "f"), 20) == "1", 10)


def reads(path):
    try:
        return path.read_text()
    except OSError as error:
        return error.errno


@contextlib.contextmanager
def tenant_over_nbd(volume):
    """A mounted volume on a server that can be stopped, with the tenant `a`, and a directory to mount that by itself."""
    with over_nbd(volume) as v:
        point = v.disk.with_suffix(".tenant")
        point.mkdir()
        try:
            v.mount("transport=dev")
            run(v.binary, "tenant", "create", v.mnt / "a")
            yield v, point
        finally:
            detach(v)
            run("umount", "-l", point, ok=None)
            point.rmdir()


@check
def an_end_that_takes_long(volume, _top):
    """A device that does not answer while what a tenant has written is made durable: others see it, and wait for nothing."""
    with tenant_over_nbd(volume) as (v, point):
        alone(v, point)
        (point / "f").write_bytes(b"x" * (4 << 20))
        # what is asked for below, and by umount(8), is in memory
        os.listdir(v.mnt)
        os.statvfs(point)
        v.settle()
        (point / "g").write_bytes(b"y" * (1 << 20))
        with stopped(v.server, seconds=20):
            silent("umount", point)
            seen = in_child(lambda: ((v.mnt / "a/f").stat().st_size, sorted(os.listdir(v.mnt / "a"))), 15)
        same(seen, (4 << 20, ["f", "g"]), "what the volume's mount shows")
        wait_for("the end of it", lambda: run(v.binary, "tenant", "mount", v.mnt, "a", point, ok=None)[0] == 0, 20)
        same((point / "f").stat().st_size, 4 << 20, "size")
        silent("umount", point)


@check
def full(volume, _top):
    """What is accepted is there, to the last byte before ENOSPC, and the neighbour has its room."""
    with tenants(volume, space=24 << 20) as (v, point):
        alone(v, point)
        kept, errors = [0, 0], [None, None]

        def fill(n):
            try:
                with open(point / f"f{n}", "wb", buffering=0) as file:
                    while True:
                        kept[n] += file.write(bytes([65 + n]) * 10_000)
            except OSError as error:
                errors[n] = error.errno

        threads = [threading.Thread(target=fill, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same(errors, [errno.ENOSPC] * 2, "errors")
        must(sum(kept) > 16 << 20, f"only {kept} bytes")
        write_synced(v.mnt / "b/f", bytes(8 << 20))
        silent("umount", point)
        v.cold()
        for n in range(2):
            must((v.mnt / f"a/f{n}").read_bytes()[: kept[n]] == bytes([65 + n]) * kept[n], "what was accepted is lost")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def detached_and_killed(volume, _top):
    """Lazily unmounted the volume goes on below its tenant; then the process dies, with pages dirty on both sides."""
    with tenants(volume) as (v, point):
        alone(v, point)
        write_synced(point / "f", b"synced")
        inside = os.open(v.mnt / "b", os.O_RDONLY)
        try:
            run("umount", "-l", v.mnt)
            (point / "g").write_text("by the tenant's")
            fd = os.open("h", os.O_CREAT | os.O_WRONLY, dir_fd=inside)
            os.write(fd, b"not synced")
            os.close(fd)
            pid = v.daemon()
            kill_and_wait(pid, signal.SIGKILL)
        finally:
            os.close(inside)
        run("umount", "-l", point)
        v.mount("transport=dev")
        same((v.mnt / "a/f").read_bytes(), b"synced", "content")
        alone(v, point)
        silent("umount", point)
        # without a kill it ends with its last user
        alone(v, point)
        (point / "g").write_text("by the tenant's")
        pid = v.daemon()
        run("umount", "-l", v.mnt)
        time.sleep(0.3)
        must(os.path.exists(f"/proc/{pid}"), "it ended under its tenant")
        same((point / "g").read_text(), "by the tenant's", "content")
        silent("umount", point)
        wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 20)
        v.mount("transport=dev")
        same((v.mnt / "a/g").read_text(), "by the tenant's", "content")


@check
def supervised(volume, _top):
    """The volume comes back by itself, the tenant's mount does not, and is mounted again."""
    with tenants(volume, "supervise") as (v, point):
        alone(v, point)
        write_synced(point / "f", b"synced")
        kill_serving(v)
        same((v.mnt / "a/f").read_bytes(), b"synced", "content over the volume's mount")
        with refused(errno.ENOTCONN, errno.EIO, errno.ECONNABORTED):
            os.listdir(point)
        alone(v, point)
        same((point / "f").read_bytes(), b"synced", "content")
        (point / "f").write_bytes(b"again")
        silent("umount", point)
        same((v.mnt / "a/f").read_bytes(), b"again", "content")


@check
def cut_off_while_requests_wait(volume, _top):
    """A connection that is ended by force, while its threads wait for a device: what was asked for over it happens before the
    volume's mount sees the tenant, or it would keep what is old. Who asks there is not held up for ever."""
    count = 40
    with tenant_over_nbd(volume) as (v, point):
        for n in range(count):
            (v.mnt / f"a/{n}").write_bytes(b"o" * 4096)
        v.settle()
        run(v.binary, "tenant", "set", "--write-iops", "10/10", v.mnt, "a")
        alone(v, point)
        kernels, taken = connection(point), requests(v)["WRITE"]
        with stopped(v.server, seconds=33):
            writer = subprocess.Popen([sys.executable, "-c", DIRECT, point, str(count)], stdout=subprocess.PIPE)
            same(writer.stdout.readline(), b"begun\n", "what the writer says")
            # All of them: a file that no request is under way for may be read, and that waits for the device.
            wait_for("the writes", lambda: int((kernels / "waiting").read_text()) >= count, 8)
            # And its threads wait with some of them, which a busy machine holds up: what they have not taken is cut off, and never
            # happens.
            wait_for("a write that was taken", lambda: requests(v)["WRITE"] > taken, 8)
            time.sleep(0.5)
            (kernels / "abort").write_text("1")
            before = in_child(lambda: contents(v, count, 2), 15)
        writer.wait(20)
        wait_for("the end of it", lambda: in_child(lambda: contents(v, count, 1), 20) is not None, 30)
        seen = contents(v, count, 1)
        run("umount", "-l", point, ok=None)
        v.umount()
        v.mount("transport=dev")
        same(contents(v, count, 1), seen, "contents after a remount")
        same(before, None, "what was seen while requests were under way")


# each thread overwrites a file's only block past the cache
DIRECT = """
import mmap, os, sys, threading
block = mmap.mmap(-1, 4096)
block.write(b"n" * 4096)
def write(n):
    try:
        os.write(os.open(f"{sys.argv[1]}/{n}", os.O_WRONLY | os.O_DIRECT | os.O_DSYNC), block)
    except OSError:
        pass
threads = [threading.Thread(target=write, args=(n,)) for n in range(int(sys.argv[2]))]
[t.start() for t in threads]
print("begun", flush=True)
[t.join() for t in threads]
"""


def contents(v, count, seconds):
    """The first bytes of the tenant's files over the volume's mount; None where that is refused for so long."""
    end = time.monotonic() + seconds
    while True:
        try:
            return [(v.mnt / f"a/{n}").read_bytes()[:1] for n in range(count)]
        except OSError as error:
            must(error.errno == errno.EBUSY, f"{error}")
        if time.monotonic() > end:
            return None
        time.sleep(0.05)


@check
def one_after_the_other(volume, _top):
    """Whoever has unmounted the tenant may unmount the volume."""
    with tenants(volume) as (v, point):
        for turn in range(10):
            alone(v, point)
            (point / "f").write_text(str(turn))
            silent("umount", point)
            silent(v.binary, "umount", v.mnt)
            v.mount("transport=dev")
            same((v.mnt / "a/f").read_text(), str(turn), "content")


@check
def appended_from_both_sides(volume, _top):
    """Two clients at once write a file that has names on both sides: what was accepted of each is there."""
    count, tries = 150, 4000
    with tenants(volume) as (v, point):
        (v.mnt / "a/f").touch()
        os.link(v.mnt / "a/f", v.mnt / "outside")
        alone(v, point)
        busy, failed = [0, 0], []

        def append(n, path):
            done = 0
            for _ in range(tries):
                try:
                    with open(path, "ab", buffering=0) as file:
                        file.write(f"{n} {done:06d}\n".encode())
                        if done % 10 == 0:
                            os.fsync(file.fileno())
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        failed.append(error)
                        return
                    busy[n] += 1
                    time.sleep(0.002)
                    continue
                done += 1
                if done == count:
                    return
            failed.append(f"{n}: only {done} of {count} in {tries} tries")

        threads = [threading.Thread(target=append, args=both) for both in enumerate((v.mnt / "outside", point / "f"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same(failed, [], f"errors (EBUSY: {busy})")
        silent("umount", point)
        lines = (v.mnt / "outside").read_text().splitlines()
        want = {f"{n} {done:06d}" for n in range(2) for done in range(count)}
        same((len(lines), len(want - set(lines))), (len(want), 0), "lines, and how many are lost")
        v.cold()
        same((v.mnt / "a/f").read_text().splitlines(), lines, "lines after a remount")
