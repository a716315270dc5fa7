"""A braidfs volume in this process, without a mount.

:class:`Volume` has the calls of :mod:`os`, and :meth:`Volume.open` that of the builtin; errors are :class:`OSError` and its
subclasses, with the errno. Calls release the GIL. `braidfs.fsspec` has a file system for `braidfs://`.
"""

from ._file import RawFile, fsync
from ._lib import library_version
from ._stat import DirEntry, Stat, StatVfs
from ._version import VERSION as __version__
from ._volume import Volume, format

__all__ = [
    "DirEntry",
    "RawFile",
    "Stat",
    "StatVfs",
    "Volume",
    "__version__",
    "format",
    "fsync",
    "library_version",
]
