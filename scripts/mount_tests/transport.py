"""How requests reach the daemon: by io_uring, by /dev/fuse, and what becomes of a mount whose rings are refused."""

import contextlib
import ctypes
import errno
import mmap
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import threading
import time

import fslib
from fslib import Failed, Skipped, name_of, of_threads, run, wait_for
from mount_tests.common import LIBC, check, daemon_only, must, same, write_synced
from mount_tests.helpers import small_volume

FAILPOINT = "BRAIDFS_TEST_RING_FAILS_ON_CPU"


@contextlib.contextmanager
def switched(allowed=True):
    """The kernel's switch as wanted, where it has one."""
    why = fslib.why_no_rings()
    if why or not fslib.IS_ROOT:
        raise Skipped(why or "needs root")
    with fslib.rings(allowed):
        yield


@contextlib.contextmanager
def with_rings(volume, allowed=True):
    """A volume of our own, not mounted, and the kernel's switch as wanted."""
    daemon_only(volume)
    with switched(allowed), small_volume(volume, size=256 << 20) as v:
        yield v


def threads(v):
    """Names of the daemon's threads, and the CPUs that each may run on."""
    return dict(of_threads(v.daemon(), lambda t: (name_of(t), os.sched_getaffinity(int(t.name)))))


def transport_of(v):
    names = threads(v)
    return "ring" if any(n.startswith("fuse-cpu-") for n in names) else "dev"


def work(top):
    """A little of everything, large and small, by several threads on all CPUs."""
    data = random.Random(4711).randbytes(3 << 20)

    def one(n):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[n % len(os.sched_getaffinity(0))]})
        d = top / f"d{n}"
        d.mkdir()
        for i in range(50):
            (d / f"f{i}").write_bytes(data[: i * 700])
        write_synced(d / "big", data)
        os.rename(d / "f1", d / "g1")
        os.setxattr(d / "g1", "user.x", b"y" * 3000)
        same(os.getxattr(d / "g1", "user.x"), b"y" * 3000, "an attribute")
        os.symlink("f2", d / "s")
        same(sorted(os.listdir(d)), sorted([f"f{i}" for i in range(50) if i != 1] + ["g1", "big", "s"]), "a listing")
        os.posix_fadvise(os.open(d / "big", os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
        same((d / "big").read_bytes(), data, "a large file")
        for i in range(2, 50):
            same((d / f"f{i}").read_bytes(), data[: i * 700], "a small file")
            os.unlink(d / f"f{i}")

    fslib.in_child(lambda: run_threads(one, 4), 60)


def run_threads(function, count):
    failed = []

    def guarded(n):
        try:
            function(n)
        except Exception as error:  # noqa: BLE001 - told by the caller
            failed.append(error)

    running = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    [t.start() for t in running]
    [t.join() for t in running]
    if failed:
        raise Failed(str(failed[0]))


@check
def requests_come_through_io_uring(volume, _top):
    with with_rings(volume) as v:
        v.mount("transport=ring")
        cpus = {n: c for n, c in threads(v).items() if n.startswith("fuse-cpu-")}
        same(sorted(cpus), [f"fuse-cpu-{c}" for c in sorted(os.sched_getaffinity(0))], "serving threads")
        for name, where in cpus.items():
            same(where, {int(name.rpartition("-")[2])}, f"CPUs of {name}")
        for kind in ("fuseblk=never", "fuseblk=always"):
            v.umount()
            v.mount("transport=ring", kind)
            (v.mnt / kind).mkdir()
            work(v.mnt / kind)
            run("sync", "-f", v.mnt)
            # not bound to the CPU of the thread that started them
            own = threads(v)
            # the kernel's own (iou-wrk) go with the thread that needed them
            bound = [n for n, c in own.items() if len(c) == 1 and not n.startswith(("fuse-cpu-", "iou-wrk-"))]
            must(len(os.sched_getaffinity(0)) == 1 or not bound, f"threads that are bound to a CPU: {bound}")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def auto_takes_what_there_is(volume, _top):
    with with_rings(volume, allowed=False) as v:
        v.mount("transport=auto")
        same(transport_of(v), "dev", "transport with the switch off")
        v.umount()
        code, text = run(v.binary, "mount", "-o", "transport=ring", v.image, v.mnt, ok=None)
        must(code == 32 and "turned off" in text and "enable_uring" in text, f"exit code {code}: {text}")
        must(not v.mount_entry(), "mounted all the same")
        with fslib.rings(True):
            v.mount("transport=auto")
            same(transport_of(v), "ring", "transport with the switch on")
            v.umount()
            v.mount("transport=dev")
            same(transport_of(v), "dev", "transport=dev")
            v.umount()


@check
def a_refused_registration_ends_in_a_mount_by_the_device(volume, _top):
    """The kernel keeps every request until all queues are registered: such a connection cannot be used."""
    with with_rings(volume) as v:
        last = max(os.sched_getaffinity(0))
        for kind in ("fuseblk=always", "fuseblk=never"):
            for cpu in sorted({0, last}):
                env = dict(os.environ, **{FAILPOINT: str(cpu)})
                run(v.binary, "mount", "-o", f"transport=auto,{kind}", v.image, v.mnt, env=env, timeout=30)
                wait_for("the mount", v.alive, 10)
                same(transport_of(v), "dev", f"transport after CPU {cpu} was refused")
                (v.mnt / f"{kind}-{cpu}").mkdir()
                same(len([m for m in mounts() if m == str(v.mnt)]), 1, "mounts there")
                work(v.mnt / f"{kind}-{cpu}")
                v.umount()
                code, text = run(
                    v.binary, "mount", "-o", f"transport=ring,{kind}", v.image, v.mnt, ok=None, env=env, timeout=30
                )
                must(code == 32 and "transport=ring" in text, f"exit code {code}: {text}")
                must(not v.mount_entry(), "mounted all the same")
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


def mounts():
    return [line.split(" ")[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines()]


def forbid_io_uring():
    """A seccomp filter under which io_uring_setup(2) fails with EPERM, for this process and what it starts."""
    load, jump, ret = 0x20, 0x15, 0x06
    program = [
        struct.pack("=HBBI", load, 0, 0, 0),  # the number of the system call
        struct.pack("=HBBI", jump, 0, 1, 425),
        struct.pack("=HBBI", ret, 0, 0, 0x00050000 | errno.EPERM),
        struct.pack("=HBBI", ret, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    filter_ = ctypes.create_string_buffer(struct.pack("=H6xQ", len(program), ctypes.addressof(code)))
    if LIBC.prctl(38, 1, 0, 0, 0) or LIBC.prctl(22, 2, ctypes.byref(filter_), 0, 0):
        raise Failed("no seccomp filter")


@check
def without_io_uring_the_device_serves(volume, _top):
    """A container's seccomp profile, for instance."""
    with with_rings(volume) as v:
        argv = [v.binary, "mount", "-o", "transport=auto", v.image, v.mnt]
        done = subprocess.run(argv, preexec_fn=forbid_io_uring, timeout=30, stdin=subprocess.DEVNULL)
        same(done.returncode, 0, "exit code of mount")
        wait_for("the mount", v.alive, 10)
        same(transport_of(v), "dev", "transport")
        work(v.mnt)
        v.umount()


@check
def a_daemon_of_one_cpu_serves_all(volume, _top):
    """The queues of CPUs that the daemon may not use have an owner, too."""
    with with_rings(volume) as v:
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            raise Skipped("one CPU")
        run("taskset", "-c", str(cpus[-1]), v.binary, "mount", "-o", "transport=ring", v.image, v.mnt)
        wait_for("the mount", v.alive, 10)
        serving = [n for n in threads(v) if n.startswith("fuse-cpu-")]
        same(serving, [f"fuse-cpu-{cpus[-1]}"], "serving threads")
        work(v.mnt)
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


CALLERS = 64


def call_for_ever(top, n, dead):
    """Whatever a caller may be in when the daemon dies. Returns the error that ends it, 0 where that is one of `dead`."""
    path = top / f"caller{n}"
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        while True:
            if n % 4 == 0:
                os.pwrite(fd, b"x" * 4096, 0)
                os.fsync(fd)
            elif n % 4 == 1:
                with contextlib.suppress(FileNotFoundError):
                    os.stat(top / f"absent{random.random()}")
            elif n % 4 == 2:
                os.close(os.open(top / f"made{n}-{random.random()}", os.O_CREAT | os.O_WRONLY, 0o600))
            else:
                os.pwrite(fd, b"y" * (1 << 20), 0)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.pread(fd, 1 << 20, 0)
    except OSError as error:
        return 0 if error.errno in dead else error.errno


def ended(callers):
    """Exit codes of those that have ended."""
    return {pid: os.waitstatus_to_exitcode(status) for pid, status in (os.waitpid(p, os.WNOHANG) for p in callers) if pid}


@check(seconds=180)
def killed_with_callers_in_flight(volume, _top):
    """All are at it when the daemon dies, and all are told so: at once, within seconds on a busy machine."""
    for transport in ("ring", "dev"):
        with with_rings(volume) as v:
            v.mount(f"transport={transport}")
            # by a ring also what the kernel says of a request that the killed process held
            dead = (*fslib.dead(), *([errno.ECANCELED] if transport == "ring" else []))
            callers, codes = [], {}
            for n in range(CALLERS):
                pid = os.fork()
                if pid == 0:
                    code = 255
                    try:
                        code = call_for_ever(v.mnt, n, dead)
                    finally:
                        os._exit(code)
                callers.append(pid)
            try:
                # each has made its file, and goes on
                wait_for("all callers to be at it", lambda: sum(n.startswith("caller") for n in os.listdir(v.mnt)) == CALLERS)
                time.sleep(0.3)
                codes = ended(callers)
                must(not codes, f"transport={transport}: callers ended before the daemon was killed: {codes}")
                v.kill9()
                killed = time.monotonic()
                while len(codes) < CALLERS and time.monotonic() < killed + 30:
                    codes |= ended(set(callers) - set(codes))
                    time.sleep(0.01)
                fslib.log(f"transport={transport}: the last of {CALLERS} callers was told after {time.monotonic() - killed:.2f} s")
            finally:
                for pid in set(callers) - set(codes):
                    os.kill(pid, signal.SIGKILL)
            stuck = CALLERS - len(codes)
            must(not stuck, f"transport={transport}: {stuck} callers are stuck after 30 s")
            others = {errno.errorcode.get(c, c) for c in codes.values() if c}
            must(not others, f"transport={transport}: callers got {others}, which a dead mount does not give")
            v.mount(f"transport={transport}")
            must(len(os.listdir(v.mnt)) > 0, "nothing there after the crash")
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def more_syncs_than_a_queue_has_places(volume, _top):
    """All from one CPU, and what is asked beside them is answered."""
    with with_rings(volume) as v:
        v.mount("transport=ring")

        def body():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            ended = threading.Event()

            def sync(n):
                fd = os.open(v.mnt / f"s{n}", os.O_CREAT | os.O_WRONLY, 0o600)
                for i in range(6):
                    os.pwrite(fd, bytes([i]) * 100, i * 100)
                    os.fsync(fd)
                os.close(fd)

            def ask(_n):
                while not ended.is_set():
                    os.stat(v.mnt)
                    with contextlib.suppress(FileNotFoundError):
                        os.stat(v.mnt / f"absent{random.random()}")

            asking = threading.Thread(target=ask, args=(0,))
            asking.start()
            run_threads(sync, 400)
            ended.set()
            asking.join()

        fslib.in_child(body, 60)
        same(len(os.listdir(v.mnt)), 400, "files")
        v.umount()


def slept(v, name):
    """How often threads of that name went to sleep of themselves, of all: each waits after what it was given to do. How often one
    began to run says more of how busy the machine is."""
    def times(thread):
        if not name_of(thread).startswith(name):
            return 0
        return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", (thread / "status").read_text(), re.MULTILINE)[1])

    return sum(of_threads(v.daemon(), times))


@check
def large_requests_are_served_beside_the_ring(volume, _top):
    """The thread of a ring serves a whole CPU: what takes long is for others, and comes back to be answered."""
    with with_rings(volume) as v:
        if os.cpu_count() < 2:
            raise Skipped("needs two CPUs")
        v.mount("transport=ring")
        size, data = 1 << 20, random.Random(99).randbytes(32 << 20)

        def transfer(fd, piece, function):
            buffer, before = mmap.mmap(-1, piece), slept(v, "fuse-large")
            for at in range(0, len(data), size):
                function(fd, buffer, at)
            return slept(v, "fuse-large") - before

        def write(fd, buffer, at):
            buffer[:] = data[at : at + len(buffer)]
            same(os.pwritev(fd, [buffer], at), len(buffer), "bytes written")

        def read(fd, buffer, at):
            same(os.preadv(fd, [buffer], at), len(buffer), "bytes read")
            same(buffer[:], data[at : at + len(buffer)], "data")

        fd = os.open(v.mnt / "big", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        least = len(data) // size // 2
        for name, function in (("WRITE", write), ("READ", read)):
            times = transfer(fd, size, function)
            must(times >= least, f"another thread slept {times} times between {len(data) // size} {name}s of 1 MiB")
            times = transfer(fd, 65536, function)
            must(times <= 2, f"another thread slept {times} times between {name}s of 64 KiB")
        os.close(fd)
        v.cold()
        same((v.mnt / "big").read_bytes(), data, "the file, read ahead")

        def streams(n):
            path = v.mnt / f"s{n}"
            path.write_bytes(data)
            os.truncate(path, len(data) - 5 - n)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                same(file.read(), data[: -5 - n], "a stream")

        run_threads(streams, 4)
        v.umount()


@check
def memory_of_large_requests_is_given_back(volume, _top):
    """How much of the cache's memory the allocator has given back by then differs from mount to mount, by up to half of the
    cache: what a ring keeps, it keeps each time."""
    with with_rings(volume) as v:
        allowed = (32 << 20) + (4 << 20) * os.cpu_count()
        for last in (False, False, False, True):
            v.mount("transport=ring", "cache=32M")
            daemon = v.daemon()
            before = resident(daemon)
            large_requests(v.mnt / "big")
            try:
                wait_for("memory to be given back", lambda: resident(daemon) - before <= allowed, 10 if last else 2)
                break
            except Failed:
                if last:
                    raise
            finally:
                v.umount()


def resident(pid):
    """Bytes of memory that a process has for itself."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) << 10


def large_requests(path):
    """Writes and reads a MiB at a time, past the cache, from each CPU, and removes the file."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    buffer = mmap.mmap(-1, 1 << 20)
    buffer.write(os.urandom(1 << 20))
    cpus = os.sched_getaffinity(0)
    for cpu in sorted(cpus):
        os.sched_setaffinity(0, {cpu})
        for i in range(48):
            os.pwrite(fd, buffer, i << 20)
            os.preadv(fd, [buffer], i << 20)
    os.sched_setaffinity(0, cpus)
    os.close(fd)
    os.unlink(path)


@check
def memory_of_large_requests_is_given_back_while_small_ones_come(volume, _top):
    """Many large ones at once use many entries of a queue; what comes later uses one."""
    with with_rings(volume) as v:
        v.mount("transport=ring", "cache=32M")
        daemon = v.daemon()
        cpus = sorted(os.sched_getaffinity(0))
        (v.mnt / "big").write_bytes(os.urandom(32 << 20))
        fd = os.open(v.mnt / "big", os.O_RDONLY | os.O_DIRECT)

        def read(n):
            os.sched_setaffinity(0, {cpus[n % len(cpus)]})
            buffer = mmap.mmap(-1, 1 << 20)
            for i in range(24):
                os.preadv(fd, [buffer], (i + n) % 32 << 20)

        peak, before = 0, resident(daemon)
        readers = [threading.Thread(target=read, args=(n,)) for n in range(64)]
        [t.start() for t in readers]
        while any(t.is_alive() for t in readers):
            peak = max(peak, resident(daemon))
            time.sleep(0.005)
        os.close(fd)
        fslib.log(f"{(peak - before) >> 20} MiB more at most")

        def small_and_done():
            for cpu in cpus:
                os.sched_setaffinity(0, {cpu})
                (v.mnt / "small").touch()
                (v.mnt / "small").unlink()
            return resident(daemon) - before <= (8 << 20) + (4 << 20) * os.cpu_count()

        wait_for("memory to be given back", small_and_done, 6)
        os.sched_setaffinity(0, cpus)
        v.umount()
