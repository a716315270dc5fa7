#!/usr/bin/env python3
"""Lines of code by crate, without tests, comments and blank lines.

usage: count-lines.py [REVISION...]    one column for each; without one the working tree

What counts as a test: files below tests/ and benches/, modules of files that are there for tests alone (tests.rs, tests/, *_tests.rs,
testing crates as a whole: testkit, conflicts), and what stands behind #[cfg(test)].
"""

import re
import subprocess
import sys

TEST_CRATES = {"testkit", "conflicts"}
TEST_FILE = re.compile(r"/(tests|benches|examples)/|(^|[/_])tests\.rs$")
STRING = re.compile(r'r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\.[^\']*|[^\'\\])\'', re.S)
TEST_ITEM = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]")


def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True).stdout


def sources(revision):
    """(path, text) of every file of Rust below crates/."""
    if revision is None:
        for path in git("ls-files", "-co", "--exclude-standard", "crates").decode().splitlines():
            if path.endswith(".rs"):
                yield path, open(path, encoding="utf-8").read()
        return
    listed = git("ls-tree", "-r", "--name-only", revision, "crates").decode().splitlines()
    for path in listed:
        if path.endswith(".rs"):
            yield path, git("show", f"{revision}:{path}").decode()


def stripped(text):
    """The text without comments, its strings as empty ones, each over as many lines as before."""
    out, at = [], 0
    marks = re.compile(STRING.pattern + r"|//[^\n]*|/\*.*?\*/", re.S)
    for found in marks.finditer(text):
        out.append(text[at : found.start()])
        whole = found.group()
        # a line of a string counts, one of a comment does not
        out.append("\n".join(["" if whole.startswith("/") else '""'] * (whole.count("\n") + 1)))
        at = found.end()
    return "".join(out) + text[at:]


def without_tests(text):
    """Without the items behind #[cfg(test)]: to the end of their block, or to the semicolon."""
    while found := TEST_ITEM.search(text):
        depth, at = 0, found.end()
        while at < len(text):
            depth += (text[at] in "{[(") - (text[at] in "}])")
            if depth < 0:  # a field, the last one of its struct
                break
            at += 1
            if depth == 0 and text[at - 1] in "};":
                break
        text = text[: found.start()] + text[at:]
    return text


def count(revision):
    by_crate = {}
    for path, text in sources(revision):
        crate = path.split("/")[1]
        if crate in TEST_CRATES or TEST_FILE.search(path):
            continue
        code = without_tests(stripped(text))
        by_crate[crate] = by_crate.get(crate, 0) + sum(bool(line.strip()) for line in code.splitlines())
    return by_crate


def main(words):
    if any(w.startswith("-") for w in words):
        print(__doc__.strip())
        return 0
    columns = [(w, count(w)) for w in words] or [("now", count(None))]
    print("| crate | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for crate in sorted({c for _, found in columns for c in found}):
        print(f"| {crate} | " + " | ".join(f"{found.get(crate, 0):,}" for _, found in columns) + " |")
    print("| all | " + " | ".join(f"{sum(found.values()):,}" for _, found in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
