"""Filling a mounted volume until there is no space, as writers in processes of their own do."""

import errno
import multiprocessing
import os

from fslib import Failed, run

PIECE = b"\x5a" * (1 << 20)


def offered(directory):
    """Bytes that `df` of the directory offers."""
    told = os.statvfs(directory)
    return told.f_bavail * told.f_frsize


def fill_file(path):
    """Writes a file until ENOSPC. Bytes that the volume took."""
    written = 0
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        while True:
            written += os.write(fd, PIECE)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.fsync(fd)  # what write() took has a place
        os.close(fd)
    return written


def fill_in_turn(files, pieces):
    """Writes to the open, unbuffered files in turn, to each its piece, until ENOSPC. Bytes that each took."""
    written = [0] * len(files)
    told = os.fstatvfs(files[0].fileno())
    size = told.f_blocks * told.f_frsize
    try:
        while True:
            for n, file in enumerate(files):
                written[n] += file.write(pieces[n])
                if sum(written) > size:
                    raise Failed(f"{written} bytes were taken, where there is place for {size}")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    return written


def _writer(path, results):
    try:
        results.put(fill_file(path))
    except OSError as error:
        results.put(error)


def fill(directory, writers):
    """Fills the directory with as many files at a time; bytes written until each writer got ENOSPC."""
    if writers == 1:
        return fill_file(directory / "f0")
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    for n in range(writers):
        os.close(os.open(directory / f"f{n}", os.O_CREAT | os.O_WRONLY, 0o600))
    all_of_them = [fork.Process(target=_writer, args=(directory / f"f{n}", results)) for n in range(writers)]
    for process in all_of_them:
        process.start()
    told = [results.get() for _ in all_of_them]
    for process in all_of_them:
        process.join()
    for result in told:
        if isinstance(result, OSError):
            raise Failed(f"a writer: {result}")
    return sum(told)


def empty(directory, mnt):
    """Removes the files and syncs."""
    for path in directory.iterdir():
        path.unlink()
    run("sync", "-f", mnt)
