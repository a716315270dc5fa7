"""The generic tests of xfstests on a braidfs; called by xfstests.sh.

Nothing of the suite is kept here. It runs from a copy of a checkout that the user built, and only the copy gets to know
the type braidfs (xfstests.rc). Every test runs by itself in a mount and a PID namespace: there the helpers of mount(8),
mkfs(8) and fsck(8) lie over /sbin and the users that the suite wants stand in /etc/passwd, so that the system does not
change; and when a test does not end, all its processes and mounts go with the namespace. The results are compared with
the list xfstests.known.

BRAIDFS_SUT=ext4 runs the same on an ext4, without the list: what fails there, too, is not of braidfs.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import fslib  # noqa: E402
import xfstests_known as known  # noqa: E402
from fslib import ROOT, Failed, Workspace, paint  # noqa: E402
from xfstests_testbed import Suite, Testbed  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = ROOT / "target/peers/results/xfstests"
COLOURS = {known.PASS: "green", known.KNOWN: "yellow", known.NOTRUN: "dim", known.SKIPPED: "dim"}


def arguments():
    parser = argparse.ArgumentParser(
        prog="xfstests.sh",
        description="Runs generic tests of xfstests on a braidfs on loop devices and compares the results with the "
        "list scripts/peers/xfstests.known. Exit code 0: all as the list says; 1: not; 2: could not run.",
        epilog="Needs root. Environment: BRAIDFS_BIN, BRAIDFS_TMP, BRAIDFS_SUT=ext4 (docs/testing.md).",
    )
    parser.add_argument("source", metavar="SOURCE", type=pathlib.Path, help="a checkout of xfstests, built as it says")
    parser.add_argument("tests", metavar="TEST", nargs="*", help="generic/001 or 001; default: the group quick")
    parser.add_argument("-g", "--group", action="append", default=[], help="tests of this group (all: every one)")
    parser.add_argument("-x", "--exclude", action="append", default=[], metavar="GROUP", help="but not of this one")
    parser.add_argument("--seconds", type=int, default=300, metavar="N", help="limit of each test, %(default)s")
    parser.add_argument("--size", type=int, default=5, metavar="GIB", help="of each device, %(default)s")
    parser.add_argument("--ram", action="store_true", help="devices in /dev/shm, not in BRAIDFS_TMP")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def first_lines(text, count=12):
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[:count] + (["..."] if len(lines) > count else [])


class Runner:
    def __init__(self, args, suite, testbed, lists):
        self.args, self.suite, self.testbed, self.lists = args, suite, testbed, lists
        self.rows = []
        self.usable = False

    def one(self, test):
        """Runs a test; returns (outcome, text): pass, fail with what the suite printed, notrun with its reason."""
        if not self.usable:
            self.testbed.make_test_volume()
        self.testbed.clear_results()
        code, output, seconds = self.testbed.check(test, self.args.seconds, self.lists.options(test))
        reason = self.testbed.result(test, "notrun")
        if code is None:
            outcome, text = "fail", f"no end after {self.args.seconds} s\n{output}"
            complaint = self.testbed.fsck_test_volume()
            if complaint:
                text += f"\nfsck of the test volume after the kill: {complaint}"
        elif reason.strip() and not re.search(r"^Failures: ", output, re.M):
            outcome, text = "notrun", " ".join(reason.split())
        elif code == 0 and re.search(r"^Passed all 1 tests", output, re.M):
            outcome, text = "pass", ""
        else:
            outcome, text = "fail", self.suite.only_the_test(output, test)
        # A volume that saw a failure may hold its debris: the next test gets a new one.
        self.usable = outcome != "fail"
        return outcome, text, seconds

    def run(self, tests):
        wide = max(map(len, tests))
        for test in tests:
            line = self.lists.skips(test)
            if line:
                outcome, text, seconds, verdict, reason = "skip", "", 0.0, known.SKIPPED, line.reason
            else:
                outcome, text, seconds = self.one(test)
                verdict, reason = self.lists.judge(test, outcome, text)
            row = {
                "test": test,
                "verdict": verdict,
                "outcome": outcome,
                "seconds": round(seconds, 1),
                "reason": reason,
                "text": text,
            }
            self.rows.append(row)
            said = {"notrun": f"{text} [{reason}]" if reason else text, "fail": reason}.get(outcome, reason)
            label = paint(f"{verdict:14}", COLOURS.get(verdict, "red"))
            print(f"{test:{wide}}  {label} {seconds:6.1f} s  {said}".rstrip(), flush=True)
            if outcome == "fail":
                kept = self.testbed.keep(test, RESULTS, text)
                if verdict == known.FAIL:
                    for part in first_lines(text):
                        print(f"    {part}")
                    print(f"    see {kept}", flush=True)

    def summary(self):
        """Prints the counts and returns whether all is as the list says."""
        counts = {verdict: sum(row["verdict"] == verdict for row in self.rows) for verdict in known.VERDICTS}
        print(f"\n{len(self.rows)} tests: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n))
        for verdict in known.RED:
            tests = [row["test"] for row in self.rows if row["verdict"] == verdict]
            if tests:
                print(f"{verdict}: {' '.join(tests)}")
        if self.args.json:
            answer = {"counts": counts, "total": len(self.rows), "tests": self.rows}
            self.args.json.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
        return not any(counts[verdict] for verdict in known.RED)


def main():
    args = arguments()
    if not fslib.IS_ROOT:
        raise Failed("needs root (mounts, loop devices, other users)")
    suite = Suite(args.source)
    tests = suite.choose(args.tests, args.group, args.exclude)
    ext4 = os.environ.get("BRAIDFS_SUT") == "ext4"
    lists = known.Known.empty() if ext4 else known.Known.read(HERE / "xfstests.known", known.capabilities())
    fslib.build()
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    fslib.log_to(RESULTS / "commands.log")
    if args.ram:
        os.environ["BRAIDFS_TMP"] = "/dev/shm"
    with Workspace(1 << 30) as work:
        testbed = Testbed(work, suite, "ext4" if ext4 else "braidfs", args.size << 30)
        runner = Runner(args, suite, testbed, lists)
        start = time.monotonic()
        print(f"{len(tests)} tests of {args.source}, {suite.version()}, on {testbed.kind}, limit {args.seconds} s each")
        try:
            runner.run(tests)
        finally:
            fine = runner.summary()
            print(f"{(time.monotonic() - start) / 60:.0f} min; outputs of failures: {RESULTS}")
    return 0 if fine else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failed, ValueError) as error:
        print(f"xfstests: {error}", file=sys.stderr)
        sys.exit(2)
