#!/usr/bin/env bash
# The Python package as its users get it: a wheel with the C library LIBRARY in it, installed into a virtual environment
# with fsspec, pandas and pyarrow (pip fetches them), its tests there, and mypy.
#
# usage: python-tests.sh LIBRARY [--or-skip]    --or-skip: where pip can fetch nothing, that is said, and is no failure
# (with BRAIDFS_NO_SKIP=1 it is)
set -euo pipefail
cd "$(dirname "$0")/.."
library=$(realpath "$1")
target=$(realpath "${CARGO_TARGET_DIR:-target}")
venv=$target/venv
tools=('setuptools>=77' pytest fsspec pandas pyarrow mypy)

unfit() { [ ! -x "$venv/bin/pip" ] || [ "$(readlink -f "$venv/bin/python")" != "$(readlink -f "$(command -v python3)")" ]; }
if unfit; then rm -rf "$venv" && python3 -m venv "$venv"; fi
if ! fetched=$("$venv/bin/pip" install -q --disable-pip-version-check --no-input "${tools[@]}" 2>&1); then
    echo "$fetched" | tail -3 >&2
    if [ "${2:-}" = --or-skip ]; then
        echo "SKIPPED: the tests of the wheel, fsspec and Parquet: pip cannot fetch ${tools[*]}" >&2
        scripts/skipped.py note "the tests of the wheel, fsspec and Parquet" "pip cannot fetch ${tools[*]}"
        exit
    fi
    echo "python-tests: pip cannot fetch ${tools[*]}" >&2
    exit 1
fi
rm -rf "$target/wheel"
mkdir -p "$target/wheel"
cp -r python "$target/wheel/source"
install -m 755 -s "$library" "$target/wheel/source/braidfs/libbraidfs.so"
"$venv/bin/pip" wheel -q --no-deps --no-build-isolation -w "$target/wheel" "$target/wheel/source"
"$venv/bin/pip" install -q --force-reinstall --no-deps "$target"/wheel/braidfs-*.whl
tests=$PWD/python/tests
cd "$target"
"$venv/bin/python" -m pytest -q -p no:cacheprovider "$tests"
"$venv/bin/mypy" --strict --allow-untyped-calls --ignore-missing-imports -p braidfs
