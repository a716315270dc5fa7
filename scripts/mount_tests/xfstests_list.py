"""The list scripts/peers/xfstests.known, and the verdicts on the suite's tests by it."""

import pathlib
import sys
import tempfile

from fslib import ROOT
from mount_tests.common import check, must, same

sys.path.insert(0, str(ROOT / "scripts/peers"))

import xfstests_known as known  # noqa: E402


def read(text, has=()):
    with tempfile.NamedTemporaryFile("w", suffix=".known") as file:
        file.write(text)
        file.flush()
        return known.Known.read(pathlib.Path(file.name), has)


@check
def xfstests_list(_volume, _top):
    """The list can be read, and names no test twice."""
    lines = known.Known.read(ROOT / "scripts/peers/xfstests.known").lines
    must(lines, "the list is empty")
    fails = [line.test for line in lines if line.what == "fails"]
    same(len(fails), len(set(fails)), "tests that are listed as failing, and how many different ones")


@check
def xfstests_verdicts(_volume, _top):
    """What is not on the list is red, and so is a listed failure that passes."""
    listed = read("# head\n\ngeneric/001 | fails | why\n* | notrun: no *clone* | none here\ngeneric/9* | skip | long\n")
    for test, outcome, text, want in [
        ("generic/001", "fail", "diff", known.KNOWN),
        ("generic/001", "pass", "", known.PASSES_NOW),
        ("generic/002", "fail", "diff", known.FAIL),
        ("generic/002", "pass", "", known.PASS),
        ("generic/001", "notrun", "no reflink clone here", known.NOTRUN),
        ("generic/002", "notrun", "no clone", known.NOTRUN),
        ("generic/002", "notrun", "no such user", known.UNKNOWN_NOTRUN),
    ]:
        same(listed.judge(test, outcome, text)[0], want, f"verdict on {test}, {outcome}, {text!r}")
    text = "generic/003 | fails without CAP_SYS_RESOURCE | limits\n"
    same(read(text).judge("generic/003", "fail", "")[0], known.KNOWN, "verdict without the capability")
    same(read(text, {"CAP_SYS_RESOURCE"}).judge("generic/003", "fail", "")[0], known.FAIL, "verdict with it")
    must(listed.skips("generic/912") and not listed.skips("generic/001"), "which tests are not started")
    text = "generic/07? | with -o fileflags,noatime | flags\n"
    same(read(text).options("generic/079"), "fileflags,noatime", "options of a test that has some")
    same(read(text).options("generic/080"), "", "options of another")
    for verdict in (known.FAIL, known.PASSES_NOW, known.UNKNOWN_NOTRUN):
        must(verdict in known.RED, f"{verdict} is not red")
    for verdict in (known.PASS, known.KNOWN, known.NOTRUN, known.SKIPPED):
        must(verdict not in known.RED, f"{verdict} is red")
    unnamed = ("generic/001 | fails", "generic/001 | fails | ", "generic/001 | passes | x", "* | notrun: | x")
    for bad in (*unnamed, "* | fails without CAP_X | x"):
        try:
            read(bad)
        except ValueError as error:
            must(":1:" in str(error), f"{error} does not name the line")
        else:
            must(False, f"{bad!r} was taken")
