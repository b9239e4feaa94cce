#!/usr/bin/env bash
# Runs the built tests on this machine's CPU and GPU and, with GPUSIM, also on a simulated GPU.
# `make test` calls it.
#   usage: scripts/run-tests.sh TEST [ARGUMENTS…]        TEST: the test program; ARGUMENTS: Catch2's
#   GPUSIM=LIBRARIES   folder of the libraries that simulate a GPU: the tests with the tag [cuda]
#                      run once more on it
#   SIMULATED=only     runs only these
#   SIMULATOR_CHECKS=1 looks for missing dependencies and races on the simulated GPU
#   MEMCHECK=1         runs only the tests of kernels, under NVIDIA's compute-sanitizer
# Every 10 s (PROGRESS_SECONDS) it says how many test cases have ended.
# The last line that it prints is "N passed, M failed" (test cases of all these runs).
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
[ $# -gt 0 ] || { echo "usage: scripts/run-tests.sh TEST [ARGUMENTS…]" >&2; exit 2; }
# shellcheck source=scripts/count-tests.sh
. "$(dirname "$0")/count-tests.sh"
test=$1
shift

# The test program adds a byte to this file for each case that ends.
export TEST_PROGRESS=$work/progress
: > "$TEST_PROGRESS"
# It waits at a pipe that nothing writes to, since a `sleep` would outlive it.
show_progress() {
    while ! read -rt "${PROGRESS_SECONDS:-10}"; do
        echo "$SECONDS s: $(wc -c < "$TEST_PROGRESS") test cases have ended"
    done <> <(:)
}
show_progress &

if [ -n "${MEMCHECK:-}" ] && [ "$MEMCHECK" != 0 ]; then
    command -v compute-sanitizer > /dev/null || {
        echo "error: MEMCHECK=1 needs compute-sanitizer, which comes with the CUDA toolkit" >&2
        exit 1
    }
    [ $# -gt 0 ] || set -- '[cuda]'
    counted compute-sanitizer --tool memcheck --error-exitcode 1 "$test" "$@"
else
    if [ "${SIMULATED:-}" = only ]; then
        :
    elif [ $# -gt 0 ] || nvidia-smi -L > /dev/null 2>&1; then
        counted "$test" "$@"
    else
        # Cases that start processes spend most of their time waiting, so other cases run at the
        # same time.
        ranks='training communicator selfcheck'
        ends='failure watchdog cluster scripts makefile'
        # shellcheck disable=SC2046,SC2086,SC2059  # the tags are words
        counted_together '[cli]~[.]' "$(printf '~[cli]~[.][%s],' $ranks)" \
            "$(printf "~[cli]~[.]$(printf '~[%s]' $ranks)[%s]," $ends)" \
            "~[cli]~[.]$(printf '~[%s]' $ranks $ends)"
    fi
    if [ -n "${GPUSIM:-}" ]; then
        echo "== on a simulated GPU: ${*:-[cuda]}"
        export LD_LIBRARY_PATH="$GPUSIM${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        if [ $# -gt 0 ]; then
            counted "$test" "$@"
        else
            # Missing dependencies between streams, in all; in tests of kernels also races, and
            # approximate instructions that err as hardware's do. The tests of ranks on several GPUs
            # choose an order themselves.
            [ "${SIMULATOR_CHECKS:-}" != 1 ] || {
                export GPUSIM_STREAMS=lazy GPUSIM_SEED=3
                # shellcheck disable=SC2034  # count-tests.sh reads it
                first_with=(GPUSIM_RACECHECK=1 GPUSIM_APPROX=1)
            }
            counted_together '[cuda]~[cli]~[training]~[.]' \
                '[cuda][cli]~[.],[cuda]~[cli][training]~[.]'
        fi
    fi
fi
finish
