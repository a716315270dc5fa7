#!/usr/bin/env bash
# Builds util-linux with dist/util-linux/*.patch and looks at volumes with its blkid, findfs and wipefs. (lsblk asks udev
# where there is one, and libblkid only where it was built without: scripts/mount_tests/distribution.py.)
#
# The source: UTIL_LINUX=DIR or UTIL_LINUX=TARBALL, else Debian's newest, fetched by apt-get with an own list of sources
# (the host's are left alone). Built in target/util-linux; root is needed for the part with loop devices.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
mkdir -p "${CARGO_TARGET_DIR:-target}/util-linux"
work=$(realpath "${CARGO_TARGET_DIR:-target}")/util-linux
braidfs=${BRAIDFS_BIN:-$(realpath "${CARGO_TARGET_DIR:-target}")/release/braidfs}
[ -x "$braidfs" ] || cargo build --release -p braidfs-cli
die() { echo "blkid-test: FAILED: $*" >&2; exit 1; }
for tool in "meson meson" "ninja ninja-build" "bison bison" "flex flex" "pkg-config pkg-config" "patch patch"; do
    command -v "${tool% *}" >/dev/null || scripts/deps.sh "${tool#* }"
done

fetch() { # the newest release tarball of Debian's archive
    local apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror
    # the one that the host uses
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Component: main' 'Created-By: Packages' 'Origin: Debian' |
        grep -v security | head -1)
    [ -n "$mirror" ] || die "apt-get knows no mirror of Debian: give the source as UTIL_LINUX=DIR or TARBALL"
    printf 'deb-src [signed-by=%s] %s sid main\n' $keyring "$mirror" >"$apt/sources.list"
    local options=(-o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$apt/lists"
        -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root -qq)
    apt-get "${options[@]}" update >&2
    (cd "$work" && apt-get "${options[@]}" source --download-only --tar-only util-linux >&2) ||
        die "the source cannot be fetched: give it as UTIL_LINUX=DIR or TARBALL"
    find "$work" -maxdepth 1 -name 'util-linux_*.orig.tar.*' ! -name '*.asc' | sort -V | tail -1
}

source=${UTIL_LINUX:-$(find "$work" -maxdepth 1 -name 'util-linux_*.orig.tar.*' ! -name '*.asc' | sort -V | tail -1)}
[ -n "$source" ] || source=$(fetch)
tree=$work/tree
made="$source $(cat dist/util-linux/*.patch | sha256sum)"
if [ "$(cat "$work/made" 2>/dev/null)" != "$made" ]; then
    rm -rf "$tree"
    if [ -d "$source" ]; then cp -a "$source" "$tree"; else mkdir "$tree" && tar -xf "$source" -C "$tree" --strip-components=1; fi
    for patch in "$here"/dist/util-linux/*.patch; do patch -s -d "$tree" -p1 <"$patch"; done

    rm -rf "$work/build"
    meson setup "$work/build" "$tree" --auto-features=disabled -Dbuild-libblkid=enabled -Dbuild-libsmartcols=enabled >"$work/meson.log" 2>&1 ||
        { tail -20 "$work/meson.log" >&2; die "meson"; }
    ninja -C "$work/build" blkid wipefs findfs >"$work/ninja.log" 2>&1 ||
        { tail -20 "$work/ninja.log" >&2; die "the patched util-linux does not build"; }
    ! grep -A5 'superblocks_braidfs.*warning\|braidfs.c:.*warning' "$work/ninja.log" || die "the compiler warns"
    echo "$made" >"$work/made"
fi
blkid=$work/build/blkid wipefs=$work/build/wipefs
[ -x "$blkid" ] || die "no blkid was built"
echo "built: $("$blkid" -V 2>&1 | head -1) with $(ls dist/util-linux)"

passed=0
ok() { passed=$((passed + 1)); echo "ok      $1"; }
images=$(mktemp -d)
devices=()
trap 'for d in "${devices[@]}"; do losetup -d "$d"; done; rm -rf "$images"' EXIT
cd "$images"

# 1. what blkid says is what our own probe says
"$braidfs" mkfs -q --size 64M --label 'my disk/1 ü' one.img
"$braidfs" mkfs -q --size 64M --data-checksums two.img
"$braidfs" mkfs -q --size 40M a.img b.img
for image in one two a b; do
    "$braidfs" probe --udev $image.img | sort >ours
    # udev's own names for what blkid calls otherwise
    "$blkid" -p -o udev $image.img | sed 's/^ID_FS_BLOCK_SIZE=/ID_FS_BLOCKSIZE=/; s/^ID_FS_FSSIZE=/ID_FS_SIZE=/' |
        grep -v '^ID_FS_FSBLOCKSIZE\|^$' | sort >theirs
    diff -u ours theirs || die "$image.img: blkid (+) and braidfs probe (-) differ"
done
ok "blkid -p -o udev says what braidfs probe --udev says, of 4 images"
[ "$("$blkid" -p -s TYPE -o value one.img)" = braidfs ] || die "blkid -p"
"$blkid" -p one.img | grep -q 'LABEL="my disk/1 .*TYPE="braidfs".*USAGE="filesystem"' || die "$("$blkid" -p one.img)"
[ "$("$blkid" -p -s UUID -o value a.img)" = "$("$blkid" -p -s UUID -o value b.img)" ] || die "two devices, two UUIDs"
[ "$("$blkid" -p -s UUID_SUB -o value a.img)" != "$("$blkid" -p -s UUID_SUB -o value b.img)" ] || die "one UUID_SUB"
ok "blkid -p, devices of one volume"

# 2. what is none is none: a byte of the superblock changed, another block of the volume
for at in 0 5 8 16 48 200 4095; do
    cp --sparse=always one.img bad.img
    printf '\xa5' | dd of=bad.img bs=1 seek=$at conv=notrunc status=none
    said=$("$blkid" -p -s TYPE -o value bad.img || true)
    [ -z "$said" ] || die "byte $at is wrong and blkid says $said"
done
truncate -s 64M other.img
dd if=one.img of=other.img bs=4096 skip=1 count=8 conv=notrunc status=none
[ -z "$("$blkid" -p -s TYPE -o value other.img || true)" ] || die "another block is taken for a superblock"
ok "damaged and foreign blocks are nothing, 8 cases"

# 3. wipefs
"$wipefs" -n two.img | grep -q 'braidfs' || die "wipefs: $("$wipefs" -n two.img)"
"$wipefs" -aq two.img
! "$braidfs" probe two.img || die "still a volume after wipefs -a"
ok "wipefs lists and wipes it"

# 4. on devices: the search by UUID and by label
if [ "$(id -u)" = 0 ]; then
    device=$(losetup --find --show one.img)
    devices+=("$device")
    uuid=$("$braidfs" probe one.img | sed -n 's/^UUID=//p')
    found=$("$blkid" -c /dev/null -t UUID="$uuid" -o device)
    [[ $found == *"$device"* ]] || die "blkid -t UUID=$uuid found '$found'"
    [ "$("$work/build/findfs" UUID="$uuid")" = "$device" ] || die "findfs UUID=$uuid"
    [ "$("$work/build/findfs" LABEL="my disk/1 ü")" = "$device" ] || die "findfs LABEL="
    ok "blkid -t UUID=, findfs by UUID and label"
else
    echo "skipped the search on devices: needs root"
fi
echo "$passed passed, 0 failed"
