#!/bin/sh
# usage: build.sh DIR: builds the valgrind tool into DIR, which then serves as VALGRIND_LIB. Needs gcc and valgrind with its
# headers and libraries (Debian: one package). A tool that is newer than its source stays.
set -eu
cd "$(dirname "$0")"
out=$1
tool=$out/conflicts-amd64-linux
[ "$tool" -nt conflicts.c ] && [ "$tool" -nt build.sh ] && exit 0
programs=${VALGRIND_LIBEXEC:-/usr/libexec/valgrind}
libs=${VALGRIND_LIBS:-/usr/lib/x86_64-linux-gnu/valgrind}
mkdir -p "$out"
work=$(mktemp -d "$out/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
gcc -O2 -g -std=gnu11 -Wall -fno-strict-aliasing -fno-builtin -fno-stack-protector -fno-pie -fno-omit-frame-pointer \
    -DVGA_amd64=1 -DVGO_linux=1 -DVGP_amd64_linux=1 -DVGPV_amd64_linux_vanilla=1 -I/usr/include/valgrind \
    -c conflicts.c -o "$work/conflicts.o"
# as valgrind links its own tools: no C library, at the address that it keeps free for itself
gcc -static -no-pie -nodefaultlibs -nostartfiles -u _start -Wl,--build-id=none -Wl,-Ttext-segment=0x58000000 \
    -o "$work/tool" "$work/conflicts.o" -L"$libs" -lcoregrind-amd64-linux -lvex-amd64-linux -lgcc-sup-amd64-linux -lgcc
cp "$programs"/default.supp "$programs"/vgpreload_core-amd64-linux.so "$programs"/*.xml "$work"/
rm "$work/conflicts.o"
# Moved, not overwritten: a run under way has the old ones mapped. The tool comes last: another build may be at the same, and who finds
# it there goes on.
for file in "$work"/*; do
    [ "$file" = "$work/tool" ] || mv "$file" "$out"/
done
mv "$work/tool" "$tool"
