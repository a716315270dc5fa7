#!/usr/bin/env bash
# Checks for the commands that the build, the tests and the demo use. Missing ones are installed by apt-get when this
# runs as root, else one line says what to install. With arguments: those Debian packages instead.
set -euo pipefail

packages=()
if [ $# -gt 0 ]; then
    packages=("$@")
else
    want() { command -v "$1" >/dev/null 2>&1 || packages+=("$2"); } # COMMAND PACKAGE
    # root's commands may lie outside of a user's PATH
    PATH=$PATH:/usr/sbin:/sbin
    want gcc gcc
    want make make
    want git git
    want python3 python3
    want mkfs.ext4 e2fsprogs
    want fusermount3 fuse3
    want losetup mount
    want setfacl acl
    want udevadm udev
    want file file
    want valgrind valgrind
    want nbdkit nbdkit
    want find findutils
    [ -x /usr/bin/time ] || packages+=(time) # not the shell's
    python3 -c 'import sqlite3' 2>/dev/null || packages+=(libpython3-stdlib)
fi
command -v cargo >/dev/null 2>&1 || { echo "deps: cargo is missing: install Rust (https://rustup.rs)" >&2; exit 1; }
[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "deps: installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    install() { apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null; }
    install 2>/dev/null || { apt-get update -qq && install; }
else
    echo "deps: please install these packages: ${packages[*]}" >&2
    exit 1
fi
