#!/usr/bin/env bash
# The Debian package in a fresh Debian: lintian, then in a debootstrap chroot install, mkfs, fstab, mount -a, use, a
# reboot, fsck -A, upgrade, remove, purge; nothing of it may be left. Needs root and /dev/fuse; three minutes.
#
# A boot is a mount and a PID namespace of its own: when it ends, so do its daemons. SUITE=bookworm|trixie (the host's);
# BUILT=PROGRAM is packed (the release build). --or-skip: what cannot be done here is said, and is no failure
# (with BRAIDFS_NO_SKIP=1 it is).
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
cannot() {
    if [ "${1:-}" = --or-skip ]; then
        echo "SKIPPED: the package in a fresh Debian: $2" >&2
        scripts/skipped.py note "the package in a fresh Debian" "$2"
        exit
    fi
    echo "deb-test: $2" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || cannot "${1:-}" "needs root"
[ -w /dev/fuse ] || cannot "${1:-}" "/dev/fuse cannot be opened"
for tool in debootstrap:debootstrap dpkg-shlibdeps:dpkg-dev; do
    command -v "${tool%:*}" >/dev/null || scripts/deps.sh "${tool#*:}" || cannot "${1:-}" "${tool#*:} is missing, and cannot be installed"
done
suite=${SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
mkdir -p "${CARGO_TARGET_DIR:-target}/deb-test"
work=$(realpath "${CARGO_TARGET_DIR:-target}")/deb-test
root=$work/root
die() { echo "deb-test: FAILED: $*" >&2; exit 1; }
ok() { passed=$((passed + 1)); echo "ok      $1"; }
passed=0

first=$(scripts/deb.sh)
version=$(dpkg-deb -f "$first" Version)
cp "$first" "$work/first.deb"
second=$(DEB_VERSION="$version+next1" scripts/deb.sh)
cp "$second" "$work/second.deb"

# It brings a hundred packages along: with --or-skip only where it is there.
if command -v lintian >/dev/null; then lint=1; elif [ "${1:-}" = --or-skip ]; then lint=; else scripts/deps.sh lintian && lint=1; fi
if [ -n "$lint" ]; then
    lintian --fail-on error --allow-root "$work/first.deb" || die "lintian"
    ok "lintian has no errors"
else
    echo "SKIPPED: lintian is not installed (make deb-test installs it)" >&2
    scripts/skipped.py note "the package by lintian" "it is not installed (make deb-test installs it)"
fi

# what it takes from the package's dependencies, but not the package: kept for the next run
base=$work/base-$suite.tar
if [ ! -e "$base" ]; then
    rm -rf "$root"
    debootstrap --variant=minbase --include=fuse3,udev "$suite" "$root" >"$work/debootstrap.log" 2>&1 ||
        { tail -5 "$work/debootstrap.log" >&2; cannot "${1:-}" "debootstrap cannot fetch a Debian"; }
    tar -C "$root" -cf "$base.part" . && mv "$base.part" "$base"
fi
rm -rf "$root"
mkdir "$root"
tar -C "$root" -xf "$base"
cp "$work"/first.deb "$work"/second.deb "$root/"

# Runs the script on standard input as root of a machine that has just been started. Its /dev is the host's, since loop
# devices are the kernel's; /dev/disk and /run are its own.
boot() {
    unshare --mount --pid --fork --kill-child --propagation=private sh -euc '
        mount --bind "$1" "$1"
        mount --rbind /dev "$1/dev"
        mount -t proc proc "$1/proc"
        mount -t sysfs sysfs "$1/sys"
        mount -t tmpfs tmpfs "$1/run"
        # not exec: the first process of the namespace has to take the place of the daemons parents
        chroot "$1" /bin/sh -eu
    ' sh "$root"
}

boot <<<true || cannot "${1:-}" "no mount and PID namespace, or none of /dev, /proc and /sys in it"

snapshot() { (cd "$root" && find etc usr var/lib sbin lib bin -xdev ! -path 'var/lib/dpkg/*' ! -path 'usr/share/doc/*' | sort); }
snapshot >"$work/before"

boot <<'S' || die "install"
dpkg -i /first.deb >/dev/null
braidfs --version
for name in mkfs mount umount fsck; do test -x /sbin/$name.braidfs; done
test -s /usr/lib/udev/rules.d/60-braidfs.rules -a -s /usr/share/bash-completion/completions/braidfs
mkfs -t braidfs -q --size 128M -L data /srv/disk.img
echo '/srv/disk.img  /mnt  braidfs  noatime  0 2' >/etc/fstab
fsck -A -T -a
mount -a
grep -q ' /mnt fuseblk.braidfs \| /mnt fuse.braidfs ' /proc/mounts
cp -a /usr/share/doc /mnt/doc
echo kept >/mnt/file
umount /mnt
S
ok "installed; mkfs, fstab, fsck -A, mount -a, use, umount"

boot <<'S' || die "second boot"
fsck -A -T -a
mount -a
grep -qx kept /mnt/file
diff -r /usr/share/doc /mnt/doc
echo 'synced before the power failed' >/mnt/file
sync /mnt/file
# power off, for the volume: its server is gone without a word
for p in /proc/[0-9]*; do
    if [ "$(readlink "$p/exe")" = /usr/bin/braidfs ]; then kill -9 "${p#/proc/}" || true; fi # the guard ends by itself
done
umount -l /mnt
S
ok "rebooted: the same tree; then the power fails"

boot <<'S' || die "third boot, upgrade"
fsck -A -T -a
# a mount by io_uring cannot be upgraded
sed -i 's/noatime/noatime,transport=dev/' /etc/fstab
mount -a
grep -qx 'synced before the power failed' /mnt/file
dpkg -i /second.deb >/dev/null
dpkg -s braidfs | grep -q '^Version: .*+next1'
# mounted all the while, by the program of the version before
grep -qx 'synced before the power failed' /mnt/file
server() { for p in /proc/[0-9]*; do if [ "$(readlink "$p/exe")" = "$1" ] && [ "$(cat "$p/comm")" != braidfs-guard ]; then echo "${p#/proc/}"; fi; done; }
[ -n "$(server '/usr/bin/braidfs (deleted)')" ]
# a descriptor that was half read goes on after the new program has taken over
printf 'one\ntwo\n' >/mnt/lines
exec 3</mnt/lines
read -r line <&3
[ "$line" = one ]
braidfs upgrade /mnt
read -r line <&3
[ "$line" = two ]
exec 3<&-
[ -z "$(server '/usr/bin/braidfs (deleted)')" ]
[ -n "$(server /usr/bin/braidfs)" ]
echo upgraded >/mnt/file
umount /mnt
mount -a
grep -qx upgraded /mnt/file
umount /mnt
fsck -A -T -f
S
ok "rebooted: what was synced is there; upgraded while mounted, a file stayed open; mounted by the new version"

boot <<'S' || die "remove"
dpkg --remove braidfs >/dev/null
# not with `!`, whose failure `set -e` does not see
for name in braidfs mkfs.braidfs mount.braidfs umount.braidfs fsck.braidfs; do
    if command -v "$name"; then echo "$name is still there" >&2; exit 1; fi
done
# fsck(8) finds no checker, and says nothing of it
if mount -t braidfs /srv/disk.img /mnt 2>/dev/null; then echo "mount still finds a helper" >&2; exit 1; fi
dpkg --purge braidfs >/dev/null 2>&1
rm /etc/fstab /srv/disk.img
S
snapshot >"$work/after"
diff "$work/before" "$work/after" | grep -v '^[0-9,]*[acd][0-9,]*$' | grep -v 'etc/fstab$' >"$work/left" || true
[ ! -s "$work/left" ] || die "left behind, or taken away: $(head -5 "$work/left")"
[ ! -e "$root/usr/share/doc/braidfs" ] || die "left behind: /usr/share/doc/braidfs"
ok "removed and purged: nothing is left"
rm -rf "$root"
echo "$passed passed, 0 failed"
