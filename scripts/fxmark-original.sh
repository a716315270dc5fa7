#!/usr/bin/env bash
# Our FxMark, in mode `original`, beside the original program (github.com/sslab-gatech/fxmark) on ext4.
#
#   scripts/fxmark-original.sh SOURCE [RUNS [SECONDS [CORES [TEST...]]]]
#
# SOURCE is a checkout (or a bare repository) of the original; it is built in a temporary directory, and nothing of it
# is kept. Both programs run in turns (A B A B) on an ext4 made afresh for each run, on one loop device over an image in
# memory. Prints the medians of both and how far they are apart; exits with 1 where fewer than eight tests (or than all,
# when fewer are named) are less than 15 % apart.
# Needs root, git, cc, e2fsprogs; FXMARK names our program (default: target/release/fxmark).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
source_dir=$(realpath "$1") runs=${2:-5} seconds=${3:-2} cores=${4:-1}
shift $(($# < 4 ? $# : 4))
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(DRBL DRBM DRBH DWOL DWOM DWAL MRPL MRPM MRPH MRDL MWCL MWRL)
ours=$(realpath "${FXMARK:-${CARGO_TARGET_DIR:-target}/release/fxmark}")
[ -x "$ours" ] || { echo "$ours is not there: cargo build --release -p fxmark, or name it with FXMARK" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "mounting needs root" >&2; exit 2; }

# mounts are private: whatever happens, they go with this process
if [ -z "${FXMARK_PRIVATE:-}" ]; then
    exec env FXMARK_PRIVATE=1 unshare --mount "$0" "$source_dir" "$runs" "$seconds" "$cores" "${tests[@]}"
fi
work=$(mktemp -d)
loop=
cleanup() {
    umount -q "$work/mnt" 2>/dev/null || true
    [ -z "$loop" ] || losetup -d "$loop" || true
    umount -q "$work/ram" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# The original, as its Makefile builds it, but for the CPU list: it has a Python script write one, we write it here.
mkdir "$work/src"
if git -C "$source_dir" rev-parse --is-bare-repository 2>/dev/null | grep -q true; then
    git -C "$source_dir" ls-tree --name-only HEAD src/ | grep '[.][ch]$' | while read -r file; do
        git -C "$source_dir" show "HEAD:$file" > "$work/$file"
    done
else
    cp "$source_dir"/src/*.[ch] "$work/src/"
fi
allowed=$(python3 -c 'import os; print(",".join(map(str, sorted(os.sched_getaffinity(0)))))')
cat > "$work/src/cpupol.h" <<C
const unsigned int seq_cores[] = {$allowed};
C
rm -f "$work/src/rdtsc.c"
cc -O3 -w -D_GNU_SOURCE -I"$work/src" -o "$work/original" "$work"/src/*.c -lpthread

mkdir "$work/ram" "$work/mnt"
size_mib=${SIZE_MIB:-1024}
mount -t tmpfs -o size=$((size_mib + 1))m tmpfs "$work/ram"
dd if=/dev/zero of="$work/ram/image" bs=1M count="$size_mib" status=none
loop=$(losetup --find --show "$work/ram/image")

fresh() {
    umount -q "$work/mnt" 2>/dev/null || true
    mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0,nodiscard "$loop"
    mount -t ext4 -o noatime "$loop" "$work/mnt"
    echo 3 > /proc/sys/vm/drop_caches
}
original() {
    fresh
    "$work/original" --type "$1" --ncore "$cores" --nbg 0 --duration "$seconds" --directio 0 --root "$work/mnt" |
        awk 'END { print $4 }'
    umount "$work/mnt"
}
ours() {
    fresh
    "$ours" --mode original -t "$work/mnt" --tests "$1" --cores "$cores" --seconds "$seconds" --reps 1 --keep-caches \
        --json -o "$work/out.json" | python3 -c 'import json,sys; print(json.load(sys.stdin)["runs"][0]["throughput"])'
    umount "$work/mnt"
}
median() { sort -g | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'; }

printf '%-6s %14s %14s %8s\n' test original ours apart
near=0
for t in "${tests[@]}"; do
    : > "$work/a"; : > "$work/b"
    for _ in $(seq "$runs"); do
        original "$t" >> "$work/a"
        ours "$t" >> "$work/b"
    done
    a=$(median < "$work/a") b=$(median < "$work/b")
    apart=$(awk -v a="$a" -v b="$b" 'BEGIN { printf "%.1f", 100 * (b - a) / a }')
    printf '%-6s %14.0f %14.0f %7s%%\n' "$t" "$a" "$b" "$apart"
    awk -v x="$apart" 'BEGIN { exit !(x < 15 && x > -15) }' && near=$((near + 1)) || true
done
echo "$near of ${#tests[@]} tests are less than 15 % apart"
wanted=$((${#tests[@]} < 8 ? ${#tests[@]} : 8))
[ "$near" -ge "$wanted" ]
