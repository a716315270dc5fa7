"""What stat, statvfs and scandir tell."""

from __future__ import annotations

import stat as modes
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._lib import StatT, StatVfsT, TimeT
    from ._volume import Volume


def _ns(t: TimeT) -> int:
    return int(t.sec) * 1_000_000_000 + int(t.nsec)


@dataclass(frozen=True)
class Stat:
    """As :class:`os.stat_result`, with the time of birth."""

    st_mode: int
    st_ino: int
    st_nlink: int
    st_uid: int
    st_gid: int
    st_size: int
    st_blocks: int
    st_rdev: int
    st_atime_ns: int
    st_mtime_ns: int
    st_ctime_ns: int
    st_birthtime_ns: int
    st_dev: int = 0
    st_blksize: int = 4096

    @property
    def st_atime(self) -> float:
        return self.st_atime_ns / 1e9

    @property
    def st_mtime(self) -> float:
        return self.st_mtime_ns / 1e9

    @property
    def st_ctime(self) -> float:
        return self.st_ctime_ns / 1e9

    @property
    def st_birthtime(self) -> float:
        return self.st_birthtime_ns / 1e9

    @classmethod
    def _of(cls, s: StatT) -> Stat:
        times = _ns(s.atime), _ns(s.mtime), _ns(s.ctime), _ns(s.btime)
        return cls(s.mode, s.ino, s.nlink, s.uid, s.gid, s.size, s.blocks, s.rdev, *times)


@dataclass(frozen=True)
class StatVfs:
    """As :func:`os.statvfs` tells."""

    f_bsize: int
    f_blocks: int
    f_bfree: int
    f_bavail: int
    f_files: int
    f_ffree: int
    f_namemax: int = 255

    @property
    def f_frsize(self) -> int:
        return self.f_bsize

    @classmethod
    def _of(cls, s: StatVfsT) -> StatVfs:
        return cls(s.block_size, s.blocks, s.free, s.available, s.inodes, s.inodes_free)


class DirEntry:
    """As :class:`os.DirEntry`."""

    __slots__ = ("_ino", "_kind", "_volume", "name", "path")

    def __init__(self, volume: Volume, directory: str, name: str, ino: int, kind: int) -> None:
        self._volume, self._ino, self._kind = volume, ino, kind << 12
        self.name = name
        self.path = directory + name if directory.endswith("/") or not directory else f"{directory}/{name}"

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return self._ino

    def is_symlink(self) -> bool:
        return modes.S_ISLNK(self._kind)

    def _is(self, kind: int, follow_symlinks: bool) -> bool:
        if not (follow_symlinks and self.is_symlink()):
            return self._kind == kind
        try:
            return modes.S_IFMT(self.stat().st_mode) == kind
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(modes.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(modes.S_IFREG, follow_symlinks)

    def stat(self, *, follow_symlinks: bool = True) -> Stat:
        return self._volume.stat(self.path, follow_symlinks=follow_symlinks)
