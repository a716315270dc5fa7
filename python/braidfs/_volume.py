"""Volumes, and what is done by path."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import io
import math
import operator
import os
import stat as modes
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional, Union

from ._file import BufferedRandom, BufferedReader, BufferedWriter, RawFile, flags_of
from ._lib import (
    NOFOLLOW,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    TIME_NOW,
    TIME_OMIT,
    DirentT,
    Handle,
    StatT,
    StatVfsT,
    TimeT,
    check,
    encoded,
    integer,
    lib,
    refused,
)
from ._stat import DirEntry, Stat, StatVfs

# nothing is there, as the functions of os.path take it: also a symlink that leads to itself or through a file
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


def format(image: Path, size: int, options: str = "") -> None:
    """Makes an image file of `size` bytes (16 MiB at least) and a volume in it. `options`: as of `braidfs_format` in
    braidfs.h, for example `label=data,data-checksums`. What exists is not overwritten."""
    check(lib.format(encoded(image), integer(size, 0, (1 << 64) - 1), options.encode()), image)


def _flags(follow_symlinks: bool) -> int:
    return 0 if follow_symlinks else NOFOLLOW


def _time(ns: Optional[int]) -> Any:
    if ns is None:
        return ctypes.byref(TimeT(0, TIME_OMIT, 0))
    return ctypes.byref(TimeT(integer(ns // 1_000_000_000), ns % 1_000_000_000, 0))


def _nanoseconds(seconds: float) -> int:
    """Rounds as :func:`os.utime` does."""
    if not isinstance(seconds, float):
        return operator.index(seconds) * 1_000_000_000
    fraction, whole = math.modf(seconds)
    return int(whole) * 1_000_000_000 + math.floor(fraction * 1e9)


class Volume:
    """The volume on an image file, block device or NBD export (nbd://HOST/EXPORT), or on several, open in this process.

    `options`: as of mount(8), see `braidfs_open` in braidfs.h; for example `ro` or `noatime,commit=1,cache=256M`. Paths start
    at the root of the volume, with or without a slash. Any number of threads may use it. It is a context manager: its end
    closes the volume.
    """

    def __init__(self, devices: Union[Path, Iterable[Path]], options: str = "") -> None:
        one = isinstance(devices, (str, bytes, os.PathLike))
        names = [encoded(d) for d in ([devices] if one else devices)]  # type: ignore[union-attr]
        self._begin(", ".join(os.fsdecode(n) for n in names))
        array = (ctypes.c_char_p * len(names))(*names)
        place = ctypes.byref(self._handle.place)
        check(lib.open(array, len(names), options.encode(), place), *map(os.fsdecode, names[:1]))

    @classmethod
    def in_memory(cls, size: int = 64 << 20, options: str = "") -> Volume:
        """A new volume in memory, for tests: it is gone when it is closed."""
        volume = cls.__new__(cls)
        volume._begin("memory")
        check(lib.open_memory(integer(size, 0, (1 << 64) - 1), options.encode(), ctypes.byref(volume._handle.place)))
        return volume

    def _begin(self, name: str) -> None:
        self._handle = Handle(lib.close)
        # what is open, in the order of the opens: each after what it writes to
        self._files: weakref.WeakKeyDictionary[io.IOBase, None] = weakref.WeakKeyDictionary()
        self.name = name
        _open_volumes.add(self)

    def __repr__(self) -> str:
        # with its place: fsspec tells file systems apart by the text of what they are made of
        return f"<braidfs.Volume {self.name!r}{' closed' if self.closed else ''} at {id(self):#x}>"

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and not handle.closed:
            handle.end()

    @property
    def closed(self) -> bool:
        """Whether it is closed; one that was opened before a fork is, in the child."""
        return self._handle.closed

    def close(self) -> None:
        """Closes all files, with what their buffers hold, makes everything durable and closes the volume."""
        first: Optional[Exception] = None
        for file in [ref() for ref in reversed(self._files.keyrefs())]:
            # what a detached one was around is there, too
            if file is None or _is_detached(file):
                continue
            try:
                file.close()
            except Exception as e:  # the others are closed all the same
                first = first or e
        for handle in list(self._handle.below):
            handle.close()
        check(self._handle.close())
        if first is not None:
            raise first

    # --- files ---

    def open(
        self,
        path: Path,
        mode: str = "r",
        buffering: int = -1,
        encoding: Optional[str] = None,
        errors: Optional[str] = None,
        newline: Optional[str] = None,
        *,
        permissions: int = 0o666,
    ) -> Any:
        """As the builtin :func:`open`: a text file, with `b` in the mode a buffered one, and with `buffering=0` a
        :class:`RawFile`."""
        flags = flags_of(mode)
        text = "b" not in mode
        if text and buffering == 0:
            raise ValueError("can't have unbuffered text I/O")
        if not text and (encoding is not None or errors is not None or newline is not None):
            raise ValueError("binary mode doesn't take encoding, errors or newline")
        name = encoded(path)
        handle = Handle(lib.file_close, self._handle)
        raw = RawFile(self, os.fsdecode(path), mode.replace("t", ""), flags, handle)
        try:
            with self._handle as volume:
                check(lib.file_open(volume, name, flags, permissions, ctypes.byref(handle.place)), path)
            if modes.S_ISDIR(raw.stat().st_mode):
                raise IsADirectoryError(21, "Is a directory", path)
            file: Any = raw
            if buffering != 0:
                size = buffering if buffering > 1 else max(io.DEFAULT_BUFFER_SIZE, 1 << 17)
                kind: Callable[..., Any] = BufferedRandom if "+" in mode else BufferedWriter
                file = (BufferedReader if raw.readable() and not raw.writable() else kind)(raw, size)
                raw._buffered = True
            self._files[file] = None
            if "a" in mode:
                file.seek(0, io.SEEK_END)
            if text:
                file = io.TextIOWrapper(file, encoding, errors, newline, line_buffering=buffering == 1)
                file.mode = mode
                self._files[file] = None
        except BaseException:
            raw.close()
            raise
        return file

    def read_bytes(self, path: Path) -> bytes:
        """All of a file."""
        with self.open(path, "rb", 0) as f:
            return bytes(f.readall())

    def write_bytes(self, path: Path, data: Any) -> int:
        """Makes a file with this content, or replaces that of the one that is there."""
        with self.open(path, "wb") as f:
            return int(f.write(data))

    def fsync(self, path: Path, *, data_only: bool = False) -> None:
        """Makes a file durable, or the entries of a directory."""
        handle = Handle(lib.file_close, self._handle)
        try:
            with self._handle as volume:
                check(lib.file_open(volume, encoded(path), 0, 0, ctypes.byref(handle.place)), path)
            with handle as pointer:
                check(lib.fsync(pointer, data_only), path)
        finally:
            handle.close()

    # --- names ---

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        with self._handle as volume:
            check(lib.mkdir(volume, encoded(path), mode), path)

    def makedirs(self, path: Path, exist_ok: bool = False) -> None:
        """A directory and those above it that are not there."""
        with self._handle as volume:
            if exist_ok:
                check(lib.mkdir_all(volume, encoded(path)), path)
                return
            name = encoded(path).rstrip(b"/")
            above = name.rpartition(b"/")[0]
            if above.strip(b"/"):
                check(lib.mkdir_all(volume, above), os.fsdecode(above))
            check(lib.mkdir(volume, name or b"/", 0o777), path)

    def rmdir(self, path: Path) -> None:
        with self._handle as volume:
            check(lib.rmdir(volume, encoded(path)), path)

    def remove(self, path: Path) -> None:
        with self._handle as volume:
            check(lib.unlink(volume, encoded(path)), path)

    unlink = remove

    def rmtree(self, path: Path) -> None:
        """A directory and all below it, following no symlink."""
        with self._handle as volume:
            check(lib.remove_all(volume, encoded(path)), path)

    def rename(self, src: Path, dst: Path) -> None:
        """Gives a file another name; what has it is replaced. Atomic, also across a crash."""
        self._rename(src, dst, 0)

    replace = rename

    def rename_noreplace(self, src: Path, dst: Path) -> None:
        self._rename(src, dst, RENAME_NOREPLACE)

    def rename_whiteout(self, src: Path, dst: Path) -> None:
        """A rename that leaves a character device 0:0 under the old name: an overlayfs hides with it what a lower layer has."""
        self._rename(src, dst, RENAME_WHITEOUT)

    def exchange(self, first: Path, second: Path) -> None:
        """Each gets the other's name, at once."""
        self._rename(first, second, RENAME_EXCHANGE)

    def _rename(self, src: Path, dst: Path, flags: int) -> None:
        with self._handle as volume:
            check(lib.rename(volume, encoded(src), encoded(dst), flags), src, dst)

    def link(self, src: Path, dst: Path) -> None:
        with self._handle as volume:
            check(lib.link(volume, encoded(src), encoded(dst)), src, dst)

    def symlink(self, src: Path, dst: Path) -> None:
        with self._handle as volume:
            check(lib.symlink(volume, encoded(src), encoded(dst)), src, dst)

    def readlink(self, path: Path) -> str:
        # no target is longer
        buffer = ctypes.create_string_buffer(4096)
        with self._handle as volume:
            size = check(lib.readlink(volume, encoded(path), buffer, len(buffer)), path)
        return os.fsdecode(buffer.raw[:size])

    def scandir(self, path: Path = "/") -> Scan:
        """As :func:`os.scandir`: an iterator of :class:`DirEntry`, and a context manager."""
        scan = Scan(self, os.fsdecode(path), Handle(lib.closedir, self._handle))
        try:
            with self._handle as volume:
                check(lib.opendir(volume, encoded(path), ctypes.byref(scan._handle.place)), path)
        except BaseException:
            scan.close()
            raise
        return scan

    def listdir(self, path: Path = "/") -> list[str]:
        with self.scandir(path) as entries:
            return [e.name for e in entries]

    def walk(self, top: Path = "/") -> Iterator[tuple[str, list[str], list[str]]]:
        """As :func:`os.walk`, from the top down; symlinks are not followed. A directory that is removed meanwhile is left out;
        one that cannot be read is an error."""
        first = os.fsdecode(top)
        todo = [first]
        while todo:
            path = todo.pop()
            dirs: list[str] = []
            files: list[str] = []
            try:
                with self.scandir(path) as entries:
                    for e in entries:
                        (dirs if _is_dir(e) else files).append(e.name)
            except (FileNotFoundError, NotADirectoryError):
                if path == first:
                    raise
                continue
            yield path, dirs, files
            for name in reversed(dirs):
                below = f"{path.rstrip('/')}/{name}" if path else name
                if self._kind(below, False) not in (0, modes.S_IFLNK):
                    todo.append(below)

    # --- attributes ---

    def stat(self, path: Path, *, follow_symlinks: bool = True) -> Stat:
        out = StatT()
        with self._handle as volume:
            check(lib.stat(volume, encoded(path), _flags(follow_symlinks), ctypes.byref(out)), path)
        return Stat._of(out)

    def lstat(self, path: Path) -> Stat:
        return self.stat(path, follow_symlinks=False)

    def _kind(self, path: Path, follow_symlinks: bool = True) -> int:
        try:
            return modes.S_IFMT(self.stat(path, follow_symlinks=follow_symlinks).st_mode)
        except OSError as e:
            if e.errno not in _NOWHERE:
                raise
            return 0

    def exists(self, path: Path) -> bool:
        return self._kind(path) != 0

    def isdir(self, path: Path) -> bool:
        return self._kind(path) == modes.S_IFDIR

    def isfile(self, path: Path) -> bool:
        return self._kind(path) == modes.S_IFREG

    def islink(self, path: Path) -> bool:
        return self._kind(path, False) == modes.S_IFLNK

    def chmod(self, path: Path, mode: int) -> None:
        with self._handle as volume:
            check(lib.chmod(volume, encoded(path), integer(mode, 0, 0xFFFFFFFF)), path)

    def chown(self, path: Path, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        """-1 leaves one."""
        with self._handle as volume:
            # the library knows the last number for "leave it"
            ids = (integer(i, -1, 0xFFFFFFFE) & 0xFFFFFFFF for i in (uid, gid))
            check(lib.chown(volume, encoded(path), *ids, _flags(follow_symlinks)), path)

    def utime(
        self,
        path: Path,
        times: Optional[tuple[float, float]] = None,
        *,
        ns: Optional[tuple[Optional[int], Optional[int]]] = None,
        follow_symlinks: bool = True,
    ) -> None:
        """As :func:`os.utime`; a `None` in `ns` leaves that time."""
        if times is not None and ns is not None:
            raise ValueError("utime: you may specify either 'times' or 'ns' but not both")
        if times is not None:
            ns = (_nanoseconds(times[0]), _nanoseconds(times[1]))
        now = ctypes.byref(TimeT(0, TIME_NOW, 0))
        both = (now, now) if ns is None else (_time(ns[0]), _time(ns[1]))
        with self._handle as volume:
            check(lib.utimens(volume, encoded(path), *both, _flags(follow_symlinks)), path)

    def truncate(self, path: Path, length: int) -> None:
        with self._handle as volume:
            check(lib.truncate(volume, encoded(path), integer(length)), path)

    def getxattr(self, path: Path, attribute: str, *, follow_symlinks: bool = True) -> bytes:
        # all of an inode's have no more
        buffer = ctypes.create_string_buffer(1 << 16)
        with self._handle as volume:
            name = encoded(attribute)
            found = lib.getxattr(volume, encoded(path), name, buffer, len(buffer), _flags(follow_symlinks))
            return buffer.raw[: check(found, path)]

    def setxattr(
        self, path: Path, attribute: str, value: bytes, flags: int = 0, *, follow_symlinks: bool = True
    ) -> None:
        """`flags`: 0, :data:`os.XATTR_CREATE` or :data:`os.XATTR_REPLACE`."""
        data = bytes(memoryview(value))
        with self._handle as volume:
            name = encoded(attribute)
            done = lib.setxattr(volume, encoded(path), name, data, len(data), flags, _flags(follow_symlinks))
            check(done, path)

    def listxattr(self, path: Path, *, follow_symlinks: bool = True) -> list[str]:
        flags = _flags(follow_symlinks)
        with self._handle as volume:
            # others may add some in between
            size = check(lib.listxattr(volume, encoded(path), None, 0, flags), path) + 4096
            buffer = ctypes.create_string_buffer(size)
            size = check(lib.listxattr(volume, encoded(path), buffer, size, flags), path)
        return [os.fsdecode(n) for n in buffer.raw[:size].split(b"\0")[:-1]]

    def removexattr(self, path: Path, attribute: str, *, follow_symlinks: bool = True) -> None:
        with self._handle as volume:
            check(lib.removexattr(volume, encoded(path), encoded(attribute), _flags(follow_symlinks)), path)

    def statvfs(self) -> StatVfs:
        out = StatVfsT()
        with self._handle as volume:
            check(lib.statvfs(volume, ctypes.byref(out)))
        return StatVfs._of(out)

    def sync(self) -> None:
        """When it returns, everything that was written survives a crash (but for what buffers of files hold)."""
        with self._handle as volume:
            check(lib.sync(volume))


def _is_detached(file: io.IOBase) -> bool:
    try:
        _ = file.closed
    except ValueError:
        return True
    return False


def _is_dir(entry: DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symlink that leads to itself, for instance
        return False


_open_volumes: weakref.WeakSet[Volume] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """What a program leaves open at its end is closed, as the files of a process are."""
    for volume in list(_open_volumes):
        # nobody is left to be told
        with contextlib.suppress(Exception):
            volume.close()
        with contextlib.suppress(Exception):
            volume._handle.end_all()
    for handle in refused():
        with contextlib.suppress(Exception):
            handle.end_all()


class Scan:
    """What :meth:`Volume.scandir` gives."""

    def __init__(self, volume: Volume, path: str, handle: Handle) -> None:
        self._volume, self._path, self._handle = volume, path, handle

    def __iter__(self) -> Scan:
        return self

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._handle.close()

    def close(self) -> None:
        check(self._handle.close())

    def __next__(self) -> DirEntry:
        # after a fork it is an error, and not an end that is none
        if self._handle.closed and not self._handle.forked:
            raise StopIteration
        out = DirentT()
        with self._handle as pointer:
            more = check(lib.readdir(pointer, ctypes.byref(out)), self._path)
        if not more:
            self.close()
            raise StopIteration
        return DirEntry(self._volume, self._path, os.fsdecode(out.name[: out.name_length]), out.ino, out.type)
