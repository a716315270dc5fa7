#!/usr/bin/env python3
"""make site: the book of docs/ by mdbook, in target/site. Links to files of the repository that are no pages of it lead to the
repository then. Fails where a link or a picture leads nowhere."""

import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE = ROOT / "target" / "site"
LINK = re.compile(r'(?P<before>\b(?:href|src)=")(?P<link>[^"]*)(?P<after>")')


def in_repository(page, link):
    """The file of the repository that a link out of the site means, as it lies there."""
    path, _, anchor = link.partition("#")
    # pages of the site lie as those of docs/ do
    there = (ROOT / "docs" / page.relative_to(SITE).parent / path).resolve()
    if not there.exists() and there.suffix == ".html":
        there = there.with_suffix(".md")
    if there.exists() and ROOT in there.parents and (ROOT / "docs") not in there.parents:
        return there.relative_to(ROOT), anchor
    return None


def main():
    subprocess.run(["mdbook", "build"], cwd=ROOT, check=True)
    repository = tomllib.loads((ROOT / "book.toml").read_text())["output"]["html"]["git-repository-url"]
    pages = {p: p.read_text() for p in SITE.rglob("*.html")}
    found = []
    for page, text in pages.items():

        def mended(m, page=page):
            link = m["link"]
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|/", link):
                return m[0]
            there = (page.parent / path).resolve() if path else page
            if SITE in there.parents and there.exists():
                if anchor and there in pages and f'id="{anchor}"' not in pages[there]:
                    found.append(f"{page.relative_to(SITE)}: {link}: no such heading")
                return m[0]
            outside = in_repository(page, link)
            if not outside:
                found.append(f"{page.relative_to(SITE)}: {link}: leads nowhere")
                return m[0]
            file, anchor = outside
            return f"{m['before']}{repository}/blob/main/{file}{'#' + anchor if anchor else ''}{m['after']}"

        # all pages on one: its links are those of the pages, its headings have other names
        if page.name != "print.html":
            page.write_text(LINK.sub(mended, text))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
