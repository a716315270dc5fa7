#!/usr/bin/env bash
# make upgrade-peers: PostgreSQL (pgbench, and a client that notes what was acknowledged) and git on one mount, while another
# program takes it over ROUNDS times (default 100). No client may see an error, no acknowledged transaction may be missing, no
# commit; amcheck, git fsck and fsck must find nothing.
. "$(dirname "$0")/lib.sh"
. "$ROOT/scripts/pg.sh"

need_root
rounds=${ROUNDS:-100}
find_postgres() { ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1; }
[ -x "$(find_postgres)/initdb" ] || command -v initdb >/dev/null || "$ROOT/scripts/deps.sh" postgresql postgresql-contrib
PATH=$(find_postgres):$PATH
need initdb postgresql
need pgbench postgresql-contrib
need git git
user=postgres
id "$user" >/dev/null 2>&1 || user=nobody

build_braidfs
"$BRAIDFS" mkfs --quiet --size 4G "$WORK/v.img"
mkdir -p "$WORK/v"
MOUNTS+=(v)
"$BRAIDFS" --log-file "$WORK/log" mount -o transport=dev "$WORK/v.img" "$WORK/v"

install -d -o "$user" "$WORK/v/data" "$WORK/run"
as_user() { (cd / && setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups env HOME="$WORK/run" PATH="$PATH" "$@"); }
sql() { as_user psql -h "$WORK/run" -d "${DB:-bench}" -v ON_ERROR_STOP=1 -qAtX "$@"; }
kill_servers() {
    local head
    head=$(cat "$WORK/run/postmaster" 2>/dev/null) || return 0
    # shellcheck disable=SC2046
    set -- "$head" $(ps -o pid= --ppid "$head")
    kill -9 "$@" 2>/dev/null || true
    wait_end "$@"
}
AT_EXIT+=(kill_servers)
as_user initdb -D "$WORK/v/data" -A trust --data-checksums >/dev/null
as_user pg_ctl -D "$WORK/v/data" -l "$WORK/run/server.log" -w -t 120 \
    -o "-k $WORK/run -c listen_addresses= -c fsync=on -c checkpoint_timeout=30s" start >/dev/null ||
    die "PostgreSQL does not start: $(tail -n 5 "$WORK/run/server.log")"
head -n 1 "$WORK/v/data/postmaster.pid" >"$WORK/run/postmaster"
DB=postgres sql -c 'create database bench'
as_user pgbench -h "$WORK/run" -i -q -s 5 bench >/dev/null 2>&1
sql -c 'create extension amcheck; create table acknowledged(id bigint primary key)'

stop=$WORK/stop
(until [ -e "$stop" ]; do
    as_user pgbench -n -h "$WORK/run" -c 3 -j 1 -t 100 bench >"$WORK/pgbench.now" 2>&1 || { cat "$WORK/pgbench.now"; exit 1; }
    cat "$WORK/pgbench.now" >>"$WORK/pgbench"
done) &
pg=$!
(for ((n = 1; ; n++)); do
    [ -e "$stop" ] && exit 0
    sql -c "insert into acknowledged values($n)" || exit 1
    echo "$n"
done) >"$WORK/acknowledged" &
notes=$!
(
    cd "$WORK/v"
    export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b HOME="$WORK/run"
    git init -q repo && cd repo && git config gc.auto 0
    for ((n = 1; ; n++)); do
        [ -e "$stop" ] && break
        mkdir -p "d$((n % 20))"
        for ((i = 0; i < 20; i++)); do echo "$n $i $RANDOM" >"d$((n % 20))/f$i"; done
        git add -A && git commit -q -m "$n" || exit 1
        if ((n % 25 == 0)); then git gc -q || exit 1; fi
        echo "$n" >"$WORK/commits"
    done
    [ "$(git rev-list --count HEAD)" = "$(cat "$WORK/commits")" ] || { echo "commits are missing"; exit 1; }
    [ -z "$(git status --porcelain)" ] && git fsck --full >/dev/null 2>&1
) &
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
done_=$(awk -F: '/number of transactions actually processed/ { split($2, n, "/"); sum += n[1] } END { print sum + 0 }' "$WORK/pgbench")
[ "$failed" = 0 ] || die "$failed transactions failed"
if grep -E 'PANIC|FATAL|ERROR|could not' "$WORK/run/server.log"; then die "errors in PostgreSQL's log"; fi
nothing_is_missing
as_user pg_ctl -D "$WORK/v/data" -m fast -w stop >/dev/null
rm -f "$WORK/run/postmaster"
as_user pg_checksums -D "$WORK/v/data" --check >/dev/null || die "pg_checksums finds damaged pages"
upgraded=$(grep -c 'took the mount over' "$WORK/log")
[ "$upgraded" = "$rounds" ] || die "$upgraded upgrades in the log, not $rounds"
unmount v
check_braidfs v.img || die "fsck finds something"
say "upgrade-peers: $rounds upgrades, none longer than $longest ms; $done_ transactions of pgbench, $last acknowledged inserts," \
    "$(cat "$WORK/commits") commits of git: no error, none missing; amcheck, checksums, git fsck and fsck clean"
