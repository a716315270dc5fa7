#!/usr/bin/env bash
# make big: a directory of 100,000 files, a sparse file of 50 GiB, a full volume; fsck after each.
. "$(dirname "$0")/../lib.sh"

need_root
files=${BIG_FILES:-100000}
with_braidfs big.img 2G big
top=$WORK/big
seconds() { local start=$EPOCHREALTIME; "$@"; awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s\n", b - a }'; }
fsck() { unmount big; check_braidfs big.img >/dev/null || die "fsck finds something after: $1"; remount_braidfs big.img big; }

mkdir "$top/many"
printf 'create %s files: ' "$files"
seconds sh -c "cd '$top/many' && seq -f 'file-%07.0f' '$files' | xargs touch && sync -f ."
[ "$(ls -f "$top/many" | grep -c '^file-')" = "$files" ] || die "not every file is listed"
printf 'list with attributes: '
seconds sh -c "find '$top/many' -ls | wc -l | grep -qx $((files + 1))"
fsck "$files files"
printf 'remove: '
seconds rm -r "$top/many"
fsck "removing $files files"

printf 'sparse 50 GiB: '
sparse() {
    truncate -s 50G "$top/sparse"
    for at in 0 1 12345 6553599; do printf 'block %s' "$at" | dd of="$top/sparse" bs=8192 seek="$at" conv=notrunc status=none; done
    sync -f "$top"
    for at in 0 1 12345 6553599; do
        dd if="$top/sparse" bs=8192 skip="$at" count=1 status=none | head -c 20 | tr -d '\0' | grep -qx "block $at" || die "block $at is wrong"
    done
    [ "$(du -k "$top/sparse" | cut -f1)" -lt 1024 ] || die "a sparse file takes $(du -h "$top/sparse" | cut -f1)"
}
seconds sparse
fsck "a sparse file"
rm "$top/sparse"

for turn in 1 2 3; do
    printf 'fill the volume, turn %s: ' "$turn"
    seconds dd if=/dev/zero of="$top/fill" bs=1M status=none 2>"$WORK/dd.err" || true
    grep -q 'No space left' "$WORK/dd.err" || die "dd did not end with ENOSPC at a write: $(cat "$WORK/dd.err")"
    df -h --output=used,avail "$top" | tail -n 1
    fsck "a full volume"
    rm "$top/fill"
done
unmount big
check_braidfs big.img || die "fsck finds something at the end"
say "big: all right"
