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

loads_volume transport=dev
loads_start 25

longest=0
for ((round = 1; round <= rounds; round++)); do
    sleep 0.3
    begun=$(date +%s%3N)
    "$BRAIDFS" upgrade -q "$WORK/v" || { touch "$stop"; die "round $round"; }
    took=$(($(date +%s%3N) - begun))
    ((took <= longest)) || longest=$took
    loads_run "round $round"
done
touch "$stop"
for job in "$pg" "$notes" "$git"; do wait "$job" || die "a load failed: $(loads_said)"; done

failed=$(awk -F: '/number of failed transactions/ { split($2, n, " "); sum += n[1] } END { print sum + 0 }' "$WORK/pgbench")
[ "$failed" = 0 ] || die "$failed transactions failed"
if grep -E 'PANIC|FATAL|ERROR|could not' "$WORK/run/server.log"; then die "errors in PostgreSQL's log"; fi
loads_are_whole "$rounds" 'took the mount over' upgraded
say "upgrade-peers: $rounds upgrades, none longer than $longest ms; $(answered "$WORK/pgbench") transactions of pgbench, $last acknowledged" \
    "inserts, $commits commits of git: no error, none missing; amcheck, checksums, git fsck and fsck clean"
