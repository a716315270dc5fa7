#!/usr/bin/env python3
"""What tests skipped, and why: each part of `make test` notes it in the file that BRAIDFS_SKIPS names, and the end of it lists all.

usage: skipped.py note WHAT WHY    notes it, where there is such a file
       skipped.py list             prints all that was noted, and removes the file

With BRAIDFS_NO_SKIP=1 what is skipped is a failure: `note` then ends with exit code 1, and so does `list` where something was noted.
"""

import collections
import os
import pathlib
import sys


def is_failure():
    """Whether nothing may be skipped."""
    return os.environ.get("BRAIDFS_NO_SKIP", "") not in ("", "0")


def note(what, why):
    """Keeps it for the list. Several processes may do so at once."""
    if path := os.environ.get("BRAIDFS_SKIPS"):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, f"{what}: {' '.join(why.split())}\n".encode())
        os.close(file)


def main(words):
    if len(words) == 3 and words[0] == "note":
        note(*words[1:])
        return int(is_failure())
    if words != ["list"]:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    path = pathlib.Path(os.environ.get("BRAIDFS_SKIPS") or "/dev/null")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if not lines:
        print("Nothing was skipped.")
        return 0
    print(f"*** SKIPPED, {len(lines)} in all (with BRAIDFS_NO_SKIP=1 that is a failure):")
    for line, times in collections.Counter(lines).items():
        print(f"***   {line}" + (f" ({times} times)" if times > 1 else ""))
    path.unlink()
    return int(is_failure())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
