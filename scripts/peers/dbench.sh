#!/usr/bin/env bash
# make dbench: the load of a file server with 4 clients (with their syncs), on ext4 and on braidfs.
. "$(dirname "$0")/../lib.sh"

need_root
need dbench dbench
seconds=${DBENCH_SECONDS:-30}

with_ext4 ext4.img 2G ext4
with_braidfs braidfs.img 2G braidfs
for mnt in ext4 braidfs; do
    dbench -t "$seconds" -D "$WORK/$mnt" "${DBENCH_CLIENTS:-4}" >"$RESULTS/dbench.$mnt.log" 2>&1 ||
        die "dbench failed on $mnt: see $RESULTS/dbench.$mnt.log"
    printf '%-8s %s\n' "$mnt" "$(grep '^Throughput' "$RESULTS/dbench.$mnt.log")"
done
unmount braidfs
check_braidfs braidfs.img || die "fsck finds something after dbench"
