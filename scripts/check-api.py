#!/usr/bin/env python3
"""The public interfaces are what their lists say: each item of the crates braidfs-fs and braidfs with its signature, and of
braidfs.h. A change of one is a line in a list, which a review sees; `--bless` writes the lists anew (make api BLESS=1).

Read are the sources as rustfmt lays them out, so that it takes no nightly compiler and a part of a second. What is named is
what `pub use` and `pub mod` of a crate's lib.rs name, less what is `#[doc(hidden)]`; what comes from the crates below is
followed there (`pub use braidfs_device as device`, a whole crate, is a line of its own). `make semver` looks deeper, at types
and traits, and needs cargo-semver-checks."""

import argparse
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATES = {"braidfs": "engine", "braidfs_fs": "fs", "braidfs_format": "format", "braidfs_device": "device", "braidfs_store": "store"}
ITEM = re.compile(r"pub (?:const |unsafe |async )*(struct|enum|fn|const|type|trait|static) (\w+)")


def cut(signature):
    """A signature up to its body, on one line."""
    text, depth = " ".join(signature.split()).replace("<<", "\0"), 0
    for at, c in enumerate(text):
        depth += (c in "([<") - (c in ")]" or (c == ">" and text[at - 1] not in "-="))
        if depth == 0 and c in "{;":
            text = text[:at]
            break
    text = text.replace("\0", "<<")
    text = re.sub(r"([(,] ?)mut ", r"\1", text)  # of the callee alone
    return text.strip().replace("( ", "(").replace(", )", ")").replace(",)", ")")


def parts(body):
    """Fields or variants of a body, split at commas that stand in no bracket."""
    found, depth, start = [], 0, 0
    for at, c in enumerate(body):
        depth += (c in "([{<") - (c in ")]}" or (c == ">" and body[at - 1] not in "-="))
        if depth == 0 and c == ",":
            found.append(body[start:at])
            start = at + 1
    found.append(body[start:])
    return [" ".join(p.split()).replace(", }", " }") for p in found if p.strip()]


def without_attributes(body):
    return re.sub(r"#\[(?:[^\[\]]|\[[^\]]*\])*\] ?", "", body)


class Source:
    """Items and impl blocks at the outermost level of a crate's files."""

    def __init__(self, crate):
        self.items, self.impls, self.macros = {}, {}, []
        self.lib = ""
        for path in sorted((ROOT / "crates" / crate / "src").rglob("*.rs")):
            if "tests" in path.stem or "tests" in path.parts:
                continue
            lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("//")]
            if path.name == "lib.rs":
                self.lib = "\n".join(lines)
            self.read(path, lines)

    def read(self, path, lines):
        attributes, at = [], 0
        while at < len(lines):
            line = lines[at]
            end = at
            if line.startswith("#["):
                while not lines[end].endswith("]"):
                    end += 1
                attributes.append(" ".join(lines[at : end + 1]))
            elif line and line[0] not in " })":
                while not (lines[end].startswith("}") or (end == at and re.search(r"[;}]$", lines[at])) or lines[end] == ");"
                           or (end > at and re.match(r"\)?\]?.*;$", lines[end]) and lines[end][0] != " ")):
                    end += 1
                block, hidden = "\n".join(lines[at : end + 1]), any(a.startswith(("#[doc(hidden)", "#[cfg(test)")) for a in attributes)
                if not hidden:
                    if m := ITEM.match(block):
                        self.items.setdefault(m[2], (path, m[1], attributes, block))
                    elif m := re.match(r"(?:unsafe )?impl\b", block):
                        head = cut(block)
                        of = re.sub(r"^(?:unsafe )?impl(?:<(?:[^<>]|<[^<>]*>)*>)? ", "", head)
                        name = re.match(r"&?(?:'\w+ )?([\w:]+)", of.split(" for ")[-1])
                        foreign = re.match(r"From<&?(\w+)(?:<.*>)?> for (?:\w+::)+\w+$", of)
                        if foreign:
                            self.impls.setdefault(foreign[1], []).append((head, block, True))
                        elif name:
                            self.impls.setdefault(name[1], []).append((head, block, " for " in of))
                attributes = []
            at = end + 1

    def describe(self, name):
        """Lines of an item: fields, variants, methods, traits."""
        if name not in self.items:
            return None
        _, kind, attributes, block = self.items[name]
        derived = sorted(d.strip() for a in attributes for m in re.findall(r"derive\(([^)]*)\)", a) for d in m.split(",") if d.strip())
        marks = [m for m in ("non_exhaustive", "must_use") if any(re.match(rf"#\[{m}\b", a) for a in attributes)]
        head = cut(block) if kind in ("fn", "const", "static", "type", "trait") else re.split(r"[{;]", " ".join(block.split()))[0].strip()
        out = [head + "".join(f" #[{m}]" for m in marks) + (f": {', '.join(derived)}" if derived else "")]
        body = re.search(r"\{(.*)\}", block, re.S)
        if kind in ("struct", "enum") and body:
            fields = [without_attributes(p).strip() for p in parts(body[1]) if "#[doc(hidden)]" not in p]
            if kind == "enum":
                out += [f"  {name}::{f}" for f in fields]
            else:
                out += [f"  {name}.{f.removeprefix('pub ')}" for f in fields if f.startswith("pub ")]
                if len(fields) != len(parts(body[1])) or any(not f.startswith("pub ") for f in fields):
                    out.append(f"  {name}: and fields that are not public")
        elif kind == "trait" and body:
            out += [f"  {name}::{cut(m)}" for m in re.findall(r"^    (fn .*?(?:\{|;))", block, re.M | re.S)]
        traits, methods = [], []
        for head, block, of_trait in self.impls.get(name, []):
            if of_trait:
                traits.append(f"  {head}")
                continue
            hidden = False
            lines = block.splitlines()
            for at, line in enumerate(lines):
                if re.match(r"    #\[(?:doc\(hidden\)|cfg\(test\))", line):
                    hidden = True
                elif m := re.match(r"    (pub (?:const |unsafe |async )*(?:fn|const) .*)", line):
                    text, end = m[1], at
                    while not re.search(r"[{;]", cut_line(text)):
                        end += 1
                        text += " " + lines[end].strip()
                    if not hidden:
                        methods.append(f"  {name}::{cut(text).removeprefix('pub ')}")
                    hidden = False
                elif not re.match(r"    #\[|^$", line):
                    hidden = False
        return out + sorted(methods) + sorted(traits)


def cut_line(text):
    """The line from where a signature may end: behind its parameters."""
    at = text.find("(")
    if at < 0:
        return text
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] in "([") - (text[end] in ")]")
        if depth == 0:
            return text[end:]
    return ""


def uses(text):
    """(path, name) of all that the `pub use` of a file name; what is hidden or for tests is left out."""
    for m in re.finditer(r"((?:^#\[[^\n]*\n)*)^pub use ([^;]+);", text, re.M):
        if "doc(hidden)" in m[1] or "cfg(" in m[1]:
            continue
        yield from expand(" ".join(m[2].split()))


def expand(tree):
    m = re.match(r"(.*?)\{(.*)\}$", tree)
    if not m:
        yield tree
        return
    for part in parts(m[2]):
        for path in expand(part):
            yield m[1] + path


def rust(crate, sources):
    """The lines of a crate."""
    source = sources[crate]
    out = {}
    todo = list(uses(source.lib))
    for path in list(todo):
        if path.endswith("::*"):
            module = path.split("::")[-2]
            file = ROOT / "crates" / CRATES[crate] / "src" / f"{module}.rs"
            todo.remove(path)
            text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("//"))
            todo += uses(text)
            todo += [f"{module}::{name}" for name, item in source.items.items() if item[0] == file]
    for path in todo:
        path, _, alias = path.partition(" as ")
        names = path.split("::")
        alias = alias or names[-1]
        first = names[0]
        if len(names) == 1 or (crate == "braidfs_fs" and first in CRATES):
            out[alias] = [f"use {path}" + (f" as {alias}" if alias != names[-1] else "")]
            continue
        lines = sources.get(first, source).describe(names[-1])
        out[alias] = lines or [f"use {path}"]
    for m in re.finditer(r"((?:^#\[[^\n]*\n)*)^pub mod (\w+);", source.lib, re.M):
        if "doc(hidden)" not in m[1]:
            file = ROOT / "crates" / CRATES[crate] / "src" / f"{m[2]}.rs"
            for name, item in source.items.items():
                if item[0] == file:
                    out[f"{m[2]}::{name}"] = [f"mod {m[2]}: {line.strip()}" for line in source.describe(name)]
    return [line for name in sorted(out) for line in out[name]]


def header():
    """Constants, structures and functions of braidfs.h."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include/braidfs.h").read_text(), flags=re.S)
    out = []
    for m in re.finditer(r"^#define (\w+)[ \t]+(\S.*?)\s*$", text, re.M):
        out.append(f"#define {m[1]} {m[2]}")
    text = re.sub(r"^#.*$|^extern \"C\" \{$|^\}$", "", text, flags=re.M)
    for m in re.finditer(r"struct (\w+) \{(.*?)\};", text, re.S):
        out += [f"struct {m[1]}: {' '.join(field.split())}" for field in m[2].split(";") if field.strip()]
    text = re.sub(r"struct \w+ \{.*?\};", "", text, flags=re.S)
    return out + sorted(" ".join(d.split()) for d in text.split(";") if d.strip())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bless", action="store_true", help="write the lists as the sources are")
    arguments = parser.parse_args()
    sources = {name: Source(place) for name, place in CRATES.items()}
    lists = {"crates/fs/api.txt": rust("braidfs_fs", sources), "crates/engine/api.txt": rust("braidfs", sources), "crates/capi/api.txt": header()}
    failed = 0
    for place, lines in lists.items():
        path, now = ROOT / place, "\n".join(lines) + "\n"
        if arguments.bless:
            path.write_text(now)
            continue
        before = path.read_text()
        if before != now:
            failed = 1
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), now.splitlines(True), place, "the sources"))
    if failed:
        print("the interface is not what its list says: where that is meant, `make api BLESS=1`; what goes, or changes, breaks programs", file=sys.stderr)
    elif not arguments.bless:
        print("interfaces: " + ", ".join(f"{place} {len(lines)} lines" for place, lines in lists.items()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
