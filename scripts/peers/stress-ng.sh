#!/usr/bin/env bash
# make stress-ng: every stressor of stress-ng's classes filesystem and io, by two processes each, which verify what they
# read. What does not end with 0 on braidfs is run on an ext4, too: exit code 1 where that says something better. The
# outputs are in target/peers/results/stress-ng. With arguments, only these stressors.
. "$(dirname "$0")/../lib.sh"

need_root
need stress-ng stress-ng
need mkfs.ext4 e2fsprogs
seconds=${STRESS_SECONDS:-5}
# These never look at the directory they are given: they work on /proc, on a file system of their own, on a raw device.
elsewhere=" binderfs procfs ramfs rawdev sysfs loop "
# Of other classes, but they use files of that directory.
more="close exec fault mmap msync sendfile"
# FUSE hands nothing of this on (docs/mounted.md).
lacking=" fiemap "
logs=$RESULTS/stress-ng
rm -rf "$logs"
mkdir -p "$logs"

with_ext4 ext4.img 4G ext4
with_braidfs braidfs.img 4G braidfs
daemon=$(daemons braidfs)

stressors() {
    for class in filesystem io; do
        stress-ng --class "$class?" 2>&1 | sed -n 's/.* stressors: //p'
    done | { tr ' ' '\n'; tr ' ' '\n' <<<"$more"; } | sort -u | while read -r name; do
        [ -z "$name" ] || [[ $elsewhere == *" $name "* ]] || say "$name"
    done
}

# Its exit code: 2 is a failure, 3 that the system has no such thing, 4 that something ran out. 124: no end.
run() { # STRESSOR MNT
    local code=0 options=()
    [ "$1" != mmap ] || options=(--mmap-file --mmap-bytes 64M)
    mkdir "$WORK/$2/stress"
    timeout -k 10 $((seconds + 120)) stress-ng --"$1" 2 "${options[@]}" --timeout "$seconds" --verify --oomable \
        --temp-path "$WORK/$2/stress" >"$logs/$1.$2" 2>&1 || code=$?
    rm -rf "${WORK:?}/$2/stress"
    # It does not count some failures that it tells of.
    [ $code != 0 ] || ! grep -q '^stress-ng: fail:' "$logs/$1.$2" || code=2
    [ $code != 0 ] || ! grep -q ', skipping stress' "$logs/$1.$2" || code=3
    echo $code
}

if [ $# = 0 ]; then
    # shellcheck disable=SC2046
    set -- $(stressors)
fi
[ $# -gt 0 ] || die "stress-ng names no stressor: $(stress-ng --class filesystem? 2>&1 | head -n 1)"
say "$# stressors of $(stress-ng --version | cut -d' ' -f1-3), $seconds s each"
fine=0 alike=() worse=()
for name in "$@"; do
    here=$(run "$name" braidfs)
    [ "$(daemons braidfs)" = "$daemon" ] || die "the daemon died under $name: see $logs/$name.braidfs"
    if [ "$here" = 0 ]; then
        fine=$((fine + 1))
        continue
    fi
    there=$(run "$name" ext4)
    if [ "$there" = "$here" ] || { [ "$here" = 3 ] && [[ $lacking == *" $name "* ]]; }; then
        alike+=("$name($here)")
    else
        worse+=("$name($here, ext4 $there)")
        say "$name: exit code $here, on ext4 $there" "$(grep -v -e ' dispatching ' -e ' setting to ' "$logs/$name.braidfs" | head -n 5)"
    fi
done
[ -z "$daemon" ] || say "memory of the daemon at most: $(awk '/^VmHWM/ { print int($2 / 1024) }' "/proc/$daemon/status") MiB"
unmount braidfs
check_braidfs braidfs.img || die "fsck finds something after stress-ng"
say "$fine pass; as on ext4, or known: ${alike[*]:-none}; worse than on ext4: ${worse[*]:-none}"
[ ${#worse[@]} = 0 ]
