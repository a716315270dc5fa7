#!/usr/bin/env bash
# xfstests.sh SOURCE [TESTS]: the generic tests of a built checkout of xfstests on a braidfs; `xfstests.sh --help` says
# the rest, and `make xfstests XFSTESTS=SOURCE` calls it. Installs the packages whose commands the tests call.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
packages=()
want() { command -v "$1" >/dev/null 2>&1 || packages+=("$2"); } # COMMAND PACKAGE
PATH=$PATH:/usr/sbin:/sbin
if [ "$(id -u)" = 0 ]; then
    want getfattr attr
    want setfacl acl
    want bc bc
    want fio fio
    want gawk gawk
    want killall psmisc
    want perl perl
    want quota quota
    want setcap libcap2-bin
    want sqlite3 sqlite3
    want uuidgen uuid-runtime
    want xfs_io xfsprogs
    [ ${#packages[@]} -eq 0 ] || "$here/../deps.sh" "${packages[@]}"
fi
exec python3 "$here/xfstests.py" "$@"
