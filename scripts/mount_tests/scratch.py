"""Tenants without a journal: what a crash, an unmount, an upgrade and their border make of them, on a mount."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal

from fslib import run
from mount_tests.common import check, daemon_only, must, refused, renameat2, root_only, same, write_synced
from mount_tests import upgrade
from mount_tests.helpers import refuses, silent, small_volume

SPACE = 64 << 20
EXCHANGE = 2


@contextlib.contextmanager
def scratch(volume, *options, size=512 << 20):
    """A volume with a tenant without a journal, `t`, mounted."""
    daemon_only(volume)
    root_only()
    with small_volume(volume, name="scratch", size=size) as v:
        v.mount("transport=dev", *options)
        run(v.binary, "tenant", "create", "--space", str(SPACE), "--journal", "scratch", v.mnt / "t")
        yield v


def tenant(v, name="t"):
    return json.loads(run(v.binary, "tenant", "show", "--json", v.mnt, name)[1])


def fill(top, n=40):
    """Files in directories, synced in every way, which promises nothing; what they hold."""
    all_of = {}
    for i in range(n):
        d = top / f"d{i % 4}"
        d.mkdir(exist_ok=True)
        content = os.urandom(10_000 + i)
        write_synced(d / f"f{i}", content)
        all_of[f"d{i % 4}/f{i}"] = content
    os.sync()
    return all_of


def holds(top, all_of):
    found = {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}
    same(sorted(found), sorted(all_of), "files")
    must(found == all_of, "a file has other content")


def kill(v):
    """The server dies; the image is as it left it."""
    v.kill9()
    silent("umount", "-l", v.mnt)


@check
def empty_after_a_kill_whole_after_an_unmount(volume, _top):
    with scratch(volume) as v:
        os.chmod(v.mnt / "t", 0o2751)
        os.chown(v.mnt / "t", 12, 34)
        all_of = fill(v.mnt / "t")
        write_synced(v.mnt / "beside", b"synced")
        v.umount()
        v.fsck("-n", "-f")
        v.mount("transport=dev")
        holds(v.mnt / "t", all_of)
        (v.mnt / "t/more").write_bytes(b"m" * 100_000)
        os.sync()
        kill(v)
        code, text = run(v.binary, "fsck", "-n", "-f", v.image, ok=None)
        must(code == 0 and "no journal and was in use" in text, f"{code}: {text}")
        # a look at it changes nothing
        v.mount("ro")
        same(os.listdir(v.mnt / "t"), [], "entries, read-only")
        v.umount()
        v.mount("transport=dev")
        same(os.listdir(v.mnt / "t"), [], "entries")
        st = os.stat(v.mnt / "t")
        same((st.st_mode & 0o7777, st.st_uid, st.st_gid, st.st_nlink), (0o2751, 12, 34, 2), "its directory")
        same((v.mnt / "beside").read_bytes(), b"synced", "content of the neighbour")
        shown = tenant(v)
        same((shown["journal"], shown["space"], shown["inodes"]), ("scratch", SPACE, 1), "the tenant")
        all_of = fill(v.mnt / "t", 9)
        v.umount()
        v.fsck("-n", "-f")
        v.mount("transport=dev")
        holds(v.mnt / "t", all_of)


@check
def its_border(volume, _top):
    with scratch(volume) as v:
        inside, outside = v.mnt / "t/f", v.mnt / "f"
        inside.write_text("inside")
        outside.write_text("outside")
        (v.mnt / "t/d").mkdir()
        (v.mnt / "d").mkdir()
        for move in (
            lambda: os.rename(inside, v.mnt / "g"), lambda: os.rename(outside, v.mnt / "t/g"),
            lambda: os.link(inside, v.mnt / "g"), lambda: os.link(outside, v.mnt / "t/g"),
            lambda: os.rename(v.mnt / "t/d", v.mnt / "e"), lambda: os.rename(v.mnt / "d", v.mnt / "t/e"),
            lambda: os.rename(inside, outside), lambda: renameat2(inside, outside, EXCHANGE),
        ):
            with refused(errno.EXDEV):
                move()
        for move in lambda: os.rename(v.mnt / "t", v.mnt / "u"), lambda: os.rmdir(v.mnt / "t"):
            with refused(errno.EBUSY):
                move()
        refuses(1, ("without a journal",), v.binary, "tenant", "create", v.mnt / "t/inner")
        # as over any border of file systems
        shutil.move(inside, v.mnt / "moved")
        same((v.mnt / "moved").read_text(), "inside", "what was moved out")
        os.rename(v.mnt / "t/d", v.mnt / "t/e")
        os.mkdir(v.mnt / "above")
        v.umount()
        v.fsck("-n", "-f")


@check
def upgrades_and_read_only_are_no_crash(volume, _top):
    with scratch(volume) as v:
        all_of = fill(v.mnt / "t")
        gone = os.open(v.mnt / "t/gone", os.O_RDWR | os.O_CREAT)
        os.write(gone, b"unlinked, not synced")
        os.unlink(v.mnt / "t/gone")
        run(v.binary, "upgrade", v.mnt, timeout=100)
        holds(v.mnt / "t", all_of)
        same(os.pread(gone, 100, 0), b"unlinked, not synced", "content of what has no name")
        os.close(gone)
        run(v.binary, "mount", "-o", "remount,ro", v.mnt)
        holds(v.mnt / "t", all_of)
        kill(v)
        # it was at rest
        v.mount("transport=dev")
        holds(v.mnt / "t", all_of)
        run(v.binary, "mount", "-o", "remount,ro", v.mnt)
        run(v.binary, "mount", "-o", "remount,rw", v.mnt)
        (v.mnt / "t/more").write_text("x")
        kill(v)
        v.mount("transport=dev")
        same(os.listdir(v.mnt / "t"), [], "entries")
        v.umount()
        v.fsck("-n", "-f")


@check(seconds=120)
def a_failed_upgrade_discards_nothing(volume, _top):
    """The new process is gone before it serves, after it had mounted: the old one finds what it closed, whether the kernel knows
    inodes of the tenant or not. And what comes later is discarded as ever."""
    with upgrade.mounted(volume, size=512 << 20) as v:
        root_only()
        run(v.binary, "tenant", "create", "--space", str(SPACE), "--journal", "scratch", v.mnt / "t")
        all_of, serving = fill(v.mnt / "t"), v.daemon()
        for step in ("new-mounting kill", "new-mounted kill", "new-mounted fail", "old-mounted fail"):
            for known in (True, False):
                if known:
                    holds(v.mnt / "t", all_of)
                else:
                    pathlib.Path("/proc/sys/vm/drop_caches").write_text("2")
                v.point.write_text(step)
                upgrade.upgrade(v, ok=(upgrade.BACK,))
                must(not v.point.exists(), f"{step} was not come to")
                same(v.daemon(), serving, "the process that serves")
                holds(v.mnt / "t", all_of)
        (v.mnt / "t/more").write_text("x")
        kill(v)
        v.mount("transport=dev")
        same(os.listdir(v.mnt / "t"), [], "entries")
        v.umount()
        v.fsck("-n", "-f")


@check
def a_journal_again(volume, _top):
    """What is there becomes durable; then it is a tenant like others. So it is with what a removed one leaves."""
    with scratch(volume) as v:
        all_of = fill(v.mnt / "t")
        run(v.binary, "tenant", "set", "--journal", "ordered", v.mnt, "t")
        kill(v)
        v.mount("transport=dev")
        holds(v.mnt / "t", all_of)
        same(tenant(v)["journal"], "ordered", "mode of the journal")
        write_synced(v.mnt / "t/synced", b"synced")
        os.rename(v.mnt / "t/synced", v.mnt / "synced")
        refuses(1, ("only an empty tenant",), v.binary, "tenant", "set", "--journal", "scratch", v.mnt, "t")
        run(v.binary, "tenant", "create", "--journal", "scratch", v.mnt / "u")
        all_of = fill(v.mnt / "u", 5)
        run(v.binary, "tenant", "remove", v.mnt, "u")
        kill(v)
        v.mount("transport=dev")
        holds(v.mnt / "u", all_of)
        os.rename(v.mnt / "u/d0", v.mnt / "d0")
        v.umount()
        v.fsck("-n", "-f")


@check
def modes_of_a_tenant(volume, _top):
    """They change while it is in use, and stay so over a mount. (Where overwrites go by them, the library's tests see.)"""
    with scratch(volume) as v:
        run(v.binary, "tenant", "create", "--journal", "data", v.mnt / "j")
        f = v.mnt / "j/f"
        with open(f, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
            for n, mode in enumerate(("data", "ordered", "mount", "data")):
                run(v.binary, "tenant", "set", "--journal", mode, v.mnt, "j")
                same(tenant(v, "j")["journal"], None if mode == "mount" else mode, "mode of the journal")
                os.pwrite(file.fileno(), bytes([n]) * (1 << 20), 0)
                os.fsync(file.fileno())
        kill(v)
        v.mount("transport=dev")
        same(f.read_bytes(), b"\3" * (1 << 20), "content")
        same(tenant(v, "j")["journal"], "data", "mode of the journal")
        must("journal mode data" in run(v.binary, "tenant", "list", v.mnt)[1], "not told by list")
        v.umount()
        v.fsck("-n", "-f")


@check
def the_server_is_killed_while_it_works(volume, _top):
    """At random moments; the neighbour keeps what it synced, and what discards is killed, too."""
    with scratch(volume) as v:
        for n in range(6):
            worker = os.fork()
            if worker == 0:
                with contextlib.suppress(OSError):
                    while True:
                        fill(v.mnt / "t", 30)
                        shutil.rmtree(v.mnt / "t/d0")
                os._exit(0)
            write_synced(v.mnt / f"n{n}", b"%d" % n)
            kill(v)
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            v.mount("transport=dev")
            same(os.listdir(v.mnt / "t"), [], "entries")
            for i in range(n + 1):
                same((v.mnt / f"n{i}").read_bytes(), b"%d" % i, "content of the neighbour")
        v.umount()
        v.fsck("-n", "-f")
