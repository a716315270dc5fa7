# Sourced by scripts/peers/*.sh: a braidfs and an ext4 to run a program on, and cleaning up whatever happens.
# Everything lives in $WORK, which is unmounted, detached and removed at exit, also after a failure or CTRL-C.
#   with_braidfs IMG SIZE MNT [MKFS-OPTION...]   formats the image $WORK/IMG and mounts it on $WORK/MNT
#   with_ext4 IMG SIZE MNT                       the same with ext4 on a loop device
#   remount_braidfs IMG MNT                      mounts it again, also over the mount point of a killed daemon
#   unmount MNT, kill_daemon MNT, check_braidfs IMG (fsck -f -n must end with 0)
#   need COMMAND PACKAGE, cargo_tool CRATE       $TOOLS/bin/CRATE of the newest version
# BRAIDFS_SUT=ext4 puts an ext4 in the place of braidfs (to test the scripts), BRAIDFS_BIN names another binary,
# BRAIDFS_TMP another place for $WORK, BRAIDFS_OPTIONS the options of the mounts.
# shellcheck shell=bash
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
BRAIDFS=${BRAIDFS_BIN:-$TARGET/release/braidfs}
SUT=${BRAIDFS_SUT:-braidfs}
TOOLS=$ROOT/target/peers
RESULTS=$ROOT/target/peers/results
WORK=$(mktemp -d "${BRAIDFS_TMP:-/var/tmp}/braidfs-peer-XXXXXX")
chmod 755 "$WORK"
mkdir -p "$RESULTS"
MOUNTS=()
AT_EXIT=()

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

is_mounted() { awk -v m="$WORK/$1" '$2 == m { found = 1 } END { exit !found }' /proc/mounts; }

# Process ids of the daemon that serves $WORK/MNT: our own binary with that mount point as an argument.
daemons() {
    local exe proc
    exe=$(readlink -f "$BRAIDFS")
    for proc in /proc/[0-9]*; do
        [ "$(readlink "$proc/exe" 2>/dev/null)" = "$exe" ] || continue
        # sees to the end of the connection, and ends with the daemon
        [ "$(cat "$proc/comm" 2>/dev/null)" != braidfs-guard ] || continue
        { tr '\0' '\n' <"$proc/cmdline"; } 2>/dev/null | grep -qxF "$WORK/$1" && basename "$proc"
    done
    return 0
}

wait_end() { # PID...
    local pid n
    for pid in "$@"; do
        for ((n = 0; n < 600; n++)); do
            [ -d "/proc/$pid" ] || break
            grep -q '^State:.[ZX]' "/proc/$pid/status" 2>/dev/null && break
            sleep 0.1
        done
    done
}

# Runs at exit, so it goes on after errors; never removes a tree that has something mounted in it.
cleanup() {
    local code=$? mnt pids pid action n
    trap '' INT TERM HUP
    set +e
    for action in "${AT_EXIT[@]}"; do eval "$action"; done
    # what a daemon has to say of a failure goes with it
    [ "$code" = 0 ] || for mnt in "${MOUNTS[@]}"; do
        [ ! -s "$WORK/$mnt.log" ] || sed "s/^/$mnt: /" "$WORK/$mnt.log" | tail -n 20 >&2
    done
    for mnt in "${MOUNTS[@]}"; do
        pids=$(daemons "$mnt")
        for ((n = 0; n < 5; n++)); do
            is_mounted "$mnt" || break
            umount "$WORK/$mnt" 2>/dev/null || umount -l "$WORK/$mnt" 2>/dev/null
        done
        for ((n = 0; n < 50; n++)); do [ -n "$(daemons "$mnt")" ] && sleep 0.1 || break; done
        for pid in $pids; do [ -n "$(daemons "$mnt")" ] && kill -9 "$pid" 2>/dev/null; done
    done
    losetup -n -O NAME,BACK-FILE -l 2>/dev/null | awk -v w="$WORK/" 'index($2, w) == 1 { print $1 }' |
        while read -r device; do losetup -d "$device"; done
    if grep -q " $WORK/" /proc/mounts; then
        printf 'still mounted below %s: please unmount and remove it\n' "$WORK" >&2
    else
        rm -rf "$WORK"
    fi
    exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

need() { # COMMAND PACKAGE
    local path
    path=$(command -v "$1" 2>/dev/null) && [ -n "$path" ] && return 0
    "$ROOT/scripts/deps.sh" "$2" && command -v "$1" >/dev/null || die "$1 is missing: install the package $2"
}

cargo_tool() { # CRATE: installs the newest version once
    [ -x "$TOOLS/bin/$1" ] || cargo install --quiet --locked --root "$TOOLS" "$1"
}

build_braidfs() {
    [ "$SUT" = ext4 ] && return 0
    [ -n "${BRAIDFS_BIN:-}" ] || (cd "$ROOT" && cargo build --quiet --release -p braidfs-cli)
    [ -x "$BRAIDFS" ] || die "$BRAIDFS: no such program"
    [ -w /dev/fuse ] || die "/dev/fuse cannot be opened: no mount is possible here"
}

need_root() { [ "$(id -u)" = 0 ] || die "needs root (mounts, other users)"; }

with_ext4() { # IMG SIZE MNT
    with_kernels "$@" mkfs.ext4 -q -F
}

with_kernels() { # IMG SIZE MNT MKFS [OPTION...]
    local img=$WORK/$1 size=$2 mnt=$3 device
    truncate -s "$size" "$img"
    "${@:4}" "$img"
    mkdir -p "$WORK/$mnt"
    MOUNTS+=("$mnt")
    device=$(losetup --find --show --direct-io=on "$img")
    mount "$device" "$WORK/$mnt"
    losetup -d "$device" # detaches with the unmount
}

mount_braidfs() { # IMG MNT
    "$BRAIDFS" mount --log-file "$WORK/$2.log" ${BRAIDFS_OPTIONS:+-o "$BRAIDFS_OPTIONS"} "$WORK/$1" "$WORK/$2"
}

with_braidfs() { # IMG SIZE MNT [MKFS-OPTION...]
    local img=$1 size=$2 mnt=$3
    shift 3
    if [ "$SUT" = ext4 ]; then
        with_ext4 "$img" "$size" "$mnt"
        return
    fi
    build_braidfs
    "$BRAIDFS" mkfs --quiet --size "$size" "$@" "$WORK/$img"
    mkdir -p "$WORK/$mnt"
    MOUNTS+=("$mnt")
    mount_braidfs "$img" "$mnt"
}

remount_braidfs() { # IMG MNT
    if [ "$SUT" = ext4 ]; then
        is_mounted "$2" || mount -o loop "$WORK/$1" "$WORK/$2"
    else
        mount_braidfs "$1" "$2"
    fi
}

unmount() { # MNT
    local pids
    pids=$(daemons "$1")
    umount "$WORK/$1"
    # shellcheck disable=SC2086
    wait_end $pids
}

kill_daemon() { # MNT
    local pids
    [ "$SUT" = ext4 ] && return 0
    pids=$(daemons "$1")
    [ -n "$pids" ] || die "no daemon found for $WORK/$1"
    # shellcheck disable=SC2086
    kill -9 $pids
    # shellcheck disable=SC2086
    wait_end $pids
}

check_braidfs() { # IMG
    if [ "$SUT" = ext4 ]; then e2fsck -f -n "$WORK/$1" >/dev/null 2>&1; else "$BRAIDFS" fsck -f -n "$WORK/$1"; fi
}
