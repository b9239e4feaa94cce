#!/usr/bin/env bash
# Fuzzes the file readers with libFuzzer: no crash, no hang, no excessive memory, no broken contract
# (test/fuzz/targets.cpp).
#   usage: scripts/fuzz.sh, or make fuzz [FUZZ_SECONDS=60] [FUZZ_TARGETS="shard safetensors"]
# Each target starts from its seeds and from what earlier runs found (build/fuzz/corpus). Inputs
# that break a reader stay in build/fuzz/found; once the reader is fixed, add them to the seeds. The
# last line is "N passed, M failed" (targets).
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
set -uo pipefail
command -v clang++ > /dev/null || {
    echo 'skipped: fuzzing, which needs clang++ with libFuzzer (apt-get install clang)'
    echo '0 passed, 0 failed'
    exit 0
}
${MAKE:-make} --no-print-directory build/fuzz/fuzz || { echo '0 passed, 1 failed'; exit 1; }
passed=0
failed=0
for target in ${FUZZ_TARGETS:-$(build/fuzz/fuzz)}; do
    echo "== fuzzing $target for ${FUZZ_SECONDS:-60} s"
    mkdir -p "build/fuzz/corpus/$target" build/fuzz/found
    if FUZZ_TARGET=$target build/fuzz/fuzz -max_total_time="${FUZZ_SECONDS:-60}" -timeout=10 \
        -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=65536 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/found/$target-" \
        "build/fuzz/corpus/$target" "test/fuzz/seeds/$target" > "build/fuzz/$target.log" 2>&1; then
        passed=$((passed + 1))
        grep -E '^stat::(number_of_executed_units|peak_rss_mb)' "build/fuzz/$target.log" || true
    else
        failed=$((failed + 1))
        tail -n 40 "build/fuzz/$target.log"
    fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
