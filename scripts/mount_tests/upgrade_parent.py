"""The parent of a supervised mount goes on as the program that serves after an upgrade; whatever dies or refuses on the way."""

import contextlib
import errno
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import time

from fslib import dead, is_running, kill_and_wait, run, stop, wait_for
from mount_tests.common import NOBODY, as_nobody, check, daemon_only, must, refused, same, write_synced
from mount_tests.helpers import small_volume
from mount_tests.supervise import both, kill_serving, supervised
from mount_tests.upgrade import (
    BACK, FAILPOINT, KILLED, Held, mounted_by_nobody, tell_while_it_is_handed_over, upgrade, wait_for_its_stop,
)

LOOKED = "looked after by the same program"


def program_of(pid):
    return os.readlink(f"/proc/{pid}/exe")


def copy_of(v, name):
    """Another program, as a package brings it; the test looks for its processes, too."""
    path = v.image.with_suffix(f".{name}")
    shutil.copy(v.binary, path)
    v.programs.append(path)
    return path


def script_of(v, name, asked, program=None):
    """A program that does as ours, or another one, but where it is asked whether it can look after a mount."""
    path = v.image.with_suffix(f".{name}")
    path.write_text(f'#!/bin/sh\nfor a in "$@"; do case $a in --can-look-after) {asked} ;; esac; done\n'
                    f'exec {shlex.quote(str(program or v.binary))} "$@"\n')
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def watched(volume, *options, **kw):
    """A supervised mount, its log, and the file by which its processes are stopped or killed at a step."""
    daemon_only(volume)
    point = volume.image.with_suffix(".point")
    os.environ[FAILPOINT] = str(point)
    try:
        with supervised(volume, *(options or ("supervise=100/3600",)), "transport=dev", **kw) as (v, log):
            v.point = point
            try:
                yield v, log
            finally:
                v.force_down()
                for path in v.image.parent.glob(f"{v.image.stem}.*"):
                    if path.is_file() and path not in (v.image, log):
                        path.unlink()
    finally:
        del os.environ[FAILPOINT]
        point.unlink(missing_ok=True)


@contextlib.contextmanager
def upgrading(v, program):
    """The command runs, and succeeds, meanwhile."""
    command = subprocess.Popen([v.binary, "upgrade", "-q", "--program", program, v.mnt], stderr=subprocess.DEVNULL)
    try:
        yield
        same(command.wait(20), 0, "exit code of the upgrade")
    finally:
        command.kill()
        command.wait()


def serves(v, other_than):
    wait_for("another process that serves", lambda: v.alive() and both(v)[1] not in (None, other_than), 20)
    return both(v)[1]


def end_by_sigterm(v, parent):
    """How long it took them (s)."""
    begun = time.monotonic()
    os.kill(parent, signal.SIGTERM)
    wait_for("the end of both", lambda: not v.daemons(), 20)
    seconds = time.monotonic() - begun
    must(not v.mount_entry(), "still mounted")
    same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
    return seconds


@check
def a_serving_process_is_asked_to_end_while_it_hands_over(volume, _top):
    """Not the parent, which hears of it from that process; and both are asked."""
    for parent_too in (False, True):
        with watched(volume) as (v, _log):
            write_synced(v.mnt / "f", b"x")
            parent, serving = both(v)
            tell_while_it_is_handed_over(v, serving, *([parent] if parent_too else []))


@check(seconds=120)
def upgrades_that_fail_do_not_fill_the_pipe(volume, _top):
    """Each tells the parent of a process that may go on, by a long path; the parent reads it."""
    with watched(volume, "supervise=100/3600,commit=300") as (v, _log):
        top = v.image.with_suffix(".long")
        long = top
        while len(str(long)) < 3000:
            long /= "d" * 200
        long.mkdir(parents=True)
        try:
            shutil.copy(v.binary, long / "program")
            serving = both(v)[1]
            for _ in range(30):
                v.point.write_text("old-given fail")
                said = upgrade(v, "--program", long / "program", ok=(BACK,))
                must(not v.point.exists(), f"the step was not come to: {said}")
                same(both(v)[1], serving, "the process that serves")
        finally:
            shutil.rmtree(top)


@check(seconds=120)
def a_parent_becomes_the_new_program(volume, _top):
    with watched(volume, size=128 << 20) as (v, log):
        programs = [copy_of(v, "one"), copy_of(v, "two")]
        parent, serving = both(v)
        held = Held(v.mnt / "top")
        for n in range(10):
            program = programs[n % 2]
            held.between()
            text = upgrade(v, "--program", program)[1]
            must(f"{LOOKED}, process {parent}" in text, text)
            serving = serves(v, serving)
            same([program_of(pid) for pid in both(v)], [str(program)] * 2, f"programs of both after upgrade {n}")
            same(both(v)[0], parent, "the parent")
            held.look()
        held.end()
        same(log.read_text().count("this program looks after the mount from now on"), 10, "parents, by the log")
        # who serves anew is of that program
        write_synced(v.mnt / "f", b"x")
        same(kill_serving(v), parent, "the parent")
        same([program_of(pid) for pid in both(v)], [str(programs[1])] * 2, "programs of both after a kill")
        same((v.mnt / "f").read_bytes(), b"x", "content")
        # also where the new one is killed as soon as it serves, or has just begun to
        for when in "served", "begun":
            program, serving = programs[when == "begun"], both(v)[1]
            if when == "begun":
                v.point.write_text("new-going kill")
            upgrade(v, "-q", "--program", program, ok=(0, BACK))
            if when == "served":
                kill_and_wait(serves(v, serving), signal.SIGKILL)
            serves(v, serving)
            same([program_of(pid) for pid in both(v)], [str(program)] * 2, f"programs of both, killed when it had {when}")
        end_by_sigterm(v, parent)


@check(seconds=120)
def a_parent_where_a_process_is_killed_at_each_step(volume, _top):
    """The mount is served again, by who went on or by another process, whose program is the parent's: what was synced is there."""
    with watched(volume) as (v, _):
        programs = [pathlib.Path(v.binary), copy_of(v, "other")]
        parent, serving = both(v)
        for step, lives in KILLED:
            now = program_of(serving)
            program = next(p for p in programs if os.path.realpath(p) != now)
            write_synced(v.mnt / "synced", step.encode())
            v.point.write_text(f"{step} kill")
            code, text = upgrade(v, "-q", "--program", program, ok=(0, BACK))
            must(not v.point.exists(), f"nobody came to {step}")
            served_by = (lambda pid, s=serving: pid == s) if lives == "old" else (lambda pid, s=serving: pid not in (None, s))
            wait_for("a process that serves", lambda by=served_by: v.alive() and by(both(v)[1]), 20)
            # "nobody" after it was told to go: it has taken the mount over, and the parent is of its program
            wanted = os.path.realpath(program) if lives == "new" or step == "new-going" else now
            wait_for("the parent's program", lambda w=wanted: [program_of(pid) for pid in both(v)] == [w] * 2, 10)
            same(both(v)[0], parent, f"{step}: the parent")
            same((v.mnt / "synced").read_bytes(), step.encode(), f"{step}: what was synced")
            serving = both(v)[1]
        end_by_sigterm(v, parent)


@check(seconds=120)
def a_parent_that_cannot_become_it_stays(volume, _top):
    """A program that serves and does not look after mounts, as older ones; says nothing; is gone when it is to be run."""
    with watched(volume) as (v, log):
        other = copy_of(v, "other")
        parent, serving = both(v)
        scripts = {
            "is of a version that cannot": script_of(v, "older", "echo \"error: unexpected argument '$a' found\" >&2; exit 2"),
            "no word (exit status: 3)": script_of(v, "silent", "exit 3"),
            "in versions 7 to 9": script_of(v, "newer", "echo looks-after-mounts 7 9 9.0; exit 0"),
            "killed by": script_of(v, "dies", "kill -9 $$"),
        }
        for why, script in scripts.items():
            upgrade(v, "-q", "--program", script)
            serving = serves(v, serving)
            said = log.read_text()
            must("does not look after the mount" in said and (why in said or why == "killed by" and "signal: 9" in said),
                 f"{script}: {said[-1000:]}")
            same(both(v)[0], parent, f"{script}: the parent")
        text = upgrade(v, "-q", "--program", script_of(v, "other-older", "exit 1", other))[1]
        must(f"the process that looks after it, {parent}, is of another program" in text, text)
        same([program_of(pid) for pid in both(v)], [os.path.realpath(v.binary), str(other)], "programs of both")
        serving = serves(v, serving)
        # gone meanwhile
        for step in "parent-asks", "parent-executes":
            gone = copy_of(v, "gone")
            v.point.write_text(f"{step} stop")
            with upgrading(v, gone):
                wait_for_its_stop(v, f"the parent to come to {step}", [parent])
                gone.unlink()
                os.kill(parent, signal.SIGCONT)
            serving = serves(v, serving)
            word = "cannot be started" if step == "parent-asks" else "cannot be executed"
            wait_for("a word in the log", lambda w=word: w in log.read_text(), 10)
        # looked after as before, by what it was
        same(kill_serving(v), parent, "the parent")
        same([program_of(pid) for pid in both(v)], [os.path.realpath(v.binary)] * 2, "programs of both after a kill")
        must(LOOKED in upgrade(v, "--program", other)[1], "becomes one that can")
        same(kill_serving(v), parent, "the parent")
        same(program_of(both(v)[1]), str(other), "the program that serves")
        end_by_sigterm(v, parent)


@check
def a_parent_that_is_asked_to_end_meanwhile(volume, _top):
    """While it waits for the word of a program that hangs: SIGTERM unmounts at once."""
    with watched(volume) as (v, _):
        parent, _ = both(v)
        script = script_of(v, "hangs", "exec sleep 100", copy_of(v, "other"))
        with upgrading(v, script):
            wait_for("the word to be waited for", lambda: asked_by(parent), 10)
            seconds = end_by_sigterm(v, parent)
            must(seconds < 8, f"waited for it: {seconds:.1f} s")


def asked_by(parent):
    """A process that the parent asks."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return any(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x00100\x00" for pid in children)


@check(seconds=90)
def a_parent_is_killed_while_it_becomes_it(volume, _top):
    """The mount goes on, unsupervised, as after any kill of the parent."""
    for step in "before it follows", "parent-asks", "parent-executes", "afterwards":
        with watched(volume) as (v, _):
            other = copy_of(v, "other")
            parent, serving = both(v)
            held = os.open(v.mnt / "held", os.O_RDWR | os.O_CREAT)
            os.write(held, b"not synced")
            if step == "before it follows":
                stop(parent)
            elif step != "afterwards":
                v.point.write_text(f"{step} kill")
            with upgrading(v, other):
                if step == "before it follows":
                    wait_for("the new process", lambda s=serving: not is_running(s), 10)
                    kill_and_wait(parent, signal.SIGKILL)
            if step == "afterwards":
                kill_and_wait(parent, signal.SIGKILL)
            wait_for("the end of the parent", lambda p=parent: not is_running(p), 10)
            must(not v.point.exists(), f"nobody came to {step}")
            wait_for("one process", lambda: len(v.daemons()) == 1, 10)
            same(os.pread(held, 20, 0), b"not synced", f"{step}: the open file")
            os.fsync(held)
            # and again
            upgrade(v, "-q", "--program", other)
            same(os.pread(held, 20, 0), b"not synced", f"{step}: the open file")
            os.close(held)
            v.umount()
            wait_for("the end of all", lambda: not v.daemons(), 10)
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")


@check
def a_parent_that_slept_follows(volume, _top):
    """It was stopped from before its process was ready until another program served."""
    with small_volume(volume) as v:
        daemon_only(volume)
        other = copy_of(v, "other")
        start = subprocess.Popen([v.binary, "mount", "-f", "-o", "supervise,transport=dev", v.image, v.mnt],
                                 stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            stop(start.pid)
            os.kill(start.pid, signal.SIGCONT)
            wait_for("the serving process", lambda: len(v.daemons()) == 2, 10)
            stop(start.pid)
            wait_for("the mount", v.alive, 10)
            serving = next(pid for pid in v.daemons() if pid != start.pid)
            with upgrading(v, other):
                wait_for("the new process", lambda: not is_running(serving), 10)
                os.kill(start.pid, signal.SIGCONT)
            wait_for("the parent to become it", lambda: program_of(start.pid) == str(other), 10)
            same(kill_serving(v), start.pid, "the parent")
            os.kill(start.pid, signal.SIGTERM)
            same(start.wait(20), 0, "exit code")
        finally:
            start.kill()
            start.wait()
            v.force_down()
            other.unlink()


@check(seconds=90)
def what_a_parent_knew_its_successor_knows(volume, _top):
    """How often it died; devices that came; which volume it is; what a remount changed."""
    with watched(volume, "supervise=2/3600") as (v, log):
        other = copy_of(v, "other")
        kill_serving(v)
        must(LOOKED in upgrade(v, "--program", other)[1], "not upgraded")
        parent = kill_serving(v)
        # the third one
        kill_and_wait(both(v)[1], signal.SIGKILL)
        wait_for("the end of the parent", lambda: not is_running(parent), 10)
        with refused(*dead()):
            os.statvfs(v.mnt)
        must("more than 2 times within 3600 seconds" in log.read_text(), "the log")
    with watched(volume, "supervise=100/3600", "cache=through") as (v, log):
        other, second, third = copy_of(v, "other"), v.image.with_suffix(".second"), v.image.with_suffix(".third")
        run(v.binary, "device", "add", "--size", "64M", v.mnt, second)
        must("were added" in upgrade(v, ok=(BACK,))[1], "a mount with a device more")
        kill_serving(v)
        must(LOOKED in upgrade(v, "--program", other)[1], "not upgraded")
        (v.mnt / "big").write_bytes(b"b" * (70 << 20))
        v.settle()
        kill_serving(v)
        same((v.mnt / "big").stat().st_size, 70 << 20, "size")
        # who was started anew is told of more
        run(v.binary, "device", "add", "--size", "64M", v.mnt, third)
        kill_serving(v)
        must(os.statvfs(v.mnt).f_blocks * 4096 > 150 << 20, "the third device is not there")
        if os.geteuid() == 0:
            run(v.binary, "mount", "-o", "remount,ro,nosuid", v.mnt)
            must(LOOKED in upgrade(v, "--program", other)[1], "a parent is upgraded again")
            before = v.mount_entry()[3]
            kill_serving(v)
            same(v.mount_entry()[3], before, "options")
        v.umount()
    with watched(volume) as (v, log):
        must(LOOKED in upgrade(v, "--program", copy_of(v, "other"))[1], "not upgraded")
        parent, serving = both(v)
        strange = v.image.with_suffix(".strange")
        run(v.binary, "mkfs", "-q", "--size", "64M", strange)
        stop(serving)
        os.rename(strange, v.image)
        kill_and_wait(serving, signal.SIGKILL)
        wait_for("the end of the parent", lambda: not is_running(parent), 20)
        must("has another volume now" in log.read_text(), "the log")


@check(seconds=90)
def a_service_has_the_parent_for_its_main_process(volume, _top):
    """Of a supervised mount in the foreground that is the parent, before and after an upgrade; a mount in the background belongs
    to no service."""
    daemon_only(volume)
    path = volume.image.with_suffix(".notify")
    with small_volume(volume) as v, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        other = copy_of(v, "other")
        told.bind(str(path))
        told.settimeout(20)
        env = dict(os.environ, NOTIFY_SOCKET=str(path))
        argv = [v.binary, "mount", "-f", "-o", "transport=dev,supervise", v.image, v.mnt]
        start = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        try:
            same(told.recv(100), b"READY=1", "what is told first")
            for program in other, v.binary:
                upgrade(v, "-q", "--program", program)
                same(told.recv(100), f"MAINPID={start.pid}".encode(), "what is told of an upgrade")
                same(program_of(start.pid), os.path.realpath(program), "the parent's program")
                same(kill_serving(v), start.pid, "the parent")
            # as systemd ends it
            os.kill(start.pid, signal.SIGTERM)
            same(start.wait(20), 0, "exit code of the main process")
            must(not v.mount_entry(), "still mounted")
            for options in "supervise", "rw":
                run("env", f"NOTIFY_SOCKET={path}", v.binary, "mount", "-o", f"transport=dev,{options}", v.image, v.mnt)
                for program in other, v.binary:
                    upgrade(v, "-q", "--program", program)
                v.umount()
            told.setblocking(False)
            with refused(errno.EAGAIN):
                told.recv(100)
        finally:
            start.kill()
            start.wait()
            v.force_down()
            path.unlink(missing_ok=True)
            other.unlink()


@check
def a_parent_of_a_users_own_mount(volume, _top):
    with mounted_by_nobody(volume, "transport=dev,supervise=100/3600") as (v, call):
        other = copy_of(v, "other")
        as_nobody(lambda: write_synced(v.mnt / "f", b"x"))
        for by in call, lambda *argv: run(v.binary, *argv):
            parent, serving = both(v)
            text = by("upgrade", "--program", other, v.mnt)[1]
            must(LOOKED in text, text)
            wait_for("another process", lambda s=serving: both(v)[1] not in (None, s), 10)
            serving = both(v)[1]
            same([program_of(pid) for pid in both(v)], [str(other)] * 2, "programs of both")
            kill_and_wait(serving, signal.SIGKILL)
            wait_for("another process that serves", lambda: v.mount_entry() and both(v)[1] not in (None, serving), 20)
            wait_for("the file", lambda: as_nobody(lambda: os.access(v.mnt / "f", os.R_OK)), 20)
            same(as_nobody(lambda: (v.mnt / "f").read_bytes()), b"x", "content")
            same([os.stat(f"/proc/{pid}").st_uid for pid in both(v)], [NOBODY] * 2, "users of both")
            same(both(v)[0], parent, "the parent")
    other.unlink()
