"""What the demo and the mount tests share: volumes to test on, forked steps with a time limit, and cleaning up.

Owns: one temporary directory with everything in it (images, mount points). Whatever happens, an exception, CTRL-C or
a SIGTERM, `Workspace` unmounts, ends the daemons that serve its own mount points, detaches its loop devices and
removes the directory.

A volume keeps no state in this process: whether it is mounted, and which daemon serves it, is looked up in /proc each
time. So a step may run in a forked child that mounts, unmounts and kills as it likes.

BRAIDFS_SUT=ext4 puts an ext4 in the place of braidfs: a check of the scripts themselves. BRAIDFS_OPTIONS=cache=through
mounts every braidfs with these options first.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import pathlib
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
IS_ROOT = os.geteuid() == 0


class Failed(Exception):
    """A check or a command that did not do what it must; the text is for people."""


class Skipped(Exception):
    """A check that cannot run here; the text says why."""


# Commands -----------------------------------------------------------------------------------------------------------

LOG = None


def log_to(path):
    """Appends every command, with its output and exit code, to the file `path`."""
    global LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    LOG = open(path, "w", buffering=1, encoding="utf-8", errors="replace")


def log(text):
    if LOG:
        LOG.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def run(*argv, ok=(0,), cwd=None, env=None, timeout=300):
    """Runs a command and returns (exit code, output); raises `Failed` unless the code is one of `ok` (None: any)."""
    argv = [str(a) for a in argv]
    log("$ " + " ".join(argv))
    try:
        # A daemon that forks itself off must not keep our pipe open, else we would wait for its end: hence a file.
        with tempfile.TemporaryFile() as out:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env=env, timeout=timeout
            )
            out.seek(0)
            text = out.read().decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise Failed(f"{argv[0]}: no end after {timeout} s: {' '.join(argv)}") from None
    except FileNotFoundError:
        raise Failed(f"{argv[0]}: command not found (scripts/deps.sh installs what is needed)") from None
    if text.strip():
        log(text.rstrip())
    if done.returncode:
        log(f"exit code {done.returncode}")
    if ok is not None and done.returncode not in ok:
        last = text.strip().splitlines()[-3:]
        raise Failed(f"{' '.join(argv)}: exit code {done.returncode}: {' / '.join(last)}")
    return done.returncode, text


def have(command):
    return shutil.which(command) is not None


def linux_from(major, minor):
    """Whether the kernel is of this version or a newer one."""
    return linux() >= (major, minor)


def linux():
    """The kernel's version: its first two numbers."""
    return tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])


def wait_for(what, condition, seconds=30):
    """Polls `condition` until it holds; raises `Failed` with `what` when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def fork_for(work):
    """A child that does `work(pipe)` and ends, by signals as any process; its id, and the end of the pipe to read from. An
    exception ends it with exit code 1, and stands in the log."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    try:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_DFL)
        os.close(reader)
        work(writer)
        code = 0
    except BaseException:  # noqa: BLE001 (the parent learns of it by the exit code)
        log(traceback.format_exc())
    finally:
        os._exit(code)


def in_child(function, timeout, on_timeout=None):
    """Calls `function` in a forked child and returns its result or raises its exception.

    A system call on a dead or hanging FUSE mount cannot be interrupted by a signal handler, but its process can be
    killed: so a hang costs one step, not the whole run. `on_timeout` may end what the child waits for.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, signal.SIG_DFL)
            os.close(reader)
            os.setpgid(0, 0)
            try:
                answer = ("done", function())
            except (Failed, Skipped) as error:
                answer = (type(error).__name__, str(error))
            except Exception as error:  # noqa: BLE001 (every failure of a check is a result)
                log(traceback.format_exc())
                answer = ("Failed", f"{type(error).__name__}: {error}")
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(answer, pipe)
        except BaseException:  # noqa: BLE001
            code = 1
        finally:
            os._exit(code)
    os.close(writer)
    answer = b""
    end = time.monotonic() + timeout
    try:
        while True:
            ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise Failed(f"hung: no end after {timeout} s")
            piece = os.read(reader, 1 << 16)
            if not piece:
                break
            answer += piece
    except BaseException:
        _kill_group(pid)
        if on_timeout:
            on_timeout()
        raise
    finally:
        os.close(reader)
        _reap(pid)
    if not answer:
        raise Failed("the step's process died")
    kind, value = pickle.loads(answer)
    if kind == "done":
        return value
    raise {"Failed": Failed, "Skipped": Skipped}[kind](value)


def _reap(pid, seconds=30):
    """Waits for the end of a child; one that waits in the kernel for a dead mount is left alone then, not waited for."""
    end = time.monotonic() + seconds
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > end:
            log(f"process {pid} was killed and does not end: it waits in the kernel")
            return
        time.sleep(0.002)


def _kill_group(pid):
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


# Volumes ------------------------------------------------------------------------------------------------------------


class Volume:
    """An image file with a file system, and the directory to mount it on."""

    kind = "?"

    def __init__(self, directory, name, size):
        self.image = directory / f"{name}.img"
        self.mnt = directory / f"{name}.mnt"
        self.size = size
        self.mnt.mkdir(exist_ok=True)

    def mount_entry(self):
        """The line of /proc/mounts as a list of fields, or None."""
        for line in pathlib.Path("/proc/mounts").read_text().splitlines():
            fields = line.split(" ")
            if fields[1] == str(self.mnt):
                return fields
        return None

    def alive(self):
        """Mounted, and answering. Who mounts anew shows the directory below for a moment, which answers, too."""
        if not self.mount_entry():
            return False
        try:
            top = os.open(self.mnt, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            os.fstatvfs(top)
            return os.fstat(top).st_dev != os.stat(self.mnt.parent).st_dev
        except OSError:
            return False
        finally:
            os.close(top)

    def daemons(self):
        return []

    def end_parents(self):
        """SIGTERM to those who would mount it again: they unmount."""
        for pid in self.daemons():
            try:
                if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "braidfs-superv":
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
            except OSError:
                pass

    def sync_commits(self):
        """Whether syncfs(2) makes everything durable, as it is mounted."""
        return True

    def settle(self):
        """Makes everything so far durable, where :meth:`sync_commits`; else the kernel has written its pages, no more."""
        run("sync", "-f", self.mnt)

    def cold(self):
        """Unmounts, drops the image's pages from the page cache, mounts again. Returns the seconds of both mounts'
        work without the dropping."""
        start = time.monotonic()
        self.umount()
        taken = time.monotonic() - start
        fd = os.open(self.image, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        start = time.monotonic()
        self.mount()
        return taken + time.monotonic() - start

    def force_down(self):
        """Unmounts in any case; for cleaning up, so it raises nothing."""
        self.end_parents()
        pids = self.daemons()
        # Processes that were killed a moment ago may still be leaving; only then is the mount point cut off.
        for _ in range(20):
            if not self.mount_entry():
                break
            code = quiet("umount", self.mnt) if IS_ROOT else quiet("fusermount3", "-u", self.mnt)
            if code == HUNG:
                for pid in pids:
                    quiet("kill", "-9", pid)
                cut_off(self.mnt)
            time.sleep(0.1 if code else 0)
        for _ in range(8):
            if not self.mount_entry():
                break
            quiet("umount", "-l", self.mnt) if IS_ROOT else quiet("fusermount3", "-uz", self.mnt)
        end = time.monotonic() + 10
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in filter(is_running, pids):
            try:
                kill_and_wait(pid, signal.SIGKILL)
            except Failed as error:
                log(str(error))
        end = time.monotonic() + 10
        while IS_ROOT and (devices := self.loops()) and time.monotonic() < end:
            for device in devices:
                quiet("losetup", "-d", device)
            time.sleep(0.1)

    def loops(self):
        if not have("losetup"):
            return []
        done = subprocess.run(["losetup", "-n", "-O", "NAME", "-j", self.image], capture_output=True, text=True)
        return done.stdout.split()


class Ext4(Volume):
    """ext4 with mkfs's defaults on a loop device (direct I/O, so that nothing is cached twice)."""

    kind = "ext4"
    # how many it has room for; None: by its size
    inodes = None

    def mkfs(self, *_options):
        self.image.unlink(missing_ok=True)
        with open(self.image, "wb") as file:
            file.truncate(self.size)
        run("mkfs.ext4", "-q", "-F", *(["-N", self.inodes] if self.inodes else []), self.image)

    def mount(self, *options):
        flags = [f for o in options if o in ("ro", "noatime") for f in ("-o", o)]
        device = attached(self.image)
        try:
            run("mount", *flags, device, self.mnt)
        finally:
            # While it is mounted this only marks the device to be detached with the unmount.
            quiet("losetup", "-d", device)

    def umount(self):
        """Where another mount namespace has a copy of the mount, umount(8) leaves it in use: a second mount of the image would
        not see what the first has not written."""
        run("umount", self.mnt)
        wait_for(f"{self.image} let go of", lambda: not self.loops(), 60)

    def fsck(self, *_options, unforced=False):
        return run("e2fsck", *([] if unforced else ["-f"]), "-n", self.image, ok=None)


def attached(image):
    """A loop device that was attached to the image."""
    _, out = run("losetup", "--find", "--show", "--direct-io=on", image, ok=None)
    device = out.strip()
    if not device.startswith("/dev/"):
        raise Failed(device if device.startswith("losetup") else f"losetup: {device}")
    return device


# How mounts that do not say it get their requests: auto, ring or dev.
TRANSPORT = os.environ.get("BRAIDFS_TRANSPORT", "")
RING_SWITCH = pathlib.Path("/sys/module/fuse/parameters/enable_uring")


def by_rings():
    """Do mounts that this process makes get their requests through io_uring, as far as it can tell?"""
    chosen = re.findall(r"\btransport=(\w+)", os.environ.get("BRAIDFS_OPTIONS", "")) or [TRANSPORT or "auto"]
    return chosen[-1] == "ring" or chosen[-1] == "auto" and RING_SWITCH.exists() and RING_SWITCH.read_text().strip() == "Y"


def dead():
    """What a call gets whose server has died; by a ring also what the kernel says of a request that the killed process held."""
    return (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, *([errno.ECANCELED] if by_rings() else []))


def why_no_rings():
    """None when FUSE over io_uring can be used, or turned on for a test, else the reason why not."""
    if not RING_SWITCH.exists():
        return "this kernel's FUSE has no io_uring"
    if RING_SWITCH.read_text().strip() != "Y" and not IS_ROOT:
        return f"{RING_SWITCH} is off, and only root may turn it on"
    return None


_SWITCH_HELD = False


@contextlib.contextmanager
def _switch_held():
    """No other process has the switch set meanwhile. Again inside of itself it does nothing."""
    global _SWITCH_HELD
    if _SWITCH_HELD:
        yield
        return
    with open(RING_SWITCH, encoding="ascii") as switch:
        fcntl.flock(switch, fcntl.LOCK_EX)
        _SWITCH_HELD = True
        try:
            yield
        finally:
            _SWITCH_HELD = False


@contextlib.contextmanager
def rings(allowed):
    """The kernel's switch for FUSE over io_uring is set for a test, and set back, which the log tells. It is one for the
    whole machine: another process that wants it set waits for the end of this block."""
    with _switch_held():
        before = RING_SWITCH.read_text().strip()
        wanted = "Y" if allowed else "N"
        if before != wanted:
            log(f"{RING_SWITCH}: {wanted} for this test")
            RING_SWITCH.write_text(wanted)
        try:
            yield
        finally:
            if before != wanted:
                RING_SWITCH.write_text(before)


class BraidFs(Volume):
    """A braidfs image, mounted by the daemon that `braidfs mount` starts."""

    kind = "braidfs"

    def __init__(self, directory, name, size, binary):
        super().__init__(directory, name, size)
        self.binary = binary
        # others that may serve it, too
        self.programs = []

    def mkfs(self, *options):
        self.image.unlink(missing_ok=True)
        run(self.binary, "mkfs", "--quiet", "--size", str(self.size), *options, self.image)

    def mount(self, *options):
        options = [o for o in (os.environ.get("BRAIDFS_OPTIONS"), *options) if o]
        if TRANSPORT and not any(o.startswith("transport=") for some in options for o in some.split(",")):
            options.append(f"transport={TRANSPORT}")
        flags = ["-o", ",".join(options)] if options else []
        run(self.binary, "mount", *flags, self.image, self.mnt, timeout=60)
        wait_for(f"{self.mnt} mounted", self.alive, 10)

    def umount(self):
        """umount(8); then waits for the daemon's end, because with plain fuse the kernel does not."""
        pids = self.daemons()
        # it has, of a tenant that was unmounted a moment ago: docs/tenants.md
        wait_for("the server to have no directory of the volume open", lambda: not any(map(self.is_held_by, pids)), 20)
        run("umount", self.mnt, timeout=60) if IS_ROOT else run("fusermount3", "-u", self.mnt, timeout=60)
        wait_for("end of the daemon after umount", lambda: not any(map(is_running, pids)), 60)

    def sync_commits(self):
        """The kernel tells the server of a syncfs only on a mount of a block device, and from Linux 6.18 on
        (docs/crash-contract.md)."""
        entry = self.mount_entry()
        return bool(entry) and entry[2].startswith("fuseblk") and linux_from(6, 18)

    def fsck(self, *options, unforced=False):
        """Without -f it looks at nothing of a volume that was unmounted: that has to be asked for."""
        if "-f" not in options and not unforced:
            raise Failed("a check without -f is none on a clean volume: name -f, or unforced=True")
        return run(self.binary, "fsck", *options, self.image, ok=None)

    def is_held_by(self, pid):
        """Whether a process has its root open. Asks the mount nothing."""
        root = os.path.join(os.path.realpath(self.mnt.parent), self.mnt.name)
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                # it may be closed by now
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}") == root:
                        return True
        return False

    def daemons(self, guards=False):
        """Process ids of the daemons that serve this mount point (which no other volume has), of our program or of one of
        `self.programs`; or of the processes that see to the end of their connections."""
        found, ours = [], {os.path.realpath(p) for p in (self.binary, *self.programs)}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                exe = os.readlink(entry / "exe").removesuffix(" (deleted)")
                guard = (entry / "comm").read_text().strip() == "braidfs-guard"
            except OSError:
                continue
            if guard == guards and exe in ours and os.fsencode(str(self.mnt)) in argv:
                found.append(int(entry.name))
        return [pid for pid in found if is_running(pid)]

    def daemon(self):
        """The one process of :meth:`daemons`. A guard that was just made has the daemon's name for a moment."""
        pids = []

        def one():
            pids[:] = self.daemons()
            return len(pids) == 1

        wait_for("one daemon", one, 10)
        return pids[0]

    def kill9(self):
        """kill -9 of the daemon, and waits for its end."""
        pids = self.daemons()
        if not pids:
            raise Failed(f"no daemon found for {self.mnt}")
        log(f"kill -9 {pids}")
        for pid in pids:
            kill_and_wait(pid, signal.SIGKILL)


def is_running(pid):
    """Until all its threads have ended: the first one may have left before the others, which hold the files of all."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def of_threads(pid, look):
    """What `look` tells of each thread of a process, by its directory in /proc. One may end at any moment: it is left out."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(look(task))
    return found


def name_of(thread):
    """Name of a thread, by its directory in /proc."""
    return (thread / "comm").read_text().strip()


def stop(pid):
    """Stops a process. The signal alone has come to none of its threads yet when `kill` returns."""
    os.kill(pid, signal.SIGSTOP)

    def stands(task):
        with contextlib.suppress(OSError):
            name, state = task.read_text().partition("(")[2].rsplit(") ", 1)
            # the kernel's own threads of a ring are not stopped
            return state[0] in "TtZX" or name.startswith("iou-")
        return True  # it has ended

    wait_for("a stop of all threads", lambda: all(map(stands, pathlib.Path(f"/proc/{pid}/task").glob("*/stat"))), 10)


def connection(point):
    """Where the kernel tells of the FUSE connection that is mounted there, and ends it."""
    device = os.stat(point).st_dev  # that of a volume on a block device is the block device
    return connection_of(os.major(device), os.minor(device))


CONNECTIONS = pathlib.Path("/sys/fs/fuse/connections")
# of the kernel's interface, the same for all processors
FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432
FSOPEN_CLOEXEC, FSCONFIG_CMD_CREATE, FSMOUNT_CLOEXEC = 1, 6, 1


@functools.cache
def connections():
    """The directory of all connections. Not every system mounts it: then it is mounted for this process alone, at no place."""
    if not IS_ROOT or os.path.ismount(CONNECTIONS):
        return CONNECTIONS
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number, *args):
        got = libc.syscall(number, *args)
        if got < 0:
            raise OSError(ctypes.get_errno(), f"fusectl: {os.strerror(ctypes.get_errno())}")
        return got

    made = call(FSOPEN, b"fusectl", FSOPEN_CLOEXEC)
    try:
        call(FSCONFIG, made, FSCONFIG_CMD_CREATE, None, None, 0)
        return pathlib.Path("/proc/self/fd") / str(call(FSMOUNT, made, FSMOUNT_CLOEXEC, 0))
    finally:
        os.close(made)


def connection_of(major, minor):
    """As [connection], by the device's numbers."""
    return connections() / str(major << 20 | minor)


def kill_and_wait(pid, sig, seconds=20):
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return
    wait_for(f"end of process {pid}", lambda: not is_running(pid), seconds)


HUNG = 124


def quiet(*argv):
    """The exit code only; 127: cannot be run, `HUNG`: no end within 15 s."""
    try:
        return subprocess.run(
            [str(a) for a in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=15,
        ).returncode
    except subprocess.TimeoutExpired:
        return HUNG
    except OSError:
        return 127


def mounts_below(directory):
    """Of what is mounted in a directory, or on it: the device's numbers, and the mount point."""
    found = []
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        point = pathlib.Path(fields[4].replace("\\040", " "))
        if point == pathlib.Path(directory) or pathlib.Path(directory) in point.parents:
            found.append((tuple(map(int, fields[2].split(":"))), point))
    return found


def cut_off(directory):
    """Ends the FUSE connections of what is mounted in a directory, so that nobody waits for them; for cleaning up, so it
    raises nothing."""
    for (major, minor), point in mounts_below(directory):
        try:
            (connection_of(major, minor) / "abort").write_text("1")
            log(f"cut off: {point}")
        except OSError as error:
            log(f"cannot cut off {point}: {error}")
        quiet("umount", "-l", point) if IS_ROOT else quiet("fusermount3", "-uz", point)


def why_no_ext4():
    """None when an ext4 can be mounted on a loop device, else the reason why not."""
    if not IS_ROOT:
        return "not root"
    if not os.path.exists("/dev/loop-control"):
        return "no loop devices (/dev/loop-control)"
    for command in ("mkfs.ext4", "losetup", "mount"):
        if not have(command):
            return f"no {command}"
    # a container may have the control device and none of the others
    try:
        with tempfile.NamedTemporaryFile(prefix="braidfs-", dir=base()) as image:
            image.truncate(1 << 20)
            quiet("losetup", "-d", attached(image.name))
    except (Failed, OSError) as error:
        return f"no loop device can be attached ({error})"
    return None


# The working directory ----------------------------------------------------------------------------------------------


def base():
    """The directory that temporary ones are made in."""
    return os.environ.get("BRAIDFS_TMP") or ("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())


def demand_room(need_bytes):
    """Raises `Failed` where a workspace would not have room."""
    free = shutil.disk_usage(base()).free
    if free < need_bytes:
        raise Failed(
            f"{base()}: {free >> 20} MiB free, {need_bytes >> 20} needed: set BRAIDFS_TMP to a directory with more room"
        )


class Workspace:
    """A temporary directory with volumes; leaving the `with` block cleans all of it away."""

    def __init__(self, need_bytes):
        demand_room(need_bytes)
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="braidfs-", dir=base()))
        self.dir.chmod(0o755)  # for the checks that act as another user
        self.volumes = []

    def __enter__(self):
        def stop(number, _frame):
            raise SystemExit(128 + number)

        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, stop)
        return self

    def __exit__(self, *_):
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)
        for volume in self.volumes:
            volume.force_down()
        cut_off(self.dir)
        left = [point for _, point in mounts_below(self.dir)]
        if left:
            # Never remove a tree with a mounted volume in it.
            print(f"still mounted, please unmount and remove by hand: {', '.join(map(str, left))}", file=sys.stderr)
        else:
            shutil.rmtree(self.dir, ignore_errors=True)

    def cleaned(self):
        return f"{self.dir} with {len(self.volumes)} volume(s)"

    def ext4(self, name, size):
        self.volumes.append(Ext4(self.dir, name, size))
        return self.volumes[-1]

    def braidfs(self, name, size):
        if os.environ.get("BRAIDFS_SUT") == "ext4":
            return self.ext4(name, size)
        self.volumes.append(BraidFs(self.dir, name, size, braidfs_binary()))
        return self.volumes[-1]


def braidfs_binary():
    """BRAIDFS_BIN, or the release build."""
    if "BRAIDFS_BIN" in os.environ:
        return pathlib.Path(os.environ["BRAIDFS_BIN"]).resolve()
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return (target if target.is_absolute() else ROOT / target) / "release" / "braidfs"


def build():
    """Builds the release binary unless BRAIDFS_BIN names one. Says before that whether a mount is possible."""
    if os.environ.get("BRAIDFS_SUT") == "ext4":
        return
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Failed("/dev/fuse cannot be opened: no mount is possible here")
    if "BRAIDFS_BIN" not in os.environ:
        done = subprocess.run(["cargo", "build", "--release", "-p", "braidfs-cli"], cwd=ROOT)
        if done.returncode:
            raise Failed("cargo build failed")
    if not os.access(braidfs_binary(), os.X_OK):
        raise Failed(f"{braidfs_binary()}: no such program")


# Colours ------------------------------------------------------------------------------------------------------------

TTY = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def paint(text, colour):
    codes = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}
    return f"\033[{codes[colour]}m{text}\033[0m" if TTY else text
