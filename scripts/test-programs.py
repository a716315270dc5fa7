#!/usr/bin/env python3
"""Builds tests and runs the test programs several at once: cargo runs one after another, and many of them wait more than they
compute.

usage: test-programs.py [--jobs N] [--leave NAME,NAME...] CARGO-TEST-COMMAND...

N programs at once (default 3: each has a thread per core already), each in the folder of its package, as cargo would; those that are
known to take long begin first, so that none is left running alone at the end. Those of --leave are built and not run, which is said; a
name that no program has is an error. What one prints comes out when it has ended; at the end
those that failed are named, and the exit code is 1. Tests in the documentation are run by cargo as usual.

A program that has not ended after BRAIDFS_PROGRAM_SECONDS (default 2700) is killed, and has failed; so has a file of tests without a
test, whose feature the command lacks. Lines with SKIPPED are noted for the list at the end of `make test` (scripts/skipped.py).
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
import skipped  # noqa: E402

# longest first; one that is not here begins behind them
LONG = (
    "test crash_seq", "test planted", "test crash_regressions", "test threads_pressed", "test crash_threads", "test planted_scratch",
    "test scratch", "test part", "test resize", "test crash_writeback", "test regressions", "test planted_moves", "test planted_resize",
    "test tenant_devices",
    "test corpus", "test bench", "lib braidfs", "test c",
)
STARTED, LOCK = set(), threading.Lock()
# how long a process that was killed may keep its output open
LEAVING = 10


def programs(command):
    """[(name, program, folder of its package)] of what `command` builds; cargo's own exit code where it fails."""
    build = [*command, "--no-run", "--message-format=json-render-diagnostics"]
    done = subprocess.run(build, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    found = []
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            kind, name = message["target"]["kind"][0], message["target"]["name"]
            found.append((f"{kind} {name}", message["executable"], pathlib.Path(message["manifest_path"]).parent))
    return sorted(found, key=lambda test: LONG.index(test[0]) if test[0] in LONG else len(LONG))


def end_all(pid, sig):
    """Sends the signal to a process and to all that it has started and that have not left it. (They have no process group of their own:
    who ends ours ends them.)"""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            pass
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    for each in found:
        try:
            os.kill(each, sig)
        except ProcessLookupError:
            pass


def output(child, seconds):
    """What the program printed, and whether it ended in time; else it is killed. What it started may outlive it, and have its output
    open: that is not waited for."""
    try:
        return child.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        end_all(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=LEAVING)[0], False
    except subprocess.TimeoutExpired as error:
        return error.output or b"", False


def run(name, program, folder, seconds):
    """Why the program failed, or None; what it printed is printed in one piece."""
    begun = time.monotonic()
    with LOCK:
        child = subprocess.Popen(
            [program], cwd=folder, env={**os.environ, "CARGO_MANIFEST_DIR": str(folder)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        STARTED.add(child)
    text, in_time = output(child, seconds)
    text = text.decode(errors="replace")
    with LOCK:
        STARTED.discard(child)
        print(f"     Running {name} ({time.monotonic() - begun:.1f} s)\n{text.rstrip()}", flush=True)
    reasons = re.findall(r"SKIPPED:?\s*(.*)", text)
    for reason in reasons:
        skipped.note(name, reason)
    if not in_time:
        return f"no end after {seconds:.0f} s: killed"
    if child.returncode:
        return f"exit code {child.returncode}"
    if (name in LONG or name.startswith("test ")) and not sum(map(int, re.findall(r"^running (\d+) test", text, re.MULTILINE))):
        return "it has no test: does the command lack a feature?"
    return f"skipped: {reasons[0]}" if reasons and skipped.is_failure() else None


def interrupted(*_):
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, metavar="N")
    parser.add_argument("--leave", type=lambda names: names.split(","), default=[], metavar="NAMES")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="CARGO-TEST-COMMAND")
    args = parser.parse_args()
    if not args.command or args.jobs < 1:
        parser.error("a command and at least one job are wanted")
    seconds = float(os.environ.get("BRAIDFS_PROGRAM_SECONDS") or 2700)
    signal.signal(signal.SIGTERM, interrupted)
    tests = programs(args.command)
    if not tests:
        sys.exit("test-programs: the command builds no test program")
    left = [test[0] for test in tests if test[0].removeprefix("test ") in args.leave]
    if len(left) != len(args.leave):
        sys.exit(f"test-programs: of {', '.join(args.leave)} there are only {', '.join(left) or 'none'}")
    tests = [test for test in tests if test[0] not in left]
    failed = []
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    try:
        running = {pool.submit(run, *test, seconds): test[0] for test in tests}
        for done in concurrent.futures.as_completed(running):
            if why := done.result():
                failed.append(f"{running[done]}: {why}")
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        with LOCK:
            for child in STARTED:
                end_all(child.pid, signal.SIGTERM)
        raise
    if subprocess.run([*args.command, "--doc"], check=False).returncode:
        failed.append("tests in the documentation")
    if left:
        print(f"left to `make heavy`: {', '.join(left)}")
    print(f"{len(tests)} test programs, {len(failed)} failed" + "".join(f"\nFAILED  {f}" for f in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
