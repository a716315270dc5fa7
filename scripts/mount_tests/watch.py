"""What a mount tells of itself: `braidfs top` as text, and what `braidfs stats --json` says of latencies, domains, cache, processes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import threading
import time

from fslib import Failed, run
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


@check(seconds=60)
def watching(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mount()
        end = threading.Event()
        thread = threading.Thread(target=load, args=(v.mnt, end))
        thread.start()
        try:
            # on a busy machine little happens in a second
            for interval in 1, 2, 4, 8:
                # to a pipe it writes text by itself
                text = run(v.binary, "top", "-d", str(interval / 2), "-n", "2", v.mnt)[1]
                report = json.loads(run(v.binary, "stats", "--json", "--interval", str(interval), v.mnt)[1])
                busy = max((d["latency"] or {"count": 0} for d in report["domains"]), key=lambda latency: latency["count"])
                if "FSYNC" in text.rpartition("braidfs top: ")[2] and busy["count"] > 10:
                    break
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
        must(busy["count"] > 10 and 0 < busy["p50_ns"] <= busy["p999_ns"], f"latencies of a domain: {busy}")
        process = max(report["processes"], key=lambda p: p["requests"])
        must(process["latency"]["count"] > 10, f"latencies of who asks most, fsyncs among them: {process}")
        must(report["cache"]["budget"] > 0, "the cache has a budget")
        threads = {p["thread"] for p in report["processes"] if p["requests"] > 10}
        must(threads & {thread.native_id, threading.main_thread().native_id}, f"who asked is told: {threads}")
        why = subprocess.run([v.binary, "top", "--batch", "-n", "1", volume.image.parent], capture_output=True, text=True)
        must(why.returncode == 1 and "no braidfs is mounted there" in why.stderr, f"no mount: {why}")
        v.umount()


def read_until(terminal, word, seconds=10):
    """What a program writes to its terminal, until it has written a word."""
    text, end = b"", time.monotonic() + seconds
    while word not in text:
        must(select.select([terminal], [], [], max(end - time.monotonic(), 0))[0], f"no {word} in {text}")
        text += os.read(terminal, 65536)


@check(seconds=60)
def top_gives_its_terminal_back(volume, _top):
    """Ended by a signal, and while it is stopped by Ctrl-Z; it goes on then."""
    daemon_only(volume)
    with small_volume(volume) as v:
        v.mount()
        for number in signal.SIGTERM, signal.SIGHUP, None:
            terminal, side = pty.openpty()
            fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
            before = termios.tcgetattr(side)
            # in a group of its own, as a shell does
            top = subprocess.Popen([v.binary, "top", v.mnt], stdin=side, stdout=side, stderr=side, preexec_fn=os.setpgrp)
            try:
                read_until(terminal, b"operations")
                must(termios.tcgetattr(side) != before, "a screen is drawn on a raw terminal")
                if number is None:
                    os.write(terminal, b"\x1a")
                    must(os.WIFSTOPPED(os.waitpid(top.pid, os.WUNTRACED)[1]), "Ctrl-Z stops it")
                    same(termios.tcgetattr(side), before, "the terminal of what was stopped")
                    os.kill(top.pid, signal.SIGCONT)
                    read_until(terminal, b"operations")
                    os.write(terminal, b"q")
                    same(top.wait(10), 0, "exit code of q")
                else:
                    os.kill(top.pid, number)
                    same(top.wait(10), 128 + number, "exit code of what a signal ended")
                same(termios.tcgetattr(side), before, "the terminal afterwards")
            finally:
                top.kill()
                top.wait()
                os.close(terminal)
                os.close(side)
        v.umount()


def write_slowly(v):
    """A file with an fsync, which takes longer than a millisecond."""
    with open(v.mnt / "f", "wb") as f:
        f.write(os.urandom(8 << 20))
        f.flush()
        os.fsync(f.fileno())


@check(seconds=30)
def slow_operations_are_logged(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        log = v.image.with_suffix(".log")
        for limit, wanted in ("1", True), ("600000", False), ("0", False):
            log.unlink(missing_ok=True)
            run(v.binary, "--log-file", log, "--log", "debug", "mount", "-o", f"slow={limit}", v.image, v.mnt)
            write_slowly(v)
            v.umount()
            text = log.read_text()
            slow = [line for line in text.splitlines() if "slow operation" in line]
            same(bool(slow), wanted, f"slow={limit}: {text}")
            must("commit{domain=" in text and "close time.busy=" in text, f"commits are spans: {text}")
        log.unlink()


@check(seconds=30)
def warnings_of_a_mount_in_the_background_go_to_the_systems_log(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v, tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as system:
        system.bind(f"{place}/log")
        system.settimeout(10)
        env = {**os.environ, "BRAIDFS_SYSLOG": f"{place}/log"}
        run(v.binary, "mount", "-o", "slow=1", v.image, v.mnt, env=env)
        pid = v.daemon()
        write_slowly(v)
        said = system.recv(4096).decode()
        must(said.startswith(f"<28>braidfs[{pid}]: WARN slow operation") and "\n" not in said, f"a line of the system's log: {said!r}")
        v.umount()
        # all into the file that an option names, and nothing there
        system.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while system.recv(4096):
                pass
        log = v.image.with_suffix(".log")
        run(v.binary, "mount", "-o", f"slow=1,log={log}", v.image, v.mnt, env=env)
        write_slowly(v)
        v.umount()
        text = log.read_text()
        must("slow operation" in text and " INFO " in text, f"the file: {text!r}")
        with contextlib.suppress(BlockingIOError):
            raise Failed(f"the system's log, too: {system.recv(4096)!r}")
        log.unlink()
        # a system without a log
        run(v.binary, "mount", "-o", "slow=1", v.image, v.mnt, env={**env, "BRAIDFS_SYSLOG": f"{place}/none"})
        write_slowly(v)


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


SAMPLE = re.compile(r'([a-z_]+)((?:\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})?) (\S+)')
ENDINGS = {"counter": ["_total"], "gauge": [""], "info": ["_info"], "histogram": ["_bucket", "_count", "_sum"]}


def fetch(path):
    """The answer's head and body."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head, body


def parsed(body):
    """{name with labels: value} and {family: type}, of a text that is as OpenMetrics has it."""
    must(body.endswith("\n# EOF\n") and body.count("# EOF") == 1, f"its end: {body[-200:]!r}")
    values, families, helped, family = {}, {}, set(), None
    for line in body.removesuffix("# EOF\n").splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            if what == "TYPE":
                must(name not in families and rest in ENDINGS, line)
                family, families[name] = name, rest
            else:
                must(name == family and what in ("HELP", "UNIT") and rest, line)
                helped |= {name} if what == "HELP" else set()
            continue
        found = SAMPLE.fullmatch(line)
        must(found, f"a line that is no sample: {line!r}")
        must(family and found[1].removeprefix(family) in ENDINGS[families[family]], f"of another family than {family}: {line}")
        must(found[1] + found[2] not in values, f"told twice: {line}")
        values[found[1] + found[2]] = float(found[3])
    same(set(families), helped, "families with HELP")
    return values, families


@check(seconds=30)
def metrics_tell_what_was_done(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        path = v.image.with_suffix(".metrics")
        v.mount(f"metrics=unix:{path}")
        head, body = fetch(path)
        must(head.startswith("HTTP/1.1 200") and "application/openmetrics-text" in head, head)
        before, families = parsed(body)
        for family, kind in ("braidfs_requests", "counter"), ("braidfs_domain_request_duration_seconds", "histogram"):
            same(families.get(family), kind, f"type of {family}")
        must(not any("tenant=" in name for name in before), "there is no tenant yet")
        uuid = dict(line.split("=", 1) for line in run(v.binary, "probe", v.image)[1].splitlines())["UUID"]
        must(any(n.startswith("braidfs_volume_info{") and f'uuid="{uuid}"' in n for n in before), f"UUID as blkid has it, {uuid}: {body[:400]}")
        run(v.binary, "tenant", "create", "--space", "16M", v.mnt / "web")
        for n in range(100):
            with open(v.mnt / "web" / f"f{n}", "wb") as f:
                f.write(b"x" * 8192)
                os.fsync(f.fileno())
        after, _ = parsed(fetch(path)[1])
        rise = lambda name: after[name] - before.get(name, 0)
        same(rise('braidfs_requests_total{operation="FSYNC"}'), 100, "FSYNCs")
        must(rise('braidfs_data_bytes_total{operation="WRITE"}') == 100 * 8192, "bytes of data of WRITE")
        commits = [name for name in after if name.startswith(("braidfs_commits_total{", "braidfs_fast_syncs_total{"))]
        must(sum(map(rise, commits)) >= 10, f"commits, and fsyncs that needed none: {[(c, after[c]) for c in commits]}")
        counters = [n for n in before if n.split("{")[0].endswith(("_total", "_bucket", "_count"))]
        must(counters and all(after[n] >= before[n] for n in counters), "no counter falls")
        must(after['braidfs_tenant_used_bytes{tenant="web"}'] >= 100 * 8192, "what the tenant uses")
        same(after['braidfs_tenant_limit_bytes{tenant="web"}'], 16 << 20, "what it may use")
        times = 'braidfs_tenant_request_duration_seconds_count{tenant="web"}'
        # one in 16 is timed, of several hundred
        must(after.get(times, 0) >= 5, f"times of its requests: {after.get(times)}")
        ends = [after[n] for n in after if n.startswith('braidfs_tenant_request_duration_seconds_bucket{tenant="web"')]
        must(ends == sorted(ends) and ends[-1] == after[times], f"buckets hold those before them: {ends}")
        v.umount()
