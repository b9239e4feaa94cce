#!/usr/bin/env bash
# Runs the built tests: on this machine's processors and GPU, and with GPUSIM on a simulated GPU as well. `make test` calls it.
#   usage: scripts/run-tests.sh TEST [ARGUMENTS…]        TEST: the test program; ARGUMENTS: Catch2's
#   GPUSIM=LIBRARIES   folder of the libraries that simulate a GPU: the tests with the tag [cuda] run once more on it
#   SIMULATED=only     on that alone
#   MEMCHECK=1         under NVIDIA's compute-sanitizer, the tests of kernels alone
# The last line that it prints is "N passed, M failed", in test cases, over all of it.
set -uo pipefail

test=$1
shift
passed=0
failed=0
status=0

run() {  # run COMMAND…: adds its counts
    local log counts
    log=$(mktemp)
    "$@" 2>&1 | tee "$log" || status=1
    counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    rm -f "$log"
    if [ -z "$counts" ]; then
        echo "error: the tests ended without a count"
        status=1
        counts="0 1"
    fi
    passed=$((passed + ${counts% *}))
    failed=$((failed + ${counts#* }))
}

if [ -n "${MEMCHECK:-}" ] && [ "$MEMCHECK" != 0 ]; then
    command -v compute-sanitizer > /dev/null ||
        { echo "error: MEMCHECK=1 needs compute-sanitizer, which comes with the CUDA toolkit" >&2; exit 1; }
    [ $# -gt 0 ] || set -- '[cuda]'
    run compute-sanitizer --tool memcheck --error-exitcode 1 "$test" "$@"
else
    [ "${SIMULATED:-}" = only ] || run "$test" "$@"
    if [ -n "${GPUSIM:-}" ]; then
        [ $# -gt 0 ] || set -- '[cuda]'
        echo "== on a simulated GPU: $*"
        run env LD_LIBRARY_PATH="$GPUSIM${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$test" "$@"
    fi
fi
echo "$passed passed, $failed failed"
[ $failed = 0 ] && exit $status
exit 1
