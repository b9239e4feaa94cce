# shellcheck shell=bash disable=SC2154  # a lesson sources this file
# What the lessons share: the program, a text, running commands and printing what was measured.
#   TRAIN_GPT=program     default: build/train_gpt
#   LESSONS_DIR=folder    where texts, shards and runs go (default: build/lessons); what is there is
#                         used again
#   TEXT=file             another text than the King James Bible; the numbers are then others. Each
#                         text, by its content, has a folder of its own in LESSONS_DIR
set -euo pipefail
[ "${1:-}" != --help ] || { echo "usage: $0"; sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
TEXT=${TEXT:+$(realpath -ms -- "$TEXT")}
script=$(realpath -- "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export LC_ALL=C.UTF-8  # awk and printf use a decimal point
program=${TRAIN_GPT:-build/train_gpt}
work=${LESSONS_DIR:-build/lessons}
if [ -n "$TEXT" ]; then
    [ -f "$TEXT" ] && [ -r "$TEXT" ] || {
        echo "error: TEXT=$TEXT is not a readable file; check the path" >&2
        exit 1
    }
    file=$(basename -- "$TEXT")
    work+=/$(echo "${file%.*}" | tr -c 'A-Za-z0-9\n' -)-$(cksum < "$TEXT" | cut -d ' ' -f 1)
fi
mkdir -p "$work"
[ -x "$program" ] || { echo "error: there is no $program; run make first" >&2; exit 1; }

# The lesson's head is its prose: the comment at the top of the file.
sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$script"
echo

# The King James Bible, one verse a line, without verse numbers; each chapter is a document.
text=${TEXT:-$work/text.txt}
if [ -z "$TEXT" ] && ! [ -s "$text" ]; then
    command -v bible > /dev/null || {
        echo "error: there is no text; install Debian's bible-kjv, or give TEXT=my.txt" >&2
        exit 1
    }
    bible -l 10000 gen1:1-rev22:21 < /dev/null |
        awk '/^[^ ]/ { if (n++) print "<|endoftext|>"; print $0 "\n" } sub(/^ +[0-9]+ /, "")' \
            > "$text.tmp"
    mv "$text.tmp" "$text"
fi

run() {  # run LOG COMMAND…: shows a command and runs it; its output goes into a file
    local log=$work/$1
    shift
    echo "\$ $*"
    "$@" > "$log" 2>&1 || { cat "$log" >&2; exit 1; }
}

# shards SIZE: the text as tokens of a vocabulary of that size, once. Lesson 1 also reads the log.
shards() {
    { [ -s "$work/tokenize-$1.log" ] &&
        grep -q '"complete": *true' "$work/data-$1/data.json" 2> /dev/null; } ||
        run "tokenize-$1.log" "$program" tokenize "$text" --train-vocab "$1" \
            --out "$work/data-$1"
}

train() {  # train NAME CONFIG ARGUMENT…: trains a run, or resumes it
    local name=$1 config=$2
    shift 2
    run "$name.log" "$program" train "$config" --data "$work/data-4096" \
        --set run_dir="$work/$name" "$@"
}

last() {  # last RUN FIELD: the last value of a field of metrics.jsonl
    grep -o "\"$2\":[-+.0-9e]*" "$work/$1/metrics.jsonl" | tail -n 1 | cut -d : -f 2
}
first() {  # first RUN FIELD
    grep -o "\"$2\":[-+.0-9e]*" "$work/$1/metrics.jsonl" | head -n 1 | cut -d : -f 2
}

calculate() { awk "BEGIN { printf \"$1\", $2 }"; }  # calculate FORMAT EXPRESSION

# measured NAME VALUE [UNIT]: prints a number, which scripts/check-lessons.sh reads. It has at most
# three digits after the point, and a large one is printed as 1,234,567.
measured() {
    local value=$2
    [[ ! $value =~ ^-?[0-9]+\.[0-9]{4,}$ ]] || value=$(printf %.3f "$value")
    while [[ $value =~ ^([0-9]+)([0-9]{3}(,.*)?)$ ]]; do
        value=${BASH_REMATCH[1]},${BASH_REMATCH[2]}
    done
    printf 'measured: %s = %s%s\n' "$1" "$value" "${3:+ $3}"
}
