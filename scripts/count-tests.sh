# shellcheck shell=bash disable=SC2154  # the script that sources this one sets `test`
# What run-tests.sh and test-full.sh share: running programs whose last line is
# "N passed, M failed", and adding these up. Lines that begin with "failed: " say which tests
# failed; they are repeated at the end. On the way the counts of parts are shown in other words, so
# that only the last line looks like the end.
set -uo pipefail
passed=0
failed=0
failures=()
first_with=()

# Whatever ends the script ends the programs that it runs. The script waits for programs in the
# background, since bash takes no signal while it waits for one in the foreground.
work=$(mktemp -d)
# shellcheck disable=SC2046  # the numbers are words
trap 'trap "" INT TERM; kill $(jobs -p) 2> /dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# interruptible COMMAND…: bash lets programs in the background, and all that they start, ignore
# Ctrl-C. This one begins as in the foreground.
interruptible() { exec env --default-signal=INT,QUIT "$@"; }

as_a_part() {
    local words='part: \1 cases passed and \2 failed; it is not over yet'
    sed -u "s/^\([0-9]*\) passed, \([0-9]*\) failed\$/$words/"
}

counted() {  # counted COMMAND…: runs it and adds its counts
    local log=$work/log
    interruptible "$@" 2>&1 | tee "$log" | as_a_part &
    wait $!
    add_counts "$log" $? "$@"
}

# counted_together ARGUMENT…: runs $test with each of them at the same time, and adds their counts.
# The first one runs with the variables of the array `first_with`.
counted_together() {
    local processes i code
    echo "running $# parts of the tests at the same time; the output of each appears when it ends"
    processes=()
    for i in "$@"; do
        if [ ${#processes[@]} = 0 ]; then
            interruptible "${first_with[@]}" "$test" "$i" > "$work/0" 2>&1 &
        else
            interruptible "$test" "$i" > "$work/${#processes[@]}" 2>&1 &
        fi
        processes+=($!)
    done
    for i in "${!processes[@]}"; do
        wait "${processes[i]}"
        code=$?
        as_a_part < "$work/$i"
        add_counts "$work/$i" $code "$test" "${@:i + 1:1}"
    done
}

# add_counts LOG CODE COMMAND…: adds what a command printed at its end, and removes the log
add_counts() {
    local log=$1 code=$2 counts
    shift 2
    counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    mapfile -t -O ${#failures[@]} failures < <(grep '^failed: ' "$log" | sort -u)
    rm -f "$log"
    if [ -z "$counts" ]; then
        echo "error: ended with exit code $code and printed no count of its tests: $*"
        counts="0 1"
    elif [ "$code" != 0 ] && [ "${counts#* }" = 0 ]; then
        echo "error: ended with exit code $code, though no test failed: $*"
        counts="${counts% *} 1"
    fi
    passed=$((passed + ${counts% *}))
    failed=$((failed + ${counts#* }))
}

finish() {  # prints what failed and the sums, and ends the script
    [ ${#failures[@]} = 0 ] || printf '%s\n' "${failures[@]}"
    echo "$passed passed, $failed failed"
    [ $failed = 0 ]
    exit
}
