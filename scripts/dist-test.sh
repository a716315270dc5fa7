#!/usr/bin/env bash
# dist-test.sh TARBALL: what somebody does who has the release tarball and cargo: unpacks it, installs the command with
# `cargo install`, and makes, fills and checks a volume with it. Fetches crates unless cargo has them.
set -euo pipefail
tarball=$(realpath "$1")
target=$(realpath "${CARGO_TARGET_DIR:-target}")
work=$(mktemp -d "$target/dist-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
tar -xzf "$tarball"
cd braidfs-*/
if [ -e .git ]; then echo "dist-test: the tarball has a .git" >&2; exit 1; fi
CARGO_TARGET_DIR=$target cargo install --quiet --path crates/cli --locked --root "$work/installed"
cd "$work"
PATH=$work/installed/bin:$PATH
if [ "$(command -v braidfs)" != "$work/installed/bin/braidfs" ]; then echo "dist-test: no braidfs was installed" >&2; exit 1; fi
braidfs --version
braidfs mkfs --quiet --size 64M disk.img
braidfs cp -r "$work"/braidfs-*/docs disk.img:/
braidfs fsck -f -n disk.img
braidfs resize --quiet disk.img 96M
braidfs fsck -f -n disk.img
[ "$(braidfs cat disk.img /docs/README.md)" = "$(<"$(echo "$work"/braidfs-*/docs/README.md)")" ]
echo "dist-test: passed"
