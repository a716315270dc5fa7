#!/usr/bin/env bash
# make postgres-rates: pgbench's transactions a second, and the time of one, by number of clients, on braidfs, ext4 and XFS (the
# thesis on bladefs has TPC-W, Figures 3.4 and 3.5). ROUNDS (default 3) of all, file systems in turns, each made anew;
# RATES_SECONDS (default 5) each; CLIENTS (default "1 2 4 8"). DOCS=docs puts the table into DOCS/figures.md, between its marks.
. "$(dirname "$0")/lib.sh"
. "$ROOT/scripts/pg.sh"

need_root
rounds=${ROUNDS:-3} seconds=${RATES_SECONDS:-5} clients=${CLIENTS:-1 2 4 8}
PG=pg
pg_programs
need mkfs.xfs xfsprogs

with_xfs() { # IMG SIZE MNT
    with_kernels "$@" mkfs.xfs -q -f
}

for ((round = 1; round <= rounds; round++)); do
    for system in ext4 xfs braidfs; do
        "with_$system" "$system.img" 4G pg
        pg_init 10
        for n in $clients; do
            as_user pgbench -n -h "$WORK/run" -c "$n" -j "$((n < 2 ? 1 : 2))" -T "$seconds" bench 2>/dev/null >"$WORK/said"
            tps=$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' "$WORK/said")
            latency=$(sed -n 's/^latency average = \([0-9.]*\) ms.*/\1/p' "$WORK/said")
            [ -n "$tps" ] && [ -n "$latency" ] || die "pgbench says nothing of its rate: $(cat "$WORK/said")"
            say "round $round, $system, $n clients: $tps transactions/s, $latency ms"
            echo "$system $n $tps $latency" >>"$WORK/rates"
        done
        pg_end
        AT_EXIT=()
        unmount pg
        rm -rf "$WORK/$system.img" "$WORK/run"
    done
done

DOCS=${DOCS:-} SECONDS_EACH=$seconds ROUNDS=$rounds python3 - "$WORK/rates" <<'PY'
import datetime, os, pathlib, statistics, sys

rates = {}
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    system, clients, tps, latency = line.split()
    rates.setdefault((int(clients), system), []).append((float(tps), float(latency)))
systems = ["ext4", "xfs", "braidfs"]
day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
rows = [
    f"Measured {day}: pgbench, scale 10, {os.environ['SECONDS_EACH']} s each, medians of {os.environ['ROUNDS']} round(s), on an image of 4 GiB "
    "(ext4 and XFS by a loop device with direct I/O). Transactions a second, and the mean time of one.",
    "",
    "| clients | " + " | ".join(systems) + " |",
    "| --- " * (len(systems) + 1) + "|",
]
for clients in sorted({c for c, _ in rates}):
    cells = [
        "{:.0f}, {:.1f} ms".format(*(statistics.median(r[i] for r in rates[clients, s]) for i in (0, 1))) for s in systems
    ]
    rows.append(f"| {clients} | " + " | ".join(cells) + " |")
text = "\n".join(rows)
print(text)
if os.environ["DOCS"]:
    page = pathlib.Path(os.environ["DOCS"]) / "figures.md"
    begin, end = "<!-- figure-thesis-3.4:begin -->", "<!-- figure-thesis-3.4:end -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")
PY
