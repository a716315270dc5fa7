"""The list of what is known of the suite's tests on braidfs, and the verdict on a result by it.

The list has lines `TEST | WHAT | REASON`; TEST may be a pattern as in a shell. WHAT is
    fails           the test fails, REASON says why; once it passes, the line must go
    fails without C the same on a machine whose root does not have the capability C (as in a container), else no line
    notrun: TEXT    the suite does not run the test and says TEXT (a pattern); REASON says what is missing, and where
    skip            the test is not started
    with -o OPTIONS the test's volumes are mounted with these options; REASON says what it needs them for
Lines that begin with # and empty ones do not count.
"""

import dataclasses
import fnmatch
import re

# Verdicts; those of RED make the run fail.
PASS = "pass"
KNOWN = "known failure"
NOTRUN = "not run"
SKIPPED = "skipped"
FAIL = "FAIL"
PASSES_NOW = "PASSES NOW"
UNKNOWN_NOTRUN = "NOT RUN, WHY?"
RED = (FAIL, PASSES_NOW, UNKNOWN_NOTRUN)
VERDICTS = (PASS, KNOWN, NOTRUN, SKIPPED, *RED)

# Those that the list names: their numbers in linux/capability.h.
CAPABILITIES = {"CAP_SYS_RESOURCE": 24}


def capabilities():
    """Names of `CAPABILITIES` that this process has."""
    with open("/proc/self/status", encoding="ascii") as status:
        bits = int(re.search(r"^CapEff:\s*(\w+)", status.read(), re.M)[1], 16)
    return {name for name, number in CAPABILITIES.items() if bits >> number & 1}


@dataclasses.dataclass
class Line:
    test: str
    what: str
    text: str
    reason: str
    number: int
    used: bool = False


class Known:
    """The lines of the list; `Known.empty()` has none and takes every `not run` as it is."""

    def __init__(self, lines, strict=True):
        self.lines = lines
        self.strict = strict

    @classmethod
    def empty(cls):
        return cls([], strict=False)

    @classmethod
    def read(cls, path, has=frozenset()):
        """`has`: capabilities of this process. Raises ValueError with the line's number where one is not of the form
        above."""
        lines = []
        for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not raw.strip() or raw.startswith("#"):
                continue
            fields = [field.strip() for field in raw.split("|")]
            if len(fields) != 3 or not all(fields):
                raise ValueError(f"{path}:{number}: not of the form TEST | WHAT | REASON")
            form = re.fullmatch(r"(fails|skip|fails without (\w+)|(?:notrun:|with -o) (.+))", fields[1])
            if not form or form[2] and form[2] not in CAPABILITIES:
                forms = "fails, fails without C, notrun: TEXT, skip, with -o OPTIONS"
                raise ValueError(f"{path}:{number}: `{fields[1]}`: none of {forms}")
            if form[2] not in has:
                lines.append(Line(fields[0], form[1].split()[0].rstrip(":"), form[3] or "", fields[2], number))
        return cls(lines)

    def _find(self, test, what, text=""):
        for line in self.lines:
            if line.what == what and fnmatch.fnmatchcase(test, line.test):
                if what != "notrun" or fnmatch.fnmatchcase(text, line.text):
                    line.used = True
                    return line
        return None

    def skips(self, test):
        """The line that says not to start it, or None."""
        return self._find(test, "skip")

    def options(self, test):
        """The options to mount its volumes with, or ""."""
        line = self._find(test, "with")
        return line.text if line else ""

    def judge(self, test, outcome, text):
        """(verdict, reason) of a test that ended with `outcome` ("pass", "fail", "notrun") and the suite's `text`."""
        fails = self._find(test, "fails")
        if outcome == "notrun":
            line = self._find(test, "notrun", text)
            if line or not self.strict:
                return NOTRUN, line.reason if line else ""
            return UNKNOWN_NOTRUN, "no line of the list has this text"
        if outcome == "pass":
            if fails:
                return PASSES_NOW, f"take it off the list (line {fails.number}: {fails.reason})"
            return PASS, ""
        return (KNOWN, fails.reason) if fails else (FAIL, "")
