"""Tenants that are mounted by themselves: a connection of their own, nothing stale on either side, nothing lost."""

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time

import fslib
from fslib import Skipped, connection, in_child, kill_and_wait, run, stop, wait_for
from mount_tests.common import (
    LIBC, check, daemon_only, must, refused, renameat2, root_only, same, write_synced,
)
from mount_tests.ending import logged_mount
from mount_tests.helpers import helpers_of, refuses, silent, small_volume

SPACE = 200 << 20
CACHESTAT = 451


@contextlib.contextmanager
def tenants(volume, *options, size=1 << 30, space=SPACE):
    """A volume with the tenants a and b, mounted, and a directory to mount a on."""
    daemon_only(volume)
    root_only()
    with small_volume(volume, size=size) as v:
        point = v.image.with_suffix(".tenant")
        point.mkdir(exist_ok=True)
        try:
            v.mount("transport=dev", *options)
            for name in "ab":
                run(v.binary, "tenant", "create", "--space", str(space), v.mnt / name)
            yield v, point
        finally:
            detach(v)
            run("umount", "-l", point, ok=None)
            point.rmdir()


def detach(v):
    """Unmounts what is on directories of the volume."""
    for line in reversed(open("/proc/self/mounts", encoding="utf-8").readlines()):
        if line.split(" ")[1].startswith(f"{v.mnt}/"):
            run("umount", "-l", line.split(" ")[1], ok=None)


def alone(v, point, *options):
    silent(v.binary, "tenant", "mount", *options, v.mnt, "a", point)


def cached(path):
    """(pages in the kernel's cache, dirty ones and those under writeback) of a file, by cachestat(2)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return cached_fd(fd)
    finally:
        os.close(fd)


def cached_fd(fd):
    """As cached(), of a file that is open: it asks no daemon."""
    span, found = ctypes.create_string_buffer(struct.pack("QQ", 0, 0)), ctypes.create_string_buffer(40)
    if LIBC.syscall(CACHESTAT, fd, span, found, 0):
        number = ctypes.get_errno()
        if number == errno.ENOSYS:
            raise Skipped("no cachestat: Linux 6.5 has it")
        raise OSError(number, os.strerror(number))
    pages, dirty, writeback = struct.unpack("QQQQQ", found.raw[:40])[:3]
    return pages, dirty + writeback


@check
def df_of_a_small_tenant_can_be_written(volume, _top):
    """A file can be filled with what df offers of a tenant with little room, and then df offers nothing."""
    for space in (5 << 18, 2 << 20, 8 << 20):
        with tenants(volume, space=space) as (v, _):
            fd = os.open(v.mnt / "a/f", os.O_WRONLY | os.O_CREAT, 0o600)
            offered, done = os.statvfs(v.mnt / "a").f_bavail, 0
            must(offered > 0, f"{offered} blocks of {space} bytes")
            try:
                with refused(errno.ENOSPC):
                    while done < 2 * space:
                        done += os.write(fd, b"d" * 4096)
                same(os.statvfs(v.mnt / "a").f_bavail, 0, "what df offers of a full tenant")
            finally:
                os.close(fd)
            must(done // 4096 >= offered, f"{done // 4096} blocks were written, {offered} of {space} bytes were offered")


@check
def what_one_side_does_the_other_sees(volume, _top):
    with tenants(volume) as (v, point):
        tree, b = v.mnt / "a", v.mnt / "b"
        (tree / "dir").mkdir()
        (tree / "dir/old").write_bytes(b"old" * 5000)
        (tree / "gone").write_text("x")
        (b / "f").write_text("b")
        # now the kernel keeps all of that: names, absent ones, attributes, listings, dirty pages
        same((sorted(os.listdir(tree)), (tree / "new").exists()), (["dir", "gone"], False), "before")
        same((tree / "dir/also").exists(), False, "before")
        alone(v, point)
        must(os.stat(point).st_dev != os.stat(v.mnt).st_dev, "the same file system")
        same((point / "dir/old").read_bytes(), b"old" * 5000, "what was written before")
        st = os.statvfs(point)
        must(st.f_blocks * st.f_bsize <= SPACE < os.statvfs(v.mnt).f_blocks * 4096, "df does not show the tenant's space")
        up = os.stat(point / "..")
        same((up.st_dev, up.st_ino), (lambda s: (s.st_dev, s.st_ino))(os.stat(point.parent)), "what is above it")
        same(sorted(os.listdir(point)), ["dir", "gone"], "listing")
        # nothing of it over the other connection, but its directory
        for ask in (lambda: os.listdir(tree), lambda: (tree / "gone").read_text(), lambda: (tree / "x").mkdir(),
                    lambda: os.rename(b / "f", tree / "f"), lambda: os.link(b / "f", tree / "f"),
                    lambda: os.unlink(tree / "gone"), lambda: os.chmod(tree, 0o700), lambda: os.stat(tree / "new")):
            with refused(errno.EBUSY):
                ask()
        same(os.stat(tree).st_ino, os.stat(point).st_ino, "number of the directory")
        (b / "f").write_text("b2")
        # changes on this side, of all that the other knew
        (point / "new").write_text("new")
        (point / "dir/also").write_text("also")
        (point / "dir/old").write_bytes(b"changed")
        os.unlink(point / "gone")
        os.rename(point / "new", point / "newer")
        os.rename(point / "newer", point / "new")
        os.mkdir(point / "sub")
        os.rename(point / "dir/also", point / "sub/also")
        os.rename(point / "sub/also", point / "dir/also")
        os.chmod(point, 0o711)
        same(os.stat(tree).st_mode & 0o777, 0o711, "mode over the other connection")
        with refused(errno.EXDEV):
            os.rename(point / "new", v.mnt / "new")
        silent("umount", point)
        # at once: what was mounted is on its way out
        same(sorted(os.listdir(tree)), ["dir", "new", "sub"], "after")
        same(((tree / "new").read_text(), (tree / "dir/also").read_text()), ("new", "also"), "after")
        same((tree / "dir/old").read_bytes(), b"changed", "after")
        same((tree / "gone").exists(), False, "after")
        (tree / "dir/old").write_bytes(b"again")
        alone(v, point, "-o", "ro")
        same((point / "dir/old").read_bytes(), b"again", "once more")
        with refused(errno.EROFS):
            (point / "no").write_text("")
        silent("umount", point)
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def again_and_again(volume, _top):
    """Mounted at once after an unmount, while others work beside it."""
    with tenants(volume) as (v, point):
        ended, asked = threading.Event(), []

        def beside():
            while not ended.is_set():
                (v.mnt / "b/f").write_text("b")
                with contextlib.suppress(OSError):
                    asked.append(len(os.listdir(v.mnt / "a")))

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            for turn in range(40):
                alone(v, point)
                (point / f"f{turn}").write_text(str(turn))
                silent("umount", point)
                if turn % 4 == 0:
                    same((v.mnt / f"a/f{turn}").read_text(), str(turn), "content")
        finally:
            ended.set()
            thread.join()
        same(asked, sorted(asked), "files that were seen, one after another")
        same(len(os.listdir(v.mnt / "a")), 40, "files")


@check
def what_is_in_use_is_not_taken_away(volume, _top):
    with tenants(volume) as (v, point):
        tree = v.mnt / "a"
        (tree / "d").mkdir()
        with open(tree / "f", "w", encoding="utf-8") as file:
            file.write("dirty")
            file.flush()
            refuses(1, ("in use through the volume's mount",), v.binary, "tenant", "mount", v.mnt, "a", point)
            file.write(" and more")
        child = subprocess.Popen(["sleep", "60"], cwd=tree / "d")
        try:
            refuses(1, ("in use through the volume's mount",), v.binary, "tenant", "mount", v.mnt, "a", point)
            # refused means: as before
            same(sorted(os.listdir(tree)), ["d", "f"], "listing")
        finally:
            child.kill()
            child.wait()
        run("mount", "--bind", v.mnt, tree)
        refuses(1, ("something is mounted on",), v.binary, "tenant", "mount", v.mnt, "a", point)
        silent("umount", tree)
        # a directory of its own may be open
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        alone(v, point)
        same((point / "f").read_text(), "dirty and more", "what was written before")
        with refused(errno.EBUSY):
            os.open("f", os.O_RDONLY, dir_fd=fd)
        with refused(errno.EBUSY):
            os.listdir(fd)
        silent("umount", point)
        same(sorted(os.listdir(fd)), ["d", "f"], "listing")
        os.close(fd)


@check
def a_file_with_names_on_both_sides(volume, _top):
    with tenants(volume) as (v, point):
        (v.mnt / "a/f").write_text("0")
        os.link(v.mnt / "a/f", v.mnt / "outside")
        alone(v, point)
        outside, prunes = v.mnt / "outside", fslib.linux_from(6, 18)
        for turn in range(10):
            if not prunes:
                break
            # each is the other's last content, over pages and attributes that were kept
            same(outside.read_text(), str(2 * turn), "outside")
            outside.write_text(str(2 * turn + 1))
            same((point / "f").read_text(), str(2 * turn + 1), "inside")
            (point / "f").write_text(str(2 * turn + 2))
            same(os.stat(outside).st_size, len(str(2 * turn + 2)), "size")
        with open(point / "f", "r+b", buffering=0) as file:
            file.write(b"dirty")
            for ask in lambda: os.stat(outside), outside.read_bytes, lambda: os.unlink(outside):
                with refused(errno.EBUSY):
                    ask()
            names = {e.name: e for e in os.scandir(v.mnt)}
            must("outside" in names, "a name is missing in the listing")
            with refused(errno.EBUSY):
                os.stat(names["outside"])
        silent("umount", point)
        same(outside.read_bytes()[:5], b"dirty", "outside")
        os.unlink(v.mnt / "a/f")
        same(os.stat(outside).st_nlink, 1, "links")


@check
def who_goes_first(volume, _top):
    with tenants(volume) as (v, point):
        other = v.image.with_suffix(".other")
        other.mkdir()
        try:
            alone(v, point)
            (point / "f").write_text("x")
            must(run("umount", v.mnt, ok=None)[0], "the volume was unmounted under a tenant")
            refuses(32, ("mounted by themselves", str(point)), v.binary, "umount", v.mnt)
            refuses(1, (f"mounted on {point} already",), v.binary, "tenant", "mount", v.mnt, "a", other)
            refuses(1, ("mounted by itself",), v.binary, "tenant", "remove", v.mnt, "a")
            refuses(1, ("no tenant",), v.binary, "tenant", "mount", v.mnt, "c", other)
            code, text = run(v.binary, "upgrade", v.mnt, ok=None)
            must(code and "mounted by itself" in text, f"an upgrade: {code}, {text!r}")
            must(run(v.binary, "mount", "-o", "remount,ro", v.mnt, ok=None)[0], "read-only under a tenant")
            (v.mnt / "b/f").write_text("y")
            (point / "f").write_text("x")
            # over a tenant's mount nobody administers the volume
            for what in ("list", point), ("set", "--space", "none", point, "a"):
                refuses(1, ("by itself",), v.binary, "tenant", *what)
            # as mount(8) has it, by the mount point and by the image
            silent("umount", point)
            for source in v.mnt, v.image:
                silent(helpers_of(v) / "mount.braidfs", source, point, "-o", "rw,tenant=a,nosuid")
                same((point / "f").read_text(), "x", "content")
                silent(v.binary, "umount", point)
            refuses(32, ("not mounted",), v.binary, "mount", "-o", "tenant=a", "/dev/null", point)
            # on its own directory, and another one beside it
            silent(v.binary, "tenant", "mount", v.mnt, "a")
            silent(v.binary, "tenant", "mount", v.mnt, "b", other)
            must(os.path.ismount(v.mnt / "a"), "not mounted on its own directory")
            same((v.mnt / "a/f").read_text(), "x", "content")
            (v.mnt / "a/f").write_text("z")
            (other / "g").write_text("g")
            silent("umount", v.mnt / "a")
            same((v.mnt / "a/f").read_text(), "z", "content")
            (other / "h").write_text("h")
            alone(v, point)
            # the end of the daemon ends all of them
            pid = v.daemon()
            kill_and_wait(pid, signal.SIGTERM)
            must(not any(map(os.path.ismount, (v.mnt, point, other))), "something is still mounted")
            v.mount()
            same([(v.mnt / n).read_text() for n in ("a/f", "b/g", "b/h")], ["z", "g", "h"], "content")
        finally:
            run("umount", "-l", other, ok=None)
            other.rmdir()


@check
def sigterm_under_another_mount(volume, _top):
    """The mount cannot be unmounted: what was written survives the kill that comes next, and it goes on until then."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        with logged_mount(v, "transport=dev,commit=300") as said:
            pid = v.daemon()
            (v.mnt / "f").write_text("not synced")
            below = os.open(v.mnt, os.O_RDONLY)
            run("mount", "-t", "tmpfs", "tmpfs", v.mnt)
            try:
                os.kill(pid, signal.SIGTERM)
                wait_for("its word", lambda: "something else is mounted over it: synced" in said(), 20)
                same(os.listdir(below), ["f"], "entries below")
            finally:
                os.close(below)
                run("umount", v.mnt)
            v.kill9()
        v.mount("transport=dev,commit=300")
        same((v.mnt / "f").read_text(), "not synced", "content")


@check
def sigterm_under_another_mount_leaves_tenants(volume, _top):
    """The volume goes on, and so do they; more of them can be mounted, and the volume is not unmounted below them."""
    with tenants(volume) as (v, point):
        v.umount()
        with logged_mount(v, "transport=dev") as said:
            alone(v, point)
            (pid,) = v.daemons()
            (point / "f").write_text("x")
            run("mount", "-t", "tmpfs", "tmpfs", v.mnt)
            try:
                os.kill(pid, signal.SIGTERM)
                wait_for("its word", lambda: "something else is mounted over it" in said(), 20)
                time.sleep(3.2)  # a signal within this time is the same one
                must(os.path.ismount(point), "the tenant's mount has ended")
            finally:
                run("umount", v.mnt)
        code, said = run(v.binary, "umount", v.mnt, ok=None)
        must(code == 32 and str(point) in said, f"exit code {code}: {said}")
        run("umount", point)
        alone(v, point)
        same((point / "f").read_text(), "x", "content")
        # a first one again
        kill_and_wait(pid, signal.SIGTERM)
        must(not os.path.ismount(point) and not v.mount_entry(), "still mounted")


@check
def the_kernel_does_not_take_parked_requests_for_congestion(volume, _top):
    """Its threshold rises as soon as a tenant has a rate: also where the mount has a block device of its own."""
    for options in ("fuseblk=never", "fuseblk=auto"):
        with tenants(volume, options) as (v, point):
            threshold = connection(v.mnt) / "congestion_threshold"
            before = int(threshold.read_text())

            def has_risen(place):
                return int((connection(place) / "congestion_threshold").read_text()) > before  # noqa: B023

            # a mount of its own has one of its own, whichever comes first
            alone(v, point)
            run(v.binary, "tenant", "set", "--read-bps", "1M", v.mnt, "a")
            for place in (v.mnt, point):
                wait_for("the threshold to rise", lambda: has_risen(place), 10)  # noqa: B023
            run("umount", point)
            alone(v, point)
            must(has_risen(point), "the threshold of a tenant that has a rate before it is mounted")


def sync_for_ever(path, many=4):
    """Threads that write to a file each and sync that, until the event that is returned; and their errors, 0 for none."""
    end = threading.Event()

    def one(name):
        fd = os.open(name, os.O_CREAT | os.O_WRONLY)
        try:
            while not end.is_set():
                os.write(fd, b"s")
                os.fsync(fd)
        except OSError as error:
            return error.errno
        finally:
            os.close(fd)
        return 0

    threads = concurrent.futures.ThreadPoolExecutor(many)
    return end, [threads.submit(one, f"{path}{n}") for n in range(many)]


@check(seconds=120)
def sigterm_while_a_tenant_is_busy(volume, _top):
    """What it asks for then waits its turn, where it has a rate, and is done."""
    for options in ("transport=dev",), ("fuseblk=never",):
        with tenants(volume, *options) as (v, point):
            run(v.binary, "tenant", "set", "--write-iops", "10/10", v.mnt, "a")
            alone(v, point)
            with open(point / "f", "w", encoding="utf-8") as file:
                file.write("written before")
                file.flush()
                pids = v.daemons()
                # more than it may: some wait their turn at any moment
                end, syncing = sync_for_ever(point / "g")
                time.sleep(2)
                os.kill(pids[0], signal.SIGTERM)
                wait_for("both to be detached", lambda: not os.path.ismount(point) and not v.mount_entry(), 20)
                # as users of the volume's own mount, this one is not cut off
                time.sleep(7)
                file.write(", and later")
                file.flush()
                os.fsync(file.fileno())
                end.set()
                same([sync.result(20) for sync in syncing], [0] * len(syncing), "errors of who syncs all the time")
            for pid in pids:
                wait_for("the end of the daemon", lambda pid=pid: not os.path.exists(f"/proc/{pid}"), 30)
            v.mount()
            same((v.mnt / "a/f").read_text(), "written before, and later", "content")


@check
def a_second_sigterm_cuts_off_users_of_a_tenant(volume, _top):
    """What the first one found is durable by then."""
    with tenants(volume) as (v, point):
        alone(v, point)
        file = os.open(point / "f", os.O_CREAT | os.O_WRONLY)
        try:
            os.write(file, b"written before")
            (pid,) = v.daemons()
            os.kill(pid, signal.SIGTERM)
            wait_for("both to be detached", lambda: not os.path.ismount(point) and not v.mount_entry(), 20)
            # signals within 3 s are one
            time.sleep(3.2)
            os.kill(pid, signal.SIGTERM)
            wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 30)
            with refused(errno.ENOTCONN, errno.EIO, errno.ECONNABORTED):
                os.fstat(file)
        finally:
            with contextlib.suppress(OSError):
                os.close(file)
        v.mount()
        same((v.mnt / "a/f").read_text(), "written before", "content")


@check
def killed(volume, _top):
    with tenants(volume) as (v, point):
        alone(v, point)
        (v.mnt / "b/f").write_text("not synced")
        write_synced(point / "f", b"synced")
        (point / "g").write_text("not synced")
        v.kill9()
        with refused(errno.ENOTCONN, errno.EIO, errno.ECONNABORTED):
            (point / "new").write_text("")
        v.mount("transport=dev")
        same((v.mnt / "a/f").read_bytes(), b"synced", "content")
        # in the place of the dead one
        alone(v, point)
        same((point / "f").read_bytes(), b"synced", "content")
        (point / "f").write_bytes(b"again")
        silent("umount", point)
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def its_pages_are_its_own(volume, _top):
    """With a daemon that answers nothing: what is dirty of a tenant's mount stays within its bound, and only that waits."""
    bound, size = 64 << 20, 160 << 20
    # with little room, or with extended attributes, the daemon is asked before each write
    with tenants(volume, "private", size=16 << 30, space="none") as (v, point):
        alone(v, point)
        flood, calm = point / "flood", v.mnt / "b/calm"
        for path in flood, calm:
            # the kernel learns by the first one that there are no attributes that a write could take away
            path.write_bytes(bytes(4096))
        (point / "read").write_bytes(bytes(8 << 20))
        same(cached(point / "read")[0], (8 << 20) // 4096, "pages of a tenant")
        run("sync", "-f", v.mnt)
        pid = v.daemon()
        # a close has the kernel write back
        body = ("import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY)\n"
                "for _ in range(%d): os.write(fd, bytes(1 << 20))\nos.write(1, b'written')\nos.read(0, 1)")
        fds = [os.open(path, os.O_RDONLY) for path in (flood, calm)]
        for path in flood, calm:
            os.stat(path)
        # whatever becomes of this process
        waker = subprocess.Popen(["sh", "-c", f"sleep 45; kill -CONT {pid}"])
        stop(pid)
        try:
            loads = (size, flood), (8 << 20, calm)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            writers = [subprocess.Popen([sys.executable, "-c", body % (n >> 20), path], **pipes) for n, path in loads]
            done = has_written(writers[1], 30)
            at_most, stood = 0, 0
            for _ in range(20):
                time.sleep(0.1)
                at_most = max(at_most, cached_fd(fds[0])[1])
                stood += not has_written(writers[0], 0)
            dirty_of_calm = cached_fd(fds[1])[1]
        finally:
            os.kill(pid, signal.SIGCONT)
            waker.kill()
            waker.wait()
            for writer in writers:
                writer.communicate(b"x", 60)
            [os.close(fd) for fd in fds]
        must(done, "the neighbour's writer waits")
        must(at_most * 4096 <= bound + (4 << 20), f"{at_most} pages of the tenant were dirty")
        must(at_most and stood == 20, "the flood did not wait")
        same(dirty_of_calm, (8 << 20) // 4096, "dirty pages of the neighbour")
        same(flood.stat().st_size, size, "size of the flood")


def has_written(process, seconds):
    return bool(select.select([process.stdout], [], [], seconds)[0])


@check
def ten_thousand_files(volume, _top):
    count = 10_000
    with tenants(volume, size=16 << 30, space="none") as (v, point):
        tree = v.mnt / "a"
        for d in range(10):
            (tree / f"d{d}").mkdir()
            for n in range(count // 10):
                (tree / f"d{d}/{n}").write_text("1")
        run("find", tree, "-ls")
        alone(v, point)

        def client(place, turn):
            for d in range(10):
                for n in range(0, count // 10, 7):
                    path = place / f"d{d}/{n}"
                    same(path.read_text(), "1", "content")
                    path.write_text(f"{turn}")
                    if n % 2:
                        os.rename(path, place / f"d{d}/renamed{n}")
                    elif n % 3 == 0:
                        os.unlink(path)

        def other():
            for n in range(2000):
                path = v.mnt / f"b/{n}"
                path.write_text("b")
                same(path.read_text(), "b", "content")
                with refused(errno.EBUSY):
                    os.stat(tree / f"d{n % 10}/{n}")

        threads = []
        failed = []

        def guarded(work):
            try:
                work()
            except BaseException as error:  # pylint: disable=broad-except
                failed.append(error)

        for work in (lambda: client(point, 2), other):
            threads.append(threading.Thread(target=guarded, args=(work,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        listed = lambda place: sorted(f"{os.path.basename(p)}/{f}" for p, _, fs in os.walk(place) for f in fs)  # noqa: E731
        here = listed(point)
        silent("umount", point)
        same(listed(tree), here, "names")
        same((tree / "d3/renamed7").read_text(), "2", "content")
        v.cold()
        same(listed(tree), here, "names after a remount")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def rings_and_others_refuse(volume, _top):
    with tenants(volume) as (v, point):
        refuses(1, ("there is no tenant x",), v.binary, "tenant", "mount", v.mnt, "x", point)
        file = point.with_suffix(".file")
        file.write_text("")
        try:
            must(run(v.binary, "tenant", "mount", v.mnt, "a", file, ok=None)[0] == 1, "mounted on a file")
            must(run(v.binary, "tenant", "mount", v.mnt, "a", file.with_suffix(".no"), ok=None)[0] == 1, "mounted nowhere")
        finally:
            file.unlink()
        # refused means: as before
        (v.mnt / "a/f").write_text("x")
        same(in_child(lambda: (v.mnt / "a/f").read_text(), 20), "x", "content")


@check
def the_root_of_a_tenant_is_not_the_volumes(volume, _top):
    """What the kernel is told of an entry of the volume's root it is not told of a tenant's root, whose number is the same."""
    with tenants(volume) as (v, point):
        alone(v, point)
        for name in ("b", "c"):
            (point / name).mkdir()
            run("mount", "-t", "tmpfs", "none", point / name)
        try:
            run(v.binary, "tenant", "create", v.mnt / "c")
            run(v.binary, "tenant", "mount", v.mnt, "b")
            for name in ("b", "c"):
                must(os.path.ismount(point / name), f"what was mounted on {name} of the tenant is gone")
        finally:
            for name in ("b", "c"):
                run("umount", "-l", point / name, ok=None)


@check
def a_tenants_directory_behind_a_link(volume, _top):
    """Who may exchange a directory for a link cannot have a tenant that lies in it mounted elsewhere."""
    with tenants(volume) as (v, point):
        (v.mnt / "up").mkdir()
        run(v.binary, "tenant", "create", v.mnt / "up/t")
        (point / "t").mkdir()
        (v.mnt / "link").symlink_to(point)
        ended = threading.Event()

        def exchange():
            while not ended.is_set():
                renameat2(v.mnt / "up", v.mnt / "link", 2)

        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for _ in range(40):
                code, _ = run(v.binary, "tenant", "mount", v.mnt, "t", ok=None)
                must(not os.path.ismount(point / "t"), "the tenant is mounted where the link leads")
                if code == 0:
                    for place in ("up/t", "link/t"):
                        run("umount", "-l", v.mnt / place, ok=None)
        finally:
            ended.set()
            thread.join()
            run("umount", "-l", point / "t", ok=None)
            (point / "t").rmdir()


@check
def the_last_of_a_volume_that_was_detached(volume, _top):
    """`braidfs umount` of a tenant waits for the devices, where the volume is mounted no more."""
    with tenants(volume) as (v, point):
        alone(v, point)
        run(v.binary, "umount", "--lazy", v.mnt)
        for n in range(40):
            (point / f"f{n}").write_bytes(os.urandom(4 << 20))
        silent(v.binary, "umount", point)
        with open(v.image, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def of_a_volume_on_two_devices(volume, _top):
    """Its source names all devices, and a tenant: what is asked by a device is about the volume, whichever mount is newest."""
    daemon_only(volume)
    root_only()
    for options in ("fuseblk=auto", "fuseblk=never"):
        with small_volume(volume) as v:
            second = v.image.with_suffix(".second")
            both, point, other = f"{v.image},{second}", v.image.with_suffix(".tenant"), v.image.with_suffix(".other")
            v.image.unlink()
            run(v.binary, "mkfs", "-q", "--size", "64M", v.image, second)
            point.mkdir()
            other.mkdir()
            try:
                run(v.binary, "mount", "-o", f"transport=dev,{options}", v.image, second, v.mnt)
                for name in "ab":
                    run(v.binary, "tenant", "create", v.mnt / name)
                alone(v, point)
                # by its devices, not through the tenant
                silent(v.binary, "mount", "-o", "tenant=b", both, other)
                silent(v.binary, "label", both, "named")
                same(run(v.binary, "label", v.image)[1], "named\n", "label")
                must(f"mounted on {v.mnt}:" in run(v.binary, "info", both)[1], "info names another mount")
                for what in (("device", "rebalance", point), ("scrub", point), ("resize", point), ("label", point, "x")):
                    refuses(1, ("a tenant is mounted there by itself",), v.binary, *what)
                for argv in (("umount", v.mnt), ("mount", "-o", "remount,ro", v.mnt)):
                    refuses(32, ("mounted by themselves", str(point), str(other)), v.binary, *argv)
                (v.mnt / "f").write_text("x")
                # the volume stays open: there is nothing to wait for
                for place in (point, other):
                    silent(v.binary, "umount", "--timeout", "5", place)
                silent(v.binary, "umount", v.mnt)
                same(run(v.binary, "fsck", "-f", "-n", v.image, second, ok=None)[0], 0, "exit code of fsck")
            finally:
                for place in (point, other, v.mnt):
                    run("umount", "-l", place, ok=None)
                point.rmdir()
                other.rmdir()
                v.force_down()
                second.unlink(missing_ok=True)
