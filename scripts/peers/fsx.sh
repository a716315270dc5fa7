#!/usr/bin/env bash
# make fsx: the file system exerciser, every read compared: FSX_OPS operations (default 10^6) of every kind, and as
# many with O_DIRECT. FSX_SEED replays a run. On failure the history is in target/peers/results/fsx.*.log.
. "$(dirname "$0")/../lib.sh"

need_root
need gcc gcc
cargo_tool fsx
ops=${FSX_OPS:-1000000}
seed=${FSX_SEED:-$((RANDOM * 32768 + RANDOM))}

# fsx has no option for O_DIRECT: this adds it to every open of the file under test, and aligns the buffers.
cat >"$WORK/direct.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static _Thread_local char bounce[1 << 20] __attribute__((aligned(4096)));

static int bounces(int fd, size_t n) { return n <= sizeof bounce && (fcntl(fd, F_GETFL) & O_DIRECT); }

#define OPEN(name)                                                                      \
    int name(const char *path, int flags, ...) {                                        \
        va_list list;                                                                   \
        va_start(list, flags);                                                          \
        mode_t mode = va_arg(list, mode_t);                                             \
        va_end(list);                                                                   \
        int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                  \
        return next(path, strstr(path, "fsx.direct") ? flags | O_DIRECT : flags, mode); \
    }
#define READ(name)                                                             \
    ssize_t name(int fd, void *to, size_t n, off_t at) {                       \
        ssize_t (*next)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, #name); \
        if (!bounces(fd, n)) return next(fd, to, n, at);                       \
        ssize_t got = next(fd, bounce, n, at);                                 \
        if (got > 0) memcpy(to, bounce, got);                                  \
        return got;                                                            \
    }
#define WRITE(name)                                                                  \
    ssize_t name(int fd, const void *from, size_t n, off_t at) {                     \
        ssize_t (*next)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, #name); \
        if (!bounces(fd, n)) return next(fd, from, n, at);                           \
        memcpy(bounce, from, n);                                                     \
        return next(fd, bounce, n, at);                                              \
    }
OPEN(open)
OPEN(open64)
READ(pread)
READ(pread64)
WRITE(pwrite)
WRITE(pwrite64)
C
gcc -shared -fPIC -o "$WORK/direct.so" "$WORK/direct.c" -ldl

config() { # ALIGN FLEN
    cat <<TOML
flen = $2
[opsize]
max = 65536
min = $1
align = $1
[weights]
close_open = 1
read = 10
write = 10
mapread = 5
mapwrite = 5
invalidate = 1
truncate = 3
fsync = 0.3
fdatasync = 0.3
posix_fallocate = $(($1 > 1 ? 0 : 2)) # fsx does not align its offsets
punch_hole = 3
sendfile = 2
posix_fadvise = 1
copy_file_range = 2
TOML
}

with_braidfs fsx.img 512M fsx

# In parts, each with the next seed and an empty file: this exerciser never unmaps what it maps, so that one process gets
# past some 400,000 operations on no file system before the kernel gives it no more mappings.
part=200000

run() { # NAME ALIGN FLEN [PRELOAD]
    config "$2" "$3" >"$WORK/$1.toml"
    local left=$ops now=$seed n
    while ((left > 0)); do
        n=$((left < part ? left : part))
        say "fsx $1: $n operations of $left, FSX_SEED=$now"
        # What a failing run leaves behind (expected content) goes beside the log, not to $WORK.
        if ! LD_PRELOAD=${4:-} "$TOOLS/bin/fsx" -q -N "$n" -S "$now" -f "$WORK/$1.toml" -P "$RESULTS" "$WORK/fsx/fsx.$1" \
            >"$RESULTS/fsx.$1.log" 2>&1; then
            tail -n 20 "$RESULTS/fsx.$1.log"
            die "fsx $1 failed; again: FSX_OPS=$n FSX_SEED=$now make fsx. See $RESULTS/fsx.$1.log"
        fi
        left=$((left - n)) now=$((now + 1))
    done
}

run cached 1 1000000
run direct 4096 4194304 "$WORK/direct.so"
unmount fsx
check_braidfs fsx.img || die "fsck finds something after fsx"
say "fsx: $ops operations cached and $ops with O_DIRECT, every read right, fsck clean"
