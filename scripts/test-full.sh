#!/usr/bin/env bash
# Every test: the suite as `make test` runs it, its long cases, all of it under AddressSanitizer and UBSan, and the data
# loader and the watchdog under ThreadSanitizer (the rest runs on OpenMP teams, whose barriers ThreadSanitizer does not see). With GPUSIM
# (a simulated GPU) also GPU kernels, with its checks for races and for missing dependencies between streams.
# The last line that it prints is "N passed, M failed" over all of these.
set -u
cd "$(dirname "$0")/.."
make=${MAKE:-make}
mkdir -p build
log=build/test-full.log
passed=0
failed=0
status=0

run() {  # run LABEL MAKE-ARGUMENTS…
    local label=$1
    shift
    echo "== $label"
    if ! $make --no-print-directory test GPUSIM= "$@" 2>&1 | tee "$log"; then status=1; fi
    local counts
    counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    if [ -z "$counts" ]; then
        echo "error: $label ended without a count of its tests"
        status=1
        counts="0 1"
    fi
    passed=$((passed + ${counts% *}))
    failed=$((failed + ${counts#* }))
}
set -o pipefail
gpusim=${GPUSIM:-}
# Below only what names it sees it: builds under a sanitizer know no CUDA.
run "as built" GPUSIM="$gpusim"
if [ -n "$gpusim" ]; then
    run "the program on a simulated GPU" GPUSIM="$gpusim" TEST_ARGS='[cli]'
    run "long cases on a simulated GPU" GPUSIM="$gpusim" TEST_ARGS='[long][cuda]'
    GPUSIM_RACECHECK=1 run "races between threads of a block" GPUSIM="$gpusim" TEST_ARGS='[cuda]'
    for seed in 0 1 2 3; do
        GPUSIM_STREAMS=lazy GPUSIM_SEED=$seed run "streams in an adverse order, seed $seed" GPUSIM="$gpusim" TEST_ARGS='[cuda]'
    done
fi
if grep -rq --include='*_test.cpp' '\[long\]' test; then run "long cases" TEST_ARGS='[long]'; fi
run "AddressSanitizer and UBSan" SANITIZE=address,undefined CUDA=0
run "ThreadSanitizer" SANITIZE=thread CUDA=0 TEST_ARGS='-# [#loader_test],[#shard_test],[#permutation_test],[#watchdog_test]'
echo "$passed passed, $failed failed"
[ $failed = 0 ] && exit $status
exit 1
