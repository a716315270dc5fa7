#!/usr/bin/env python3
"""No circle of imports between files of the engine, tests aside (docs/architecture.md).

A file uses another where a path in it (`use`, or written out: `crate::a::b`, `super::b`) leads there; a name that a module
hands on (`pub use`) leads to where it is declared. A module's declaration of its parts (`mod b;`) is no use of them, nor is
a method that another file adds to a type. Prints the circles, and exits with 1 where there is one.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates/engine/src"


def modules():
    """Module path (a tuple) -> file, of the files that are no tests."""
    found = {}
    for file in sorted(ROOT.rglob("*.rs")):
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if "tests" in parts or parts[-1] == "testdev":
            continue
        if parts[-1] in ("mod", "lib"):
            parts.pop()
        found[tuple(parts)] = file
    return found


def code(file):
    """The text without comments, and without what is compiled for tests only (each a block or an item to the next `;`)."""
    text = re.sub(r"//[^\n]*", "", file.read_text())
    out, at = [], 0
    for m in re.finditer(r"#\[cfg\((?:all\()?test[^\]]*\]\s*", text):
        if m.start() < at:
            continue
        out.append(text[at : m.start()])
        at = m.end()
        brace, semicolon = text.find("{", at), text.find(";", at)
        if semicolon != -1 and (brace == -1 or semicolon < brace):
            at = semicolon + 1
            continue
        depth = 0
        for at in range(brace, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                at += 1
                break
    return "".join(out) + text[at:]


def leaves(tree, prefix=()):
    """The paths of a `use` tree, as tuples; (path, name under which it is known)."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace == -1:
        path, _, alias = tree.partition(" as ")
        parts = prefix + tuple(p.strip() for p in path.split("::") if p.strip())
        yield parts, alias.strip() or parts[-1]
        return
    prefix += tuple(p for p in tree[:brace].strip().split("::") if p)
    depth, start = 0, brace + 1
    for i in range(brace, len(tree)):
        depth += {"{": 1, "}": -1}.get(tree[i], 0)
        if (tree[i] == "," and depth == 1) or depth == 0:
            if tree[start:i].strip():
                yield from leaves(tree[start:i], prefix)
            start = i + 1
        if depth == 0:
            return


def absolute(path, module, known):
    """A path without `crate`, `super`, `self`; None where it leads out of the engine."""
    path, base = list(path), None
    if path[0] == "crate":
        base, path = (), path[1:]
    elif path[0] in ("self", "super"):
        base = module
        while path and path[0] in ("self", "super"):
            base, path = (base[:-1] if path[0] == "super" else base), path[1:]
    elif module + (path[0],) in known:
        base = module
    return None if base is None else base + tuple(path)


def graph():
    """Module -> the modules that it uses."""
    known = modules()
    texts = {m: code(f) for m, f in known.items()}
    exports = {m: {} for m in known}
    for m, text in texts.items():
        for use in re.finditer(r"\bpub(?:\([a-z]+\))? use ([^;]+);", text):
            for path, name in leaves(use.group(1)):
                exports[m][name] = absolute(path, m, known)

    def home(path):
        """The module in which what a path names is declared."""
        for n in range(len(path), -1, -1):
            module, name = path[:n], path[n : n + 1]
            if module in known:
                target = exports[module].get(name[0]) if name else None
                return home(target) if target else module
        return None

    uses = {m: set() for m in known}
    for m, text in texts.items():
        plain = re.sub(r"(?<!\w)(?:pub(?:\([a-z]+\))? )?use [^;]+;", "", text)
        uses_of = re.finditer(r"(\bpub(?:\([a-z]+\))? )?\buse ([^;]+);", text)
        leaf = [(u.group(1), path, name) for u in uses_of for path, name in leaves(u.group(2))]
        # what is handed on counts where it is used here as well
        paths = [path for public, path, name in leaf if not public or re.search(rf"\b{re.escape(name)}\b", plain)]
        paths += [tuple(p.split("::")) for p in re.findall(r"(?<![:\w])[a-z_]\w*(?:::\w+)+", plain)]
        for path in paths:
            target = absolute(path, m, known)
            # the root only hands on
            if target and home(target) not in (None, m, ()):
                uses[m].add(home(target))
    return uses


def circles(uses):
    """Strongly connected components of more than one module (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(m):
        index[m] = low[m] = len(index)
        stack.append(m)
        for n in sorted(uses[m]):
            if n not in index:
                visit(n)
                low[m] = min(low[m], low[n])
            elif n in stack:
                low[m] = min(low[m], index[n])
        if low[m] == index[m]:
            part = []
            while not part or part[-1] != m:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for m in sorted(uses):
        if m not in index:
            visit(m)
    return found


def main():
    uses = graph()
    found = [{"::".join(m): {"::".join(n) for n in uses[m] if n in part} for m in part} for part in circles(uses)]
    for part in found:
        print("circle of imports:")
        for m, back in part.items():
            print(f"  {m} uses {', '.join(sorted(back))}")
    if not found:
        print(f"circles: {len(uses)} files, none")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
