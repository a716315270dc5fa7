# Sourced by scripts that run PostgreSQL on a braidfs, behind lib.sh. The data directory is $WORK/$PG/data (set PG first), the
# socket, the server's log and the head's process id are in $WORK/run.
#   pg_programs              finds or installs the servers and pgbench
#   pg_init SCALE            a cluster with pgbench's tables and a table `acknowledged`, its servers running
#   pg_start [SETTING...]    starts the servers; fails with the end of their log
#   pg_kill                  kill -9 of all servers of this cluster
#   pg_end                   stops them; page checksums
#   note_inserts             inserts 1, 2, ... one by one, prints each number that was acknowledged, ends with the first error
#   nothing_is_missing       of what was acknowledged, whose numbers are in $WORK/acknowledged
# shellcheck shell=bash

# Debian keeps the server's programs outside of PATH.
pg_programs() {
    local find='ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1'
    [ -x "$(eval "$find")/initdb" ] || command -v initdb >/dev/null || "$ROOT/scripts/deps.sh" postgresql postgresql-contrib
    PATH=$(eval "$find"):$PATH
    need initdb postgresql
    need pgbench postgresql-contrib
    user=postgres
    id "$user" >/dev/null 2>&1 || user=nobody
}

as_user() { (cd / && setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups env HOME="$WORK/run" PATH="$PATH" "$@"); }
sql() { as_user psql -h "$WORK/run" -d "${DB:-bench}" -v ON_ERROR_STOP=1 -qAtX "$@"; }

pg_start() { # [SETTING...], as -c has them
    # The servers were killed, but as zombies their process ids may still be there for PostgreSQL to stumble over.
    [ -e "$WORK/run/postmaster" ] || rm -f "$WORK/run"/.s.PGSQL.* "$WORK/$PG/data/postmaster.pid"
    local settings="-k $WORK/run -c listen_addresses= -c fsync=on -c full_page_writes=on" setting
    for setting in "$@"; do settings+=" -c $setting"; done
    as_user pg_ctl -D "$WORK/$PG/data" -l "$WORK/run/server.log" -w -t 120 -o "$settings" start >/dev/null ||
        die "PostgreSQL does not start: $(tail -n 20 "$WORK/run/server.log")"
    head -n 1 "$WORK/$PG/data/postmaster.pid" >"$WORK/run/postmaster"
}

pg_kill() {
    local head pid
    head=$(cat "$WORK/run/postmaster" 2>/dev/null) || return 0
    # shellcheck disable=SC2046
    set -- "$head" $(ps -o pid= --ppid "$head")
    for pid in "$@"; do kill -9 "$pid" 2>/dev/null || true; done
    wait_end "$@"
    rm -f "$WORK/run/postmaster"
}

pg_init() { # SCALE [SETTING...]
    local scale=$1
    shift
    install -d -o "$user" "$WORK/$PG/data" "$WORK/run"
    AT_EXIT+=(pg_kill)
    as_user initdb -D "$WORK/$PG/data" -A trust --data-checksums >/dev/null
    pg_start "$@"
    DB=postgres sql -c 'create database bench'
    as_user pgbench -h "$WORK/run" -i -q -s "$scale" bench >/dev/null 2>&1
    sql -c 'create extension amcheck; create table acknowledged(id bigint primary key)'
}

pg_end() {
    as_user pg_ctl -D "$WORK/$PG/data" -m fast -w stop >/dev/null
    rm -f "$WORK/run/postmaster"
    as_user pg_checksums -D "$WORK/$PG/data" --check >/dev/null || die "pg_checksums finds damaged pages"
}

# From the number behind the last one that was acknowledged; one that came through without an answer is not made twice.
note_inserts() {
    local n
    n=$(tail -n 1 "$WORK/acknowledged" 2>/dev/null) || true
    for ((n = ${n:-0} + 1; ; n++)); do
        [ -e "${stop:-}" ] && return 0
        sql -c "insert into acknowledged values($n) on conflict do nothing" || return 1
        echo "$n"
    done
}

# Whether all that was acknowledged is there, and amcheck and pgbench's own sums find nothing; $last: how many.
nothing_is_missing() {
    local found damaged same
    last=$(tail -n 1 "$WORK/acknowledged")
    found=$(sql -c "select count(*) from acknowledged where id <= $last")
    [ "$found" = "$last" ] || die "$last inserts were acknowledged, $found are there after recovery"
    sql >"$WORK/amcheck" 2>&1 <<'SQL' || die "amcheck: $(cat "$WORK/amcheck")"
do $$
declare index regclass;
begin
    for index in select c.oid from pg_class c join pg_am a on a.oid = c.relam where a.amname = 'btree' and c.relkind = 'i'
    loop
        perform bt_index_parent_check(index, true);
    end loop;
end $$
SQL
    damaged=$(sql -c "select count(*) from pg_class c, lateral verify_heapam(c.oid) where c.relkind = 'r'")
    [ "$damaged" = 0 ] || die "amcheck: $damaged damaged tuples"
    same=$(sql -c "select (select sum(abalance) from pgbench_accounts) = (select sum(bbalance) from pgbench_branches) and (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history)")
    [ "$same" = t ] || die "pgbench's balances do not agree"
}

# Transactions that pgbench had answered, by what its runs printed into the file $1.
answered() { awk -F: '/number of transactions actually processed/ { split($2, n, "/"); sum += n[1] } END { print sum + 0 }' "$1"; }
