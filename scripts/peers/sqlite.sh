#!/usr/bin/env bash
# make sqlite: SQLite on the C library by the VFS of contrib/sqlite: its tests with 50 kills, then the same SQL on ext4, on a
# mounted braidfs and on the library, interleaved, each on a loop device of the same size. Medians and spread.
. "$(dirname "$0")/../lib.sh"

need_root
# The VFS reads a variable of this name, too: there the options are the library's.
mount_options=${BRAIDFS_OPTIONS:-}
unset BRAIDFS_OPTIONS
repetitions=${SQLITE_REPETITIONS:-5}
[ -e /usr/include/sqlite3ext.h ] || "$ROOT/scripts/deps.sh" libsqlite3-dev
build_braidfs
if [ -z "${SQLITE_BENCH_ONLY:-}" ]; then
    (cd "$ROOT" && BRAIDFS_SQLITE_KILLS=50 cargo test --quiet -p braidfs-capi --test c sqlite -- --nocapture) || die "tests of the VFS"
fi
# with BRAIDFS_BIN the library beside that
[ -n "${BRAIDFS_BIN:-}" ] || (cd "$ROOT" && cargo build --quiet --release -p braidfs-capi)
lib=$(dirname "$BRAIDFS")
[ -e "$lib/libbraidfs_c.so" ] || die "no libbraidfs_c.so beside $BRAIDFS; make lib makes one in target/release"
ln -s "$(readlink -f "$lib/libbraidfs_c.so")" "$WORK/libbraidfs.so"
ln -s libbraidfs.so "$WORK/libbraidfs.so.0"
cc -O2 -Wall -DSQLITE_CORE -D_GNU_SOURCE -pthread -I"$ROOT/include" "$ROOT"/contrib/sqlite/{braidfs_vfs,bench}.c -o "$WORK/bench" \
    -L"$WORK" -lbraidfs -lsqlite3 -Wl,-rpath,"$WORK"

device() { # NAME: a loop device without the host's cache
    fallocate -l 1G "$WORK/$1.img"
    losetup --find --show --direct-io=on "$WORK/$1.img"
}
ext4=$(device ext4) mounted=$(device mounted) library=$(device library)
mkfs.ext4 -q -F "$ext4"
"$BRAIDFS" mkfs --quiet --force "$mounted"
"$BRAIDFS" mkfs --quiet --force "$library"
mkdir "$WORK/ext4" "$WORK/mounted"
MOUNTS+=(ext4 mounted)
mount "$ext4" "$WORK/ext4"
"$BRAIDFS" mount ${mount_options:+-o "$mount_options"} "$mounted" "$WORK/mounted"

run() { # SYSTEM KIND PLACE JOURNAL SYNCHRONOUS
    "$WORK/bench" "$2" "$3" "$4" "$5" >"$WORK/out" || die "$1 $4 $5"
    sed "s/^/$1 $4,$5 /" "$WORK/out" >>"$WORK/all"
}
for ((i = 0; i < repetitions; i++)); do
    for how in "wal full" "delete full" "delete extra"; do
        # shellcheck disable=SC2086
        {
            run ext4 mount "$WORK/ext4" $how
            run mount mount "$WORK/mounted" $how
            run library library "$library" $how
        }
    done
done
unmount mounted
"$BRAIDFS" fsck -f -n "$mounted" >/dev/null && "$BRAIDFS" fsck -f -n "$library" >/dev/null || die "fsck finds something"
cp "$WORK/all" "$RESULTS/sqlite"
python3 - "$WORK/all" <<'PYTHON'
import statistics, sys
runs = {}
for line in open(sys.argv[1]):
    system, how, load, rate = line.split()
    runs.setdefault((how, load), {}).setdefault(system, []).append(float(rate))
print("operations a second: median (least to most); times the mount, times ext4")
print("| journal, synchronous | load | ext4 | mount | library | library / mount | library / ext4 |")
print("|---|---|---|---|---|---|---|")
for (how, load), of in runs.items():
    median = {s: statistics.median(r) for s, r in of.items()}
    cells = [f"{median[s]:.0f} ({min(of[s]):.0f} to {max(of[s]):.0f})" for s in ("ext4", "mount", "library")]
    ratios = [f"{median['library'] / median[s]:.2f}" for s in ("mount", "ext4")]
    print("| " + " | ".join([how.replace(",", ", "), load.replace(",", ", ").replace("-", " "), *cells, *ratios]) + " |")
PYTHON
say "sqlite: every committed transaction survived, fsck clean"
