"""A serving process that is killed while a thread of it waits in the kernel, for the process itself or for its device: its guard ends
the connection (docs/mounted.md)."""

import contextlib
import ctypes
import mmap
import os
import pathlib
import signal
import subprocess
import time

from fslib import BraidFs, Ext4, Skipped, fork_for, log, name_of, of_threads, run, wait_for, why_no_ext4
from mount_tests.common import LIBC, check, daemon_only, must, root_only, same
from mount_tests.helpers import small_volume
from mount_tests.overwrite import requests
from mount_tests.transport import switched

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x40000000
SYNC_FILE_RANGE_WRITE = 2


def ptrace(what, thread):
    if LIBC.ptrace(what, thread, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def stop(thread):
    """Of all threads of a process this one alone."""
    ptrace(PTRACE_SEIZE, thread)
    ptrace(PTRACE_INTERRUPT, thread)
    os.waitpid(thread, WALL)


def threads_named(pid, name):
    return [int(thread) for thread, its in of_threads(pid, lambda t: (t.name, name_of(t))) if its.startswith(name)]


def state(pid, thread):
    return pathlib.Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def guards(volume):
    return volume.daemons(guards=True)


def make_wait_for_itself(volume, pid):
    """Leaves a helper thread of the server in the kernel, where it waits for a page that is on its way to the server."""
    path = volume.mnt / "f"
    path.write_bytes(bytes(1 << 20))
    # closed by the end of the mount: a close would wait for the page, too
    file = open(path, "r+b")  # noqa: SIM115
    os.fsync(file.fileno())
    mapped = mmap.mmap(file.fileno(), 1 << 20)
    same(mapped[0], 0, "what is mapped")
    helpers = threads_named(pid, "fuse-helper")
    for helper in helpers:
        stop(helper)
    # The answer waits for a helper, which has to drop the page from the kernel's cache.
    before = requests(volume)["WRITE"]
    writer = os.fork()
    if writer == 0:
        with contextlib.suppress(OSError):
            direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            os.pwrite(direct, mmap.mmap(-1, 4096), 0)
        os._exit(0)
    wait_for("the write", lambda: requests(volume)["WRITE"] > before, 20)
    time.sleep(0.5)
    mapped[0] = 7
    stopped = [thread for thread in threads_named(pid, "fuse-") if thread not in helpers]
    for thread in stopped:
        stop(thread)
    if LIBC.sync_file_range(file.fileno(), ctypes.c_long(0), ctypes.c_long(4096), SYNC_FILE_RANGE_WRITE):
        raise OSError(ctypes.get_errno(), "sync_file_range")
    for helper in helpers:
        ptrace(PTRACE_DETACH, helper)
    wait_for("a helper in the kernel", lambda: any(state(pid, helper) == "D" for helper in helpers), 10)
    return writer, stopped, file, mapped


@check
def killed_while_it_waits_for_itself(volume, _top):
    kill_what_waits_for_itself(volume, "dev")


@check
def killed_while_it_waits_for_itself_by_rings(volume, _top):
    with switched():
        kill_what_waits_for_itself(volume, "ring")


def kill_what_waits_for_itself(volume, transport):
    root_only()
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mount(f"transport={transport}", "latency=off")
        pid = v.daemon()
        same(len(guards(v)), 1, "number of guards")
        writer, stopped, file, mapped = make_wait_for_itself(v, pid)
        os.kill(pid, signal.SIGKILL)
        for thread in stopped:
            os.waitpid(thread, WALL)
        # all of it, not only the first thread
        wait_for("the end of all its threads", lambda: ended(pid), 20)
        wait_for("the end of its guard", lambda: not guards(v), 10)
        os.waitpid(writer, 0)
        mapped.close()
        with contextlib.suppress(OSError):
            file.close()
        run("umount", "-l", v.mnt, timeout=20)
        v.mount()
        same(len((v.mnt / "f").read_bytes()), 1 << 20, "length of the file after the kill")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@contextlib.contextmanager
def on_a_file_system_of_its_own(volume):
    """A small volume whose image lies on an ext4 that can be frozen: who writes there waits, and cannot be killed."""
    if why := why_no_ext4():
        raise Skipped(why)
    below = Ext4(volume.image.parent, "below", 256 << 20)
    below.mkfs()
    below.mount()
    try:
        v = BraidFs(below.mnt, "frozen", 64 << 20, volume.binary)
        v.mkfs("--domains", "2")
        try:
            yield v, below.mnt
        finally:
            run("fsfreeze", "-u", below.mnt, ok=None)
            v.force_down()
    finally:
        below.force_down()
        below.image.unlink()


@check(seconds=60)
def killed_while_its_device_hangs(volume, _top):
    """Who uses the mount has an error soon, although the process ends when the device answers only."""
    kill_while_the_device_hangs(volume, "dev")


@check(seconds=60)
def killed_while_its_device_hangs_by_rings(volume, _top):
    """The same of what came to a serving thread that did not take it any more."""
    with switched():
        kill_while_the_device_hangs(volume, "ring")


def kill_while_the_device_hangs(volume, transport):
    root_only()
    daemon_only(volume)
    with on_a_file_system_of_its_own(volume) as (v, below):
        v.mount(f"transport={transport}", "commit=1", "latency=off")
        (v.mnt / "d").mkdir()
        (v.mnt / "mapped").write_bytes(bytes(4096))
        run("sync", "-f", v.mnt)
        pid = v.daemon()
        run("fsfreeze", "-f", below)
        (v.mnt / "f").touch()
        tasks = pathlib.Path(f"/proc/{pid}/task")
        wait_for("a thread that waits for the device", lambda: any(state(pid, t.name) == "D" for t in tasks.iterdir()), 20)
        stopped = threads_named(pid, "fuse-cpu-")
        must(bool(stopped) == (transport == "ring"), f"serving threads: {stopped}")
        for thread in stopped:
            stop(thread)
        cpus = sorted(os.sched_getaffinity(0))
        users = [user(cpus[n % len(cpus)], (v.mnt / f"missing{n}").stat) for n in range(4)]
        users.append(user(cpus[0], lambda: write_mapped(v.mnt / "mapped")))
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        for thread in stopped:
            os.waitpid(thread, WALL)
        for who in users:
            wait_for("the end of a user", lambda: os.waitpid(who, os.WNOHANG)[0], 10)  # noqa: B023
        must(not ended(pid), "the process has ended: it did not wait for the device")
        run("umount", "-l", v.mnt, timeout=20)
        run("fsfreeze", "-u", below)
        wait_for("the end of all its threads", lambda: ended(pid), 20)
        v.mount()
        must((v.mnt / "d").is_dir(), "what was synced is gone")
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


def user(cpu, work):
    """A process on a CPU, which may fail."""

    def there(_pipe):
        os.sched_setaffinity(0, {cpu})
        work()

    pid, reader = fork_for(there)
    os.close(reader)
    return pid


def write_mapped(path):
    """What is written back comes from the kernel's cache."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        mapped[0] = 1
        mapped.flush()


def ended(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except FileNotFoundError:
        return True


@check
def the_guard_ends_with_the_server(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mount()
        (guard,) = guards(v)
        # what asks for the end of all is not for it
        for sig in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            os.kill(guard, sig)
        (v.mnt / "f").write_text("x")
        same(guards(v), [guard], "its guard after signals that ask to end")
        v.umount()
        wait_for("the end of the guard", lambda: not guards(v), 10)
        # without it the mount goes on
        v.mount()
        (guard,) = guards(v)
        os.kill(guard, signal.SIGKILL)
        (v.mnt / "g").write_text("y")
        v.umount()
        v.mount()
        same(((v.mnt / "f").read_text(), (v.mnt / "g").read_text()), ("x", "y"), "content")
        v.kill9()
        wait_for("the end of the guard", lambda: not guards(v), 10)
        run("umount", "-l", v.mnt) if os.geteuid() == 0 else run("fusermount3", "-uz", v.mnt)


@check
def standard_streams_are_not_kept_open(volume, _top):
    """Who starts a mount with a pipe sees the end of that, though the mount stays."""
    daemon_only(volume)
    with small_volume(volume) as v:
        argv = [v.binary, "mount", v.image, v.mnt]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
        same(done.returncode, 0, f"exit code of mount: {done.stdout.decode()}")
        log(done.stdout.decode())
        must(v.daemons() and guards(v), "no server, or no guard")
        v.umount()
