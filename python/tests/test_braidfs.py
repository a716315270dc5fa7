"""The package without any other: `python3 -m unittest discover -s python/tests -p 'test_braidfs.py'`."""

import array
import errno
import gc
import io
import os
import pathlib
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import braidfs
from braidfs._file import flags_of


class Documented(unittest.TestCase):
    def test_the_block_of_the_page_does_what_it_says(self):
        page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "embedding.md"
        block = re.search(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)[1]
        with tempfile.TemporaryDirectory() as place:
            # the package of this test, from wherever it was imported
            env = {**os.environ, "PYTHONPATH": str(pathlib.Path(braidfs.__file__).resolve().parents[1])}
            ran = subprocess.run([sys.executable, "-c", block], cwd=place, env=env, capture_output=True, text=True)
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "['1']\n", ""))


class OnAnImage(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)
        self.image = os.path.join(self.dir, "vol.img")
        braidfs.format(self.image, 64 << 20, "label=py")

    def test_what_is_written_is_there_after_a_close(self):
        with braidfs.Volume(self.image) as v:
            with self.assertRaises(OSError) as e:
                braidfs.Volume(self.image)
            self.assertEqual(e.exception.errno, errno.EBUSY)
            with v.open("text", "w", encoding="utf-8") as f:
                f.write("grüße\nund mehr\n")
            left = v.open("left-open", "wb")
            left.write(b"in a buffer")
        self.assertTrue(left.closed and v.closed)
        with self.assertRaises(ValueError):
            v.listdir()
        with braidfs.Volume([self.image], "ro") as v:
            with v.open("text", encoding="utf-8") as f:
                self.assertEqual(f.readlines(), ["grüße\n", "und mehr\n"])
            self.assertEqual(v.read_bytes("left-open"), b"in a buffer")
            with self.assertRaises(OSError) as e:
                v.mkdir("d")
            self.assertEqual(e.exception.errno, errno.EROFS)

    def test_the_volume_of_a_program_that_ends_is_closed(self):
        code = (
            "import braidfs, sys\n"
            "v = braidfs.Volume(sys.argv[1], 'commit=3600')\n"
            "f = v.open('f', 'w'); f.write('kept')\n"
        )
        subprocess.run([sys.executable, "-c", code, self.image], check=True)
        with braidfs.Volume(self.image) as v:
            self.assertEqual(v.read_bytes("f"), b"kept")

    def test_a_volume_that_becomes_garbage_before_its_file_is_closed_after_it(self):
        v = braidfs.Volume(self.image, "commit=3600")
        f = v.open("f", "wb")
        f.write(b"in a buffer")
        v.ring = [f]
        del v, f
        gc.collect()
        with braidfs.Volume(self.image) as v:
            self.assertEqual(v.read_bytes("f"), b"in a buffer")

    def test_a_signals_handler_may_close_what_it_interrupts(self):
        code = (
            "import braidfs, signal, sys\n"
            "from braidfs._file import lib\n"
            "v = braidfs.Volume(sys.argv[1], 'commit=3600')\n"
            "f = v.open('f', 'wb', 0)\n"
            "write = lib.write\n"
            "def interrupted(*a):\n"
            "    n = write(*a)\n"
            "    signal.raise_signal(signal.SIGUSR1)\n"
            "    assert f.closed\n"
            "    return n\n"
            "lib.write = interrupted\n"
            "signal.signal(signal.SIGUSR1, lambda *_: f.close())\n"
            "assert f.write(b'kept') == 4\n"
            "v.close()\n"
        )
        # it waited for itself once
        subprocess.run([sys.executable, "-c", code, self.image], check=True, timeout=60)
        with braidfs.Volume(self.image) as v:
            self.assertEqual(v.read_bytes("f"), b"kept")

    def test_interrupts_anywhere_leave_a_volume_that_can_be_closed(self):
        code = (
            "import braidfs, random, signal, sys\n"
            "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
            "v = braidfs.Volume(sys.argv[1], 'commit=3600')\n"
            "random.seed(7)\n"
            "sys.unraisablehook = lambda _: None\n"
            "for n in range(500):\n"
            "    try:\n"
            "        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))\n"
            # not for ever: an interrupt in a finalizer is not seen
            "        for _ in range(20):\n"
            "            with v.open('f', 'wb', 0) as f:\n"
            "                f.write(b'x')\n"
            "            v.listdir()\n"
            "            v.fsync('/')\n"
            "    except KeyboardInterrupt:\n"
            "        pass\n"
            "signal.setitimer(signal.ITIMER_REAL, 0)\n"
            "v.write_bytes('g', b'kept')\n"
            "v.close()\n"
        )
        subprocess.run([sys.executable, "-c", code, self.image], check=True, timeout=30)
        with braidfs.Volume(self.image) as v:
            self.assertEqual(v.read_bytes("g"), b"kept")

    def test_what_was_synced_survives_a_kill(self):
        code = (
            "import braidfs, os, sys\n"
            "v = braidfs.Volume(sys.argv[1], 'commit=3600')\n"
            "f = v.open('synced', 'w'); f.write('kept'); braidfs.fsync(f)\n"
            "v.write_bytes('late', b'lost')\n"
            "os.kill(os.getpid(), 9)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, self.image])
        self.assertEqual(done.returncode, -signal.SIGKILL)
        with braidfs.Volume(self.image) as v:
            self.assertEqual(v.listdir(), ["synced"])
            self.assertEqual(v.read_bytes("synced"), b"kept")

    def test_a_child_leaves_the_volume_alone(self):
        with braidfs.Volume(self.image) as v:
            f = v.open("f", "wb", 0)
            child = os.fork()
            if child == 0:
                refused = 0
                for call in (lambda: f.write(b"child"), lambda: v.mkdir("child"), lambda: v.sync()):
                    try:
                        call()
                    except OSError as e:
                        refused += e.errno == errno.EBADF
                v.close()
                os._exit(refused != 3)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            f.write(b"parent")
            f.close()
        with braidfs.Volume(self.image) as v:
            self.assertEqual(v.listdir(), ["f"])
            self.assertEqual(v.read_bytes("f"), b"parent")


class InMemory(unittest.TestCase):
    def setUp(self):
        self.v = braidfs.Volume.in_memory()
        self.addCleanup(self.v.close)

    def test_modes_are_those_of_open(self):
        """The same calls on files of the system answer the same."""

        def answers(open, directory):
            path = directory + "/f"
            for mode in "rb r+b xb wb w+b ab a+b rb xb r+b w+b wb+ r w a x rt br+ rw U q rbt bt".split():
                try:
                    with open(path, mode, **({} if "b" in mode else {"encoding": "ascii"})) as f:
                        said = [mode, f.tell(), f.readable(), f.writable(), f.seekable()]
                        if f.writable():
                            f.write(b"data" if "b" in mode else "data")
                            said.append(f.tell())
                        if f.readable():
                            f.seek(1)
                            said.append(f.read())
                        yield said
                except (OSError, ValueError) as e:
                    yield [mode, type(e)]

        self.v.mkdir("d")
        with tempfile.TemporaryDirectory() as d:
            self.assertEqual(list(answers(self.v.open, "d")), list(answers(open, d)))

    def test_raw_files(self):
        with self.v.open("f", "w+b", 0) as f:
            self.assertIsInstance(f, braidfs.RawFile)
            self.assertEqual(f.write(bytearray(b"hello")), 5)
            self.assertEqual(f.write(memoryview(b"..world")[2:]), 5)
            self.assertEqual(f.write(b""), 0)
            self.assertEqual(f.pread(5, 5), b"world")
            self.assertEqual(f.pwrite(b"W", 5), 1)
            self.assertEqual(f.seek(-5, io.SEEK_END), 5)
            self.assertEqual(f.readall(), b"World")
            self.assertEqual(f.truncate(3), 3)
            self.assertEqual(f.stat().st_size, 3)
            f.seek(0)
            buffer = bytearray(9)
            self.assertEqual(f.readinto(memoryview(buffer)[2:]), 3)
            self.assertEqual(buffer[:6], b"\0\0hel\0")
            self.assertRaises(TypeError, f.readinto, b"read-only")
            f.seek(100)
            self.assertEqual(f.readall(), b"")
            self.assertRaises(io.UnsupportedOperation, f.fileno)
            f.fsync()
            f.fsync(data_only=True)
        self.assertRaises(ValueError, f.read)
        self.assertRaises(ValueError, f.write, b"x")
        with self.v.open("f", "rb", 0) as f:
            self.assertRaises(io.UnsupportedOperation, f.write, b"x")
        self.assertRaises(TypeError, braidfs.fsync, io.BytesIO())

    def test_what_is_detached_is_closed_by_itself(self):
        for mode in "rb", "r+b", "wb":
            self.v.write_bytes("f", b"text")
            raw = self.v.open("f", mode).detach()
            self.assertFalse(raw.closed)
            handle = raw._handle
            del raw
            gc.collect()
            self.assertTrue(handle.closed)
        volume = braidfs.Volume.in_memory()
        text = volume.open("t", "w")
        text.write("text")
        buffer = text.detach()
        buffer.write(b" and more")
        with io.BufferedReader(volume.open("f", "w+b").detach()) as again:
            volume.close()
            self.assertTrue(buffer.closed and again.closed)

    def test_a_whole_file_is_read_in_few_pieces(self):
        data = random.Random(1).randbytes(3_000_000)
        self.v.write_bytes("f", data)
        calls = []

        class Counting:
            def __getattr__(self, name):
                calls.append(name)
                return getattr(braidfs._lib.lib, name)

        with mock.patch("braidfs._file.lib", Counting()):
            self.assertEqual(self.v.read_bytes("f"), data)
            with self.v.open("f", "rb") as f:
                f.seek(1_000_001)
                self.assertEqual(f.read(), data[1_000_001:])
        self.assertLessEqual(calls.count("read"), 4)
        with self.v.open("f", "rb", 0) as f, self.v.open("f", "ab", 0) as more:
            size = f.stat

            def grows():
                stat = size()
                more.write(data[:1_000_000])
                return stat

            with mock.patch.object(f, "stat", grows):
                self.assertEqual(f.readall(), data + data[:1_000_000])
        with self.v.open("f", "ab", 0) as f:
            self.assertRaises(io.UnsupportedOperation, f.readall)

    def test_errors_are_those_of_os(self):
        v = self.v
        v.makedirs("a/b/c", exist_ok=True)
        v.write_bytes("a/f", b"1")
        cases = [
            (FileNotFoundError, lambda: v.open("no")),
            (FileNotFoundError, lambda: v.stat("")),
            (FileExistsError, lambda: v.mkdir("a")),
            (FileExistsError, lambda: v.makedirs("a/b/c")),
            (FileExistsError, lambda: v.makedirs("a/f", exist_ok=True)),
            (NotADirectoryError, lambda: v.listdir("a/f")),
            (NotADirectoryError, lambda: v.stat("a/f/g")),
            (IsADirectoryError, lambda: v.open("a")),
            (IsADirectoryError, lambda: v.open("a", "w")),
            (IsADirectoryError, lambda: v.remove("a")),
            (FileExistsError, lambda: v.rename_noreplace("a/f", "a/b")),
            (ValueError, lambda: v.open("a\0b")),
            (ValueError, lambda: v.open("a", "rw")),
        ]
        for i, (wanted, call) in enumerate(cases):
            with self.subTest(i):
                self.assertRaises(wanted, call)
        with self.assertRaises(OSError) as e:
            v.rmdir("a")
        self.assertEqual((e.exception.errno, e.exception.filename), (errno.ENOTEMPTY, "a"))
        with self.assertRaises(OSError) as e:
            v.rename("no", "else")
        self.assertEqual((e.exception.filename, e.exception.filename2), ("no", "else"))
        with self.assertRaises(OSError) as e:
            braidfs.Volume.in_memory(64 << 20, "no-such-option")
        self.assertIn("no-such-option", str(e.exception))

    def test_times_are_those_that_the_same_call_sets_on_the_host(self):
        numbers = random.Random(1)
        seconds = [numbers.choice((1e9, 2e9, 2.5, -1.0)) * numbers.random() for _ in range(200)]
        self.v.write_bytes("f", b"")
        with tempfile.NamedTemporaryFile() as host:
            for t in [*seconds, 1_700_000_000.123457, 0.1, -0.3, -1e-10, 1e9 - 1e-7, 1_600_000_000, True]:
                os.utime(host.name, times=(t, 5.7))
                self.v.utime("f", times=(t, 5.7))
                there, here = os.stat(host.name), self.v.stat("f")
                self.assertEqual((here.st_atime_ns, here.st_mtime_ns), (there.st_atime_ns, there.st_mtime_ns), t)

    def test_names_and_attributes(self):
        v = self.v
        v.makedirs("a/b")
        v.write_bytes("a/f", b"12345")
        v.symlink("f", "a/link")
        v.symlink("b", "a/dirlink")
        v.link("a/f", "a/b/hard")
        self.assertEqual(v.readlink("a/link"), "f")
        with v.scandir("a") as entries:
            found = {e.name: (e.is_dir(), e.is_file(), e.is_symlink(), e.path) for e in entries}
        self.assertEqual(
            found,
            {
                "b": (True, False, False, "a/b"),
                "f": (False, True, False, "a/f"),
                "link": (False, True, True, "a/link"),
                "dirlink": (True, False, True, "a/dirlink"),
            },
        )
        walked = [(p, sorted(d), sorted(f)) for p, d, f in v.walk("a")]
        self.assertEqual(walked, [("a", ["b", "dirlink"], ["f", "link"]), ("a/b", [], ["hard"])])
        st = v.stat("a/link")
        self.assertEqual((st.st_size, st.st_nlink, st.st_uid), (5, 2, os.geteuid()))
        v.utime("a/f", ns=(-1, 1_500_000_000_123_456_789))
        v.chmod("a/f", 0o600)
        v.chown("a/f", 5, -1)
        st = v.stat("a/f")
        times = st.st_atime_ns, st.st_mtime_ns
        self.assertEqual(times, (-1, 1_500_000_000_123_456_789))
        self.assertEqual((st.st_mode & 0o7777, st.st_uid, st.st_gid), (0o600, 5, os.getegid()))
        v.utime("a/f", ns=(None, 7))
        self.assertEqual((v.stat("a/f").st_atime_ns, v.stat("a/f").st_mtime_ns), (-1, 7))
        v.setxattr("a/f", "user.k", b"v\0w")
        self.assertEqual((v.getxattr("a/f", "user.k"), v.listxattr("a/f")), (b"v\0w", ["user.k"]))
        v.removexattr("a/f", "user.k")
        self.assertEqual(v.listxattr("a/f"), [])
        v.exchange("a/f", "a/b")
        self.assertTrue(v.isdir("a/f") and v.isfile("a/b") and v.islink("a/link") and not v.exists("no"))
        v.rename_whiteout("a/link", "link")
        whiteout = v.lstat("a/link")
        self.assertEqual((stat.S_ISCHR(whiteout.st_mode), whiteout.st_mode & 0o7777), (True, 0))
        v.replace("link", "a/link")
        v.truncate("a/b", 2)
        self.assertEqual(v.read_bytes("a/b"), b"12")
        odd = os.fsdecode(b"\xff\xfe")
        v.mkdir(odd)
        self.assertIn(odd, v.listdir())
        v.rmtree("a")
        self.assertEqual(v.listdir(), [odd])
        s = v.statvfs()
        self.assertTrue(0 < s.f_bavail <= s.f_bfree <= s.f_blocks)
        v.sync()
        v.fsync("/")

    def test_numbers_that_do_not_fit_are_refused(self):
        v = self.v
        v.write_bytes("n", b"abc")
        before = v.stat("n")
        with v.open("n", "r+b", 0) as f:
            for call in (
                lambda: f.truncate(1 << 64),
                lambda: f.pwrite(b"x", 1 << 64),
                lambda: f.pread(1, 1 << 63),
                lambda: f.seek(1 << 64),
                lambda: v.truncate("n", 1 << 64),
                lambda: v.truncate("n", -(1 << 63) - 1),
                lambda: v.chown("n", 1 << 32, -1),
                lambda: v.chown("n", -1, -2),
                lambda: v.chmod("n", 1 << 32),
                lambda: v.utime("n", ns=(1 << 100, 0)),
            ):
                self.assertRaises(OverflowError, call)
            self.assertRaises(TypeError, f.truncate, 1.0)
        after = v.stat("n")
        self.assertEqual(v.read_bytes("n"), b"abc")
        self.assertEqual((after.st_uid, after.st_mode, after.st_mtime_ns), (before.st_uid, before.st_mode, before.st_mtime_ns))

    def test_values_of_attributes_are_bytes_of_any_buffer(self):
        self.v.write_bytes("f", b"")
        self.v.setxattr("f", "user.n", array.array("I", [1, 2]))
        self.assertEqual(self.v.getxattr("f", "user.n"), array.array("I", [1, 2]).tobytes())

    def test_an_interrupt_after_a_call_loses_no_pointer(self):
        for name, call in (
            ("file_open", lambda: self.v.open("f", "wb")),
            ("opendir", lambda: self.v.scandir("/")),
            ("file_open", lambda: self.v.fsync("/")),
        ):
            real = getattr(braidfs._volume.lib, name)

            def interrupted(*arguments, real=real):
                real(*arguments)
                raise KeyboardInterrupt

            with mock.patch.object(braidfs._volume.lib, name, interrupted):
                self.assertRaises(KeyboardInterrupt, call)
        # EBUSY once
        self.v.close()

    def test_threads_share_a_file_and_a_close_waits_for_them(self):
        f = self.v.open("f", "w+b", 0)
        stop, wrong = threading.Event(), []

        def work(n):
            buffer = bytearray([n]) * 65536
            try:
                while not stop.is_set():
                    f.pwrite(buffer, n * 65536)
                    if f.pread(65536, n * 65536) != buffer:
                        wrong.append(n)
            except ValueError:
                pass  # closed

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        while self.v.stat("f").st_size < 4 * 65536:
            pass
        f.close()
        stop.set()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_calls_release_the_gil(self):
        """Another thread counts while this one is in one long call."""
        count, stop = [0], threading.Event()

        def work():
            while not stop.is_set():
                count[0] += 1
                time.sleep(0)  # gives the GIL back

        data = bytes(24 << 20)
        with self.v.open("f", "wb", 0) as f:
            t = threading.Thread(target=work)
            t.start()
            try:
                switch = sys.getswitchinterval()
                sys.setswitchinterval(1000)  # nobody is made to give it up
                before = count[0]
                for _ in range(3):
                    f.pwrite(data, 0)
                after = count[0]
            finally:
                sys.setswitchinterval(switch)
                stop.set()
                t.join()
        self.assertGreater(after, before)

    def test_flags(self):
        self.assertEqual(flags_of("rb"), 0)
        for bad in ("", "b", "rr", "r+w", "rbt", "+"):
            self.assertRaises(ValueError, flags_of, bad)


if __name__ == "__main__":
    unittest.main()
