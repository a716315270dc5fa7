"""Open files."""

from __future__ import annotations

import ctypes
import io
from typing import IO, TYPE_CHECKING, Any, Optional, Union

from ._lib import O_APPEND, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY, Handle, StatT, check, integer, lib
from ._stat import Stat

if TYPE_CHECKING:
    from ._volume import Volume

_WHAT = {"r": 0, "w": O_CREAT | O_TRUNC, "x": O_CREAT | O_EXCL, "a": O_CREAT | O_APPEND}


def flags_of(mode: str) -> int:
    """The library's flags of a mode of :func:`open`, without `b` and `t`."""
    letters = set(mode)
    what = letters & set(_WHAT)
    if len(letters) != len(mode) or letters - set("rwxa+bt") or len(what) != 1 or {"b", "t"} <= letters:
        raise ValueError(f"invalid mode: {mode!r}")
    (what_letter,) = what
    access = O_RDWR if "+" in letters else O_RDONLY if what_letter == "r" else O_WRONLY
    return access | _WHAT[what_letter]


def _address(data: Any) -> tuple[Any, int]:
    """What a call takes for the bytes of `data`, and how many they are. Read-only memory that is not :class:`bytes` is
    copied: ctypes has no pointer to it."""
    if isinstance(data, bytes):
        return data, len(data)
    view = memoryview(data).cast("B")
    if view.nbytes == 0:
        return b"", 0
    if view.readonly:
        return view.tobytes(), view.nbytes
    return ctypes.byref(ctypes.c_char.from_buffer(view)), view.nbytes


def _room(buffer: Any) -> tuple[Any, int]:
    """What a call takes for writable memory, and its bytes."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise TypeError("a read-only buffer")
    return _address(view)


class RawFile(io.RawIOBase):
    """A file of a volume, unbuffered: :meth:`Volume.open` gives it with `buffering=0`, and below what it gives else.

    Any number of threads may use it; a close waits for them.
    """

    def __init__(self, volume: Volume, path: str, mode: str, flags: int, handle: Handle) -> None:
        self._volume, self._handle, self._flags = volume, handle, flags
        self.name, self.mode = path, mode
        # whether a buffer above it closes it
        self._buffered = False

    def __del__(self) -> None:
        # in garbage it may be found before its buffer, which writes then what it holds, and closes it
        if not self._buffered:
            self.close()

    def __repr__(self) -> str:
        return f"<braidfs.RawFile name={self.name!r} mode={self.mode!r}>"

    @property
    def volume(self) -> Volume:
        """Whose file it is."""
        return self._volume

    def readable(self) -> bool:
        self._check_open()
        return not self._flags & O_WRONLY

    def writable(self) -> bool:
        self._check_open()
        return bool(self._flags & (O_WRONLY | O_RDWR))

    def seekable(self) -> bool:
        self._check_open()
        return True

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readinto(self, buffer: Any) -> int:
        if not self.readable():
            raise io.UnsupportedOperation("read")
        where, size = _room(buffer)
        with self._handle as pointer:
            return check(lib.read(pointer, where, size), self.name)

    def readall(self) -> bytes:
        """All from the position to the end, in as few reads as the size of the file needs."""
        if not self.readable():
            raise io.UnsupportedOperation("read")
        # one more: the read that finds the end needs room
        buffer = bytearray(max(self.stat().st_size - self.tell(), 0) + 1)
        size = 0
        while True:
            if size == len(buffer):  # it has grown meanwhile
                buffer.extend(bytes(max(size // 8, 1 << 16)))
            with memoryview(buffer)[size:] as rest:
                got = self.readinto(rest)
            if got == 0:
                break
            size += got
        with memoryview(buffer)[:size] as content:
            return bytes(content)

    def write(self, data: Any) -> int:
        if not self.writable():
            raise io.UnsupportedOperation("write")
        where, size = _address(data)
        with self._handle as pointer:
            return check(lib.write(pointer, where, size), self.name)

    def preadinto(self, buffer: Any, offset: int) -> int:
        """Reads at an offset into writable memory; the position stays."""
        where, size = _room(buffer)
        with self._handle as pointer:
            return check(lib.pread(pointer, where, size, integer(offset)), self.name)

    def pread(self, size: int, offset: int) -> bytes:
        """As :func:`os.pread`."""
        buffer = bytearray(size)
        del buffer[self.preadinto(buffer, offset) :]
        return bytes(buffer)

    def pwrite(self, data: Any, offset: int) -> int:
        """As :func:`os.pwrite`; fewer bytes than given only where space ran out."""
        where, size = _address(data)
        with self._handle as pointer:
            return check(lib.pwrite(pointer, where, size, integer(offset)), self.name)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check_open()
        with self._handle as pointer:
            return check(lib.lseek(pointer, integer(offset), integer(whence, 0, 0xFFFFFFFF)), self.name)

    def truncate(self, size: Optional[int] = None) -> int:
        if not self.writable():
            raise io.UnsupportedOperation("truncate")
        size = self.tell() if size is None else integer(size)
        with self._handle as pointer:
            check(lib.ftruncate(pointer, size), self.name)
        return size

    def stat(self) -> Stat:
        """As :func:`os.fstat`."""
        out = StatT()
        with self._handle as pointer:
            check(lib.fstat(pointer, ctypes.byref(out)), self.name)
        return Stat._of(out)

    def fsync(self, *, data_only: bool = False) -> None:
        """As :func:`os.fsync`, or :func:`os.fdatasync`: what was written to this object survives a crash, with its names.
        For files with a buffer see :func:`braidfs.fsync`."""
        with self._handle as pointer:
            check(lib.fsync(pointer, data_only), self.name)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("a file of a volume in this process has no descriptor")

    def isatty(self) -> bool:
        self._check_open()
        return False

    def close(self) -> None:
        if self.closed:
            return
        try:
            super().close()
        finally:
            check(self._handle.close(), self.name)


class _Detaches:
    """Of a buffer: what it gives back is closed by itself again."""

    def detach(self) -> RawFile:
        raw: RawFile = super().detach()  # type: ignore[misc]
        raw._buffered = False
        raw.volume._files.pop(self, None)  # type: ignore[call-overload]
        raw.volume._files[raw] = None
        return raw


class BufferedReader(_Detaches, io.BufferedReader):
    """See :meth:`Volume.open`."""


class BufferedWriter(_Detaches, io.BufferedWriter):
    """See :meth:`Volume.open`."""


class BufferedRandom(_Detaches, io.BufferedRandom):
    """See :meth:`Volume.open`."""


def fsync(file: Union[IO[Any], io.IOBase], *, data_only: bool = False) -> None:
    """Writes what the buffers of a file of :meth:`Volume.open` hold, and makes it durable."""
    file.flush()
    raw: Any = file
    while not isinstance(raw, RawFile):
        below = getattr(raw, "buffer", None) or getattr(raw, "raw", None)
        if below is None:
            raise TypeError("not a file of a braidfs volume")
        raw = below
    raw.fsync(data_only=data_only)
