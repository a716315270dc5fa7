"""Where the suite runs: a patched copy of its checkout, two loop devices, and a namespace for each test."""

import grp
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import time

import fslib
from fslib import Failed, Volume, run

HERE = pathlib.Path(__file__).resolve().parent

# As the suite's README asks for: a user with a group, one whose name begins with a digit, and another one.
USERS = ("fsgqa", "123456-fsgqa", "fsgqa2")
GROUPS = ("fsgqa", "fsgqa2")


class Suite:
    """A checkout of xfstests that its owner has built. It is only read."""

    def __init__(self, source):
        self.source = source.resolve()
        for name in ("check", "common/rc", "tests/generic"):
            if not (self.source / name).exists():
                raise Failed(f"{source}: no checkout of xfstests (clone it, build it as its README says): no {name}")
        for name in ("ltp/fsstress", "src/lstat64", "tests/generic/group.list"):
            if not (self.source / name).exists():
                raise Failed(f"{source} is not built: build it as its README says, then call this again (no {name})")

    def version(self):
        """Commit of the checkout, for the head of the output."""
        code, text = run("git", "-c", "safe.directory=*", "-C", self.source, "log", "-1", "--format=%h of %cs", ok=None)
        return text.strip() if code == 0 else "no git"

    def groups(self):
        """Test to its groups, in the suite's order."""
        found = {}
        for line in (self.source / "tests/generic/group.list").read_text().splitlines():
            words = line.split("#")[0].split()
            if words:
                found[f"generic/{words[0]}"] = set(words[1:])
        return found

    def choose(self, names, groups, exclude):
        """The tests that `names` and `groups` mean (quick where both are empty), without those of `exclude`."""
        all_tests = self.groups()
        wanted = [name if "/" in name else f"generic/{name}" for name in names]
        for name in wanted:
            if name not in all_tests:
                raise Failed(f"{name}: no generic test of this checkout")
        groups = groups or ([] if names else ["quick"])
        for group in [*groups, *exclude]:
            if group != "all" and not any(group in has for has in all_tests.values()):
                raise Failed(f"{group}: no test is in this group")
        wanted += [t for t, has in all_tests.items() if t not in wanted and ("all" in groups or has & set(groups))]
        wanted = [t for t in wanted if not all_tests[t] & set(exclude)]
        if not wanted:
            raise Failed("no test is left")
        return wanted

    def copy(self, to, kind):
        """Makes the copy that runs, and tells it of the type braidfs."""
        shutil.copytree(self.source, to, symlinks=True, ignore=shutil.ignore_patterns(".git", "*.o", "*.lo", "results"))
        if kind == "braidfs":
            for name in ("rc", "attr"):
                with open(to / "common" / name, "a", encoding="utf-8") as file:
                    file.write((HERE / "xfstests.rc").read_text())

    @staticmethod
    def only_the_test(output, test):
        """What `check` printed about the test, without its head and its summary."""
        lines = output.splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith(test)]
        ends = [n for n, line in enumerate(lines) if line.startswith(("Ran: ", "Failures: "))]
        return "\n".join(lines[starts[0] if starts else 0 : ends[0] if ends else len(lines)]).strip()


class LoopVolume(Volume):
    """A sparse file on a loop device of its own."""

    def __init__(self, directory, name, size):
        super().__init__(directory, name, size)
        with open(self.image, "wb") as file:
            file.truncate(size)
        _, out = run("losetup", "--find", "--show", "--direct-io=on", self.image)
        self.device = out.strip()

    def wait_free(self, seconds=60):
        """Waits until nothing is mounted from it in any namespace; the kernel refuses O_EXCL until then."""

        def free():
            try:
                os.close(os.open(self.device, os.O_RDONLY | os.O_EXCL))
            except OSError:
                return False
            return True

        fslib.wait_for(f"{self.device} in use by nobody", free, seconds)

    def detach_inner(self):
        """Detaches loop devices that a test made on files of this volume and left; they would keep it mounted."""
        number = os.stat(self.device).st_rdev
        inner = f"{os.major(number)}:{os.minor(number)}"
        _, out = run("losetup", "--list", "--noheadings", "--raw", "--output", "NAME,BACK-MAJ:MIN", ok=None)
        for line in out.splitlines():
            fields = line.split()
            if fields[1:] == [inner]:
                fslib.quiet("losetup", "-d", fields[0])


def with_users(passwd, group, home):
    """/etc/passwd and /etc/group with the suite's users, where they lack. No password, so that /etc/shadow stays."""
    uids, gids = {u.pw_uid for u in pwd.getpwall()}, {g.gr_gid for g in grp.getgrall()}
    free = (n for n in range(60001, 65000) if n not in uids and n not in gids)
    ids = {line.split(":")[0]: line.split(":")[2] for line in group.splitlines() if line.count(":") >= 3}
    for name in GROUPS:
        if name not in ids:
            ids[name] = next(free)
            group += f"{name}:x:{ids[name]}:\n"
    have = {line.split(":")[0] for line in passwd.splitlines()}
    for name in USERS:
        if name not in have:
            uid = next(free)
            passwd += f"{name}:*:{uid}:{ids.get(name, ids['fsgqa'])}::{home}:/bin/bash\n"
    return passwd, group


def end_namespaces(process):
    """Kills all that runs in the namespaces of `unshare`, whose first process dies with it; after a signal to us, too.

    The mount namespace is held until they are dead: a daemon that was the last one in it would wait in its exit for its
    own answer to the unmount of its volume, for ever (fs/fuse/inode.c: fuse_conn_destroy), and sync(2) with it.
    """
    if process.poll() is not None:
        return
    try:
        hold = os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        hold, children = None, []
    process.send_signal(signal.SIGKILL)
    process.wait()
    if hold is not None:
        # The first process of a PID namespace is gone only after all others are.
        fslib.wait_for("end of a test's processes", lambda: not any(fslib.is_running(int(c)) for c in children), 60)
        os.close(hold)


class Testbed:
    """The devices TEST_DEV and SCRATCH_DEV, and how a test is run on them."""

    def __init__(self, work, suite, kind, size):
        self.kind = kind
        self.dir = work.dir
        if self.dir.resolve().is_relative_to("/tmp"):
            raise Failed("each test gets a /tmp of its own: set BRAIDFS_TMP to a directory elsewhere")
        if not any(line.split()[-1] == "overlay" for line in open("/proc/filesystems")):
            fslib.quiet("modprobe", "overlay")
        self.volumes = [LoopVolume(work.dir, name, size) for name in ("test", "scratch")]
        work.volumes += self.volumes
        self.test, self.scratch = self.volumes
        self.copy = work.dir / "suite"
        suite.copy(self.copy, kind)
        self.results = work.dir / "results"
        self.log = work.dir / "daemon.log"
        self._write_helpers()
        self._write_config()

    def _write_helpers(self):
        helpers = self.dir / "sbin"
        helpers.mkdir()
        if self.kind == "braidfs":
            for name in ("mkfs", "mount", "umount", "fsck"):
                (helpers / f"{name}.braidfs").symlink_to(fslib.braidfs_binary())
        # The suite would ask systemd to run each test in a scope, by a process id of another namespace.
        stub = helpers / "systemd-run"
        stub.write_text("#!/bin/sh\nexit 1\n")
        stub.chmod(0o755)
        home = self.dir / "home"
        home.mkdir(mode=0o777)
        passwd, group = (pathlib.Path("/etc", name).read_text() for name in ("passwd", "group"))
        passwd, group = with_users(passwd, group, home)
        (self.dir / "passwd").write_text(passwd)
        (self.dir / "group").write_text(group)

    def _write_config(self):
        config = {
            "FSTYP": self.kind,
            "TEST_DEV": self.test.device,
            "TEST_DIR": self.test.mnt,
            "SCRATCH_DEV": self.scratch.device,
            "SCRATCH_MNT": self.scratch.mnt,
            "RESULT_BASE": self.results,
        }
        if self.kind == "braidfs":
            config |= {"MKFS_OPTIONS": "--force", "FSCK_OPTIONS": "-n -f"}
        lines = [f"export {name}='{value}'\n" for name, value in config.items()]
        (self.dir / "local.config").write_text("".join(lines))
        sbin = os.path.realpath("/sbin")
        (self.dir / "inside.sh").write_text(
            f"""set -e
mount -t overlay -o lowerdir='{self.dir}/sbin:{sbin}' overlay '{sbin}'
for name in passwd group; do mount --bind '{self.dir}'/$name /etc/$name; done
mount --bind '{self.dir}/tmp' /tmp
cd '{self.copy}'
set +e
PATH='{self.dir}/sbin':$PATH HOST_OPTIONS='{self.dir}/local.config' FSTESTS_ISOL=privatens ./check "$1"
exit $?
"""
        )

    def make_test_volume(self):
        force = "--force" if self.kind == "braidfs" else "-F"
        program = [fslib.braidfs_binary(), "mkfs"] if self.kind == "braidfs" else ["mkfs.ext4", "-q"]
        run(*program, force, self.test.device)

    def fsck_test_volume(self):
        """What the check of the test volume finds, or nothing."""
        program = [fslib.braidfs_binary(), "fsck", "-f", "-n"] if self.kind == "braidfs" else ["e2fsck", "-p"]
        code, text = run(*program, self.test.device, ok=None, timeout=300)
        return "" if code <= (0 if self.kind == "braidfs" else 1) else text

    def clear_results(self):
        for directory in (self.results, self.dir / "tmp"):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        (self.dir / "tmp").chmod(0o1777)
        self.log.unlink(missing_ok=True)

    def result(self, test, suffix):
        """Text of a file that the suite wrote about the test."""
        try:
            return pathlib.Path(f"{self.results / test}.{suffix}").read_text(errors="replace")
        except OSError:
            return ""

    def check(self, test, seconds, options=""):
        """Runs one test, its volumes mounted with `options`; returns (exit code, None where it did not end, and what it printed, seconds)."""
        out = self.dir / "check.out"
        env = {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "LC_ALL": "C", "HOME": "/root", "TERM": "dumb"}
        env |= {"BRAIDFS_LOG": "info", "BRAIDFS_LOG_FILE": str(self.log)}
        if options:
            env |= {"MOUNT_OPTIONS": f"-o {options}", "TEST_FS_MOUNT_OPTS": f"-o {options}"}
        flags = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        fslib.log(f"$ check {test}")
        start = time.monotonic()
        with open(out, "wb") as file:
            process = subprocess.Popen(
                ["unshare", *flags, "bash", self.dir / "inside.sh", test],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_namespaces(process)
        taken = time.monotonic() - start
        for volume in self.volumes:
            volume.detach_inner()
            volume.wait_free()
        return code, out.read_text(errors="replace"), taken

    def keep(self, test, results, text):
        """Copies what the suite and the daemon wrote about the test to a directory below `results`."""
        to = results / test.replace("/", ".")
        to.mkdir(exist_ok=True)
        (to / "check.out").write_text(text + "\n")
        for path in self.results.glob(f"{test}.*"):
            if path.is_file():
                shutil.copy(path, to)
        if self.log.exists():
            shutil.copy(self.log, to)
        return to
