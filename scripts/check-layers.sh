#!/usr/bin/env bash
# Imports in the engine point one way, down the layers:
#   volume, namespace > domain > cell > journal > nodes, space > store (the crate)
# mkfs may use all of them; error, types, live and planted are used by all and use none. Modules of one rank may use each
# other. A line ending in `// layering: REASON` is an exception. Exit code 1 and a list when one points upwards.
set -euo pipefail
cd "$(dirname "$0")/.."

awk '
BEGIN {
    rank["volume"] = rank["namespace"] = 60; rank["domain"] = 55; rank["cell"] = 50; rank["journal"] = 30
    rank["nodes"] = rank["space"] = 20; rank["store"] = 10; rank["types"] = rank["live"] = rank["error"] = rank["planted"] = 0
    rank["mkfs"] = 90; rank["lib"] = 100
}
FNR == 1 {
    path = FILENAME; sub(/^crates\/engine\/src\//, "", path)
    module = path; sub(/\/.*/, "", module); sub(/\.rs$/, "", module)
    # A test module may build whatever it needs: a file of its own, or the rest of one.
    depth = 0; tests = FILENAME ~ /\/tests\.rs$/; files++
    if (!(module in rank)) { print FILENAME ": module " module " has no rank in scripts/check-layers.sh"; bad = 1 }
}
/^[ ]*#\[cfg\(.*test.*\)\]/ { tests = 1 }
tests { next }
/\/\/ layering: / { next }
{
    line = $0; sub(/\/\/.*/, "", line)
    # Grouped imports, `use crate::{cell::A, space::B};`, may run over several lines.
    if (grouped != "" && FILENAME == grouped_file) { grouped = grouped " " line; if (line ~ /;/) { check_group(grouped); grouped = "" } next }
    if (line ~ /use crate::\{/) { grouped = line; grouped_file = FILENAME; if (line ~ /;/) { check_group(grouped); grouped = "" } next }
    while (match(line, /crate::[a-z_]+/)) {
        check(substr(line, RSTART + 7, RLENGTH - 7)); line = substr(line, RSTART + RLENGTH)
    }
}
function check(used) {
    if (!(used in rank) || used == module) return
    if (rank[used] > rank[module]) { print FILENAME ":" FNR ": " module " uses " used ", a layer above it"; bad = 1 }
}
function check_group(text,    i, c, level, word) {
    sub(/.*use crate::\{/, "", text); level = 0; word = ""; skip = 0
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == "{") level++
        else if (c == "}") level--
        if (level == 0 && c ~ /[a-z_]/) word = word c
        else if (c == "," && level == 0) { skip = 0; word = "" }
        else if (c == ":" && level == 0 && word != "") { if (!skip) check(word); skip = 1; word = "" }
    }
}
END {
    if (!files) { print "check-layers: no files found"; exit 1 }
    if (!bad) print "layering: " files " files, all imports point down"
    exit bad
}' $(find crates/engine/src -name '*.rs' | sort)
