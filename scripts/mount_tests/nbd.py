"""A volume on an NBD server, mounted: nbdkit with its filters, and qemu-nbd. Without nbdkit these are skipped, loudly."""

import contextlib
import hashlib
import os
import pathlib
import select
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time

import fslib
from fslib import BraidFs, Failed, Skipped, run, wait_for
from mount_tests.common import check, daemon_only, must, same, write_synced

SIZE = 256 << 20


class Shell:
    """Starts programs in the background. To be made before a file of a volume is open here: a child that is made later closes what it
    has of ours before it becomes the program, which writes back what is dirty of it, and waits for the very server that it
    is to become."""

    def __init__(self):
        self.process = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True)

    def ask(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, argv, said):
        """Its process id. What it says is appended to the file `said`."""
        return self.ask(f"{shlex.join(argv)} < /dev/null >> {shlex.quote(str(said))} 2>&1 & echo $!")

    def wait(self, pid):
        """Its exit code."""
        return self.ask(f"wait {pid}; echo $?")

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class OverNbd(BraidFs):
    """A volume on the export of a server, in the place of an image file."""

    def __init__(self, volume, name, parameters=""):
        super().__init__(volume.image.parent, name, SIZE, volume.binary)
        self.disk, self.server, self.shell = self.image, None, Shell()
        self.socket = self.image.with_suffix(".sock")
        self.said = self.image.with_suffix(".said")
        self.parameters = parameters
        self.image = self.uri()

    def uri(self, parameters=None):
        parameters = self.parameters if parameters is None else parameters
        return f"nbd+unix:///?socket={self.socket}" + (f"&{parameters}" if parameters else "")

    def start(self, *words, plugin=None, threads=1):
        """nbdkit, in the foreground as a child: with filters and their parameters, on the disk's file. It serves one request of
        a connection after the other: before 1.34 it may abort where a client hangs up while several wait for their replies."""
        if not fslib.have("nbdkit"):
            raise Skipped("no nbdkit: scripts/deps.sh installs it")
        self.socket.unlink(missing_ok=True)
        filters = [w for w in words if w.startswith("--")]
        parameters = [w for w in words if not w.startswith("--")]
        plugin = plugin or ["file", str(self.disk)]
        self.serve(["nbdkit", "--foreground", f"--threads={threads}", "--unix", str(self.socket), *filters, *plugin,
                    *parameters])

    def start_qemu(self):
        if not fslib.have("qemu-nbd"):
            raise Skipped("no qemu-nbd (package qemu-utils)")
        self.socket.unlink(missing_ok=True)
        self.serve(["qemu-nbd", "--format=raw", "--persistent", "--shared=8", "--discard=unmap",
                    f"--socket={self.socket}", str(self.disk)])

    def serve(self, argv):
        self.stop()
        fslib.log("$ " + " ".join(argv) + " &")
        self.server = self.shell.start(argv, self.said)
        wait_for("the server's socket", lambda: self.is_listening() or not fslib.is_running(self.server), 10)
        if why := self.ended():
            raise Failed(why)

    def is_listening(self):
        """The socket has its name before it takes connections."""
        accepts = 0x10000
        rows = [line.split(maxsplit=7) for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
        return any(row[7:] == [str(self.socket)] and int(row[3], 16) & accepts for row in rows)

    def ended(self):
        """How the server ended that nobody here stopped, or None."""
        if not self.server or fslib.is_running(self.server):
            return None
        pid, self.server = self.server, None
        said = self.said.read_text(errors="replace")[-500:] if self.said.exists() else ""
        return f"the server ended by itself with {self.shell.wait(pid)}, and said: {said}"

    def stop(self, sig=signal.SIGKILL):
        if why := self.ended():
            fslib.log(why)
        if self.server:
            os.kill(self.server, sig)
            self.shell.wait(self.server)
            self.server = None

    def blank(self):
        with open(self.disk, "wb") as file:
            file.truncate(self.size)

    def mkfs(self, *options):
        run(self.binary, "mkfs", "--quiet", "--domains", "3", *options, self.image)


@contextlib.contextmanager
def over_nbd(volume, name="nbd", parameters="", **how):
    """A volume on nbdkit, made and not mounted; all gone afterwards."""
    daemon_only(volume)
    v = OverNbd(volume, name, parameters)
    v.blank()
    try:
        v.start(*how.get("words", ()))
        v.mkfs()
        yield v
    except Failed as error:
        if why := v.ended():
            raise Failed(f"{error}; {why}") from error
        raise
    finally:
        try:
            v.force_down()
        finally:
            v.stop()
            v.shell.close()
            for path in (v.disk, v.socket, v.said):
                path.unlink(missing_ok=True)


def tree_hash(top):
    """Names and contents below a directory."""
    total = hashlib.sha256()
    for folder, names, files in os.walk(top):
        names.sort()
        for name in sorted(files):
            path = pathlib.Path(folder, name)
            total.update(str(path.relative_to(top)).encode())
            total.update(os.readlink(path).encode() if path.is_symlink() else path.read_bytes())
    return total.hexdigest()


def some_thousand_files(top):
    for n in range(3000):
        folder = top / f"d{n % 60}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{n}").write_bytes(f"{n} ".encode() * (n % 2000))


def clean(v):
    code, text = v.fsck("-f", "-n")
    same(code, 0, f"exit code of fsck ({text.strip()})")


class Synced(threading.Thread):
    """Writes and syncs files one after the other, until it is told to stop or gets an error."""

    def __init__(self, top, number):
        super().__init__()
        self.top, self.number, self.synced, self.stop, self.error = top, number, {}, False, None

    def run(self):
        n = 0
        try:
            while not self.stop:
                n += 1
                path, data = self.top / f"w{self.number}-{n % 97}", f"{self.number} {n} ".encode() * (n % 4000)
                self.synced.pop(path, None)
                write_synced(path, data)
                self.synced[path] = data
        except OSError as error:
            self.error = error


@contextlib.contextmanager
def writers(top, count=3):
    threads = [Synced(top, n) for n in range(count)]
    for t in threads:
        t.start()
    try:
        yield threads
    finally:
        for t in threads:
            t.stop = True
        for t in threads:
            t.join()


def synced(threads):
    return sum(len(t.synced) for t in threads)


def wait_for_synced(threads, least, seconds=0.0):
    """At least so long, and until so many files are synced or a writer has an error: a busy machine may take longer for them."""
    time.sleep(seconds)
    wait_for("synced files", lambda: synced(threads) >= least or any(t.error for t in threads), 30)


def no_errors(threads):
    must(all(t.error is None for t in threads), f"errors: {[t.error for t in threads]}")


def all_there(threads, least=1):
    number = synced(threads)
    must(number >= least, f"{number} synced files are too few to tell")
    for t in threads:
        for path, data in t.synced.items():
            must(path.read_bytes() == data, f"{path}: not what was synced")


def whole_afterwards(v, threads, least=1):
    """Unmounts it, checks it, and mounts it again for a look at what was synced."""
    v.umount()
    clean(v)
    v.mount()
    all_there(threads, least)
    v.umount()


@check(seconds=120)
def nbd_files_are_copied_compared_and_checked(volume, _top):
    with over_nbd(volume) as v:
        source = v.disk.with_suffix(".source")
        try:
            some_thousand_files(source)
            v.mount()
            same(v.mount_entry()[2], "fuse.braidfs", "type of the mount")
            run("cp", "-a", source, v.mnt / "copy")
            same(tree_hash(v.mnt / "copy"), tree_hash(source), "content")
            # the lease is told of, and looked at by who comes from elsewhere
            code, text = run(v.binary, "dump", "super", v.image)
            must("held" in text and "process" in text, f"no owner in {text}")
            run(v.binary, "umount", v.mnt)
            must("given back" in run(v.binary, "dump", "super", v.image)[1], "the lease is not given back")
            clean(v)
            v.mount()
            same(tree_hash(v.mnt / "copy"), tree_hash(source), "content after a remount")
            v.umount()
            same(run(v.binary, "ls", f"{v.image}:/copy")[1].count("d"), 60, "directories by `ls`")
        finally:
            shutil.rmtree(source, ignore_errors=True)


@check
def nbd_by_qemu(volume, _top):
    with over_nbd(volume, parameters="lease=off") as v:
        v.start_qemu()
        v.mkfs("--force")
        v.mount()
        with writers(v.mnt) as threads:
            wait_for_synced(threads, 1, 0.5)
        no_errors(threads)
        v.umount()
        v.start_qemu()
        clean(v)
        v.mount()
        all_there(threads)
        v.umount()


@check(seconds=120)
def nbd_server_killed_and_started_under_load(volume, _top):
    with over_nbd(volume, parameters="lease=5") as v:
        v.mount()
        with writers(v.mnt) as threads:
            for _ in range(3):
                wait_for_synced(threads, 5, 0.4)
                v.stop()
                time.sleep(0.2)
                v.start()
            wait_for_synced(threads, 5)
        no_errors(threads)
        whole_afterwards(v, threads, 5)


@check(seconds=120)
def nbd_server_away_for_too_long(volume, _top):
    with over_nbd(volume, parameters="timeout=1&lease=5") as v:
        v.mount()
        with writers(v.mnt) as threads:
            wait_for_synced(threads, 4, 0.5)
            v.stop()
            wait_for("an error for each writer", lambda: all(t.error for t in threads), 30)
        v.start()
        # it does not come back by itself, and its mount still can be unmounted
        with contextlib.suppress(OSError):
            (v.mnt / "late").write_text("x")
            must(False, "written after the device failed")
        v.force_down()
        v.mount()
        whole_afterwards(v, threads)


@check(seconds=120)
def nbd_errors_injected(volume, _top):
    with over_nbd(volume, parameters="lease=off") as v:
        trigger = v.disk.with_suffix(".errors")
        v.start("--filter=error", "error-pwrite-rate=20%", f"error-file={trigger}", "error=EIO")
        v.mount()
        try:
            with writers(v.mnt) as threads:
                wait_for_synced(threads, 4, 0.5)
                trigger.touch()
                wait_for("an error for each writer", lambda: all(t.error for t in threads), 30)
        finally:
            trigger.unlink(missing_ok=True)
        v.force_down()
        code, text = v.fsck("-f", "-y")
        must(code in (0, 1) and "E125" not in text, f"fsck: exit code {code}: {text}")
        v.mount()
        whole_afterwards(v, threads)


@check(seconds=120)
def nbd_slow_servers(volume, _top):
    with over_nbd(volume, parameters="lease=off") as v:
        v.start("--filter=delay", "--filter=rate", "rdelay=5ms", "wdelay=15ms", "rate=200M", threads=16)
        v.mount()
        with writers(v.mnt, 2) as threads:
            wait_for_synced(threads, 1, 1)
        no_errors(threads)
        whole_afterwards(v, threads)


@check(seconds=120)
def nbd_daemon_killed(volume, _top):
    with over_nbd(volume, parameters="timeout=1&lease=60") as v:
        v.mount()
        with writers(v.mnt) as threads:
            wait_for_synced(threads, 4, 0.5)
            no_errors(threads)
            v.kill9()
        start = time.monotonic()
        # fsck has the lease, and opens the volume within it, to replay its journals
        code, text = v.fsck("-f", "-y")
        took = time.monotonic() - start
        must(1 <= took < 30, f"fsck after {took:.1f} s: what was in flight is waited for, not the lease of the dead")
        must(code in (0, 1) and "E12" not in text, f"fsck: exit code {code}: {text}")
        v.mount()
        all_there(threads)
        with writers(v.mnt) as threads:
            wait_for_synced(threads, 4, 0.3)
            no_errors(threads)
            v.kill9()
        v.mount()
        whole_afterwards(v, threads)


@check(seconds=120)
def nbd_two_mounts_at_once(volume, _top):
    with over_nbd(volume) as v:
        v.mount()
        other = v.mnt.with_name("nbd-other")
        other.mkdir(exist_ok=True)
        try:
            # under another name of the same export, so that nothing but the lease tells
            alias = v.socket.with_suffix(".alias")
            alias.symlink_to(v.socket)
            uri = v.uri().replace(str(v.socket), str(alias))
            code, text = run(v.binary, "mount", uri, other, ok=None)
            must(code == 32 and "is in use by process" in text, f"second mount: exit code {code}: {text}")
            for command in (("mkfs", "--force"), ("fsck", "-f", "-y"), ("fsck", "-n"), ("ls",), ("scrub",)):
                code, text = run(v.binary, *command, uri, ok=None)
                must(code and "in use" in text, f"{command}: exit code {code}: {text}")
            dump = v.socket.with_suffix(".dump")
            code, text = run(v.binary, "image", "export", uri, dump, ok=None)
            must(code and "in use" in text and not dump.exists(), f"image export: exit code {code}: {text}")
            run(v.binary, "info", uri)
            write_synced(v.mnt / "f", b"still here")
        finally:
            alias.unlink(missing_ok=True)
            other.rmdir()
        v.umount()
        clean(v)


@check(seconds=120)
def nbd_umount_waits_for_its_own_mount(volume, _top):
    """Several have an export open: who unmounts waits for the process of that mount, and for no other one."""
    with over_nbd(volume) as v:
        other = v.mnt.with_name("nbd-other")
        other.mkdir(exist_ok=True)
        try:
            for second in (v.mnt, other):
                run(v.binary, "mount", "-o", "ro", v.image, v.mnt)
                run(v.binary, "mount", "-o", "ro", v.image, other)
                for point in (second, other if second == v.mnt else v.mnt):
                    run(v.binary, "umount", "--timeout", "5", point)
            # here who only reads came first, and stays
            run(v.binary, "mount", "-o", "ro", v.image, other)
            v.start("--filter=delay", "wdelay=30ms")
            v.mount()
            for n in range(200):
                (v.mnt / f"f{n}").write_bytes(b"late" * 5000)
            run(v.binary, "umount", v.mnt)
            must("given back" in run(v.binary, "dump", "super", v.image)[1], "umount did not wait")
        finally:
            run("umount", other, ok=None)
            other.rmdir()
        wait_for("end of the reader", lambda: not v.daemons(), 20)
        clean(v)


class Proxy(threading.Thread):
    """TCP in front of the server's socket; cuts all connections when it is told to."""

    def __init__(self, target):
        super().__init__(daemon=True)
        self.target, self.pairs, self.done = target, [], False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self):
        while not self.done:
            ready, _, _ = select.select([self.listener, *[s for p in self.pairs for s in p]], [], [], 0.05)
            for s in ready:
                if s is self.listener:
                    client, _ = s.accept()
                    server = socket.socket(socket.AF_UNIX)
                    server.connect(str(self.target))
                    self.pairs.append((client, server))
                    continue
                pair = next((p for p in self.pairs if s in p), None)
                if pair is None:
                    continue
                try:
                    data = s.recv(1 << 16)
                    if not data:
                        raise OSError
                    pair[1 - pair.index(s)].sendall(data)
                except OSError:
                    self.drop(pair)
        self.cut()
        self.listener.close()

    def drop(self, pair):
        if pair in self.pairs:
            self.pairs.remove(pair)
        for s in pair:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def cut(self):
        for pair in list(self.pairs):
            for s in pair:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)


@check(seconds=120)
def nbd_connections_cut_under_load(volume, _top):
    with over_nbd(volume) as v:
        proxy = Proxy(v.socket)
        proxy.start()
        try:
            v.image = f"nbd://127.0.0.1:{proxy.port}/?lease=off"
            v.mount()
            with writers(v.mnt) as threads:
                for _ in range(8):
                    wait_for_synced(threads, 5, 0.2)
                    proxy.cut()
                wait_for_synced(threads, 5)
            no_errors(threads)
            whole_afterwards(v, threads, 5)
        finally:
            v.force_down()
            proxy.done = True
            proxy.join()
