#!/usr/bin/env bash
# make supervise-peers: PostgreSQL (pgbench, and a client that notes what was acknowledged) and git on one supervised mount, whose
# serving process is killed KILLS times (default 100). Each time the mount must come back by itself; then the servers and clients,
# whose open files are dead, are started again as an administrator would. At the end no acknowledged transaction may be missing,
# no commit whose directories were synced; amcheck, git fsck and fsck must find nothing. OPTIONS: more mount options.
. "$(dirname "$0")/lib.sh"
. "$ROOT/scripts/loads.sh"

need_root
kills=${KILLS:-100}
pg_programs
need git git

# The processes of the mount: $parent looks after it, $serving serves, empty while nobody does.
find_server() {
    local pid
    parent='' serving=''
    for pid in $(daemons v); do
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = braidfs-superv ]; then parent=$pid; else serving=$pid; fi
    done
}
# Whether a process that opens by path finds the volume.
serves() { find_server; [ -n "$serving" ] && [ "$serving" != "$1" ] && [ -e "$repo/.git" ]; }

loads_volume "supervise=$((2 * kills))/86400${OPTIONS:+,$OPTIONS}"
export GIT_SYNC=1
find_server
first=$parent
[ -n "$parent" ] && [ -n "$serving" ] || die "no supervised mount"

times=$WORK/times answers=0 unsynced=0 errors=0
for ((round = 1; round <= kills; round++)); do
    loads_start 0
    # at least two commits, and a transaction; then at some moment of the next ones
    want=$(($(wc -l <"$WORK/commits") + 2)) noted=$(wc -l <"$WORK/acknowledged")
    for ((n = 0; n < 1200; n++)); do
        [ "$(wc -l <"$WORK/commits")" -ge "$want" ] && [ "$(wc -l <"$WORK/acknowledged")" -gt "$noted" ] && break
        sleep 0.05
    done
    ((n < 1200)) || die "round $round: the loads do nothing: $(loads_said)"
    sleep "0.$((RANDOM % 10))"
    loads_run "round $round"
    exec 9<>"$WORK/v/open"
    find_server
    begun=$(date +%s%3N)
    kill -9 "$serving"
    killed=$serving
    for ((n = 0; n < 3000; n++)); do serves "$killed" && break; sleep 0.02; done
    ((n < 3000)) || die "round $round: nobody serves: $(tail -n 5 "$WORK/log")"
    echo $(($(date +%s%3N) - begun)) >>"$times"
    [ "$parent" = "$first" ] || die "round $round: another parent"
    # What was open is dead for good: the kernel may take a write into its cache, and tells at the sync.
    if python3 -c 'import os; os.write(9, b"late"); os.fsync(9)' 2>/dev/null; then die "round $round: a file of the dead mount was synced"; fi
    { exec 9>&-; } 2>/dev/null || true
    # Each client fails, as its files and its server are gone: git at once, the others with the server.
    pg_kill
    for job in "$pg" "$notes" "$git"; do if wait "$job"; then die "round $round: a load saw no error"; else errors=$((errors + 1)); fi; done
    git_mend
    head=$(git -C "$repo" log -1 --format=%s)
    synced=$(tail -n 1 "$WORK/commits")
    [ "$head" -ge "$synced" ] || die "round $round: commit $synced is gone, the last one is $head"
    ((head >= $(tail -n 1 "$WORK/commits.git"))) || unsynced=$((unsynced + 1))
    pg_start checkpoint_timeout=30s
done

answers=$(answered "$WORK/pgbench")
rows=$(sql -c 'select count(*) from pgbench_history')
# three clients, each with one transaction that may have been done and not answered
((rows >= answers && rows <= answers + 3 * kills)) || die "pgbench had $answers transactions answered, $rows are there"
loads_are_whole "$kills" 'mounted again' 'mounted again'
say "supervise-peers: $kills kills, mounted again after $(sort -n "$times" | awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] " ms (median), " t[NR] }') ms" \
    "(longest); $answers transactions that pgbench had answered, $last acknowledged inserts, $commits commits: none missing ($unsynced" \
    "times one whose directories were not synced yet); $errors errors of clients; amcheck, checksums, git fsck and fsck clean"
