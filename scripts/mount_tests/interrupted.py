"""What the server asks of the system is interrupted (EINTR), as an image on a network file system may have it: it asks again."""

import contextlib
import os
import subprocess

from fslib import Skipped, have, run, wait_for
from mount_tests.common import check, daemon_only, must, root_only, same
from mount_tests.helpers import small_volume


@contextlib.contextmanager
def every_other_interrupted(pid, call, trace):
    """Every other such call of the process is interrupted before it has done anything."""
    argv = ["strace", "-qq", "-f", "-o", trace, "-e", f"trace={call}", "-e", f"inject={call}:error=EINTR:when=1+2", "-p", str(pid)]
    tracer = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        wait_for("strace", lambda: is_traced(pid), 10)
        yield
    finally:
        tracer.terminate()
        tracer.wait()


def is_traced(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return any(line.startswith("TracerPid:") and int(line.split()[1]) for line in status)


@check
def what_is_interrupted_is_asked_again(volume, _top):
    root_only()
    daemon_only(volume)
    if not have("strace"):
        raise Skipped("no strace")
    for call in "fdatasync", "fallocate":
        with small_volume(volume) as v:
            v.mount()
            trace = v.image.with_suffix(".trace")
            with every_other_interrupted(v.daemon(), call, trace):
                (v.mnt / "f").write_bytes(os.urandom(8 << 20))
                v.settle()
                (v.mnt / "f").unlink()
                v.settle()
                run("fstrim", v.mnt)
                (v.mnt / "g").write_bytes(b"x")
                v.settle()
            must(trace.read_text().count("INJECTED") > 1, f"no {call} was interrupted")
            trace.unlink()
            v.umount()
            same(v.fsck("-f", "-n")[0], 0, "exit code of fsck")
