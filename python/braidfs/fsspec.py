"""The fsspec file system `braidfs://`.

    import fsspec
    fs = fsspec.filesystem("braidfs", volume="vol.img")
    pandas.read_parquet("braidfs://data/table.parquet", storage_options={"volume": "vol.img"})

A volume is opened once in a process, with the options of the first who asks, and closed at the process's end, or by
:meth:`BraidFileSystem.close`; other processes cannot open it meanwhile, but where all have the option `ro`. So with `ro` it can be
used in children of a fork, too: each opens it for itself.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat as modes
import threading
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, Optional, Union

from fsspec import AbstractFileSystem
from fsspec.transaction import Transaction
from fsspec.utils import stringify_path

from ._file import RawFile, flags_of
from ._stat import Stat
from ._volume import Volume

_lock = threading.Lock()
_volumes: weakref.WeakValueDictionary[tuple[str, ...], Volume] = weakref.WeakValueDictionary()


def _forget() -> None:
    """In a child: the volumes are the parent's, and another of its threads may have held the lock."""
    global _lock, _volumes
    _lock, _volumes = threading.Lock(), weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_forget)


def _opened(devices: Union[str, list[str], tuple[str, ...]], options: str) -> Volume:
    """The volume on these devices, which one process can open only once."""
    names = [devices] if isinstance(devices, (str, os.PathLike)) else list(devices)
    key = tuple(os.path.realpath(n) for n in names)
    with _lock:
        volume = _volumes.get(key)
        if volume is None or volume.closed:
            volume = Volume(names, options)
            _volumes[key] = volume
        return volume


_KINDS = {modes.S_IFREG: "file", modes.S_IFDIR: "directory", modes.S_IFLNK: "link"}


class _InTransaction(io.BufferedWriter):
    """A new version of a file, which takes its place when the transaction ends."""

    def __init__(self, raw: RawFile, temporary: str, path: str, exclusive: bool) -> None:
        super().__init__(raw, 1 << 17)
        self._of, self._temporary, self._path, self._exclusive = raw.volume, temporary, path, exclusive

    def commit(self) -> None:
        try:
            self.close()
            if self._exclusive:
                self._of.rename_noreplace(self._temporary, self._path)
            else:
                self._of.replace(self._temporary, self._path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        # nothing that goes wrong here may keep the transaction from its end
        with suppress(OSError):
            # not by the buffer, which would write what it holds first: again an error where no space is left
            self.raw.close()
        with suppress(OSError):
            self._of.remove(self._temporary)


class _Transaction(Transaction):  # type: ignore[misc] # fsspec has no types
    """One that always ends: where a file cannot be committed, those that were not are discarded. (Not every version of fsspec
    does so: what is written later would go to temporary files that nobody commits.)"""

    def complete(self, commit: bool = True) -> None:
        fs, files = self.fs, self.files
        try:
            while files:
                file = files.popleft()
                if commit:
                    file.commit()
                else:
                    file.discard()
        finally:
            while files:
                files.popleft().discard()
            fs._intrans = False
            fs._transaction = None


class BraidFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The files of a volume.

    `volume`: path of its image or block device, or a list of them, or a :class:`braidfs.Volume`. `options`: as of it.
    `auto_mkdir`: writing makes directories that are missing.
    """

    protocol = "braidfs"
    root_marker = "/"
    transaction_type = _Transaction

    def __init__(
        self, volume: Any = None, options: str = "", auto_mkdir: bool = True, **storage_options: Any
    ) -> None:
        super().__init__(volume=volume, options=options, auto_mkdir=auto_mkdir, **storage_options)
        if volume is None:
            raise ValueError("braidfs: name the volume: storage_options={'volume': 'vol.img'}")
        self._devices, self._options = volume, options
        self._volume: Volume = volume if isinstance(volume, Volume) else _opened(volume, options)
        self.auto_mkdir = auto_mkdir

    @property
    def volume(self) -> Volume:
        """The volume, opened again where somebody has closed it, and after a fork."""
        if self._volume.closed and not isinstance(self._devices, Volume):
            self._volume = _opened(self._devices, self._options)
        return self._volume

    def close(self) -> None:
        """Closes the volume, for all who use it; the next call opens it again."""
        self._volume.close()

    @property
    def fsid(self) -> str:
        return f"braidfs_{self.volume.name}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        path = stringify_path(path)
        path = path.removeprefix("braidfs:") if path.startswith("braidfs://") else path
        return "/" + path.strip("/")

    @classmethod
    def _parent(cls, path: str) -> str:
        return cls._strip_protocol(path).rpartition("/")[0] or "/"

    def _make_parent(self, path: str) -> None:
        if self.auto_mkdir:
            self.volume.makedirs(self._parent(path), exist_ok=True)

    # --- what is there ---

    def _entry(self, path: str, st: Stat, target: Optional[str] = None) -> dict[str, Any]:
        kind = _KINDS.get(modes.S_IFMT(st.st_mode), "other")
        entry = {
            "name": path,
            "size": st.st_size if kind == "file" else 0,
            "type": kind,
            "created": st.st_birthtime,
            "mtime": st.st_mtime,
            "mode": st.st_mode,
            "uid": st.st_uid,
            "gid": st.st_gid,
            "ino": st.st_ino,
            "nlink": st.st_nlink,
            "islink": target is not None,
        }
        if target is not None:
            entry["destination"] = target
        return entry

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Of a symlink what it leads to, with `islink` and `destination`; itself, of type `link`, where it leads nowhere."""
        return self._info(self._strip_protocol(path), True)

    def _info(self, path: str, follow: bool) -> dict[str, Any]:
        """Without `follow` a symlink is what it leads to only where that is a file."""
        st = self.volume.lstat(path)
        if not modes.S_ISLNK(st.st_mode):
            return self._entry(path, st)
        try:
            target = self.volume.readlink(path)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return self._info(path, follow)  # it is none any more
        # it may lead to nothing, to itself, through a file
        with suppress(OSError):
            there = self.volume.stat(path)
            if follow or modes.S_ISREG(there.st_mode):
                st = there
        return self._entry(path, st, target)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a directory. A symlink to another one is of type `link` here: those who walk do not follow it, as it may
        lead in a circle."""
        path = self._strip_protocol(path)
        try:
            with self.volume.scandir(path) as entries:
                names = [e.path for e in entries]
        except NotADirectoryError:
            info = self.info(path)  # a path below a file is an error
            return [info] if detail else [path]
        if not detail:
            return names
        found = []
        for name in names:
            try:
                found.append(self._info(self._strip_protocol(name), False))
            except FileNotFoundError:
                pass  # removed since
        return found

    def exists(self, path: str, **_: Any) -> bool:
        return self.volume.exists(self._strip_protocol(path))

    def isfile(self, path: str) -> bool:
        return self.volume.isfile(self._strip_protocol(path))

    def isdir(self, path: str) -> bool:
        return self.volume.isdir(self._strip_protocol(path))

    def created(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["created"], tz=timezone.utc)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)

    # --- names ---

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        if create_parents:
            self.volume.makedirs(path)
        else:
            self.volume.mkdir(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.volume.makedirs(self._strip_protocol(path), exist_ok)

    def rmdir(self, path: str) -> None:
        self.volume.rmdir(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        self.volume.remove(self._strip_protocol(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: Optional[int] = None) -> None:
        """With `maxdepth` what lies deeper stays, and the directories that it lies in."""
        partly = recursive and maxdepth is not None
        paths = self.expand_path(path, recursive=partly, maxdepth=maxdepth)
        if recursive and "/" in paths:
            raise OSError(errno.EBUSY, "the root directory cannot be removed", "/")
        # they are sorted: what is in a directory goes before it
        for p in reversed(paths):
            if not self.isdir(p) or self.volume.islink(p):
                self.volume.remove(p)
            elif recursive and not partly:
                self.volume.rmtree(p)
            else:
                try:
                    self.volume.rmdir(p)
                except OSError as e:
                    if not partly or e.errno != errno.ENOTEMPTY:
                        raise

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: Optional[int] = None, **_: Any) -> None:
        """A rename: atomic, whatever is below."""
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        self._make_parent(path2)
        self.volume.replace(path1, path2)

    mv_file = mv

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        self._make_parent(path2)
        if self.isdir(path1):
            self.volume.makedirs(path2, exist_ok=True)
            return
        if self.exists(path2) and self.volume.stat(path1).st_ino == self.volume.stat(path2).st_ino:
            raise OSError(errno.EINVAL, "source and target are the same file", path1, None, path2)
        with self.volume.open(path1, "rb", 0) as source, self.volume.open(path2, "wb") as target:
            buffer = memoryview(bytearray(1 << 20))
            while n := source.readinto(buffer):
                target.write(buffer[:n])

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        self._make_parent(path)
        with self.volume.open(path, "wb" if truncate else "ab", 0):
            pass
        self.volume.utime(path)

    # --- content ---

    def open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        """As of every fsspec file system. A close of the volume closes also what is made here around a file: for text, and
        for `compression`."""
        file = super().open(path, mode, *arguments, **options)
        with suppress(TypeError):  # of a codec, and without weak references
            self._volume._files.setdefault(file)
        return file

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Optional[int] = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **_: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        flags_of(mode)
        if not autocommit and ("a" in mode or "+" in mode):
            # done at once, it has nothing to take back
            raise NotImplementedError(f"braidfs: mode {mode!r} in a transaction: only a new version of a whole file can wait")
        if "r" not in mode:
            self._make_parent(path)
        if autocommit or "r" in mode:
            file = self.volume.open(path, mode)
            if "r" in mode:
                # fsspec counts from it where it reads from the end
                file.size = file.raw.stat().st_size
            return file
        if "x" in mode and self.exists(path):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        temporary = f"{self._parent(path).rstrip('/')}/.{secrets.token_hex(8)}.new"
        raw = self.volume.open(temporary, "xb", 0)
        return _InTransaction(raw, temporary, path, "x" in mode)
