#!/usr/bin/env bash
# make rocksdb: db_bench (synced writes, overwrites, reads, reads beside writes, checksums) on ext4 and on braidfs.
. "$(dirname "$0")/../lib.sh"

need_root
need db_bench rocksdb-tools
keys=${ROCKSDB_KEYS:-300000}

bench() { # MNT BENCHMARKS KEYS-PER-THREAD [OPTION]
    db_bench --db="$WORK/$1/db" --benchmarks="$2" --num="$3" "${@:4}" --value_size=400 --threads=2 --compression_type=none \
        --verify_checksum=true >>"$RESULTS/rocksdb.$1.log" 2>&1 || die "db_bench failed on $1: see $RESULTS/rocksdb.$1.log"
}

with_ext4 ext4.img 4G ext4
with_braidfs braidfs.img 4G braidfs
for mnt in ext4 braidfs; do
    say "$mnt"
    : >"$RESULTS/rocksdb.$mnt.log"
    bench "$mnt" fillsync $((keys / 60))
    bench "$mnt" overwrite,readrandom,readwhilewriting,verifychecksum "$keys" --use_existing_db=true
    if grep -qiE 'corruption|io error' "$RESULTS/rocksdb.$mnt.log"; then
        die "db_bench reports an error on $mnt: see $RESULTS/rocksdb.$mnt.log"
    fi
    grep -E '^(fill|over|read|verify)[a-z]* *:' "$RESULTS/rocksdb.$mnt.log" | cut -c1-100
done
unmount braidfs
check_braidfs braidfs.img || die "fsck finds something after db_bench"
