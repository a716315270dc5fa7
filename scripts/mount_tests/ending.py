"""How a mount ends that is in use, has moved, or whose process does not answer: what was acknowledged is not lost (docs/mounted.md)."""

import contextlib
import mmap
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

from fslib import connection, fork_for, kill_and_wait, run, wait_for
from fslib import stop as stop_process
from mount_tests.common import NOBODY, as_nobody, check, daemon_only, must, root_only, same, write_synced
from mount_tests.guard import PTRACE_DETACH, ptrace, stop, threads_named
from mount_tests.helpers import small_volume
from mount_tests.upgrade import fill_up, mounted, mounted_by_nobody, on_a_small_disk, server

# The kernel tells the server of no sync, and the server commits by itself much later.
LATE = "fuseblk=never,commit=300,transport=dev"

# Signals within 3 s are one.
SAME = 3.2


def leave_dirty(path, content):
    """In the kernel's cache only: a close writes back, and this comes after it."""
    write_synced(path, bytes(len(content)))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), len(content))
    mapped[:] = content
    mapped.close()


@check
def umount_by_force_loses_nothing(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        for options in (LATE, "transport=dev"):
            v.mount(options)
            content = os.urandom(8192)
            leave_dirty(v.mnt / "f", content)
            # a healthy one that is in use stays as it is
            with open(v.mnt / "g", "wb") as file:
                code, said = run(v.binary, "umount", "--force", v.mnt, ok=None, timeout=60)
                same(code, 32, f"exit code: {said}")
                must("busy" in said and "does not answer, not its users" in said, said)
                file.write(b"still served")
            run(v.binary, "umount", "--force", v.mnt, timeout=60)
            v.mount(options)
            same(((v.mnt / "f").read_bytes(), (v.mnt / "g").read_bytes()), (content, b"still served"), "content")
            v.umount()


@check
def umount_by_force_cuts_off_who_does_not_answer(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("transport=dev")
        write_synced(v.mnt / "f", b"synced")
        pid = v.daemon()
        os.kill(pid, signal.SIGSTOP)
        try:
            code, said = run(v.binary, "umount", "--force", v.mnt, ok=None, timeout=50)
        finally:
            os.kill(pid, signal.SIGCONT)
        same(code, 32, f"exit code: {said}")
        must("unmounted by force" in said and "did not answer and was cut off" in said, said)
        wait_for("the end of the daemon", lambda: not v.daemons(), 20)
        v.mount("transport=dev")
        same((v.mnt / "f").read_bytes(), b"synced", "content")
        v.umount()


@check
def umount_of_a_dead_mount_is_no_failure(volume, _top):
    """Nothing is lost that was synced: the next mount replays the journal."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        for options in LATE, "transport=dev":
            for how in (), ("--force",):
                v.mount(options)
                write_synced(v.mnt / "f", b"synced")
                pid = v.daemon()
                kill_and_wait(pid, signal.SIGKILL)
                code, said = run(v.binary, "umount", *how, v.mnt, ok=None)
                same(code, 0, f"exit code: {said}")
                must("its server had died; the next mount replays the journal" in said, said)
                v.mount(options)
                same((v.mnt / "f").read_bytes(), b"synced", "content")
                same(run(v.binary, "umount", v.mnt), (0, ""), "unmount of one that is served")


def held_by_nobody(directory):
    """A process of the user nobody that has the directory open."""
    def hold(pipe):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        os.open(directory, os.O_RDONLY)
        os.write(pipe, b"x")
        signal.pause()

    pid, reader = fork_for(hold)
    same(os.read(reader, 1), b"x", "its word")
    os.close(reader)
    return pid


@check
def umount_by_force_of_a_users_own_mount(volume, _top):
    """Root, whom it does not let in, has it synced, and its process cut off where that does not answer."""
    with mounted_by_nobody(volume, LATE.replace("fuseblk=never,", "")) as (v, call):
        as_nobody(lambda: leave_dirty(v.mnt / "f", b"not synced"))
        held = held_by_nobody(v.mnt)
        try:
            code, said = run(v.binary, "umount", "--force", v.mnt, ok=None, timeout=60)
            must(code == 32 and "busy" in said, f"{code}: {said}")
        finally:
            os.kill(held, signal.SIGKILL)
            os.waitpid(held, 0)
        same(run(v.binary, "umount", "--force", v.mnt, timeout=60), (0, ""), "unmount")
        call("mount", "-o", "transport=dev", v.image, v.mnt)
        same(as_nobody(lambda: (v.mnt / "f").read_bytes()), b"not synced", "content")
        as_nobody(lambda: leave_dirty(v.mnt / "f", b"never given"))
        pid = server(v)
        os.kill(pid, signal.SIGSTOP)
        try:
            code, said = run(v.binary, "umount", "--force", v.mnt, ok=None, timeout=50)
        finally:
            os.kill(pid, signal.SIGCONT)
        must(code == 32 and "unmounted by force" in said and "did not answer and was cut off" in said, f"{code}: {said}")


@check
def an_unmount_that_lost_the_last_writes_says_so(volume, _top):
    """An image file on a disk that is full when the volume is closed. Nothing was synced, so that nobody has been told."""
    daemon_only(volume)
    root_only()
    with mounted(volume) as v, contextlib.ExitStack() as stack:
        full, image = on_a_small_disk(v, stack)
        run(v.binary, "mount", "-o", "transport=dev,commit=300", image, v.mnt)
        stack.callback(v.force_down)
        write_synced(v.mnt / "kept", b"synced")
        for n in range(1000):
            (v.mnt / f"{n:0200}").write_text("x")
        fill_up(full)
        code, said = run(v.binary, "umount", v.mnt, ok=None)
        same(code, 32, f"exit code: {said}")
        must("not closed properly" in said and "may be lost" in said and "braidfs fsck" in said, said)
        # a check that cannot write gives nothing up
        code, said = run(v.binary, "fsck", "-y", image, ok=None)
        same(code, 8, f"exit code of fsck: {said}")
        must("nothing of them is given up" in said, said)
        (full / "fill").unlink()
        run(v.binary, "mount", "-o", "transport=dev", image, v.mnt)
        same((v.mnt / "kept").read_bytes(), b"synced", "content")
        code, said = run(v.binary, "umount", v.mnt, ok=None)
        same((code, said), (0, ""), "unmount of a sound one")
        same(run(v.binary, "fsck", "-f", "-n", image, ok=None)[0], 0, "exit code of fsck")


@check
def an_unmount_tells_of_each_device(volume, _top):
    """The table of mounts names one of two devices, and the other one fails when the volume is closed."""
    daemon_only(volume)
    root_only()
    with mounted(volume) as v, contextlib.ExitStack() as stack:
        full, image = on_a_small_disk(v, stack)
        other = image.with_name("other")
        own = v.image.with_suffix(".own")
        stack.callback(own.unlink, missing_ok=True)
        image.unlink()
        run(v.binary, "mkfs", "-q", "--size", "256M", own, other)
        run(v.binary, "mount", "-o", "transport=dev,commit=300", f"{own},{other}", v.mnt)
        stack.callback(v.force_down)
        must(v.mount_entry()[2] == "fuseblk.braidfs", f"{v.mount_entry()}")
        same(run(v.binary, "umount", v.mnt), (0, ""), "unmount of a sound one")
        run(v.binary, "mount", "-o", "transport=dev,commit=300", f"{own},{other}", v.mnt)
        # directories of all domains
        for d in range(16):
            (v.mnt / f"{d}").mkdir()
            for n in range(100):
                (v.mnt / f"{d}/{n:0200}").write_text("x")
        fill_up(full)
        code, said = run(v.binary, "umount", v.mnt, ok=None)
        same(code, 32, f"exit code: {said}")
        must("not closed properly" in said and "may be lost" in said, said)


@check
def umount_by_force_leaves_what_is_mounted_over_it(volume, _top):
    """Somebody mounts there while it is synced, which may take long."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount("transport=dev")
        leave_dirty(v.mnt / "f", b"not synced")
        pid, kernels = v.daemon(), connection(v.mnt)
        stop_process(pid)
        try:
            command = subprocess.Popen(
                [v.binary, "umount", "--force", v.mnt], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            wait_for("a request that waits", lambda: int((kernels / "waiting").read_text()) > 0, 20)
            run("mount", "-t", "tmpfs", "over", v.mnt)
        finally:
            os.kill(pid, signal.SIGCONT)
        said, _ = command.communicate(timeout=60)
        try:
            same(command.returncode, 32, f"exit code: {said}")
            must("something else was mounted over it" in said, said)
            kinds = [line.split()[2] for line in pathlib.Path("/proc/mounts").read_text().splitlines() if line.split()[1] == str(v.mnt)]
            same(kinds, ["fuseblk.braidfs", "tmpfs"], "what is mounted there")
        finally:
            run("umount", "-t", "tmpfs", v.mnt, ok=None)
        same(run(v.binary, "umount", "--force", v.mnt), (0, ""), "unmount")
        v.mount("transport=dev")
        same((v.mnt / "f").read_bytes(), b"not synced", "content")
        v.umount()


def killed_later(v, pid):
    """The server is killed, and what is left of the mount goes."""
    os.kill(pid, signal.SIGKILL)
    wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 20)
    run("umount", "-l", v.mnt, ok=None)


@contextlib.contextmanager
def in_use(path):
    """A file that is open, and may be cut off."""
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            os.close(file)


@contextlib.contextmanager
def logged_mount(v, *options):
    """Mounts with a log of its own: a function that gives its text."""
    file = v.image.with_suffix(".ending.log")
    file.unlink(missing_ok=True)
    v.mount(*options, f"log={file}")
    try:
        yield file.read_text
    finally:
        file.unlink(missing_ok=True)


@check
def sigterm_makes_a_busy_mount_durable(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, logged_mount(v, LATE) as said:
        pid = v.daemon()
        leave_dirty(v.mnt / "f", b"not synced")
        with open(v.mnt / "g", "wb"):
            os.kill(pid, signal.SIGTERM)
            wait_for("its word", lambda: "busy: synced and detached" in said(), 20)
            killed_later(v, pid)
        v.mount(LATE)
        same((v.mnt / "f").read_bytes(), b"not synced", "content")


@check
def signals_that_come_together_are_one(volume, _top):
    """A service manager sends SIGHUP right after SIGTERM; a shutdown reaches a supervisor, too, which hands its signal on."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        for options in (LATE, f"supervise,{LATE}"):
            with logged_mount(v, options) as said:
                pids = sorted(v.daemons(), key=started)
                content = os.urandom(8 << 20)
                leave_dirty(v.mnt / "f", content)
                with in_use(v.mnt / "g") as file:
                    for pid in pids:
                        os.kill(pid, signal.SIGTERM)
                    os.kill(pids[-1], signal.SIGHUP)
                    wait_for("its word", lambda: "busy: synced and detached" in said(), 20)
                    os.write(file, b"still served")
                wait_for("the end of the daemons", lambda: not v.daemons(), 20)
            v.mount(LATE)
            same((v.mnt / "f").read_bytes(), content, "content")
            same((v.mnt / "g").read_bytes(), b"still served", "what was written after the signals")
            (v.mnt / "g").unlink()
            v.umount()


@check
def sigterm_of_a_covered_mount(volume, _top):
    """It goes on; when it is covered no more, a signal is a first one again: who uses the mount is not cut off."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, logged_mount(v, LATE) as said:
        pid = v.daemon()
        leave_dirty(v.mnt / "f", b"not synced")
        with in_use(v.mnt / "g") as file:
            run("mount", "-t", "tmpfs", "none", v.mnt)
            try:
                os.kill(pid, signal.SIGTERM)
                wait_for("its word", lambda: "something else is mounted over it: synced" in said(), 20)
            finally:
                run("umount", v.mnt)
            os.write(file, b"still served")
            time.sleep(SAME)
            os.kill(pid, signal.SIGTERM)
            wait_for("its word", lambda: "busy: synced and detached" in said(), 20)
            os.write(file, b", and still")
        wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 20)
        v.mount(LATE)
        content = (v.mnt / "f").read_bytes(), (v.mnt / "g").read_bytes()
        same(content, (b"not synced", b"still served, and still"), "content")


@check
def sigterm_after_a_lazy_unmount(volume, _top):
    """It cannot be reached any more, and a second signal would cut off who uses it."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, logged_mount(v, LATE) as said:
        pid = v.daemon()
        leave_dirty(v.mnt / "f", b"not synced")
        with in_use(v.mnt / "g") as file:
            run("umount", "-l", v.mnt)
            os.kill(pid, signal.SIGTERM)
            wait_for("its word", lambda: "it was detached before: synced" in said(), 20)
            os.write(file, b"still served")
            time.sleep(SAME)
            os.kill(pid, signal.SIGTERM)
            wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 20)
        v.mount(LATE)
        same((v.mnt / "f").read_bytes(), b"not synced", "content")


@contextlib.contextmanager
def below_another(v):
    """Its mount point lies in a directory that has another name in the end."""
    above, renamed, before = v.mnt.parent / "above", v.mnt.parent / "renamed", v.mnt
    v.mnt = above / before.name
    v.mnt.mkdir(parents=True)

    def rename():
        above.rename(renamed)
        # as the server was called; what is seen is elsewhere
        return renamed / before.name

    try:
        yield rename
    finally:
        for path in v.mnt, renamed / before.name:
            run("umount", "-l", path, ok=None)
        for pid in v.daemons():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        v.mnt = before
        for path in above, renamed:
            shutil.rmtree(path, ignore_errors=True)


@check
def sigterm_after_a_directory_above_was_renamed(volume, _top):
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, below_another(v) as rename:
        v.mount(LATE)
        pid = v.daemon()
        leave_dirty(v.mnt / "f", b"not synced")
        now = rename()
        os.kill(pid, signal.SIGTERM)
        wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 20)
        must(not os.path.ismount(now), "it is mounted yet")
        v.mnt = now
        v.mount(LATE)
        same((v.mnt / "f").read_bytes(), b"not synced", "content")
        v.umount()


@check
def supervised_where_a_directory_above_was_renamed(volume, _top):
    """The mount comes back where it was seen last."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v, below_another(v) as rename:
        v.mount(f"supervise,{LATE}")
        write_synced(v.mnt / "f", b"synced")
        now = rename()
        parent, child = sorted(v.daemons(), key=started)
        os.kill(child, signal.SIGKILL)
        wait_for("the mount to come back", lambda: readable(now / "f"), 20)
        same(((now / "f").read_bytes(), os.path.ismount(now)), (b"synced", True), "content, and whether it is mounted")
        os.kill(parent, signal.SIGTERM)
        wait_for("the end of the parent", lambda: not os.path.exists(f"/proc/{parent}"), 20)
        must(not os.path.ismount(now), "it is mounted yet")


def started(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def readable(path):
    with contextlib.suppress(OSError):
        return bool(path.read_bytes())
    return False


@check
def a_second_signal_cuts_off_while_the_first_waits(volume, _top):
    """Unmounting waits for a server that is stopped in part: for its own answer."""
    daemon_only(volume)
    root_only()
    with small_volume(volume) as v:
        v.mount(LATE)
        pid = v.daemon()
        leave_dirty(v.mnt / "f", bytes(4096))
        with in_use(v.mnt / "g") as file:
            # who serves
            stopped = [t for t in threads_named(pid, "fuse-") if re.fullmatch(r"fuse-\d+", name_of(pid, t))]
            for thread in stopped:
                stop(thread)
            try:
                os.kill(pid, signal.SIGTERM)
                wait_for("the first signal's work", lambda: threads_named(pid, "fuse-end"), 10)
                time.sleep(SAME)
                must(threads_named(pid, "fuse-end"), "the first signal does not wait")
                os.kill(pid, signal.SIGTERM)
                wait_for("the end of the connection", lambda: fails(file), 10)
            finally:
                for thread in stopped:
                    ptrace(PTRACE_DETACH, thread)
        wait_for("the end of the daemon", lambda: not os.path.exists(f"/proc/{pid}"), 20)
        v.mount(LATE)
        v.umount()
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


def name_of(pid, thread):
    return pathlib.Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()


def fails(file):
    """In a process of its own: it may wait."""
    pid, reader = fork_for(lambda _pipe: os.fstat(file))
    os.close(reader)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
