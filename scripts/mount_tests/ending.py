"""How a mount ends that is in use, has moved, or whose process does not answer: what was acknowledged is not lost (docs/mounted.md)."""

import mmap
import os
import signal

from fslib import run, wait_for
from mount_tests.common import check, daemon_only, must, root_only, same, write_synced
from mount_tests.helpers import small_volume

# The kernel tells the server of no sync, and the server commits by itself much later.
LATE = "fuseblk=never,commit=300,transport=dev"


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
