#!/usr/bin/env python3
"""Do the links between pages lead anywhere? Each relative link of README.md, docs/, python/README.md and contrib/ names a file that is
there, and a heading of it; docs/SUMMARY.md, the site's table of contents, lists every page of docs/ once; what is quoted as
`braidfs WORD` is a command of crates/cli/src/main.rs; the functions of "Paths by function" in docs/architecture.md are in the
files that they are said to be in; each Rust file that a page names is there."""

import itertools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def text_of(page):
    """The page without code."""
    return re.sub(r"`[^`\n]*`", lambda m: re.sub(r"[\[\]()]", " ", m[0]), FENCE.sub("", page.read_text()))


def anchors(page):
    """Names of its headings, as GitHub and mdBook make them."""
    seen = {}
    names = set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text()))
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", FENCE.sub("", page.read_text()), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        n = seen.get(name, 0)
        seen[name] = n + 1
        names.add(f"{name}-{n}" if n else name)
    return names


def broken(page):
    """What is wrong with the page's links."""
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            yield f"{target}: no such heading"


def commands():
    """Names of the commands that there are."""
    source = (ROOT / "crates/cli/src/main.rs").read_text()
    variants = re.search(r"^enum Command \{$(.*?)^\}$", source, re.M | re.S)[1]
    names = re.findall(r"^    ([A-Z]\w*)[({,]", variants, re.M)
    return {re.sub(r"(?<=.)(?=[A-Z])", "-", name).lower() for name in names} | {"help"}


def no_commands(page, known):
    """Words that stand for commands, and are none. A word in capitals, or with an ellipsis, stands for any."""
    for word in re.findall(r"(?:`|^    (?:sudo )?|&& )braidfs ([a-z][a-z-]*)", page.read_text(), re.M):
        if word not in known:
            yield f"`braidfs {word}`: no such command"


def sources():
    """The Rust files, each as its path behind a slash."""
    return [f"/{f.relative_to(ROOT)}" for top in ("crates", "fuzz") for f in (ROOT / top).rglob("*.rs") if "target" not in f.parts]


def no_files(page, files):
    """Rust files that a page names, whole or by the end of their paths, and that are none."""
    for name in sorted(set(re.findall(r"`([\w/.-]+\.rs)`", page.read_text()))):
        if not any(f.endswith(f"/{name}") for f in files):
            yield f"`{name}`: no such file"


def no_functions():
    """Functions of "Paths by function" that are not in the file named before them."""
    page = DOCS / "architecture.md"
    paths = re.search(r"^## Paths by function$(.*?)^## ", page.read_text(), re.M | re.S)[1]
    source, file = "", ""
    for name in re.findall(r"`([\w/-]+\.rs|\w+)`", paths):
        if name.endswith(".rs"):
            file = next((f for f in [ROOT / "crates" / name, ROOT / "crates/engine/src" / name] if f.exists()), None)
            source = file.read_text() if file else ""
            if not file:
                yield f"{page.relative_to(ROOT)}: `{name}`: no such file"
        elif file and not re.search(rf"\bfn {name}\b", source):
            yield f"{page.relative_to(ROOT)}: no function `{name}` in {file.relative_to(ROOT)}"


def main():
    known, files = commands(), sources()
    pages = sorted(DOCS.rglob("*.md"))
    found = [
        f"{page.relative_to(ROOT)}: {what}"
        for page in [ROOT / "README.md", ROOT / "python/README.md", ROOT / "contrib/sqlite/README.md", *pages]
        for what in itertools.chain(broken(page), no_commands(page, known), no_files(page, files))
    ]
    found += no_functions()
    listed = [str(DOCS / link) for link in LINK.findall((DOCS / "SUMMARY.md").read_text())]
    for page in pages:
        if page.name != "SUMMARY.md" and listed.count(str(page)) != 1:
            found.append(f"docs/SUMMARY.md: lists {page.relative_to(DOCS)} {listed.count(str(page))} times")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
