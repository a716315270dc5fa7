#!/usr/bin/env bash
# make upgrade-peers: PostgreSQL (pgbench, and a client that notes what was acknowledged) and git on one mount, while another
# program takes it over ROUNDS times (default 100). No client may see an error, no acknowledged transaction may be missing, no
# commit; amcheck, git fsck and fsck must find nothing.
. "$(dirname "$0")/lib.sh"
. "$ROOT/scripts/loads.sh"

need_root
rounds=${ROUNDS:-100}
pg_programs
need git git

build_braidfs
"$BRAIDFS" mkfs --quiet --size 4G "$WORK/v.img"
mkdir -p "$WORK/v"
MOUNTS+=(v)
"$BRAIDFS" --log-file "$WORK/log" mount -o transport=dev "$WORK/v.img" "$WORK/v"
loads_init
(pgbench_load || { cat "$WORK/pgbench.now"; exit 1; }) &
pg=$!
note_inserts >>"$WORK/acknowledged" &
notes=$!
(git_load 25) &
git=$!

longest=0
for ((round = 1; round <= rounds; round++)); do
    sleep 0.3
    begun=$(date +%s%3N)
    "$BRAIDFS" upgrade -q "$WORK/v" || { touch "$stop"; die "round $round"; }
    took=$(($(date +%s%3N) - begun))
    ((took <= longest)) || longest=$took
    for job in "$pg" "$notes" "$git"; do kill -0 "$job" 2>/dev/null || { touch "$stop"; wait "$job" || die "round $round: a load failed"; }; done
done
touch "$stop"
wait "$pg" || die "pgbench failed"
wait "$notes" || die "a client of PostgreSQL got an error"
wait "$git" || die "git failed"

failed=$(awk -F: '/number of failed transactions/ { split($2, n, " "); sum += n[1] } END { print sum + 0 }' "$WORK/pgbench")
[ "$failed" = 0 ] || die "$failed transactions failed"
if grep -E 'PANIC|FATAL|ERROR|could not' "$WORK/run/server.log"; then die "errors in PostgreSQL's log"; fi
nothing_is_missing
git_is_whole
pg_end
upgraded=$(grep -c 'took the mount over' "$WORK/log")
[ "$upgraded" = "$rounds" ] || die "$upgraded upgrades in the log, not $rounds"
unmount v
check_braidfs v.img || die "fsck finds something"
say "upgrade-peers: $rounds upgrades, none longer than $longest ms; $(answered "$WORK/pgbench") transactions of pgbench, $last acknowledged" \
    "inserts, $commits commits of git: no error, none missing; amcheck, checksums, git fsck and fsck clean"
