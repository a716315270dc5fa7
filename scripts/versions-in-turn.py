#!/usr/bin/env python3
"""Several builds of braidfs in turn, by its own benchmark: how much faster or slower is each than the first?

usage: versions-in-turn.py [options] NAME=PROGRAM NAME=PROGRAM...

Each round runs every program once, on a volume made anew in memory (root), each time another one first: what the machine does
meanwhile meets all of them. For each test and number of cores it prints the operations a second of the first (median of the rounds),
and of each other one how many times as many it did in the same round: the median, and the quartiles.

  git worktree add /tmp/before REVISION && (cd /tmp/before && cargo build --release -p braidfs-cli)
  versions-in-turn.py before=/tmp/before/target/release/braidfs now=target/release/braidfs
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = "DRBL,DRBM,DRBH,DWOL,DWOM,DWAL,DWTL,DWSL,MRPL,MRPM,MRPH,MRDL,MRDM,MWCL,MWCM,MWUL,MWUM,MWRL,MWRM"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", metavar="NAME=PROGRAM")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tests", default=TESTS, help="as of `braidfs bench --tests`")
    parser.add_argument("--target", default="library", help="library or braidfs (mounted)")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--seconds", default="0.5", help="of each measurement")
    parser.add_argument("--size", default="3G", help="of the volume")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds: at least one")
    programs = dict(p.split("=", 1) for p in asked.programs if "=" in p)
    if len(programs) != len(asked.programs) or len(programs) < 2:
        parser.error("at least two programs, each with a name of its own: NAME=PROGRAM")
    for path in programs.values():
        if not Path(path).is_file():
            parser.error(f"{path}: no such program; build it (see --help)")
    return asked, programs


def throughputs(program, asked, out):
    """{(test, cores): operations a second} of one run."""
    words = ["-t", asked.target, "--media", "ram", "--size", asked.size, "--reps", "1", "--warm-up", "0.2", "-o", out]
    words += ["--seconds", asked.seconds, "--cores", asked.cores, "--tests", asked.tests]
    done = subprocess.run([program, "bench", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{program} bench ended with {done.returncode}: {done.stderr.strip()}")
    return {(r["test"], r["cores"]): r["throughput"] for r in json.loads(Path(out).read_text())["runs"]}


def main():
    asked, programs = arguments()
    names = list(programs)
    rounds = []
    with tempfile.TemporaryDirectory() as work:
        for n in range(asked.rounds):
            if sys.stderr.isatty():
                print(f"round {n + 1} of {asked.rounds}", end="\r", file=sys.stderr, flush=True)
            turn = names[n % len(names) :] + names[: n % len(names)]
            rounds.append({name: throughputs(programs[name], asked, f"{work}/results.json") for name in turn})
    first, others = names[0], names[1:]
    print(f"| test | cores | {first}, k ops/s | " + " | ".join(f"{o} / {first}" for o in others) + " |")
    print("|---|---:|---:|" + "---:|" * len(others))
    for cell in rounds[0][first]:
        row = [f"{statistics.median(r[first][cell] for r in rounds) / 1000:,.0f}"]
        for other in others:
            times = sorted(r[other][cell] / r[first][cell] for r in rounds if cell in r[other])
            if not times:
                row.append("-")
                continue
            low, high = times[len(times) // 4], times[3 * len(times) // 4]
            row.append(f"{statistics.median(times):.2f} ({low:.2f} to {high:.2f})")
        print(f"| {cell[0]} | {cell[1]} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
