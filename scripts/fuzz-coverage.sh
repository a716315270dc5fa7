#!/usr/bin/env bash
# The fuzz targets under libFuzzer, which keeps inputs that reach new code, on the stable toolchain.
#   FUZZ_SECONDS   for each target (default 60)
#   FUZZ_TARGETS   which (default: structures journal image operations)
#   FUZZ_SANITIZER none (default), or address, which makes it slower
#   FUZZ_KEEP=1    puts inputs that reach code which fuzz/corpus does not into fuzz/corpus
# New inputs and logs: target/fuzz-coverage. A failing input: fuzz/artifacts/TARGET.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fuzz --version >/dev/null 2>&1 || { echo "make fuzz-coverage: cargo-fuzz is missing: cargo install cargo-fuzz" >&2; exit 1; }
command -v c++ >/dev/null || { echo "make fuzz-coverage: a C++ compiler is missing: apt-get install g++" >&2; exit 1; }

# coverage instrumentation is an unstable flag of rustc
export RUSTC_BOOTSTRAP=1
found=${CARGO_TARGET_DIR:-target}/fuzz-coverage
failed=0

fuzz() { # TARGET CORPUS... -- ARGS...
    cargo fuzz run -s "${FUZZ_SANITIZER:-none}" --features libfuzzer "$@"
}

for target in ${FUZZ_TARGETS:-structures journal image operations}; do
    mkdir -p "$found/$target"
    log=$found/$target.log
    # no longer than a target reads; -timeout: what takes longer hangs
    case $target in
        structures) longest=4200 ;;
        *) longest=400 ;;
    esac
    # on a terminal one sees it work
    if [ -t 1 ]; then show=/dev/stdout; else show=/dev/null; fi
    fuzz "$target" "$found/$target" "fuzz/corpus/$target" -- -max_total_time="${FUZZ_SECONDS:-60}" -timeout=30 \
        -len_control=0 -max_len=$longest -print_final_stats=1 2>&1 | tee "$log" >"$show" || {
        failed=1
        echo "FAILED: $target: see $log and fuzz/artifacts/$target" >&2
        continue
    }
    awk -v t="$target" '
        $2 == "INITED" { before = $4 }
        $2 == "DONE" { runs = substr($1, 2); after = $4 }
        /average_exec_per_sec/ { rate = $2 }
        END { printf "%s: %d inputs, %d a second, %d edges reached, by the corpus %d; 0 failures\n", t, runs, rate, after, before }
    ' "$log"
    if [ "${FUZZ_KEEP:-0}" = 1 ]; then
        # by edges alone: inputs that only go round more often are too many to keep
        fuzz "$target" "fuzz/corpus/$target" "$found/$target" -- -merge=1 -use_counters=0 -timeout=30 >>"$log" 2>&1
        git status --short -- "fuzz/corpus/$target"
    fi
done
exit $failed
