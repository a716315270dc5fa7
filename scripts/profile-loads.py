#!/usr/bin/env python3
"""What ordinary work costs on a mount, by profile: requests, CPU time of the server and of the programs.

usage: profile-loads.py [OPTIONS...]    default: cache=back cache=through private private,cache=through

Prints a table in Markdown; docs/mounted.md has one, and what follows from it. CPU time and requests say the same on a
busy machine; wall-clock time does not and is left out. Needs root. Uses cc, git and tar where they are there.
"""

import contextlib
import json
import os
import random
import resource
import sqlite3
import sys

import fslib
from fslib import run

SIZE = 4 << 30
TICK = os.sysconf("SC_CLK_TCK")


def tree(folder):
    """2,000 files of 100 bytes to 64 KiB, as in a source tree."""
    dice = random.Random(5)
    for n in range(2000):
        path = folder / f"d{n % 100}"
        path.mkdir(parents=True, exist_ok=True)
        (path / f"f{n}.txt").write_bytes(dice.randbytes(int(100 * 1.9 ** dice.uniform(0, 10))))


def sources(folder):
    folder.mkdir()
    for n in range(60):
        (folder / f"s{n}.c").write_text(f"#include <stdio.h>\nint f{n}(int x) {{ printf(\"%d\", x); return x * {n}; }}\n")
    (folder / "main.c").write_text("int main(void) { return 0; }\n")


def build(top):
    script = 'for s in *.c; do cc -c -o "${s%.c}.o" "$s" || exit 1; done; ar rc lib.a *.o; cc -o program main.c lib.a; rm *.o'
    run("sh", "-c", script, cwd=top / "src")


def log_lines(top):
    fd = os.open(top / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for n in range(50_000):
        os.write(fd, b"%06d 2026-11-22T12:00:00 host program: a line of a log, as programs write them\n" % n)
    os.close(fd)


def database(top):
    with contextlib.closing(sqlite3.connect(top / "db", isolation_level=None)) as db:
        db.execute("create table t(k integer primary key, v text)")
        for n in range(300):
            db.execute("insert into t values(?, ?)", (n, "v" * 200))
        db.execute("begin")
        for n in range(300, 20_000):
            db.execute("insert into t values(?, ?)", (n, "v" * 200))
        db.execute("commit")


def overwrites(top):
    dice, page = random.Random(6), b"p" * 1000
    with open(top / "big", "w+b", buffering=0) as file:
        for _ in range(32):
            file.write(bytes(1 << 20))
        for _ in range(20_000):
            os.pwrite(file.fileno(), page, dice.randrange(32 << 20))
        os.fsync(file.fileno())


def mail(top):
    """Deliver to a temporary name, sync, rename; read and remove some."""
    for folder in ("tmp", "new"):
        (top / folder).mkdir()
    for n in range(500):
        with open(top / "tmp" / f"m{n}", "wb") as file:
            file.write(b"m" * 3000)
            file.flush()
            os.fsync(file.fileno())
        os.rename(top / "tmp" / f"m{n}", top / "new" / f"m{n}")
        if n % 2:
            (top / "new" / f"m{n}").read_bytes()
            os.unlink(top / "new" / f"m{n}")


def loads(top, source):
    copy = top / "copy"
    yield "copy 2,000 files", lambda: run("cp", "-a", source, copy)
    yield "compare them", lambda: run("diff", "-r", source, copy)
    yield "find -ls, after that", lambda: run("find", copy, "-ls")
    yield "unpack 2,000 files", lambda: ((top / "tar").mkdir(), run("tar", "-xf", f"{source}.tar", "-C", top / "tar"))
    yield "rm -rf", lambda: run("rm", "-rf", copy)
    if fslib.have("git"):
        git = ("git", "-C", top / "tar", "-c", "user.name=a", "-c", "user.email=b")
        yield "git add, commit", lambda: (run(*git, "init", "-q"), run(*git, "add", "."), run(*git, "commit", "-qm", "c"))
        yield "git status", lambda: run(*git, "status")
    if fslib.have("cc"):
        sources(top / "src")
        yield "build 61 C files", lambda: build(top)
    yield "mail, 500 messages", lambda: mail(top)
    yield "log, 50,000 lines", lambda: log_lines(top)
    yield "database, 300 commits", lambda: database(top)
    yield "20,000 small overwrites", lambda: overwrites(top)


def asked(volume):
    report = json.loads(run(volume.binary, "stats", "--json", volume.mnt)[1])
    return sum(o["requests"] for o in report["operations"] if not o["name"].endswith("FORGET"))


def cpu(volume):
    """Seconds of the server, of the programs."""
    server = 0
    for pid in volume.daemons():
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        server += (int(fields[11]) + int(fields[12])) / TICK
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return server, sum(u.ru_utime + u.ru_stime for u in use)


def measure(volume, function):
    """(requests, seconds of CPU), what is written back later included."""
    before, (server, programs) = asked(volume), cpu(volume)
    function()
    run("sync", "-f", volume.mnt)
    count, (server_now, programs_now) = asked(volume) - before, cpu(volume)
    return count, server_now - server + programs_now - programs


def main(words):
    profiles = words or ["cache=back", "cache=through", "private", "private,cache=through"]
    table = {}
    fslib.build()
    with fslib.Workspace(need_bytes=3 << 30) as space:
        source = space.dir / "source"
        tree(source)
        run("tar", "-cf", f"{source}.tar", "-C", source, ".")
        for options in profiles:
            volume = space.braidfs("loads", SIZE)
            volume.mkfs()
            volume.mount(options, "noatime")
            for name, function in loads(volume.mnt, source):
                table.setdefault(name, []).append(measure(volume, function))
            volume.umount()
    print("| requests, seconds of CPU | " + " | ".join(f"`{p}`" for p in profiles) + " |")
    print("|---" * (len(profiles) + 1) + "|")
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{count:,}, {seconds:.2f}" for count, seconds in row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
