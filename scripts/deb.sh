#!/usr/bin/env bash
# Builds the Debian package of the program $BUILT, else target/release/braidfs: target/deb/braidfs_VERSION_ARCH.deb. Its files are
# those of `make install`, put where Debian wants them. Needs dpkg-dev only; no debhelper, whose build would fetch what
# cargo needs a second time. DEB_VERSION=... is the version, else that of the workspace.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
PATH=$PATH:/usr/sbin:/sbin
command -v dpkg-shlibdeps >/dev/null || scripts/deps.sh dpkg-dev
version=${DEB_VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)}
arch=$(dpkg --print-architecture)
# the date of the sources, so that the same sources make the same package
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.toml)}"
export SOURCE_DATE_EPOCH

out=$target/deb root=$target/deb/root
umask 022
rm -rf "$root"
mkdir -p "$root/DEBIAN"
make --no-print-directory --assume-old=build install DESTDIR="$root" PREFIX=/usr SBINDIR=/usr/sbin LIBDIR=/usr/lib >/dev/null

strip --strip-unneeded --remove-section=.comment --remove-section=.note "$root/usr/bin/braidfs"
for link in "$root"/usr/sbin/*; do ln -sfn ../bin/braidfs "$link"; done
mkdir -p "$root/usr/share/zsh/vendor-completions"
mv "$root"/usr/share/zsh/site-functions/* "$root/usr/share/zsh/vendor-completions/"
rmdir "$root/usr/share/zsh/site-functions"

doc=$root/usr/share/doc/braidfs
install -d "$doc/examples" "$root/usr/share/lintian/overrides"
install -m 644 dist/debian/copyright "$doc/"
install -m 644 dist/debian/lintian-overrides "$root/usr/share/lintian/overrides/braidfs"
install -m 644 dist/modprobe.d/braidfs.conf "$doc/examples/modprobe-braidfs.conf"
fill() { sed "s|@VERSION@|$version|g; s|@ARCH@|$arch|; s|@DATE@|$(date -R -u -d "@$SOURCE_DATE_EPOCH")|; s|@SIZE@|${size:-0}|; s|@DEPENDS@|${depends:-}|" "$1"; }
fill dist/debian/changelog.in >"$doc/changelog"
cargo tree --locked --offline -p braidfs-cli --edges normal --prefix none --no-dedupe --format '{p} {l}' |
    sed 's/ (\/[^)]*)//; s/ (proc-macro)//' | sort -u >"$doc/libraries"
[ -s "$doc/libraries" ] || { echo "deb: cargo tree told no libraries" >&2; exit 1; }
find "$doc/changelog" "$doc/libraries" "$root/usr/share/man" -type f -exec gzip -9n {} +

# dpkg-shlibdeps wants to be in a source package
mkdir -p "$out/source/debian"
printf 'Source: braidfs\n\nPackage: braidfs\nArchitecture: any\n' >"$out/source/debian/control"
program=$(realpath "$root/usr/bin/braidfs")
depends=$(cd "$out/source" && dpkg-shlibdeps -O "$program" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { echo "deb: dpkg-shlibdeps told no dependencies" >&2; exit 1; }
size=$(du -sk --apparent-size --exclude=DEBIAN "$root" | cut -f1)
fill dist/debian/control.in >"$root/DEBIAN/control"
install -m 755 dist/debian/postinst dist/debian/postrm "$root/DEBIAN/"
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group --build "$root" "$out" >/dev/null
echo "$out/braidfs_${version}_$arch.deb"
