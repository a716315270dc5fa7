#!/usr/bin/env python3
"""Builds tests and runs the test programs several at once: cargo runs one after another, and many of them wait more than they
compute.

usage: test-programs.py [--jobs N] CARGO-TEST-COMMAND...

N programs at once (default 3: each has a thread per core already), each in the folder of its package, as cargo would; those that are
known to take long begin first, so that none is left running alone at the end. What one prints comes out when it has ended; at the end
those that failed are named, and the exit code is 1. Tests in the documentation are run by cargo as usual.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
# longest first; one that is not here begins behind them
LONG = (
    "test threads_pressed", "test crash_seq", "test planted", "test crash_regressions", "test planted_scratch", "test planted_resize",
    "test scratch", "test part", "test planted_moves", "test regressions", "test tenant_devices", "test crash_threads",
    "test corpus", "test bench", "lib braidfs", "test c",
)
STARTED, LOCK = set(), threading.Lock()


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


def run(name, program, folder):
    """The program's exit code; what it printed is printed in one piece."""
    begun = time.monotonic()
    with LOCK:
        child = subprocess.Popen(
            [program], cwd=folder, env={**os.environ, "CARGO_MANIFEST_DIR": str(folder)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        STARTED.add(child)
    text = child.communicate()[0].decode(errors="replace")
    with LOCK:
        STARTED.discard(child)
        print(f"     Running {name} ({time.monotonic() - begun:.1f} s)\n{text.rstrip()}", flush=True)
    return child.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, metavar="N")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="CARGO-TEST-COMMAND")
    args = parser.parse_args()
    if not args.command or args.jobs < 1:
        parser.error("a command and at least one job are wanted")
    tests = programs(args.command)
    if not tests:
        sys.exit("test-programs: the command builds no test program")
    failed = []
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    try:
        running = {pool.submit(run, *test): test[0] for test in tests}
        for done in concurrent.futures.as_completed(running):
            if done.result():
                failed.append(f"{running[done]}: exit code {done.result()}")
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        with LOCK:
            for child in STARTED:
                child.terminate()
        return 130
    if subprocess.run([*args.command, "--doc"], check=False).returncode:
        failed.append("tests in the documentation")
    print(f"{len(tests)} test programs, {len(failed)} failed" + "".join(f"\nFAILED  {f}" for f in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
