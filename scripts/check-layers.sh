#!/usr/bin/env bash
# Imports in the engine and in the checker point one way, down the layers:
#   engine: volume, names, file, attributes, fsync, braid/entry, braid/reconcile, braid/stale > domain > cell > braid/rules, braid/plan > braid/durability, braid/vacated > braid/frontier > journal >
#     quota > nodes, space > store (the crate) > budget, spending
#   check: check, image > repair > quick, online, dump > scan > data > model > collect, home > rules > parts > read > pair, report > usage
# braid/ is the protocol between domains: its files have ranks of their own, its rules use no layer that does I/O.
# mkfs may use all of the engine; error, panics, lazy, types, numa, device_set, runtime_options, planted, codes, finding and threads are used by all and use none. Modules of one
# rank may use each other, files of the engine not in a circle (check-circles.py). That the checker does not use the engine cargo sees to. A line ending in `// layering: REASON` is an exception. Exit code 1 and a list when one points upwards.
set -euo pipefail
cd "$(dirname "$0")/.."

awk '
BEGIN {
    set("engine", "types device_set runtime_options error panics planted lazy numa", 0); set("engine", "budget spending", 5); set("engine", "store", 10); set("engine", "nodes space", 20); set("engine", "quota", 25)
    set("engine", "journal", 30); set("engine", "braid/frontier", 40); set("engine", "braid/durability braid/vacated", 45)
    set("engine", "braid/rules braid/plan", 46)
    set("engine", "cell", 50); set("engine", "domain", 55)
    set("engine", "volume names file attributes fsync", 60); set("engine", "braid/mod braid/entry braid/reconcile braid/stale", 60)
    set("engine", "mkfs", 90); set("engine", "lib", 100)
    set("check", "codes error finding threads", 0); set("check", "usage", 5); set("check", "report", 10); set("check", "pair", 15); set("check", "read", 20)
    set("check", "parts", 25); set("check", "rules", 30); set("check", "collect", 40); set("check", "home", 40)
    set("check", "model", 50); set("check", "data", 55); set("check", "scan", 60); set("check", "quick online dump", 70)
    set("check", "repair", 80); set("check", "check image", 90); set("check", "lib", 100)
}
FNR == 1 {
    crate = FILENAME; sub(/^crates\//, "", crate); sub(/\/.*/, "", crate)
    path = FILENAME; sub(/^crates\/[a-z]+\/src\//, "", path)
    module = path; sub(/\.rs$/, "", module)
    if (match(module, /^braid\/[^\/]+/)) module = substr(module, 1, RLENGTH); else sub(/\/.*/, "", module)
    # A test module may build whatever it needs: a file of its own, or the rest of one.
    depth = 0; tests = FILENAME ~ /\/tests\.rs$/; files++
    if (!tests && !((crate, module) in rank)) { print FILENAME ": module " module " has no rank in scripts/check-layers.sh"; bad = 1 }
}
/^[ ]*#\[cfg\(.*test.*\)\]/ { tests = 1 }
tests { next }
/\/\/ layering: / { next }
{
    line = $0; sub(/\/\/.*/, "", line)
    # Grouped imports, `use crate::{cell::A, space::B};`, may run over several lines.
    if (grouped != "" && FILENAME == grouped_file) { grouped = grouped " " line; if (line ~ /;/) { check_group(grouped); grouped = "" } next }
    if (line ~ /use crate::\{/) { grouped = line; grouped_file = FILENAME; if (line ~ /;/) { check_group(grouped); grouped = "" } next }
    while (match(line, /crate::(braid::)?[a-z_]+/)) {
        used = substr(line, RSTART + 7, RLENGTH - 7); sub(/^braid::/, "braid/", used)
        check(used); line = substr(line, RSTART + RLENGTH)
    }
}
function set(crate, modules, value,    names, i, n) {
    n = split(modules, names, " ")
    for (i = 1; i <= n; i++) rank[crate, names[i]] = value
}
function check(used) {
    if (!((crate, used) in rank) || used == module) return
    if (rank[crate, used] > rank[crate, module]) { print FILENAME ":" FNR ": " module " uses " used ", a layer above it"; bad = 1 }
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
}' $(find crates/engine/src crates/check/src -name '*.rs' | sort)
