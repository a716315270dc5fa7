"""The C library: where it is, what its functions take, what they answer.

Calls through :mod:`ctypes` release the GIL.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import operator
import os
import pathlib
import sys
import threading
from ctypes import c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, Optional

O_RDONLY, O_WRONLY, O_RDWR = 0, 1, 2
O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_NOFOLLOW = 0x40, 0x80, 0x200, 0x400, 0x20000
NOFOLLOW = 1
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
TIME_NOW, TIME_OMIT = 0x3FFFFFFF, 0x3FFFFFFE


class TimeT(ctypes.Structure):
    """struct braidfs_time"""

    _fields_ = [("sec", c_int64), ("nsec", c_uint32), ("reserved", c_uint32)]


class StatT(ctypes.Structure):
    """struct braidfs_stat"""

    _fields_ = [
        ("ino", c_uint64),
        ("size", c_uint64),
        ("blocks", c_uint64),
        ("rdev", c_uint64),
        ("mode", c_uint32),
        ("nlink", c_uint32),
        ("uid", c_uint32),
        ("gid", c_uint32),
        ("atime", TimeT),
        ("mtime", TimeT),
        ("ctime", TimeT),
        ("btime", TimeT),
        ("reserved", c_uint64 * 4),
    ]


class StatVfsT(ctypes.Structure):
    """struct braidfs_statvfs"""

    _fields_ = [
        ("block_size", c_uint64),
        ("blocks", c_uint64),
        ("free", c_uint64),
        ("available", c_uint64),
        ("inodes", c_uint64),
        ("inodes_free", c_uint64),
        ("reserved", c_uint64 * 4),
    ]


class DirentT(ctypes.Structure):
    """struct braidfs_dirent"""

    _fields_ = [("ino", c_uint64), ("type", c_uint32), ("name_length", c_uint32), ("name", c_char * 256)]


_P = ctypes.POINTER
# name: what it answers, what it takes
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "error": (c_char_p,),
    "version": (c_char_p,),
    "format": (c_int, c_char_p, c_uint64, c_char_p),
    "open": (c_int, _P(c_char_p), c_size_t, c_char_p, _P(c_void_p)),
    "open_memory": (c_int, c_uint64, c_char_p, _P(c_void_p)),
    "close": (c_int, c_void_p),
    "sync": (c_int, c_void_p),
    "statvfs": (c_int, c_void_p, _P(StatVfsT)),
    "mkdir": (c_int, c_void_p, c_char_p, c_uint32),
    "mkdir_all": (c_int, c_void_p, c_char_p),
    "rmdir": (c_int, c_void_p, c_char_p),
    "unlink": (c_int, c_void_p, c_char_p),
    "remove_all": (c_int, c_void_p, c_char_p),
    "rename": (c_int, c_void_p, c_char_p, c_char_p, c_uint32),
    "link": (c_int, c_void_p, c_char_p, c_char_p),
    "symlink": (c_int, c_void_p, c_char_p, c_char_p),
    "readlink": (c_int64, c_void_p, c_char_p, c_void_p, c_size_t),
    "stat": (c_int, c_void_p, c_char_p, c_uint32, _P(StatT)),
    "chmod": (c_int, c_void_p, c_char_p, c_uint32),
    "chown": (c_int, c_void_p, c_char_p, c_uint32, c_uint32, c_uint32),
    "utimens": (c_int, c_void_p, c_char_p, _P(TimeT), _P(TimeT), c_uint32),
    "truncate": (c_int, c_void_p, c_char_p, c_int64),
    "getxattr": (c_int64, c_void_p, c_char_p, c_char_p, c_void_p, c_size_t, c_uint32),
    "setxattr": (c_int, c_void_p, c_char_p, c_char_p, c_char_p, c_size_t, c_uint32, c_uint32),
    "listxattr": (c_int64, c_void_p, c_char_p, c_void_p, c_size_t, c_uint32),
    "removexattr": (c_int, c_void_p, c_char_p, c_char_p, c_uint32),
    "file_open": (c_int, c_void_p, c_char_p, c_uint32, c_uint32, _P(c_void_p)),
    "file_close": (c_int, c_void_p),
    "pread": (c_int64, c_void_p, c_void_p, c_size_t, c_int64),
    "pwrite": (c_int64, c_void_p, c_void_p, c_size_t, c_int64),
    "read": (c_int64, c_void_p, c_void_p, c_size_t),
    "write": (c_int64, c_void_p, c_void_p, c_size_t),
    "lseek": (c_int64, c_void_p, c_int64, c_uint32),
    "fsync": (c_int, c_void_p, c_int),
    "ftruncate": (c_int, c_void_p, c_int64),
    "fstat": (c_int, c_void_p, _P(StatT)),
    "opendir": (c_int, c_void_p, c_char_p, _P(c_void_p)),
    "readdir": (c_int, c_void_p, _P(DirentT)),
    "closedir": (c_int, c_void_p),
}


def _load() -> ctypes.CDLL:
    """The library that BRAIDFS_LIBRARY names, else the one in the wheel, else the one that is installed."""
    named = os.environ.get("BRAIDFS_LIBRARY")
    bundled = pathlib.Path(__file__).with_name("libbraidfs.so")
    name = named or (str(bundled) if bundled.exists() else ctypes.util.find_library("braidfs") or "libbraidfs.so.0")
    try:
        return ctypes.CDLL(name)
    except OSError as e:
        raise ImportError(
            f"the C library of braidfs cannot be loaded ({e}): install the wheel or the library (`make install-lib`), or set"
            " BRAIDFS_LIBRARY to its path"
        ) from e


class _Library:
    """The functions, by their names without the prefix."""

    def __init__(self) -> None:
        library = _load()
        for name, (answer, *arguments) in _FUNCTIONS.items():
            function = getattr(library, "braidfs_" + name)
            function.restype, function.argtypes = answer, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


lib = _Library()


def library_version() -> str:
    """Version of the C library that is loaded."""
    return str(lib.version().decode())


def integer(value: Any, low: int = -(1 << 63), high: int = (1 << 63) - 1) -> int:
    """`value` as the library takes it: what does not fit ctypes would cut silently."""
    number = operator.index(value)
    if not low <= number <= high:
        raise OverflowError(f"{number} is not within {low} to {high}")
    return number


def check(result: int, *paths: Any) -> int:
    """The result of a call; raises the :class:`OSError` of a negative one, about `paths`."""
    if result >= 0:
        return result
    text = lib.error().decode("utf-8", "replace")
    if not paths:
        raise OSError(-result, text)
    raise OSError(-result, text, paths[0], None, *paths[1:2])


def encoded(path: Any) -> bytes:
    """A path as the library takes it."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("embedded null byte")
    return name


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


EBUSY = 16


class Handle:
    """A pointer of the library that is closed once, and not while another thread uses it.

    The library puts the pointer into `place`: the handle is there before it, so that no interrupt loses it. In a `with` it
    gives the pointer. A close waits for those who use it. `above` is the volume's handle, which lives as long, and has in
    `below` what is open.
    """

    __slots__ = ("__weakref__", "_close", "_deferred", "_forks", "_idle", "_lock", "_users", "above", "below", "place")

    def __init__(self, close: Callable[[int], int], above: Optional[Handle] = None) -> None:
        self.place = c_void_p()
        self.above = above
        self.below: set[Handle] = set()
        self._close = close
        # the frame of each `with`, and its thread
        self._users: dict[Any, int] = {}
        # reentrant: a signal's handler may use the handle that it interrupts the use of
        self._lock = threading.RLock()
        self._idle: Optional[threading.Event] = None
        self._deferred = False
        self._forks = _forks
        if above is not None:
            above.below.add(self)

    def __enter__(self) -> int:
        if self.forked:
            raise OSError(9, "opened before a fork: open the volume in the process that uses it")
        frame, thread = sys._getframe(1), threading.get_ident()
        try:
            with self._lock:
                pointer = self.place.value
                if pointer is None or self._idle is not None:
                    raise ValueError("I/O operation on what is closed")
                self._users[frame] = thread
                return pointer
        except BaseException:
            # an interrupt, and nobody calls __exit__
            self._leave(frame)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(sys._getframe(1))

    def _leave(self, frame: Any) -> None:
        self._users.pop(frame, None)
        idle = self._idle
        if idle is None or self._users:
            return
        if self._deferred:
            # who asked for it is no more there to be told
            check(self._end())
        else:
            idle.set()

    def _threads(self) -> set[int]:
        """Threads that use it. Those that have ended do not, nor does this one where an interrupt has thrown it out of its
        `with` before the end."""
        if self._users:
            me, stack, frame = threading.get_ident(), set(), sys._getframe(1)
            while frame is not None:
                stack.add(frame)
                frame = frame.f_back  # type: ignore[assignment]
            alive = sys._current_frames()
            for user, thread in list(self._users.items()):
                if thread not in alive or (thread == me and user not in stack):
                    self._users.pop(user, None)
        return set(self._users.values())

    @property
    def forked(self) -> bool:
        """It is the parent's: this process cannot use it."""
        return self._forks != _forks

    @property
    def closed(self) -> bool:
        return self.forked or self.place.value is None or self._idle is not None

    def close(self) -> int:
        """What the library's close answers; 0 where it was closed before. In a signal's handler that has interrupted a use of
        it, it is closed when that has ended."""
        if self.forked:
            # the parent's; its lock may be held by a thread that is not here
            self.place.value = None
            return 0
        idle = threading.Event()
        try:
            with self._lock:
                # one that was put off may have been forgotten: its `with` was interrupted, too
                if self._idle is not None and not (self._deferred and not self._threads()):
                    return 0
                self._idle = idle
            while threads := self._threads():
                if threading.get_ident() in threads:
                    self._deferred = True
                    return 0
                # not for ever: a thread may end without leaving
                idle.wait(1)
                idle.clear()
            return self._end()
        except BaseException:
            if self._idle is idle:
                self._idle = None
            raise

    def _end(self) -> int:
        with self._lock:
            pointer, answers = self.place.value, [0]
            try:
                if pointer is not None:
                    # one call of C for the call and its answer: no interrupt comes in between
                    answers.extend(map(self._close, (pointer,)))
            finally:
                if answers[-1] != -EBUSY and (pointer is None or len(answers) > 1):
                    self.place.value = None
                    if self.above is not None:
                        self.above.below.discard(self)
                # where it is in use it is as it was
                self._idle, self._deferred = None, False
        if self.above in _refused:
            self.above.end()
        return answers[-1]

    def end(self) -> None:
        """A close without anybody to be told. A volume of which files are open is closed after the last of them: in garbage
        it may be found before them, and they write then what their buffers hold."""
        if self.close() == -EBUSY:
            _refused.add(self)
        else:
            _refused.discard(self)

    def end_all(self) -> None:
        """At the end of the program: closes what is open of a volume, and it. Where it cannot be, it is synced."""
        for handle in list(self.below):
            handle.close()
        self.end()
        if self in _refused:
            with self as pointer:
                lib.sync(pointer)


# Volumes that are garbage, with files that are still open.
_refused: set[Handle] = set()


def refused() -> list[Handle]:
    """Handles of volumes that nobody has any more, and that could not be closed yet."""
    return list(_refused)
