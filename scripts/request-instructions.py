#!/usr/bin/env python3
"""make request-instructions: what a mounted request costs in instructions of the server. For each kind of operation a program
does it some times, and many times, on a fresh mount (transport=dev) whose server runs under valgrind; the difference, divided,
is what one more costs. Nearly the same on a busy machine; the kernel's own instructions are not among them. The requests that
an operation is made of are counted in the same way, by `braidfs stats`.

    scripts/request-instructions.py [--json FILE] [--rounds N] [--compare FILE] [KIND...]
    scripts/request-instructions.py --profile DIR KIND...

With several rounds the medians. `--compare` with what an earlier version of the program cost, as `--json` wrote it. `--profile`
leaves callgrind's profile of each kind in a directory (for callgrind_annotate; a program with lines:
`CARGO_PROFILE_RELEASE_DEBUG=line-tables-only`)."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from counted_server import BINARY, OPTIONS, built, counted_server

# How often each kind is done: the differences count.
FEW, MANY = 200, 2200
# Those that need more of what is made before, or are long by themselves.
FEWER = {"readdir": (10, 110)}
# Sparse. Where less than 256 MiB are free, requests that take room look closer how much there is.
SIZE = "8G"
# argv: mount point, kind, how often, how often at most (what is made before is made for so many)
LOAD = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCKS 64

static void must(int ok) { if (!ok) { perror("load"); exit(1); } }
static void make(const char *name) { must(mknod(name, S_IFREG | 0600, 0) == 0); }

static const char *kind;
static int is(const char *what) { return !strcmp(kind, what); }

static int fd;
static char block[4096] = { 1 };

static long at(long i) { return i % BLOCKS * (long)sizeof block; }
static void overwrite(long i) { must(pwrite(fd, block, sizeof block, at(i)) == sizeof block); }

static void list(void)
{
	DIR *dir = opendir("dir");
	int names = 0;
	must(dir != NULL);
	while (readdir(dir))
		names++;
	must(names == 102);
	/* or the kernel tells it the next time */
	must(posix_fadvise(dirfd(dir), 0, 0, POSIX_FADV_DONTNEED) == 0);
	closedir(dir);
}

static void once(long i)
{
	char name[64];
	struct stat st;
	struct statx stx;
	snprintf(name, sizeof name, "n%ld", i);
	if (is("lookup-absent"))
		must(stat(name, &st) < 0 && errno == ENOENT);
	else if (is("lookup"))
		must(stat(name, &st) == 0);
	else if (is("getattr"))
		must(statx(AT_FDCWD, "file", AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &stx) == 0);
	else if (is("read")) {
		must(pread(fd, block, sizeof block, at(i)) == sizeof block);
		must(posix_fadvise(fd, at(i), sizeof block, POSIX_FADV_DONTNEED) == 0);
	} else if (is("overwrite")) {
		overwrite(i);
		must(sync_file_range(fd, at(i), sizeof block, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER) == 0);
	} else if (is("create-unlink")) {
		make(name);
		must(unlink(name) == 0);
	} else if (is("mkdir-rmdir"))
		must(mkdir(name, 0700) == 0 && rmdir(name) == 0);
	else if (is("rename"))
		must(rename(i % 2 ? "b" : "a", i % 2 ? "a" : "b") == 0);
	else if (is("rename-over-directories"))
		must(rename(i % 2 ? "dir/a" : "a", i % 2 ? "a" : "dir/a") == 0);
	else if (is("create-rename-over-file")) {
		make("new");
		must(rename("new", "file") == 0);
	} else if (is("symlink-unlink"))
		must(symlink("file", name) == 0 && unlink(name) == 0);
	else if (is("link-unlink"))
		must(link("file", name) == 0 && unlink(name) == 0);
	else if (is("chmod"))
		must(chmod("file", i % 2 ? 0600 : 0640) == 0);
	else if (is("utimens")) {
		struct timespec times[2] = { { i, 0 }, { i, 1 } };
		must(utimensat(AT_FDCWD, "file", times, 0) == 0);
	} else if (is("readdir"))
		list();
	else if (is("fsync")) {
		overwrite(i);
		must(fsync(fd) == 0);
	} else if (is("fdatasync")) {
		overwrite(i);
		must(fdatasync(fd) == 0);
	} else {
		fprintf(stderr, "load: no such kind: %s\n", kind);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	char name[64];
	must(argc == 5 && chdir(argv[1]) == 0);
	kind = argv[2];
	long n = atol(argv[3]), most = atol(argv[4]);
	fd = open("file", O_RDWR | O_CREAT, 0600);
	must(fd >= 0);
	for (long i = 0; i < BLOCKS; i++)
		overwrite(i);
	must(fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
	/* nothing is read ahead */
	must(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM) == 0);
	make("a");
	must(mkdir("dir", 0700) == 0);
	for (long i = 0; is("readdir") && i < 100; i++) {
		snprintf(name, sizeof name, "dir/name-%ld", i);
		make(name);
	}
	if (is("lookup")) {
		for (long i = 0; i < most; i++) {
			snprintf(name, sizeof name, "n%ld", i);
			make(name);
		}
		/* the kernel forgets names that nobody uses (shrink_dcache_sb in fs/super.c), the server nothing */
		must(mount(NULL, ".", NULL, MS_REMOUNT, NULL) == 0);
	}
	/* what the kernel asks once only */
	struct stat st;
	must(stat("asked", &st) < 0 && stat("file", &st) == 0);
	for (long i = 0; i < n; i++)
		once(i);
	return 0;
}
"""
KINDS = {
    "lookup-absent": "look-up of a name that is not there",
    "lookup": "look-up of a file",
    "getattr": "getattr",
    "read": "read of 4 KiB, in the server's cache",
    "overwrite": "overwrite of 4 KiB",
    "create-unlink": "mknod and unlink",
    "mkdir-rmdir": "mkdir and rmdir",
    "rename": "rename within a directory",
    "rename-over-directories": "rename to another directory",
    "create-rename-over-file": "mknod and rename over a file",
    "symlink-unlink": "symlink and unlink",
    "link-unlink": "link and unlink",
    "chmod": "chmod",
    "utimens": "utimensat",
    "readdir": "readdir of 100 names",
    "fsync": "overwrite of 4 KiB and fsync",
    "fdatasync": "overwrite of 4 KiB and fdatasync",
}


def requests(mnt):
    """How many requests of each operation code the server has been asked."""
    stats = subprocess.run([BINARY, "stats", "--json", mnt], check=True, capture_output=True, text=True)
    return {o["name"]: o["requests"] for o in json.loads(stats.stdout)["operations"]}


def run(work, load, kind, times, most, tool="cachegrind", out=None):
    """Instructions and requests of a mount on which it is done so many times."""
    with counted_server(work, tool=tool, out=out, size=SIZE) as counted:
        subprocess.run([load, counted.mnt, kind, str(times), str(most)], check=True)
        asked = requests(counted.mnt)
    return counted.instructions, asked


def count(work, load, kind):
    """Instructions for one more, and its requests by operation code."""
    few, many = FEWER.get(kind, (FEW, MANY))
    (first, asked_first), (last, asked_last) = (run(work, load, kind, times, many) for times in (few, many))
    per = {op: (n - asked_first.get(op, 0)) / (many - few) for op, n in asked_last.items()}
    # IOCTL: those of the question itself differ by none
    asked = {op: round(n, 2) for op, n in sorted(per.items()) if round(n, 2)}
    return (last - first) / (many - few), asked


def told(asked):
    return ", ".join(op + (f" ({n:g})" if n != 1 else "") for op, n in asked.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of these only: " + ", ".join(KINDS))
    parser.add_argument("--json", metavar="FILE", help="writes the counts there")
    parser.add_argument("--compare", metavar="FILE", help="with these counts")
    parser.add_argument("--rounds", type=int, default=1, help="medians of so many (1)")
    parser.add_argument("--profile", metavar="DIR", help="callgrind's profiles go there, nothing is counted")
    args = parser.parse_args()
    for kind in args.kinds:
        if kind not in KINDS:
            parser.error(f"no such kind: {kind}; there are " + ", ".join(KINDS))
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    kinds = args.kinds or list(KINDS)
    before = json.loads(Path(args.compare).read_text())["kinds"] if args.compare else {}
    results = {}
    with tempfile.TemporaryDirectory(prefix="braidfs-requests-", dir="/var/tmp") as work:
        work = Path(work)
        load = built(work / "load", LOAD)
        if args.profile:
            Path(args.profile).mkdir(parents=True, exist_ok=True)
            for kind in kinds:
                out = Path(args.profile).resolve() / f"{kind}.callgrind"
                most = FEWER.get(kind, (FEW, MANY))[1]
                run(work, load, kind, most, most, "callgrind", out)
                print(out, flush=True)
            return
        print("| operation | requests | instructions |" + (" before | |" if before else ""))
        print("|---|---|---:|" + ("---:|---:|" if before else ""))
        for kind in kinds:
            counts = [count(work, load, kind) for _ in range(args.rounds)]
            each = round(statistics.median(c[0] for c in counts))
            asked = counts[0][1]
            results[kind] = {"operation": KINDS[kind], "instructions": each, "requests": asked}
            line = f"| {KINDS[kind]} | {told(asked)} | {each:,} |"
            if kind in before:
                old = before[kind]["instructions"]
                line += f" {old:,} | {(each / old - 1) * 100:+.0f} % |"
            print(line, flush=True)
    if args.json:
        text = {"layout": 1, "options": OPTIONS, "size": SIZE, "rounds": args.rounds, "kinds": results}
        Path(args.json).write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
