"""What a mount tells of itself: `braidfs top` as text, and what `braidfs stats --json` says of latencies, domains, cache, processes."""

import json
import os
import subprocess
import threading
import time

from fslib import run
from mount_tests.common import as_nobody, check, daemon_only, must, same
from mount_tests.helpers import small_volume


def load(top, end):
    """Creates, writes, syncs and looks up names that are not there, until it is told to end."""
    n = 0
    while not end.is_set():
        n += 1
        with open(top / f"f{n % 50}", "wb") as f:
            f.write(b"x" * 8192)
            f.flush()
            os.fsync(f.fileno())
        must(not os.path.exists(top / f"none{n}"), "a name that nobody made")


@check(seconds=30)
def watching(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mount()
        end = threading.Event()
        thread = threading.Thread(target=load, args=(v.mnt, end))
        thread.start()
        try:
            # to a pipe it writes text by itself
            text = run(v.binary, "top", "-d", "0.5", "-n", "2", v.mnt)[1]
            report = json.loads(run(v.binary, "stats", "--json", "--interval", "1", v.mnt)[1])
        finally:
            end.set()
            thread.join()
        same(text.count("braidfs top: "), 2, "one text for each look")
        second = text.split("braidfs top: ")[2]
        for word in ("FSYNC", "WRITE", "p99.9", "domain", "process", "python"):
            must(word in second, f"{word} is in what top shows:\n{second}")
        fsync = next(o for o in report["operations"] if o["name"] == "FSYNC")
        latency = fsync["latency"]
        # every request is timed while somebody watches, where the clock is quick; those under way when it looks are answered later
        timed = fsync["requests"] - 2 if report["sampled"] == 1 else 1
        must(latency["count"] >= timed, f"all fsyncs of the interval were timed until their answer: {fsync}")
        must(0 < latency["p50_ns"] <= latency["p90_ns"] <= latency["p99_ns"] <= latency["p999_ns"], f"percentiles rise: {latency}")
        lookup = next(o for o in report["operations"] if o["name"] == "LOOKUP")
        same(lookup["errors"], 0, "a name that is not there is an answer to remember, not an error")
        write = next(o for o in report["operations"] if o["name"] == "WRITE")
        same(write["bytes"] % 4096, 0, "bytes written, in whole pages here")
        must(write["bytes"] >= 8192 * (write["requests"] - 1), f"bytes of data of WRITE: {write}")
        same([d["domain"] for d in report["domains"]], [0, 1], "each domain")
        same(report["layout"], 1, "the number of the layout")
        must(report["cache"]["budget"] > 0, "the cache has a budget")
        threads = {p["thread"] for p in report["processes"] if p["requests"] > 10}
        must(threads & {thread.native_id, threading.main_thread().native_id}, f"who asked is told: {threads}")
        why = subprocess.run([v.binary, "top", "--batch", "-n", "1", volume.image.parent], capture_output=True, text=True)
        must(why.returncode == 1 and "no braidfs is mounted there" in why.stderr, f"no mount: {why}")
        v.umount()


@check(seconds=30)
def slow_operations_are_logged(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        log = v.image.with_suffix(".log")
        for limit, wanted in ("1", True), ("600000", False), ("0", False):
            log.unlink(missing_ok=True)
            run(v.binary, "--log-file", log, "--log", "debug", "mount", "-o", f"slow={limit}", v.image, v.mnt)
            with open(v.mnt / "f", "wb") as f:
                f.write(os.urandom(8 << 20))
                f.flush()
                os.fsync(f.fileno())
            v.umount()
            text = log.read_text()
            slow = [line for line in text.splitlines() if "slow operation" in line]
            same(bool(slow), wanted, f"slow={limit}: {text}")
            must("commit{domain=" in text and "close time.busy=" in text, f"commits are spans: {text}")
        log.unlink()


@check(seconds=30)
def others_may_not_watch(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mount()
        report = json.loads(run(v.binary, "stats", "--json", "--interval", "1", v.mnt)[1])
        must(report["processes"] and not report["restricted"], f"root sees who asks: {report['processes']}")
        same(report["pid_namespace"], os.stat("/proc/self/ns/pid").st_ino, "the numbers are those of this namespace")
        # the watch of root ends some seconds after its last question
        deadline = time.monotonic() + 20
        while json.loads(run(v.binary, "stats", "--json", v.mnt)[1])["sampled"] == 1:
            must(time.monotonic() < deadline, "nobody watches, and still every request is timed")
            os.listdir(v.mnt)
        other = json.loads(as_nobody(lambda: run(v.binary, "stats", "--json", "--interval", "1", v.mnt)[1]))
        must(other["restricted"] and other["processes"] == [], f"another user sees none: {other['processes']}")
        same(other["sampled"], 16, "another user has nothing timed")
        v.umount()
