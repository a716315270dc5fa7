"""A server under valgrind, which counts the instructions that it executes: nearly the same ones on a busy machine. For
watch-cost.py and request-instructions.py."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = os.environ.get("BRAIDFS_BIN", str(ROOT / "target/release/braidfs"))
# No thread looks at the clock by itself, nothing is written behind the requests.
OPTIONS = "transport=dev,latency=off,fuseblk=never,commit=300,threads=2"
# valgrind counts an instruction that repeats itself for each byte; and a buffer that is cleared at the start of one run, and of
# another one not, since its memory is new, must not look like a million instructions.
TUNABLES = "glibc.cpu.x86_rep_stosb_threshold=0x10000000:glibc.cpu.x86_rep_movsb_threshold=0x10000000"
# valgrind hides the vDSO in auxv(5), but not in this newer way to it, which then leads nowhere: it is refused.
LAUNCHER = r"""
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_prctl, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x41555856 /* PR_GET_AUXV */, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof rules / sizeof rules[0], rules };
	if (argc < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
		perror("launcher");
		return 1;
	}
	execvp(argv[1], argv + 1);
	perror(argv[1]);
	return 1;
}
"""


def built(program, source):
    """Compiles a C program; its path."""
    subprocess.run(["cc", "-O2", "-x", "c", "-o", program, "-"], check=True, input=source, text=True)
    return program


class Counted:
    """A mount whose server is counted. `instructions` is there when the server has ended."""

    def __init__(self, mnt):
        self.mnt, self.instructions = mnt, None


@contextlib.contextmanager
def counted_server(work, options="", env=None, tool="cachegrind", out=None, size="256M"):
    """Formats an image in the directory `work`, serves it under valgrind for as long as the block lasts, unmounts
    it, and counts the instructions of the server from its start to its end. `out`: where valgrind's profile goes."""
    image, mnt, launcher = work / "counted.img", work / "counted", work / "launcher"
    out = out or work / "valgrind.out"
    for old in (image, *out.parent.glob(f"{out.name}*")):
        old.unlink(missing_ok=True)
    mnt.mkdir(exist_ok=True)
    if not launcher.exists():
        built(launcher, LAUNCHER)
    subprocess.run([BINARY, "mkfs", "--quiet", "--size", size, image], check=True)
    more = {"cachegrind": ["--cache-sim=no"], "callgrind": ["--separate-threads=no"]}[tool]
    valgrind = ["valgrind", f"--tool={tool}", *more, f"--{tool}-out-file={out}.%p", "--log-file=/dev/null"]
    mount = [BINARY, "mount", "--foreground", "-o", OPTIONS + options, image, mnt]
    env = dict(os.environ, BRAIDFS_LOG="error", GLIBC_TUNABLES=TUNABLES, **(env or {}))
    server = subprocess.Popen([launcher, *valgrind, *mount], env=env)
    counted, guards = Counted(mnt), []
    try:
        deadline = time.monotonic() + 120
        while not os.path.ismount(mnt):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit("the server under valgrind does not mount (is valgrind there, and is this root?)")
            time.sleep(0.05)
        # counted, too, and by itself: it ends after the server
        guards = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        yield counted
    finally:
        subprocess.run(["umount", mnt], check=False, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(120)
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
            server.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{guard}") for guard in guards) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(FileNotFoundError):
        Path(f"{out}.{server.pid}").replace(out)
    for guard in guards:
        Path(f"{out}.{guard}").unlink(missing_ok=True)
    if not out.exists():
        sys.exit(f"valgrind did not count: {out}")
    summary = re.search(r"^summary: (\d+)", out.read_text(), re.M)
    if not summary:
        sys.exit(f"valgrind did not count: {out}")
    counted.instructions = int(summary.group(1))
