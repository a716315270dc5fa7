#!/usr/bin/env python3
"""make demo: real work on a braidfs and, beside it, on an ext4 of the same size; then a killed daemon.

Every figure is the time of the step until the data is durable (syncfs included). Where syncfs does not reach a braidfs, as on
Linux before 6.18, its time is without the commit, which the heading says, and no ratio is given. Both sides do the same steps
alternately, on images in one directory. Everything is made in one temporary directory and removed at the end, also
after a failure or CTRL-C. Exit code 0: every step and every comparison was right.
"""

import concurrent.futures
import functools
import hashlib
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

sys.dont_write_bytecode = True
import fslib  # noqa: E402
from fslib import Failed, in_child, log, paint, run  # noqa: E402

SIZE = 4 << 30
ROOM = 5 << 30
STEP_SECONDS = 150
FILES, BYTES = (20_000, 30_000), (500 << 20, 700 << 20)  # (at least, at most) of the copied input
MESSAGES, MAIL_WRITERS = 2000, 4
GIT_FILES = 3000
SQL_TRANSACTIONS = {"wal": 3000, "delete": 1000}


# Input: real files of this machine -----------------------------------------------------------------------------------


def choose_input():
    """[(absolute path, is_symlink)] of the Rust toolchain and /usr/share, between the bounds FILES and BYTES."""
    _, sysroot = run("rustc", "--print", "sysroot", cwd=fslib.ROOT)
    sysroot = sysroot.strip().splitlines()[-1]
    chosen, seen, total = [], set(), 0
    # The toolchain brings the big files, /usr/share the many; the last entry only fills up what is still missing.
    for top, share in ((sysroot + "/lib", 300 << 20), ("/usr/share/doc", 1 << 40), ("/usr/share", 1 << 40), (sysroot, 1 << 40)):
        taken = 0
        for folder, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                if len(chosen) >= FILES[0] and total >= BYTES[0]:
                    return chosen, total
                path = os.path.join(folder, name)
                if path in seen:
                    continue
                is_link = os.path.islink(path)
                if not is_link and not (os.path.isfile(path) and os.access(path, os.R_OK)):
                    continue
                size = 0 if is_link else os.path.getsize(path)
                if taken + size > share or total + size > BYTES[1] or len(chosen) >= FILES[1]:
                    continue
                seen.add(path)
                chosen.append((path, is_link))
                taken += size
                total += size
    return chosen, total


def digest(path):
    """What the copy must have in common with its source: kind, mode and content."""
    if os.path.islink(path):
        return "link " + os.readlink(path)
    content = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            content.update(piece)
        return f"{os.fstat(file.fileno()).st_mode & 0o7777:o} {content.hexdigest()}"


def digests(paths):
    # not multiprocessing.Pool: its end is a SIGTERM, which one that was just forked can miss (it has our handler), and then waits for ever
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(digest, paths, chunksize=256))


# Steps: each gets the volume and the shared input, and returns a remark for the table or None --------------------------


def step_copy(volume, work):
    """The listed files, with their directories, by cp -a."""
    target = volume.mnt / "copy"
    target.mkdir()
    with open(work.list_file, "rb") as names:
        done = subprocess.run(
            ["xargs", "-0", "cp", "-a", "--parents", "-t", target], stdin=names, cwd="/", capture_output=True, text=True
        )
    if done.returncode:
        raise Failed(f"cp: {done.stderr.strip().splitlines()[-1:]}")


def step_compare(volume, work):
    """After a remount, so that it is what the volume holds and not what the page cache holds."""
    found = digests([f"{volume.mnt}/copy{path}" for path, _ in work.files])
    wrong = [path for (path, _), want, have in zip(work.files, work.digests, found) if want != have]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(found)} files differ, the first is {wrong[0]}")
    return f"{len(found)} files equal"


def step_git(volume, work):
    """init, add, commit, change, commit, gc, fsck --strict."""
    repo = volume.mnt / "repo"
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(volume.mnt)}
    git = ["git", "-c", "user.name=demo", "-c", "user.email=demo@localhost", "-c", "gc.auto=0", "-c", "core.fsync=all"]
    call = functools.partial(run, *git, env=env)
    call("init", "-q", repo)
    for number, path in enumerate(work.small_files):
        folder = repo / f"part{number % 50}"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / f"{number}.{os.path.basename(path)}")
    call("-C", repo, "add", ".")
    call("-C", repo, "commit", "-q", "-m", "first")
    for folder in sorted(repo.glob("part*"))[:10]:
        for file in sorted(folder.iterdir()):
            with open(file, "a", encoding="utf-8") as out:
                out.write("changed\n")
    call("-C", repo, "commit", "-q", "-a", "-m", "second")
    call("-C", repo, "gc", "-q", "--prune=now")
    call("-C", repo, "fsck", "--strict", "--no-progress")
    _, status = call("-C", repo, "status", "--porcelain")
    if status.strip():
        raise Failed(f"git status is not clean: {status[:100]}")
    return "fsck --strict: no error"


def step_sqlite(mode, volume, _work):
    """Transactions with synchronous=FULL; each is an fsync or more."""
    db = sqlite3.connect(volume.mnt / f"{mode}.db", isolation_level=None)
    if db.execute(f"pragma journal_mode={mode}").fetchone()[0] != mode:
        raise Failed(f"SQLite refused the journal mode {mode}")
    db.execute("pragma synchronous=full")
    db.execute("create table account(id integer primary key, balance int, note text)")
    db.executemany("insert into account values(?, 1000, ?)", ((i, "x" * (i % 300)) for i in range(1000)))
    rng = random.Random(7)
    for turn in range(SQL_TRANSACTIONS[mode]):
        giver, taker, amount = rng.randrange(1000), rng.randrange(1000), rng.randrange(100)
        db.execute("begin immediate")
        db.execute("update account set balance = balance - ? where id = ?", (amount, giver))
        db.execute("update account set balance = balance + ? where id = ?", (amount, taker))
        db.execute("insert into account(balance, note) values(0, ?)", (f"turn {turn}",))
        db.execute("commit")
    check = db.execute("pragma integrity_check").fetchone()[0]
    balance, rows = db.execute("select sum(balance), count(*) from account").fetchone()
    db.close()
    if check != "ok" or balance != 1_000_000 or rows != 1000 + SQL_TRANSACTIONS[mode]:
        raise Failed(f"integrity_check says {check}, balance {balance}, rows {rows}")
    return "integrity_check: ok"


def deliver(box, who):
    """One mail process: write to tmp/, fsync, rename to new/."""
    rng = random.Random(who)
    for number in range(MESSAGES // MAIL_WRITERS):
        name = f"{who}.{number}"
        with open(box / "tmp" / name, "wb") as file:
            file.write(rng.randbytes(rng.randrange(2 << 10, 8 << 10)))
            file.flush()
            os.fsync(file.fileno())
        os.rename(box / "tmp" / name, box / "new" / name)


def step_mail(volume, _work):
    """Four processes deliver to one mail box."""
    box = volume.mnt / "mail"
    for folder in ("tmp", "new"):
        (box / folder).mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=deliver, args=(box, who)) for who in range(MAIL_WRITERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    arrived, left = len(os.listdir(box / "new")), os.listdir(box / "tmp")
    if any(p.exitcode for p in processes) or arrived != MESSAGES or left:
        raise Failed(f"{arrived} of {MESSAGES} messages arrived, {len(left)} left in tmp")


def step_walk(volume, work):
    """find -ls over everything, after a remount."""
    done = subprocess.run(["find", volume.mnt / "copy", "-ls"], capture_output=True)
    lines = done.stdout.count(b"\n")
    if done.returncode or lines < len(work.files):
        raise Failed(f"find: exit code {done.returncode}, {lines} lines for {len(work.files)} files")
    return f"{lines} names"


def step_remove(volume, _work):
    run("rm", "-rf", volume.mnt / "copy")
    if (volume.mnt / "copy").exists():
        raise Failed("rm -rf left something")


# (name, function, remount with a cold cache before it)
STEPS = [
    ("copy", step_copy, False),
    ("compare (sha256, cold)", step_compare, True),
    ("git add, commit, gc, fsck", step_git, False),
    ("SQLite, WAL", functools.partial(step_sqlite, "wal"), False),
    ("SQLite, rollback journal", functools.partial(step_sqlite, "delete"), False),
    ("mail: write, fsync, rename", step_mail, False),
    ("find -ls (cold)", step_walk, True),
    ("rm -rf", step_remove, False),
]


def measure(volume, function, cold, work):
    """(seconds, remark) of one step in a child process; what others left dirty is written out before."""

    def body():
        volume.settle()
        if cold:
            volume.cold()
        start = time.monotonic()
        remark = function(volume, work)
        volume.settle()
        return time.monotonic() - start, remark

    return in_child(body, STEP_SECONDS, on_timeout=volume.force_down)


# The killed daemon ---------------------------------------------------------------------------------------------------


def synced_writer(folder, who, journal):
    """Writes files for ever; a line `name sha256` goes to `journal` (outside of the volume) after each fsync."""
    rng = random.Random(1000 + who)
    number = 0
    with open(journal, "a", buffering=1, encoding="utf-8") as out:
        while True:
            path = folder / f"d{number % 7}" / f"{who}.{number}"
            data = rng.randbytes(rng.randrange(1, 60_000))
            try:
                with open(path, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                return  # the daemon is dead: what we expect
            out.write(f"{path} {hashlib.sha256(data).hexdigest()}\n")
            number += 1


def kill_and_recover(volume, directory):
    """Returns a remark; raises `Failed` when a synced file is lost or wrong, or fsck finds something."""
    folder = volume.mnt / "synced"
    for part in range(7):
        (folder / f"d{part}").mkdir(parents=True)
    journals = [directory / f"synced.{who}" for who in range(3)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=synced_writer, args=(folder, who, j)) for who, j in enumerate(journals)]
    for writer in writers:
        writer.start()
    time.sleep(2)
    if isinstance(volume, fslib.BraidFs):
        volume.kill9()
        for writer in writers:
            writer.join(20)
        start = time.monotonic()
        volume.mount()  # over the dead mount point: it must take it over
    else:  # BRAIDFS_SUT=ext4: there is no daemon to kill, only the logic to test
        for writer in writers:
            writer.kill()
            writer.join()
        start = time.monotonic()
        volume.cold()
    seconds = time.monotonic() - start
    synced = [line.split(" ") for j in journals if j.exists() for line in j.read_text().splitlines()]
    lost = []
    for path, sha in synced:
        try:
            if hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() != sha:
                lost.append(path)
        except OSError as error:
            lost.append(f"{path}: {error.strerror}")
    if lost:
        raise Failed(f"{len(lost)} of {len(synced)} synced files are lost or wrong, the first is {lost[0]}")
    if len(synced) < 20:
        raise Failed(f"only {len(synced)} files were synced before the kill: no real test")
    volume.umount()
    code, text = volume.fsck("-f", "-n")
    if code:
        raise Failed(f"fsck -f -n after recovery: exit code {code}: {text.strip().splitlines()[-3:]}")
    return f"{len(synced)} synced files intact, mounted again in {seconds:.2f} s, fsck clean"


# The table -------------------------------------------------------------------------------------------------------------


def cell(result):
    if result is None:
        return "-"
    return "FAILED" if isinstance(result, str) else f"{result:.2f} s"


def print_row(name, ours, theirs, remark, comparable):
    """A line of the table; a ratio only of what is `comparable`."""
    ratio, colour = "", "dim"
    if comparable and isinstance(ours, float) and isinstance(theirs, float) and theirs > 0:
        value = ours / theirs
        ratio, colour = f"{value:.2f}x", "green" if value <= 1.2 else "yellow" if value <= 3 else "red"
    first = f"{cell(ours):>10}"
    first = paint(first, "red") if isinstance(ours, str) else first
    print(f"  {name:<28}{first}{cell(theirs):>10}  {paint(f'{ratio:>8}', colour)}   {remark or ''}", flush=True)


def heading(space, theirs, durable):
    """What the figures are. `durable`: those of braidfs, too, end when all is durable."""
    if not durable:
        what = "the time of each step, on ext4 until it is durable" if theirs else "the time of each step"
        print(f"{SIZE >> 30} GiB in {space.dir}; {what}. What braidfs has to commit then is NOT in its column: syncfs reaches\n"
              "it only on a mount of a block device and from Linux 6.18 on (docs/crash-contract.md)."
              + (" So there is no ratio." if theirs else ""))
    elif theirs:
        print(f"Two file systems of {SIZE >> 30} GiB in {space.dir}; the time to do each step until it is durable:")
    else:
        print(f"A braidfs of {SIZE >> 30} GiB in {space.dir}; the time to do each step until it is durable:")


class Work:
    """The input that both sides get."""

    def __init__(self, directory):
        self.files, self.bytes = choose_input()
        self.list_file = directory / "files"
        self.list_file.write_bytes(b"\0".join(os.fsencode(path.lstrip("/")) for path, _ in self.files) + b"\0")
        small = (p for p, is_link in self.files if not is_link and 0 < os.path.getsize(p) < 32 << 10)
        self.small_files = [path for path, _ in zip(small, range(GIT_FILES))]
        # Reads everything once: the side that copies first does not pay for the cold source.
        self.digests = digests([path for path, _ in self.files])


def demo():
    begin = time.monotonic()
    failures = []
    with fslib.Workspace(need_bytes=ROOM) as space:
        ours = space.braidfs("braidfs", SIZE)
        without = fslib.why_no_ext4()
        theirs = None if without else space.ext4("ext4", SIZE)
        sides = [ours] + ([theirs] if theirs else [])
        if without:
            print(f"No comparison with ext4 here: {without}.")
        work = Work(space.dir)
        log(f"input: {len(work.files)} files, {work.bytes} bytes")
        for volume in sides:
            volume.mkfs()
            volume.mount()
        durable = ours.sync_commits()
        heading(space, theirs, durable)
        print(f"Input: {len(work.files)} files, {work.bytes >> 20} MiB, from the Rust toolchain and /usr/share.\n")
        print(paint(f"  {'step':<28}{ours.kind:>10}{'ext4':>10}  {'ratio':>8}", "bold"))
        totals = [0.0, 0.0]
        for name, function, cold in STEPS:
            results, remark = [None, None], None
            for index, volume in enumerate(sides):
                try:
                    results[index], remark = measure(volume, function, cold, work)
                except Failed as error:
                    results[index] = str(error)
                    failures.append(f"{name} on {volume.kind}: {error}")
                    if not volume.alive():
                        volume.force_down()
                        volume.mount()
            print_row(name, *results, remark, durable)
            if not any(isinstance(result, str) for result in results):
                totals = [total + (result or 0.0) for total, result in zip(totals, results)]
        print_row("all", totals[0], totals[1] if theirs else None, "", durable)
        try:
            remark = in_child(lambda: kill_and_recover(ours, space.dir), STEP_SECONDS, ours.force_down)
            print(f"\n  kill -9 of the daemon in the middle of synced writes: {paint(remark, 'green')}")
        except Failed as error:
            failures.append(f"kill -9 and recovery: {error}")
    for failure in failures:
        print(paint(f"FAILED  {failure}", "red"))
    print(f"\n{'Failed' if failures else 'All right'} after {time.monotonic() - begin:.0f} s. "
          f"Log: {fslib.LOG.name}. Unmounted and removed: {space.cleaned()}.")
    return 1 if failures else 0


def main():
    fslib.log_to(fslib.ROOT / "target" / "demo.log")
    try:
        # before the minutes that the build takes
        fslib.demand_room(ROOM)
        fslib.build()
        return demo()
    except (Failed, OSError, subprocess.SubprocessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
