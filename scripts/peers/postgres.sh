#!/usr/bin/env bash
# make postgres: pgbench on PostgreSQL on braidfs; kill -9 of the servers and of the braidfs daemon under load; after
# the remount PostgreSQL must recover, amcheck must find nothing and no acknowledged transaction may be missing.
. "$(dirname "$0")/../lib.sh"
. "$ROOT/scripts/pg.sh"

need_root
seconds=${POSTGRES_SECONDS:-60}
PG=pg
pg_programs

with_braidfs pg.img 4G pg
pg_init 10
say "pgbench, scale 10, 4 clients, $seconds s:"
as_user pgbench -n -h "$WORK/run" -c 4 -j 2 -T "$seconds" bench 2>/dev/null | grep -E '^(tps|latency average|number of failed)'

# Load for the crash: one connection that notes outside of the volume what was acknowledged, and pgbench beside it.
# -n: else pgbench empties its history, and the sums below could not agree.
as_user pgbench -n -h "$WORK/run" -c 3 -T 60 bench >/dev/null 2>&1 &
load=$!
note_inserts >>"$WORK/acknowledged" 2>/dev/null &
notes=$!
sleep 5
if [ $((RANDOM % 2)) = 0 ]; then pg_kill; kill_daemon pg; else kill_daemon pg; pg_kill; fi
wait "$load" "$notes" || true
remount_braidfs pg.img pg
pg_start
nothing_is_missing
pg_end
unmount pg
check_braidfs pg.img || die "fsck finds something after PostgreSQL"
say "postgres: $last acknowledged inserts kept over kill -9, amcheck, checksums and fsck clean"
