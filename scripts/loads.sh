# Sourced by scripts that have PostgreSQL and git work on a mount while something happens to it, behind lib.sh. The mount is
# $WORK/v; a load ends when the file $stop exists, or with its first error.
#   loads_volume OPTIONS a volume, mounted so, with its log in $WORK/log; on it PostgreSQL and an empty repository
#   loads_start GC       all three of those below, as $pg, $notes and $git
#   loads_run WHEN       ends the script where one of them has ended
#   loads_are_whole N EVENT WHAT
#                        nothing that was acknowledged is missing, the log tells of EVENT N times (WHAT says what that is), fsck
#                        finds nothing; the volume is unmounted
#   pgbench_load         pgbench again and again; what it printed is in $WORK/pgbench
#   note_inserts         see pg.sh
#   git_load GC          commits, numbered in their subjects, after each GC of them a gc (0: never). With GIT_SYNC set the
#                        directories that a commit changed are synced, too. $WORK/commits has the number of each commit that is to
#                        survive, $WORK/commits.git that of each one that git said is there
#   git_mend             what an administrator does after a crash: stale locks go, the work tree is that of the last commit
#   git_is_whole         all commits in $WORK/commits are there, and git fsck finds nothing; $commits: how many
# shellcheck shell=bash
. "$ROOT/scripts/pg.sh"

# shellcheck disable=SC2034 # for pg.sh
PG=v
stop=$WORK/stop
repo=$WORK/v/repo
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b GIT_CONFIG_NOSYSTEM=1 \
    GIT_CONFIG_GLOBAL=/dev/null

loads_volume() { # OPTIONS
    build_braidfs
    "$BRAIDFS" mkfs --quiet --size 4G "$WORK/v.img"
    mkdir -p "$WORK/v"
    MOUNTS+=(v)
    "$BRAIDFS" --log-file "$WORK/log" mount -o "$1" "$WORK/v.img" "$WORK/v"
    pg_init 5 checkpoint_timeout=30s
    git init -q "$repo"
    git -C "$repo" config gc.auto 0
    git -C "$repo" config core.fsync all
    git -C "$repo" config core.fsyncMethod fsync
    git_sync
    : >"$WORK/pgbench" >"$WORK/commits" >"$WORK/commits.git" >"$WORK/acknowledged"
}

loads_start() { # GC
    pgbench_load &
    pg=$!
    note_inserts >>"$WORK/acknowledged" 2>"$WORK/notes.now" &
    notes=$!
    (git_load "$1") >"$WORK/git.now" 2>&1 &
    git=$!
}

loads_said() { tail -n 5 "$WORK/pgbench.now" "$WORK/notes.now" "$WORK/git.now"; }

loads_run() { # WHEN
    local job
    for job in "$pg" "$notes" "$git"; do
        kill -0 "$job" 2>/dev/null || {
            touch "$stop"
            die "$1: a load has ended: $(loads_said)"
        }
    done
}

loads_are_whole() { # N EVENT WHAT
    local count
    nothing_is_missing
    git_is_whole
    pg_end
    count=$(grep -c "$2" "$WORK/log")
    [ "$count" = "$1" ] || die "$3 $count times by the log, not $1"
    unmount v
    check_braidfs v.img || die "fsck finds something"
}

# -n: else pgbench empties its history, and the sums could not agree.
pgbench_load() {
    local code
    until [ -e "$stop" ]; do
        code=0
        as_user pgbench -n -h "$WORK/run" -c 3 -j 1 -t 100 bench >"$WORK/pgbench.now" 2>&1 || code=$?
        cat "$WORK/pgbench.now" >>"$WORK/pgbench"
        [ "$code" = 0 ] || return 1
    done
}

# git syncs its files, and then renames them: a name survives when its directory is synced.
git_sync() { find "$repo/.git" -type d -exec sync {} + && sync "$repo" "$WORK/v"; }

git_load() { # GC
    local n i
    n=$(git -C "$repo" log -1 --format=%s 2>/dev/null) || n=0
    cd "$repo" || return 1
    while [ ! -e "$stop" ]; do
        n=$((n + 1))
        mkdir -p "d$((n % 20))"
        for ((i = 0; i < 20; i++)); do echo "$n $i $RANDOM" >"d$((n % 20))/f$i" || return 1; done
        git add -A && git commit -q -m "$n" || return 1
        echo "$n" >>"$WORK/commits.git"
        if [ -n "${GIT_SYNC:-}" ]; then git_sync || return 1; fi
        echo "$n" >>"$WORK/commits"
        if (($1 > 0 && n % $1 == 0)); then git gc -q || return 1; fi
    done
}

git_mend() {
    find "$repo/.git" -name '*.lock' -delete
    # before the first commit there is none
    ! git -C "$repo" rev-parse -q --verify HEAD >/dev/null || git -C "$repo" reset -q --hard
}

git_is_whole() {
    local missing
    commits=$(wc -l <"$WORK/commits")
    missing=$(git -C "$repo" log --format=%s | sort | comm -13 - <(sort "$WORK/commits") | wc -l)
    [ "$missing" = 0 ] || die "$missing commits of $commits are missing"
    [ -z "$(git -C "$repo" status --porcelain)" ] || die "git status shows changes"
    git -C "$repo" fsck --full --strict >"$WORK/git-fsck" 2>&1 || die "git fsck: $(cat "$WORK/git-fsck")"
}
