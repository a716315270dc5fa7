#!/usr/bin/env bash
# Checks for the commands that the build, the tests and the demo use. Missing ones are installed by apt-get when this
# runs as root, else one line says what to install. With arguments: those Debian packages instead; --tests: those, too, that
# only some tests need, which say that they skip without; --demo: what the demo needs, no more.
set -euo pipefail

packages=()
optional=()
if [ "${1:-}" != --tests ] && [ "${1:-}" != --demo ] && [ $# -gt 0 ]; then
    packages=("$@")
else
    want() { command -v "$1" >/dev/null 2>&1 || packages+=("$2"); } # COMMAND PACKAGE
    # root's commands may lie outside of a user's PATH
    PATH=$PATH:/usr/sbin:/sbin
    want gcc gcc
    # which gcc only recommends, and cannot link without
    gcc -E -x c - <<<'#include <stdlib.h>' >/dev/null 2>&1 || packages+=(libc6-dev)
    want make make
    want git git
    want python3 python3
    # only root can mount an ext4, and only others need fusermount3
    if [ "${1:-}" != --demo ] || [ "$(id -u)" = 0 ]; then
        want mkfs.ext4 e2fsprogs
        want losetup mount
    fi
    if [ "${1:-}" != --demo ] || [ "$(id -u)" != 0 ]; then
        want fusermount3 fuse3
    fi
    if [ "${1:-}" != --demo ]; then
        want setfacl acl
        want udevadm udev
        want file file
        want valgrind valgrind
        want nbdkit nbdkit
        [ -x /usr/bin/time ] || packages+=(time) # not the shell's
    fi
    python3 -c 'import sqlite3' 2>/dev/null || packages+=(libpython3-stdlib)
    if [ "${1:-}" = --tests ]; then
        may() { command -v "$1" >/dev/null 2>&1 || optional+=("$2"); }
        may g++ g++
        may pkg-config pkg-config
        may systemd-analyze systemd
        may man man-db
        may groff groff-base
        may zsh zsh
        may fish fish
        may debootstrap debootstrap
        may dpkg-shlibdeps dpkg-dev
        [ -e /usr/include/sqlite3ext.h ] || optional+=(libsqlite3-dev)
        python3 -c 'import venv, ensurepip' 2>/dev/null || optional+=(python3-venv)
    fi
fi
command -v cargo >/dev/null 2>&1 || { echo "deps: cargo is missing: install Rust (https://rustup.rs)" >&2; exit 1; }
install() { apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    if [ ${#packages[@]} -gt 0 ]; then
        echo "deps: installing ${packages[*]}"
        install "${packages[@]}" 2>/dev/null || { apt-get update -qq && install "${packages[@]}"; }
    fi
    if [ ${#optional[@]} -gt 0 ]; then
        echo "deps: installing ${optional[*]}"
        install "${optional[@]}" 2>/dev/null || { apt-get update -qq && install "${optional[@]}"; } ||
            echo "deps: ${optional[*]} cannot be installed: some tests will say that they skip" >&2
    fi
else
    [ ${#optional[@]} -eq 0 ] || echo "deps: with these packages more tests run: ${optional[*]}" >&2
    [ ${#packages[@]} -eq 0 ] || { echo "deps: please install these packages: ${packages[*]}" >&2; exit 1; }
fi
