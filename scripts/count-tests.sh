# shellcheck shell=bash
# What run-tests.sh and test-full.sh share: running programs whose last line is "N passed, M failed", and adding these up.
set -uo pipefail
passed=0
failed=0

counted() {  # counted COMMAND…: runs it and adds its counts
    local log counts code
    log=$(mktemp)
    "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    rm -f "$log"
    if [ -z "$counts" ]; then
        echo "error: ended with exit code $code and without a count of its tests: $*"
        counts="0 1"
    elif [ "$code" != 0 ] && [ "${counts#* }" = 0 ]; then
        echo "error: ended with exit code $code, though no test failed: $*"
        counts="${counts% *} 1"
    fi
    passed=$((passed + ${counts% *}))
    failed=$((failed + ${counts#* }))
}

finish() {  # prints the sums and ends the script
    echo "$passed passed, $failed failed"
    [ $failed = 0 ]
    exit
}
