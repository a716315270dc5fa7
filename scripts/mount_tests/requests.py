"""What operations cost: the requests that reach the server, counted by itself (`braidfs stats`), for each profile.

The table says of each operation which requests it sends, with how many of them per operation; docs/mounted.md has the
sums. It holds for Linux 6.18; on others the checks skip. How a mount without OPEN and OPENDIR differs is in `without_opens`.
"""

import json
import os
import time

import fslib
from fslib import Failed, Skipped, run
from mount_tests.common import check, daemon_only, root_only, same
from mount_tests.helpers import small_volume

KERNEL = (6, 18)
N = 1000
TOLERANCE = 0.05
FOLDERS = 50
NO_OPEN_SUPPORT, NO_OPENDIR_SUPPORT = 1 << 17, 1 << 24
# The kernel gives inodes back when it likes, others ask for the space of all mounts; FLUSH (25) is asked once and refused.
NOT_COUNTED = ("FORGET", "BATCH_FORGET", "STATFS", "#25")
# What the command that asks sends itself, some of it more than once.
ASKING = ("OPENDIR", "IOCTL", "RELEASEDIR")

# operation: by default; private; private,cache=through. `n*` before a request: that many per operation. `?`: at most one,
# as the clock has it: the kernel's own change time (of 4 ms) is sent where it is not what the server told.
TABLE = {
    "create, close": ("GETATTR LOOKUP CREATE RELEASE", "LOOKUP CREATE RELEASE", "LOOKUP CREATE RELEASE"),
    "create, write 4 KiB, close": (
        "GETATTR LOOKUP CREATE GETXATTR WRITE RELEASE ?SETATTR", "LOOKUP CREATE WRITE RELEASE ?SETATTR",
        "LOOKUP CREATE WRITE RELEASE",
    ),
    "open, close": ("OPEN RELEASE", "OPEN RELEASE", "OPEN RELEASE"),
    "open, close, stat": ("OPEN RELEASE GETATTR", "OPEN RELEASE GETATTR", "OPEN RELEASE"),
    "stat": ("", "", ""),
    "write, fsync": ("WRITE FSYNC ?SETATTR", "WRITE FSYNC ?SETATTR", "WRITE FSYNC"),
    "ftruncate": ("GETXATTR SETATTR", "SETATTR", "SETATTR"),
    "rename": ("GETATTR LOOKUP RENAME SETATTR", "LOOKUP RENAME SETATTR", "LOOKUP RENAME"),
    "rename over": ("GETATTR LOOKUP RENAME 2*SETATTR", "LOOKUP RENAME 2*SETATTR", "LOOKUP RENAME"),
    "link": ("GETATTR LOOKUP LINK SETATTR", "LOOKUP LINK SETATTR", "LOOKUP LINK"),
    "unlink": ("GETATTR UNLINK SETATTR", "UNLINK SETATTR", "UNLINK"),
    "mkdir": ("GETATTR LOOKUP MKDIR", "LOOKUP MKDIR", "LOOKUP MKDIR"),
    "rmdir": ("GETATTR RMDIR", "RMDIR", "RMDIR"),
    # per file, of 20 in each directory
    "cp -r": (
        "GETATTR 1.05*LOOKUP CREATE 0.05*MKDIR GETXATTR WRITE RELEASE ?SETATTR",
        "1.05*LOOKUP CREATE 0.05*MKDIR WRITE RELEASE ?SETATTR", "1.05*LOOKUP CREATE 0.05*MKDIR WRITE RELEASE",
    ),
    # tar writes in records of 10 KiB, so that a third of the files are written in two pieces
    "tar x": (
        "GETATTR 1.05*LOOKUP CREATE 0.05*MKDIR 2*GETXATTR WRITE RELEASE 3.15*SETATTR ?SETATTR",
        "1.05*LOOKUP CREATE 0.05*MKDIR WRITE RELEASE 3.15*SETATTR ?SETATTR",
        "1.05*LOOKUP CREATE 0.05*MKDIR 1.35*WRITE RELEASE 3.15*SETATTR",
    ),
    "cat again": ("OPEN GETATTR RELEASE", "OPEN GETATTR RELEASE", "OPEN RELEASE"),
    "find -ls, cold": 3 * ("0.05*OPENDIR 0.1*READDIRPLUS 0.05*RELEASEDIR",),
    # after all files were opened and closed once more; to list a directory takes the validity of its access time
    "find -ls, warm": 2 * ("1.05*GETATTR 0.05*OPENDIR 0.05*RELEASEDIR",) + ("0.05*GETATTR 0.05*OPENDIR 0.05*RELEASEDIR",),
    "rm -rf": (
        "GETATTR UNLINK SETATTR 0.05*RMDIR 0.1*OPENDIR 0.1*RELEASEDIR",
        "UNLINK SETATTR 0.05*RMDIR 0.1*OPENDIR 0.1*RELEASEDIR", "UNLINK 0.05*RMDIR 0.1*OPENDIR 0.1*RELEASEDIR",
    ),
}
PROFILES = {"rw": 0, "private": 1, "private,cache=through": 2}


def wanted(cell, opens, opendirs):
    """{request: how many}, and those of which there may be one."""
    exact, perhaps = {}, set()
    for word in cell.split():
        times, _, name = word.rpartition("*")
        if word.startswith("?"):
            perhaps.add(word[1:])
            continue
        name = without_opens(name, opens, opendirs)
        if name:
            exact[name] = exact.get(name, 0) + float(times or 1)
    return exact, perhaps


def without_opens(name, opens, opendirs):
    """What takes the place of a request where the kernel opens by itself."""
    if not opens and name in ("OPEN", "RELEASE", "CREATE"):
        return "MKNOD" if name == "CREATE" else None
    return None if not opendirs and name in ("OPENDIR", "RELEASEDIR") else name


class Counter:
    """Requests that came since the last look."""

    def __init__(self, volume):
        self.volume, self.before, self.asked = volume, {}, 0

    def report(self):
        self.asked += 1
        return json.loads(run(self.volume.binary, "stats", "--json", self.volume.mnt)[1])

    def since(self):
        """{request: how many}, but those of asking. Waits until no more come: some of a close come after it."""
        last, cost = {}, None
        for _ in range(50):
            now = {o["name"]: o["requests"] for o in self.report()["operations"] if o["name"] not in NOT_COUNTED}
            came = {k: now[k] - last.get(k, 0) for k in now}
            # Twice the same and nothing but asking: so much one asking costs, which depends on how long the answer is.
            if came == cost and all(k in ASKING for k, count in came.items() if count):
                break
            last, cost = now, came
            time.sleep(0.02)
        else:
            raise Failed(f"there is no end of requests: {came}")
        came = {k: now[k] - self.before.get(k, 0) - self.asked * (k in ASKING and cost[k]) for k in now}
        self.before, self.asked = now, 0
        return came

    def of(self, function):
        """{request: how many per operation} of N operations."""
        run("sync", "-f", self.volume.mnt)
        self.since()
        function()
        return {k: max(0, count) / N for k, count in self.since().items()}

    def mounted_again(self):
        """The server is another one and counts from 0."""
        self.before, self.asked = {}, 0


def compare(operation, have, exact, perhaps):
    """What is wrong, or None."""
    for name in sorted(have.keys() | exact.keys()):
        count, want = have.get(name, 0), exact.get(name, 0)
        most = want + TOLERANCE + (name in perhaps)
        if not want - TOLERANCE <= count <= most:
            shown = " ".join(f"{c:.2f}*{n}" for n, c in sorted(have.items()) if c >= 0.005)
            return f"{operation}: {count:.2f} {name} instead of {want:g}: {shown}"
    total = sum(c for n, c in have.items() if n not in perhaps)
    most = sum(c for n, c in exact.items() if n not in perhaps)
    return None if abs(total - most) <= TOLERANCE else f"{operation}: {total:.2f} requests instead of {most:g}"


def create(path, data=b""):
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    if data:
        os.write(fd, data)
    os.close(fd)


def opened_and_closed(path):
    os.close(os.open(path, os.O_RDONLY))


def each(function):
    return lambda: [function(n) for n in range(N)]


def operations(counter, top, source, options):
    """Yields each operation with its counts."""
    volume = counter.volume
    page = b"x" * 4096

    def path(kind):
        return lambda n: top / f"{kind}{n}"

    a, b, c = path("a"), path("b"), path("c")
    yield "create, close", counter.of(each(lambda n: create(a(n))))
    yield "create, write 4 KiB, close", counter.of(each(lambda n: create(b(n), page)))
    each(lambda n: os.stat(b(n)))()
    yield "open, close", counter.of(each(lambda n: opened_and_closed(b(n))))
    each(lambda n: os.stat(b(n)))()
    yield "open, close, stat", counter.of(each(lambda n: (opened_and_closed(b(n)), os.stat(b(n)))))
    yield "stat", counter.of(each(lambda n: os.stat(b(n))))
    fd = os.open(b(0), os.O_RDWR)
    yield "write, fsync", counter.of(each(lambda n: (os.pwrite(fd, page, 0), os.fsync(fd))))
    yield "ftruncate", counter.of(each(lambda n: os.ftruncate(fd, n)))
    os.close(fd)
    yield "rename", counter.of(each(lambda n: os.rename(a(n), c(n))))
    yield "rename over", counter.of(each(lambda n: os.rename(c(n), b(n))))
    yield "link", counter.of(each(lambda n: os.link(b(n), c(n))))
    yield "unlink", counter.of(each(lambda n: os.unlink(b(n))))
    each(lambda n: os.unlink(c(n)))()
    yield "mkdir", counter.of(each(lambda n: os.mkdir(a(n))))
    yield "rmdir", counter.of(each(lambda n: os.rmdir(a(n))))
    tree = top / "tree"
    yield "cp -r", counter.of(lambda: run("cp", "-r", source, tree))
    run("tar", "-cf", f"{source}.tar", "-C", source, ".")
    (top / "unpacked").mkdir()
    yield "tar x", counter.of(lambda: run("tar", "-xf", f"{source}.tar", "-C", top / "unpacked"))
    files = sorted(tree.glob("*/*"))
    run("cat", *files)
    yield "cat again", counter.of(lambda: run("cat", *files))
    volume.umount()
    volume.mount(options)
    counter.mounted_again()
    yield "find -ls, cold", counter.of(lambda: run("find", tree, "-ls"))
    for _ in range(2):
        run("cat", *files)
    yield "find -ls, warm", counter.of(lambda: run("find", tree, "-ls"))
    yield "rm -rf", counter.of(lambda: run("rm", "-rf", tree))


def requests_of(volume, options):
    daemon_only(volume)
    root_only()
    if fslib.linux() != KERNEL:
        raise Skipped(f"the counts are those of Linux {'.'.join(map(str, KERNEL))}, and this is {os.uname().release}")
    source = volume.image.parent / "source"
    for n in range(N):
        folder = source / f"d{n % FOLDERS}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{n}").write_bytes(b"z" * 4096)
    # somebody else may have the kernel drop its caches meanwhile: what is wrong three times is wrong
    for _ in range(3):
        wrong = once(volume, source, options)
        if not wrong:
            return
    raise Failed("\n".join(wrong))


def once(volume, source, options):
    """What is wrong."""
    wrong, seen = [], set()
    with small_volume(volume, size=256 << 20) as v:
        v.mount(options)
        counter = Counter(v)
        flags = counter.report()["init_flags"]
        opens, opendirs = not flags & NO_OPEN_SUPPORT, not flags & NO_OPENDIR_SUPPORT
        same(opens, "fileflags" in options, "whether OPEN is asked")
        top = v.mnt / "top"
        top.mkdir()
        for operation, have in operations(counter, top, source, options):
            seen.add(operation)
            cell = TABLE[operation][PROFILES[options.removesuffix(",fileflags")]]
            wrong.append(compare(operation, have, *wanted(cell, opens, opendirs)))
        v.umount()
    same(seen, TABLE.keys(), "operations")
    wrong = [w for w in wrong if w]
    return wrong and [f"{options}, {'with' if opens else 'without'} OPEN:", *wrong]


for name, options in {
    "requests_by_default": "rw",
    "requests_with_opens": "rw,fileflags",
    "requests_of_a_private_mount": "private",
    "requests_of_a_private_mount_with_opens": "private,fileflags",
    "requests_of_a_private_mount_without_writeback": "private,cache=through",
    "requests_of_a_private_mount_without_writeback_with_opens": "private,cache=through,fileflags",
}.items():
    def of_options(volume, _top, options=options):
        requests_of(volume, options)

    of_options.__name__ = name
    check(seconds=180)(of_options)
