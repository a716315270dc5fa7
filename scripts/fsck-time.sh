#!/usr/bin/env bash
# Times fsck of a braidfs beside e2fsck -f of an ext4 with the same tree, and the memory of both. Run it on a quiet machine.
# usage: scripts/fsck-time.sh [--damaged] [FILES]   (default 1000000; as root, for the ext4 and the mounts)
# --damaged: also with a block of inodes zeroed on each, for which both have to look closer (nothing is repaired)
# BRAIDFS_BIN: this binary; BRAIDFS_TMP: where the images go (default /var/tmp; about 8 KiB per file and file system)
set -euo pipefail
cd "$(dirname "$0")/.."
damaged=
if [ "${1:-}" = --damaged ]; then
    damaged=yes
    shift
fi
files=${1:-1000000}
bin=${BRAIDFS_BIN:-${CARGO_TARGET_DIR:-target}/release/braidfs}
[ -x "$bin" ] || { echo "fsck-time: $bin: no such program: run make build" >&2; exit 1; }
[ -x /usr/bin/time ] || { echo "fsck-time: /usr/bin/time is missing: apt-get install time" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "fsck-time: must be root: mounts an ext4 image" >&2; exit 1; }
dir=$(mktemp -d "${BRAIDFS_TMP:-/var/tmp}/braidfs-fsck.XXXXXX")
trap 'umount "$dir/b" 2>/dev/null; umount "$dir/e" 2>/dev/null; rm -rf "$dir"' EXIT
mkdir "$dir/b" "$dir/e"
mib=$((files / 100 + 512))
truncate -s "${mib}M" "$dir/e.img"
mkfs.ext4 -q -F -N $((files + files / 10 + 1000)) "$dir/e.img"
"$bin" mkfs --quiet --size "${mib}M" "$dir/b.img"

# 1000 files in a directory, three quarters of them of some hundred bytes, the others of two blocks
fill() {
    python3 - "$1" "$files" <<'PY'
import os, sys
top, files = sys.argv[1], int(sys.argv[2])
small, large = b"s" * 300, b"l" * 8000
for n in range(files):
    if n % 1000 == 0:
        here = os.path.join(top, f"d{n // 100000}", f"d{n // 1000}")
        os.makedirs(here)
    with open(os.path.join(here, f"file-{n}"), "wb") as file:
        file.write(large if n % 4 == 0 else small)
PY
}
"$bin" mount "$dir/b.img" "$dir/b"
fill "$dir/b"
"$bin" umount "$dir/b"
mount -o loop "$dir/e.img" "$dir/e"
fill "$dir/e"
umount "$dir/e"

# Seconds and the most memory of a command, after the image has left the page cache or is all in it.
measure() {
    local name=$1 image=$2 cache=$3
    shift 3
    sync
    if [ "$cache" = cold ]; then
        python3 -c 'import os,sys; f=os.open(sys.argv[1], os.O_RDONLY); os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)' "$image"
    else
        cat "$image" > /dev/null
    fi
    # not measured by a shell or interpreter: their own memory would count
    local code=0
    /usr/bin/time -o "$dir/time" -f "%e %U %S %M" "$@" > /dev/null 2>&1 || code=$?
    tail -n 1 "$dir/time" | awk -v name="$name, $cache" -v code=$code \
        '{ printf "%-28s %8.2f s %8.2f s %8.1f MiB  exit code %d\n", name, $1, $2 + $3, $4 / 1024, code }'
}
echo "$files files, $(nproc) CPUs"
printf "%-28s %10s %10s %12s\n" "" "time" "CPU time" "peak memory"
for cache in cold warm; do
    measure "braidfs fsck -f" "$dir/b.img" $cache "$bin" fsck -f -n "$dir/b.img"
    measure "braidfs fsck -f --memory 1M" "$dir/b.img" $cache "$bin" fsck -f -n --memory 1M "$dir/b.img"
    measure "e2fsck -f" "$dir/e.img" $cache e2fsck -f -n "$dir/e.img"
done
[ -n "$damaged" ] || exit 0

zero() {
    [ -n "$2" ] || { echo "fsck-time: $1: cannot tell where the inodes lie" >&2; exit 1; }
    dd if=/dev/zero of="$1" bs=4096 seek="$2" count=1 conv=notrunc status=none
}
file=/d0/d0/file-$((files < 1000 ? files / 2 : 500))
first=$("$bin" dump super "$dir/b.img" | sed -n 's/.* groups 0 to .* from block \([0-9]*\) on.*/\1/p' | head -n 1)
block=$("$bin" dump "path:$file" "$dir/b.img" | sed -n '1s/.*: block \([0-9]*\) record.*/\1/p')
zero "$dir/b.img" "${block:+$((block + ${first:?}))}"
zero "$dir/e.img" "$(debugfs -R "imap $file" "$dir/e.img" 2> /dev/null | sed -n 's/.*located at block \([0-9]*\),.*/\1/p')"
echo "with a block of inodes zeroed"
for cache in cold warm; do
    measure "braidfs fsck -f -n" "$dir/b.img" $cache "$bin" fsck -f -n "$dir/b.img"
    measure "e2fsck -f -n" "$dir/e.img" $cache e2fsck -f -n "$dir/e.img"
done
