#!/usr/bin/env bash
# make postgres: pgbench on PostgreSQL on braidfs; kill -9 of the servers and of the braidfs daemon under load; after
# the remount PostgreSQL must recover, amcheck must find nothing and no acknowledged transaction may be missing.
. "$(dirname "$0")/../lib.sh"
. "$ROOT/scripts/pg.sh"

need_root
seconds=${POSTGRES_SECONDS:-60}
# Debian keeps the server's programs outside of PATH.
find_postgres() { ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1; }
[ -x "$(find_postgres)/initdb" ] || command -v initdb >/dev/null || "$ROOT/scripts/deps.sh" postgresql postgresql-contrib
PATH=$(find_postgres):$PATH
need initdb postgresql
need pgbench postgresql-contrib
user=postgres
id "$user" >/dev/null 2>&1 || user=nobody

with_braidfs pg.img 4G pg
install -d -o "$user" "$WORK/pg/data" "$WORK/run"
as_user() { (cd / && setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups env HOME="$WORK/run" PATH="$PATH" "$@"); }
sql() { as_user psql -h "$WORK/run" -d "${DB:-bench}" -v ON_ERROR_STOP=1 -qAtX "$@"; }
start() {
    as_user pg_ctl -D "$WORK/pg/data" -l "$WORK/run/server.log" -w -t 120 \
        -o "-k $WORK/run -c listen_addresses= -c full_page_writes=on -c fsync=on" start >/dev/null ||
        { tail -n 20 "$WORK/run/server.log"; die "PostgreSQL does not start"; }
}
# Ends only the servers of our own data directory.
kill_servers() {
    local head pid
    head=$(head -n 1 "$WORK/pg/data/postmaster.pid" 2>/dev/null || cat "$WORK/run/postmaster" 2>/dev/null) || return 0
    # shellcheck disable=SC2046
    set -- "$head" $(ps -o pid= --ppid "$head")
    for pid in "$@"; do kill -9 "$pid" 2>/dev/null || true; done
    wait_end "$@"
}
AT_EXIT+=(kill_servers)

as_user initdb -D "$WORK/pg/data" -A trust --data-checksums >/dev/null
start
head -n 1 "$WORK/pg/data/postmaster.pid" >"$WORK/run/postmaster"
DB=postgres sql -c 'create database bench'
as_user pgbench -h "$WORK/run" -i -q -s 10 bench >/dev/null 2>&1
sql -c 'create extension amcheck; create table acknowledged(id bigint primary key)'
say "pgbench, scale 10, 4 clients, $seconds s:"
as_user pgbench -n -h "$WORK/run" -c 4 -j 2 -T "$seconds" bench 2>/dev/null | grep -E '^(tps|latency average|number of failed)'

# Load for the crash: one connection that notes outside of the volume what was acknowledged, and pgbench beside it.
# -n: else pgbench empties its history, and the sums below could not agree.
as_user pgbench -n -h "$WORK/run" -c 3 -T 60 bench >/dev/null 2>&1 &
load=$!
(for ((n = 1; ; n++)); do sql -c "insert into acknowledged values($n)" 2>/dev/null || break; echo "$n"; done) >"$WORK/acknowledged" &
notes=$!
sleep 5
if [ $((RANDOM % 2)) = 0 ]; then kill_servers; kill_daemon pg; else kill_daemon pg; kill_servers; fi
wait "$load" "$notes" || true
remount_braidfs pg.img pg
# The servers are dead, but as zombies their process ids may still be there for PostgreSQL to stumble over.
rm -f "$WORK/run"/.s.PGSQL.* "$WORK/pg/data/postmaster.pid"
start
nothing_is_missing
as_user pg_ctl -D "$WORK/pg/data" -m fast -w stop >/dev/null
rm -f "$WORK/run/postmaster"
as_user pg_checksums -D "$WORK/pg/data" --check >/dev/null || die "pg_checksums finds damaged pages"
unmount pg
check_braidfs pg.img || die "fsck finds something after PostgreSQL"
say "postgres: $last acknowledged inserts kept over kill -9, amcheck, checksums and fsck clean"
