"""A supervised mount: its process is killed, and programs that come later find the files again."""

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time

import fslib
from fslib import Failed, connection, dead, is_running, kill_and_wait, quiet, run, stop, wait_for
from mount_tests.common import check, daemon_only, must, refused, root_only, same, write_synced
from mount_tests.helpers import loop_device, small_volume

# `make supervise-kills` asks for more.
KILLS = int(os.environ.get("SUPERVISE_KILLS", "3"))


def parent_of(pid):
    with contextlib.suppress(OSError):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def name_of(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    return None


def both(v):
    """The process that looks on, and the one that serves (None while there is none)."""
    # one that becomes another program has that one's name for a moment
    end = time.monotonic() + 2
    while True:
        pids = v.daemons()
        parents = [pid for pid in pids if name_of(pid) == "braidfs-superv"]
        if len(parents) == 1 or time.monotonic() > end:
            break
        time.sleep(0.01)
    same(len(parents), 1, f"parents among {pids}")
    serving = [pid for pid in pids if pid not in parents and parent_of(pid) == parents[0]]
    return parents[0], serving[0] if serving else None


def kill_serving(v):
    """kill -9 of the serving process; returns when another one serves."""
    parent, serving = both(v)
    fslib.log(f"kill -9 {serving}")
    kill_and_wait(serving, signal.SIGKILL)
    wait_for("another process that serves", lambda: v.alive() and both(v)[1] not in (None, serving), 20)
    return parent


@contextlib.contextmanager
def supervised(volume, *options, size=64 << 20):
    """A small volume, mounted so, and the file with its log."""
    daemon_only(volume)
    with small_volume(volume, size=size) as v:
        log = v.image.with_suffix(".log")
        os.environ["BRAIDFS_LOG_FILE"] = str(log)
        try:
            v.mount(*options)
            yield v, log
        finally:
            del os.environ["BRAIDFS_LOG_FILE"]
            v.force_down()
            if log.exists():
                fslib.log(log.read_text())
            log.unlink(missing_ok=True)


class Writer(threading.Thread):
    """Writes files by their paths and keeps which of them were synced; where the mount is dead it tries again."""

    def __init__(self, top, number):
        super().__init__()
        self.top, self.number, self.synced, self.refused, self.failure, self.stop = top, number, {}, 0, None, False

    def one(self, n):
        path, data = self.top / f"w{self.number}-{n % 200}", f"{self.number} {n} ".encode() * (n % 3000)
        # until it is synced, it may have either content
        self.synced.pop(path, None)
        write_synced(path, data)
        self.synced[path] = data
        (self.top / f"x{self.number}-{n % 50}").write_bytes(data)

    def run(self):
        n = 0
        while not self.stop:
            n += 1
            try:
                self.one(n)
            except OSError as error:
                self.refused += 1
                # ENOENT: between two mounts the directory below is seen
                if error.errno not in (*dead(), errno.ENOENT):
                    self.failure = error
                    return
                time.sleep(0.01)


@check(seconds=60 + 5 * KILLS)
def killed_under_load_and_mounted_again(volume, _top):
    with supervised(volume, f"supervise={2 * KILLS}/3600", "noatime", size=256 << 20) as (v, log):
        top = v.mnt / "load"
        top.mkdir()
        fd = os.open(top, os.O_RDONLY)
        os.fsync(fd)
        before = v.mount_entry()
        writers = [Writer(top, n) for n in range(3)]
        for w in writers:
            w.start()

        def wait_for_more_than(n):
            enough = lambda: sum(len(w.synced) for w in writers) > n or any(w.failure for w in writers)  # noqa: E731
            wait_for("synced files", enough, 30)

        try:
            for n in range(KILLS):
                # one that has served for a second is replaced at once
                time.sleep(0.4 if KILLS <= 3 else 1.1)
                wait_for_more_than(n)
                parent = kill_serving(v)
                (v.mnt / "a later program").write_text("works")
            wait_for_more_than(KILLS)
        finally:
            for w in writers:
                w.stop = True
            for w in writers:
                w.join()
        for w in writers:
            must(w.failure is None, f"a writer got {w.failure!r}")
        must(sum(len(w.synced) for w in writers) > KILLS, "too little was written")
        for w in writers:
            for path, data in w.synced.items():
                must(path.read_bytes() == data, f"{path}: not what was synced")
        # what was open stays dead
        with refused(*dead()):
            os.listdir(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
        after = v.mount_entry()
        # a loop device of an image may have another number, as user and group ids have not
        same((after[1:4]), (before[1:4]), "place, type and options of the mount")
        text = log.read_text()
        same(text.count("mounted again"), KILLS, "processes that were replaced, by the log")
        v.umount()
        must(not is_running(parent), "the parent outlives an unmount")
        same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
        print(f"  {KILLS} kills, {sum(len(w.synced) for w in writers)} synced files, "
              f"{sum(w.refused for w in writers)} calls refused meanwhile")


def ends_by(signum, function):
    """A child that calls `function` must be ended by this signal."""
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    must(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signum, f"a child ended with {status:#x}")


@check
def what_open_files_see(volume, _top):
    """The first table of docs/mounted.md on processes that die, row by row."""
    root_only()
    with supervised(volume, "supervise=100/3600", "transport=dev") as (v, _):
        for name in "held", "map", "collected":
            write_synced(v.mnt / name, b"synced" * 50_000)
        for name in "dir", "within":
            (v.mnt / name).mkdir()
        write_synced(v.mnt / "dir" / "f", b"x")
        write_synced(v.mnt / "within" / "f", b"below")
        bound = v.image.with_suffix(".bound")
        bound.mkdir()
        run("mount", "--bind", v.mnt, bound)
        run("mount", "-t", "tmpfs", "tmpfs", v.mnt / "within")
        (v.mnt / "within" / "theirs").touch()
        held, collected, cwd = (os.open(v.mnt / name, how) for name, how in
                                (("held", os.O_RDWR), ("collected", os.O_RDWR), ("dir", os.O_RDONLY)))
        below = os.open(v.mnt / "map", os.O_RDWR)
        mapped = mmap.mmap(below, 0)
        try:
            # not written back when it dies
            os.pwrite(collected, b"not synced", 0)
            _, serving = both(v)
            waiting = connection(v.mnt) / "waiting"
            under_way = []

            def call():
                try:
                    os.stat(v.mnt / "a name that nobody knows")
                except OSError as error:
                    under_way.append(error.errno)

            thread = threading.Thread(target=call)
            try:
                stop(serving)
                before = int(waiting.read_text())
                thread.start()
                wait_for("the call", lambda: int(waiting.read_text()) > before, 10)
            finally:
                # whatever failed: what is open here can be closed only when another one serves
                kill_serving(v)
            thread.join()
            calls = {
                "fsync": lambda: os.fsync(held),
                "fsync of what was collected": lambda: os.fsync(collected),
                "a listing": lambda: os.listdir(cwd),
                "open by a directory": lambda: os.open("g", os.O_RDONLY, dir_fd=cwd),
                "truncate": lambda: os.truncate(held, 0),
                "read": lambda: os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED) or os.pread(held, 4096, 200_000),
                "fstat": lambda: os.fstat(cwd),
                "a bind mount": lambda: os.listdir(bound),
                "a write by a bind mount": lambda: (bound / "held").write_bytes(b"y"),
            }
            must(under_way and under_way[0] in (errno.ENOTCONN, errno.ECONNABORTED), f"a call under way got {under_way}")
            for _ in range(2):
                for name, call in calls.items():
                    try:
                        answer = call()
                    except OSError as error:
                        must(error.errno in dead(), f"{name}: {error}")
                    else:
                        raise Failed(f"{name} on the dead mount answers {answer!r:.50}")
                # the cache may take it, and who syncs is told
                with refused(*dead()):
                    os.pwrite(held, b"late", 0)
                    os.fsync(held)
                mapped.madvise(mmap.MADV_DONTNEED)
                ends_by(signal.SIGBUS, lambda: os.posix_fadvise(below, 0, 0, os.POSIX_FADV_DONTNEED) or mapped[200_000])
            same(os.listdir(v.mnt / "within"), ["f"], "what is in a directory on which somebody had mounted")
            must(not any(line.split()[1] == str(v.mnt / "within") for line in pathlib.Path("/proc/mounts").read_text().splitlines()),
                 "a mount within the dead one is there")
            for name in "held", "collected", "map":
                same((v.mnt / name).read_bytes(), b"synced" * 50_000, f"{name}, opened anew")
        finally:
            mapped.close()
            for fd in held, collected, cwd, below:
                with contextlib.suppress(OSError):
                    os.close(fd)
            run("umount", "-l", bound, ok=None)
            bound.rmdir()
        # nobody has it any more
        write_synced(v.mnt / "held", b"later")


@check(seconds=120)
def killed_while_a_thread_waits_for_its_own_pages(volume, _top):
    """lseek to data has the kernel write pages back, which waits for the server: killed then, it could not end."""
    root_only()
    with supervised(volume, "supervise=100/3600", "transport=dev", size=256 << 20) as (v, log):
        stop = threading.Event()

        def seek(number):
            while not stop.is_set():
                try:
                    with open(v.mnt / f"s{number}", "wb", buffering=0) as file:
                        while not stop.is_set():
                            file.truncate(0)
                            os.pwrite(file.fileno(), b"x" * 200_000, 0)
                            os.lseek(file.fileno(), 0, os.SEEK_DATA)
                except OSError as error:
                    if error.errno not in (*dead(), errno.ENOENT):
                        raise
                    time.sleep(0.01)

        load = [threading.Thread(target=seek, args=(n,)) for n in range(4)]
        for thread in load:
            thread.start()
        try:
            # with each, one in two of them waits for itself
            for _ in range(5):
                # one that has served for a second is replaced at once
                time.sleep(1.1)
                kill_serving(v)
        finally:
            stop.set()
            for thread in load:
                thread.join()
        print(f"  5 kills, {log.read_text().count('waits for itself')} of a process that waited for itself")


@check
def a_mount_that_dies_too_often_is_given_up(volume, _top):
    with supervised(volume, "supervise=1/3600") as (v, log):
        kill_serving(v)
        parent, serving = both(v)
        kill_and_wait(serving, signal.SIGKILL)
        wait_for("the end of the parent", lambda: not is_running(parent), 10)
        with refused(*dead()):
            os.statvfs(v.mnt)
        must("gives up" in log.read_text() and "more than 1 times within 3600 seconds" in log.read_text(), "the log")


@check
def a_volume_that_cannot_be_mounted_is_given_up(volume, _top):
    with supervised(volume, "supervise=100/3600") as (v, log):
        write_synced(v.mnt / "f", b"x")
        parent, serving = both(v)
        stop(serving)
        size = v.image.stat().st_size
        with open(v.image, "r+b") as image:
            image.truncate(0)
            image.truncate(size)
        kill_and_wait(serving, signal.SIGKILL)
        wait_for("the end of the parent", lambda: not is_running(parent), 20)
        text = log.read_text()
        same(text.count("cannot be mounted again"), 3, f"tries in the log {text[-500:]}")
        must("gives up" in text, "the log")
        # the dead mount stays: nobody writes into the directory below by mistake
        with refused(*dead()):
            os.statvfs(v.mnt)


@check
def another_volume_does_not_go_in_its_place(volume, _top):
    """Somebody formats the image, or puts another one under its name, while its mount is dead: that one is not touched."""
    with supervised(volume, "supervise=100/3600") as (v, log):
        write_synced(v.mnt / "f", b"x")
        parent, serving = both(v)
        other = v.image.with_suffix(".other")
        run(v.binary, "mkfs", "-q", "--size", "64M", other)
        before = other.read_bytes()
        stop(serving)
        os.rename(other, v.image)
        kill_and_wait(serving, signal.SIGKILL)
        wait_for("the end of the parent", lambda: not is_running(parent), 20)
        text = log.read_text()
        must("has another volume now" in text and "gives up" in text, f"the log: {text[-500:]}")
        must(v.image.read_bytes() == before, "the other volume is as it was")
        with refused(*dead()):
            os.statvfs(v.mnt)


@check
def sigterm_to_the_parent_unmounts(volume, _top):
    for what in "serving", "killed":
        with supervised(volume, "supervise") as (v, _):
            (v.mnt / "f").write_text("x" * 10000)
            parent, serving = both(v)
            if what == "killed":
                kill_and_wait(serving, signal.SIGKILL)
            os.kill(parent, signal.SIGTERM)
            wait_for("the end of both", lambda: not v.daemons(), 20)
            must(not v.mount_entry(), "still mounted")
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
    with supervised(volume, "supervise") as (v, _):
        kill_and_wait(both(v)[1], signal.SIGTERM)
        wait_for("the end of both", lambda: not v.daemons(), 20)
        must(not v.mount_entry(), "still mounted")


@check
def a_mount_over_it_is_left_alone(volume, _top):
    root_only()
    with supervised(volume, "supervise") as (v, log):
        (v.mnt / "f").write_text("below")
        parent, serving = both(v)
        run("mount", "-t", "tmpfs", "tmpfs", v.mnt)
        try:
            (v.mnt / "theirs").write_text("on top")
            kill_and_wait(serving, signal.SIGKILL)
            wait_for("a word in the log", lambda: "mounted over the dead mount" in log.read_text(), 10)
            same((v.mnt / "theirs").read_text(), "on top", "what is mounted over it")
            must(is_running(parent), "the parent does not wait")
        finally:
            run("umount", v.mnt)
        wait_for("another process that serves", lambda: v.alive() and both(v)[1], 20)
        same(v.mount_entry()[2].split(".")[-1], "braidfs", "what is mounted")
        # unmounted by somebody while nobody serves it: that was meant
        serving = both(v)[1]
        stop(parent)
        kill_and_wait(serving, signal.SIGKILL)
        run("umount", "-l", v.mnt)
        os.kill(parent, signal.SIGCONT)
        wait_for("the end of the parent", lambda: not is_running(parent), 10)
        must(not v.mount_entry(), "mounted again after an unmount")


@check
def a_mount_of_somebody_else_in_its_place_is_left_alone(volume, _top):
    """The kernel gives it the same numbers: even where its server dies, too, it is not ours."""
    root_only()
    with supervised(volume, "supervise") as (v, _), small_volume(volume, name="other") as other:
        parent, _ = both(v)
        stop(parent)
        try:
            run("umount", v.mnt)
            run(v.binary, "mount", other.image, v.mnt)
            theirs = next(pid for pid in v.daemons() if os.fsencode(str(other.image)) in
                          pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
            kill_and_wait(theirs, signal.SIGKILL)
            os.kill(parent, signal.SIGCONT)
            wait_for("the end of the parent", lambda: not is_running(parent), 10)
            with refused(*dead()):
                os.statvfs(v.mnt)
        finally:
            os.kill(parent, signal.SIGCONT) if is_running(parent) else None
            quiet("umount", "-l", v.mnt)


@contextlib.contextmanager
def locked(v):
    """Somebody has the image: who would mount it waits."""
    with open(v.image, "rb") as image:
        wait_for("the lock", lambda: took(image), 10)
        yield


def took(image):
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(image, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@check
def an_unmount_while_it_is_recovered_is_meant(volume, _top):
    root_only()
    for then in "nothing", "tmpfs":
        with supervised(volume, "supervise") as (v, _):
            parent, serving = both(v)
            stop(parent)
            kill_and_wait(serving, signal.SIGKILL)
            with locked(v):
                os.kill(parent, signal.SIGCONT)
                wait_for("another process", lambda: both(v)[1], 10)
                run("umount", "-l", v.mnt)
                if then == "tmpfs":
                    run("mount", "-t", "tmpfs", "tmpfs", v.mnt)
            wait_for("the end of both", lambda: not v.daemons(), 20)
            entry = v.mount_entry()
            if then == "tmpfs":
                run("umount", v.mnt)
                same(entry[2], "tmpfs", "what is on top")
            must(not v.mount_entry(), "mounted again after an unmount")


@check
def what_a_remount_changed_is_kept(volume, _top):
    root_only()
    with supervised(volume, "supervise", "noexec") as (v, _):
        write_synced(v.mnt / "f", b"x")
        run(v.binary, "mount", "-o", "remount,ro,nosuid", v.mnt)
        before = v.mount_entry()
        kill_serving(v)
        same(v.mount_entry()[3], before[3], "options")
        with refused(errno.EROFS):
            (v.mnt / "f").write_bytes(b"y")
        run(v.binary, "mount", "-o", "remount,rw", v.mnt)
        kill_serving(v)
        write_synced(v.mnt / "f", b"z")
        must("nosuid" in v.mount_entry()[3], "nosuid is lost")


@check
def metrics_are_told_by_the_next_process(volume, _top):
    daemon_only(volume)
    path = volume.image.with_suffix(".metrics")
    with supervised(volume, "supervise", f"metrics=unix:{path}") as (v, _):
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                must(client.recv(100).startswith(b"HTTP/1.1 200"), "no metrics")
            kill_serving(v)


@check
def ends_that_are_none_have_no_good_exit_code(volume, _top):
    """And a parent that is killed early leaves nobody waiting; and a starting program may ignore SIGCHLD."""
    daemon_only(volume)
    with small_volume(volume) as v:
        for what in signal.SIGTERM, signal.SIGKILL:
            v.mount()
            v.kill9()
            with locked(v):
                start = subprocess.Popen([v.binary, "mount", "-o", "supervise", v.image, v.mnt],
                                         stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                wait_for("the serving process", lambda: len(v.daemons()) == 3 and both(v)[1], 10)
                parent, serving = both(v)
                os.kill(parent, what)
                try:
                    same(start.wait(20), 32, f"exit code after {what.name} to the parent")
                finally:
                    kill_and_wait(serving, signal.SIGKILL)
                    start.kill()
                    start.wait()
        start = subprocess.Popen([v.binary, "mount", "-f", "-o", "supervise", v.image, v.mnt],
                                 stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                 preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        try:
            wait_for("the mount", v.alive, 10)
            kill_serving(v)
            parent, serving = both(v)
            stop(serving)
            os.kill(parent, signal.SIGTERM)
            # handed on, or not yet: both are killed processes
            time.sleep(0.1)
            kill_and_wait(serving, signal.SIGKILL)
            same(start.wait(20), 32, "exit code of a process that was killed while it ended")
        finally:
            start.kill()
            start.wait()


@check
def a_block_device_of_somebody_else_is_refused(volume, _top):
    """A dead mount at the place says nothing about who has the device."""
    root_only()
    daemon_only(volume)
    with small_volume(volume) as v, small_volume(volume, name="other") as other, loop_device(other.image) as device:
        v.mount()
        v.kill9()
        fd = os.open(device, os.O_RDONLY | os.O_EXCL)
        try:
            same(run(v.binary, "mount", device, v.mnt, ok=None)[0], 32, "exit code")
        finally:
            os.close(fd)


@check
def a_block_device_that_open_files_keep(volume, _top):
    """The dead mount of a block device keeps its claim as long as somebody has a file open on it."""
    root_only()
    daemon_only(volume)
    with small_volume(volume) as v, loop_device(v.image) as device:
        log = v.image.with_suffix(".log")
        for option in "rw", "ro":
            run(v.binary, "--log-file", log, "mount", "-o", f"{option},supervise,transport=dev", device, v.mnt)
            try:
                if option == "rw":
                    write_synced(v.mnt / "f", b"synced")
                held = open(v.mnt / "f", "rb", buffering=0)
                kill_serving(v)
                with refused(*dead()):
                    os.fsync(held.fileno())
                same((v.mnt / "f").read_bytes(), b"synced", "what was synced")
                must(v.mount_entry()[0] != str(device), "two mounts have the device")
                if option == "rw":
                    write_synced(v.mnt / "g", b"later")
                else:
                    with refused(errno.EROFS):
                        (v.mnt / "g").write_bytes(b"x")
                # close asks the dead mount, too
                with contextlib.suppress(OSError):
                    held.close()
                if option == "rw":
                    wait_for("the claim", lambda: "claimed again" in log.read_text(), 10)
                    with refused(errno.EBUSY):
                        os.open(device, os.O_RDONLY | os.O_EXCL)
                kill_serving(v)
                same((v.mnt / "g").read_bytes(), b"later", "what was written after the first kill")
                same(v.mount_entry()[0], str(device), "what is mounted when nobody else has the device")
            finally:
                v.end_parents()
                wait_for("the end of both", lambda: not v.daemons(), 20)
        log.unlink()
        same(run(v.binary, "fsck", "-f", "-n", device, ok=None)[0], 0, "exit code of fsck")


@check
def readiness_is_told(volume, _top):
    """As systemd starts it: in the foreground, READY=1 when it can be used, status 0 after an unmount."""
    daemon_only(volume)
    with small_volume(volume) as v:
        path = v.image.with_suffix(".socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind(str(path))
            told.settimeout(20)
            env = dict(os.environ, NOTIFY_SOCKET=str(path))
            for options in "transport=dev", "transport=dev,supervise":
                daemon = subprocess.Popen([v.binary, "mount", "-f", "-o", options, v.image, v.mnt], env=env,
                                          stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                try:
                    same(told.recv(100), b"READY=1", "what was told")
                    must(v.alive(), "not mounted when it is told")
                    quiet("umount", v.mnt)
                    same(daemon.wait(20), 0, "exit code")
                finally:
                    daemon.kill()
                    daemon.wait()
        path.unlink()
        # one that cannot be mounted has the exit code that the unit does not restart
        same(run(v.binary, "mount", "-f", v.image.with_suffix(".none"), v.mnt, ok=None)[0], 32, "exit code")
