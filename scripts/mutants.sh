#!/usr/bin/env bash
# Checks that the tests can fail: puts the deliberate faults of test/mutants.txt into the sources,
# one at a time, and runs the test that must find each.
#   usage: scripts/mutants.sh [--random N [--seed S]] [--list] [--check] [NAME…]
#   NAME…          only these faults
#   --random N     N faults chosen at random; --seed S repeats a choice
#   --list         prints the faults and exits
#   --check        checks without building that each fault still fits its file, and that its test
#                  exists
#   GPUSIM=folder  the simulated GPU's sources (as for make) or libraries; without it, faults in
#                  CUDA code are skipped
# It works in a copy of the tree in TMPDIR, including what is built in build/. Other variables are
# those of make. A fault is caught if its test fails, crashes or takes more than 120 s. The last
# line is "N passed, M failed": faults that were caught, and faults that were missed or do not fit
# the sources.
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
make=${MAKE:-make}
limit=120  # seconds

usage() {
    echo "usage: scripts/mutants.sh [--random N [--seed S]] [--list] [--check] [NAME…]" >&2
    exit 2
}
mode=run
count=
seed=
wanted=()
while [ $# -gt 0 ]; do
    case $1 in
        --list | --check) mode=${1#--} ;;
        --random | --seed)
            [[ ${2:-} =~ ^[0-9]+$ ]] || usage
            if [ "$1" = --random ]; then count=$2; else seed=$2; fi
            shift ;;
        -*) usage ;;
        *) wanted+=("$1") ;;
    esac
    shift
done

# --- The list -------------------------------------------------------------------------------------

names=() files=() needs=() faults=() edits=() tests=()
read_list() {
    local line name file need field=4
    while IFS= read -r line; do
        case $line in
            '' | '#'*) continue ;;
            ' '*)
                line=${line#"${line%%[! ]*}"}
                case $field in
                    1) faults+=("$line") ;;
                    2) edits+=("$line") ;;
                    3) tests+=("$line") ;;
                    *) break ;;
                esac
                field=$((field + 1)) ;;
            *)
                [ $field = 4 ] || break
                read -r name file need <<< "$line"
                names+=("$name") files+=("$file") needs+=("$need")
                field=1 ;;
        esac
        line=
    done < test/mutants.txt
    if [ $field != 4 ] || [ -n "${line:-}" ]; then
        echo "error: in test/mutants.txt the entry ${names[-1]:-before the first name} does not" \
            "have four lines" >&2
        exit 1
    fi
    name=$(printf '%s\n' "${names[@]}" | sort | uniq -d | head -n 1)
    [ -z "$name" ] || { echo "error: test/mutants.txt has two faults called $name" >&2; exit 1; }
}

needs_it() { [[ " ${needs[$1]} " == *" $2 "* ]]; }  # needs_it INDEX cuda|mpi|amx|VARIABLE=VALUE

# Catch2's pattern of an entry's test, and the section to run; empty: all sections.
pattern_of() { echo "${tests[$1]%% -c *}"; }
section_of() { [[ ${tests[$1]} != *' -c '* ]] || echo "${tests[$1]#* -c }"; }

# put_fault INDEX TO: the file with the fault; false unless one line is changed or deleted
put_fault() {
    local differences
    sed "${edits[$1]}" "${files[$1]}" > "$2" || return 1
    differences=$(diff -- "${files[$1]}" "$2") || true
    [ "$(grep -c '^<' <<< "$differences")" = 1 ] && [ "$(grep -c '^>' <<< "$differences")" -le 1 ]
}

passed=0
failed=0
result() {  # result INDEX passed|failed TEXT
    echo "${names[$1]}: $3"
    if [ "$2" = passed ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}
give_up() {
    echo "error: $1"
    echo "0 passed, 1 failed"
    exit 1
}
finish() {
    echo "$passed passed, $failed failed"
    [ $failed = 0 ]
    exit
}

read_list
chosen=()
for name in "${wanted[@]}"; do
    found=
    for i in "${!names[@]}"; do
        [ "${names[i]}" != "$name" ] || found=$i
    done
    [ -n "$found" ] || {
        echo "error: test/mutants.txt has no fault called $name; --list shows them" >&2
        exit 2
    }
    chosen+=("$found")
done
[ ${#wanted[@]} -gt 0 ] || chosen=("${!names[@]}")

if [ "$mode" = list ]; then
    for i in "${chosen[@]}"; do
        echo "${names[i]}  (${files[i]}${needs[i]:+; needs ${needs[i]// / and }})"
        echo "    ${faults[i]}"
    done
    exit
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/mutants.XXXXXX")
end_test() {  # kills processes that the last test left running
    [ ! -s "$work/session" ] || pkill -KILL -s "$(cat "$work/session")" || true
    rm -f "$work/session"
}
trap 'end_test; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [ "$mode" = check ]; then
    # The names of tests and sections, one per line, with string literals joined as the compiler
    # does.
    cat test/*.cpp test/*/*.cpp | tr '\n' ' ' |
        sed 's/" *"//g; s/TEST_CASE_METHOD([^,]*,/TEST_CASE(/g' |
        grep -o '\(TEST_CASE\|SECTION\)( *"[^"]*"' |
        sed 's/( *"/ /; s/"$//' > "$work/tests"
    mapfile -t all_tests < <(sed -n 's/^TEST_CASE //p' "$work/tests")
    for i in "${chosen[@]}"; do
        pattern=$(pattern_of "$i")
        section=$(section_of "$i")
        is_there=
        for name in "${all_tests[@]}"; do
            # shellcheck disable=SC2053  # the pattern is one
            if [[ $name == $pattern ]]; then
                is_there=1
                break
            fi
        done
        if [ ! -e "${files[i]}" ]; then
            result "$i" failed "there is no ${files[i]}"
        elif ! put_fault "$i" "$work/file" 2> "$work/log"; then
            result "$i" failed \
                "does not apply: its edit must change one line of ${files[i]}: ${edits[i]}"
            cat "$work/log"
        elif [[ $pattern == *,* ]]; then
            result "$i" failed \
                "the pattern of its test has a comma, which separates patterns: $pattern"
        elif [ -z "$is_there" ]; then
            result "$i" failed "no test is called: $pattern"
        elif [ -n "$section" ] && ! grep -qxF "SECTION $section" "$work/tests"; then
            result "$i" failed "no test has the section: $section"
        else
            passed=$((passed + 1))
        fi
    done
    finish
fi

# --- The copy -------------------------------------------------------------------------------------

simulator=${GPUSIM:+$(realpath "$GPUSIM")}
copy=$work/tree
mkdir -p "$copy/build"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file"
done | xargs -0 cp -a --parents -t "$copy"
git describe --always --dirty --exclude='*' > "$copy/COMMIT"
[ ! -e third_party ] || ln -s "$root/third_party" "$copy/third_party"
for part in config.mk flags version cudnn nccl mpi objects train_gpt test ${simulator:+gpusim}; do
    [ ! -e "build/$part" ] || cp -a "build/$part" "$copy/build/"
done
cd "$copy"

build() { "$make" --no-print-directory DEBUG= SANITIZE= build/train_gpt build/test; }
echo "building without a fault"
build > "$work/log" 2>&1 || {
    tail -n 40 "$work/log"
    give_up "the tree does not build without a fault"
}
if [ -n "$simulator" ] && [ -e "$simulator/Makefile" ]; then
    "$make" --no-print-directory DEBUG= SANITIZE= GPUSIM="$simulator" simulator ||
        give_up "the simulator does not build"
    simulator=$copy/build/gpusim/lib
fi
cp -a build "$work/pristine"
touch "$work/built"

has_cuda=
has_mpi=
has_amx=
if [ -n "$simulator" ] && grep -qx 'HAVE_CUDA := 1' build/config.mk; then has_cuda=1; fi
if grep -qx 'HAVE_MPI := 1' build/config.mk && command -v mpirun > /dev/null; then has_mpi=1; fi
if grep -qsw amx_bf16 /proc/cpuinfo; then has_amx=1; fi
runnable=()
without_cuda=0
without_mpi=0
without_amx=0
for i in "${chosen[@]}"; do
    if needs_it "$i" cuda && [ -z "$has_cuda" ]; then
        without_cuda=$((without_cuda + 1))
    elif needs_it "$i" mpi && [ -z "$has_mpi" ]; then
        without_mpi=$((without_mpi + 1))
    elif needs_it "$i" amx && [ -z "$has_amx" ]; then
        without_amx=$((without_amx + 1))
    else
        runnable+=("$i")
    fi
done
[ $without_cuda = 0 ] ||
    echo "skipped: faults in CUDA code ($without_cuda)," \
        "which need a build for CUDA and GPUSIM=folder"
[ $without_mpi = 0 ] ||
    echo "skipped: faults that need many ranks ($without_mpi), which need MPI and mpirun"
[ $without_amx = 0 ] ||
    echo "skipped: faults in code for AMX ($without_amx), which need a processor that has it"
if [ -n "$count" ] && [ ${#runnable[@]} -gt 0 ]; then
    seed=${seed:-$((RANDOM * 32768 + RANDOM))}
    echo "seed $seed: scripts/mutants.sh --random $count --seed $seed repeats this choice"
    mapfile -t runnable < <(printf '%s\n' "${runnable[@]}" |
        awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand(), $0 }' |
        sort -n | head -n "$count" | cut -d ' ' -f 2 | sort -n)
fi

# --- One fault after another ----------------------------------------------------------------------

run_test() {  # run_test INDEX: into the log; its exit code, or 124 or 137 when it took too long
    local section environment=(TRAIN_GPT="$copy/build/train_gpt") arguments code=0
    arguments=("$(pattern_of "$1")")
    section=$(section_of "$1")
    [ -z "$section" ] || arguments+=(-c "$section")
    local word
    for word in ${needs[$1]}; do [[ $word != *=* ]] || environment+=("$word"); done
    if needs_it "$1" cuda; then
        environment+=(LD_LIBRARY_PATH="$simulator${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
    fi
    # Runs in a separate session, so that all processes that it starts can be found.
    # shellcheck disable=SC2016  # the inner shell replaces these
    {
        setsid --wait bash -c 'echo $$ > "$0" && exec "$@"' "$work/session" \
            timeout --kill-after=10 $limit env -u TRAIN_GPT_BINARY "${environment[@]}" \
            build/test "${arguments[@]}" > "$work/log" 2>&1
    } 2> /dev/null || code=$?
    end_test
    return $code
}

judge() {  # judge INDEX CODE: what the log says of a test that ended with this code
    local counts cases
    counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$work/log" | tail -n 1)
    cases=${counts#* }
    if [ "$2" = 124 ] || [ "$2" = 137 ]; then
        result "$1" passed "caught by a timeout: the test was ended after $limit s"
    elif [ -z "$counts" ]; then
        result "$1" passed "caught by a crash: the test ended with exit code $2 and without a count"
    elif [ "$cases" != 0 ]; then
        local crash=
        [ "$2" -lt 128 ] || crash=" (a crash with exit code $2)"
        result "$1" passed "caught by $cases failed test case$([ "$cases" = 1 ] || echo s)$crash"
    elif [ "${counts% *}" = 0 ]; then
        result "$1" failed "no test ran with the arguments: ${tests[$1]}"
    elif [ "$2" != 0 ]; then
        result "$1" passed "caught by a crash at the end: exit code $2, though no test case failed"
    else
        result "$1" failed "MISSED: ${faults[$1]}; the test passed: ${tests[$1]}"
        grep -m 1 '^TEST_SEED=' "$work/log" || true
        grep '^skipped' "$work/log" || true
    fi
}

take_back() {  # take_back FILE: the file, and what was built with the fault, as they were
    cp -a --remove-destination "$work/file" "$1"
    find build -newer "$work/built" -type f -print0 | while IFS= read -r -d '' part; do
        rm -f "$part"
        [ ! -e "$work/pristine/${part#build/}" ] || cp -a "$work/pristine/${part#build/}" "$part"
    done
}

for i in "${runnable[@]}"; do
    file=${files[i]}
    if ! put_fault "$i" "$work/fault" 2> /dev/null; then
        result "$i" failed "does not apply: its edit must change one line of $file: ${edits[i]}"
        continue
    fi
    cp -a "$file" "$work/file"
    cat "$work/fault" > "$file"
    if build > "$work/log" 2>&1; then
        code=0
        run_test "$i" || code=$?
        judge "$i" $code
    else
        tail -n 20 "$work/log"
        result "$i" failed "does not compile"
    fi
    take_back "$file"
done
finish
