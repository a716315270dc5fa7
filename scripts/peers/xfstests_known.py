"""The list of what is known of the suite's tests on braidfs, and the verdict on a result by it.

The list has lines `TEST | WHAT | REASON`; TEST may be a pattern as in a shell. WHAT is
    fails           the test fails, REASON says why; once it passes, the line must go
    notrun: TEXT    the suite does not run the test and says TEXT (a pattern); REASON says what is missing, and where
    skip            the test is not started
Lines that begin with # and empty ones do not count.
"""

import dataclasses
import fnmatch

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
    def read(cls, path):
        """Raises ValueError with the line's number where one is not of the form above."""
        lines = []
        for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not raw.strip() or raw.startswith("#"):
                continue
            fields = [field.strip() for field in raw.split("|")]
            if len(fields) != 3 or not all(fields):
                raise ValueError(f"{path}:{number}: not of the form TEST | WHAT | REASON")
            what, _, text = fields[1].partition(":")
            text = text.strip()
            if what not in ("fails", "notrun", "skip") or (what == "notrun") != bool(text):
                raise ValueError(f"{path}:{number}: `{fields[1]}` is none of fails, notrun: TEXT, skip")
            lines.append(Line(fields[0], what, text, fields[2], number))
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
