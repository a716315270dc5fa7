#!/usr/bin/env bash
# make pjdfstest: the POSIX conformance suite on an ext4 and on a braidfs. Exit code 1 when a case fails on braidfs
# that passes on ext4. The full output of both is in target/peers/results/pjdfstest.*.log.
. "$(dirname "$0")/../lib.sh"

need_root
need mkfs.ext4 e2fsprogs
cargo_tool pjdfstest

# Two users with their primary groups; every Debian and Fedora has these.
cat >"$WORK/pjdfstest.toml" <<TOML
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.02
allow_remount = ${PJDFSTEST_REMOUNT:-false}

[dummy_auth]
entries = [["nobody", "$(id -gn nobody)"], ["daemon", "$(id -gn daemon)"]]
TOML

with_ext4 ext4.img 1G ext4
with_ext4 second.img 256M second # for the cases that need another file system (EXDEV)
with_braidfs braidfs.img 1G braidfs

run() { # MNT LOG
    local code=0
    (cd "$WORK/$1" && "$TOOLS/bin/pjdfstest" -c "$WORK/pjdfstest.toml" -p "$WORK/$1" -s "$WORK/second" "${@:3}") \
        >"$2" 2>&1 || code=$?
    sed -i 's/\x1b\[[0-9;]*m//g' "$2"
    grep -q ' ok$' "$2" || die "no case passed on $1 (exit code $code): see $2"
    # A case is a line `name  ok|FAILED|skipped`.
    for word in ok FAILED skipped; do
        awk -v w="$word" 'NF == 2 && $2 == w { print $1 }' "$2" | sort >"$2.$word"
    done
    printf '%-8s %5d ok %5d failed %5d skipped\n' "$1" "$(wc -l <"$2.ok")" "$(wc -l <"$2.FAILED")" "$(wc -l <"$2.skipped")"
}

run ext4 "$RESULTS/pjdfstest.ext4.log" "$@"
run braidfs "$RESULTS/pjdfstest.braidfs.log" "$@"
unmount braidfs
check_braidfs braidfs.img || die "fsck finds something after pjdfstest"

# A case that did not end on braidfs (a crash of the suite) counts as failed too.
sort -m "$RESULTS"/pjdfstest.braidfs.log.{ok,skipped} >"$RESULTS/pjdfstest.braidfs.log.fine"
worse=$(comm -23 "$RESULTS/pjdfstest.ext4.log.ok" "$RESULTS/pjdfstest.braidfs.log.fine")
# The suite skips what the C library cannot tell it of a file system (LINK_MAX knows only the kernel's own).
skipped=$(comm -12 "$RESULTS/pjdfstest.ext4.log.ok" "$RESULTS/pjdfstest.braidfs.log.skipped")
better=$(comm -13 "$RESULTS/pjdfstest.ext4.log.ok" "$RESULTS/pjdfstest.braidfs.log.ok" | wc -l)
rm -f "$RESULTS"/pjdfstest.*.log.{ok,FAILED,skipped,fine}
[ "$better" = 0 ] || say "$better cases pass on braidfs only"
[ -z "$skipped" ] || say "pass on ext4, skipped by the suite on braidfs:" $skipped
if [ -n "$worse" ]; then
    say "pass on ext4, not on braidfs:" "" "$worse"
    exit 1
fi
say "pjdfstest: no case that passes on ext4 fails on braidfs"
