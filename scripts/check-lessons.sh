#!/usr/bin/env bash
# Runs the lessons in scripts/lessons/ and checks the numbers that they print and claim, and that
# they take at most 15 minutes together; two quiet CPU cores need less. `make test-full` calls it.
#   usage: scripts/check-lessons.sh
#   TRAIN_GPT=program     default: build/train_gpt
#   LESSONS_DIR=folder    new or empty; default: build/lessons, which is made anew
#   LESSONS_SECONDS=900   how long they may take where the machine is slow or loaded
# Without the text (Debian's bible-kjv), prints that and skips. The last line that it prints is
# "N passed, M failed".
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -u
cd "$(dirname "$0")/.." || exit
export LC_ALL=C.UTF-8
export LESSONS_DIR=${LESSONS_DIR:-build/lessons}
unset TEXT
if ! command -v bible > /dev/null; then
    echo "skipped: the lessons, since there is no bible-kjv (on Debian: apt-get install bible-kjv)"
    echo "0 passed, 0 failed"
    exit
fi
[ "$LESSONS_DIR" != build/lessons ] || rm -rf build/lessons
mkdir -p "$LESSONS_DIR"
[ -z "$(ls -A "$LESSONS_DIR")" ] || {
    echo "error: $LESSONS_DIR is not empty; name a new folder" >&2
    exit 2
}
passed=0 failed=0
check() {  # check CODE CLAIM: counts an exit code
    if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "failed: $2"; fi
}

# Lesson, what it measures, the least and the largest value. The numbers are those of one text, seed
# and vocabulary. Losses differ a little between processors, which add up in other orders.
claims='1-tokenizer;bytes of a token with a vocabulary of 257;1;1
1-tokenizer;bytes of a token with a vocabulary of 512;2.3;2.45
1-tokenizer;bytes of a token with a vocabulary of 4096;3.85;4
1-tokenizer;bytes of a token with a vocabulary of 16384;4.2;4.4
1-tokenizer;weights of the embedding of 16384 vectors of 128;2097152;2097152
2-loss;loss of the first step, before the weights move;8.25;8.45
2-loss;ln 4096;8.318;8.318
2-loss;validation loss after 150 steps;4.3;4.47
2-loss;perplexity;70;90
2-loss;bits per byte;1.58;1.65
2-loss;bytes of a token, from loss and bits;3.85;4
2-loss;bits per byte of gzip -9;2.2;2.5
3-optimizers;validation loss of AdamW at 0.002;4.74;4.94
3-optimizers;validation loss of AdamW at 0.004;4.7;4.93
3-optimizers;validation loss of AdamW at 0.008;4.95;5.6
3-optimizers;validation loss of Muon;4.3;4.47
3-optimizers;what Muon gains;0.3;0.6
4-mixture;weights of the dense model;1901696;1901696
4-mixture;weights of the mixture;3675296;3675296
4-mixture;weights of the mixture that a token passes;1905824;1905824
4-mixture;validation loss of the dense model;4.53;4.72
4-mixture;difference of the two;-0.05;0.1
4-mixture;busiest expert, over the mean, with balance;1;1.8
4-mixture;busiest expert, over the mean, without;2;4
5-ranks;exit code of the comparison;0;0
5-ranks;ranks of the second run;2;2
5-ranks;last loss on one rank;5.5;5.72
6-plan;weights;405853388800;405853388800
6-plan;FLOPs of a token;2.5e12;2.55e12
6-plan;memory of a rank without a pipeline, GiB;280;310
6-plan;memory of a rank with a pipeline of 16, GiB;55;77
6-plan;bubble, percent of a step;34;44
6-plan;share of the peak (MFU), percent;20;30
6-plan;memory of a rank, interleaved, GiB;55;77
6-plan;bubble, interleaved, percent;15;30
6-plan;MFU, interleaved, percent;33;45
6-plan;days for 15 trillion tokens;60;85'

all_began=$SECONDS
for lesson in scripts/lessons/[1-9]-*.sh; do
    name=$(basename "$lesson" .sh)
    began=$SECONDS
    "$lesson" > "$LESSONS_DIR/$name.txt" 2>&1
    check $? "$lesson ends with an error: $(tail -n 1 "$LESSONS_DIR/$name.txt")"
    echo "$name: $((SECONDS - began)) s"
done
all_lasted=$((SECONDS - all_began))
echo "all lessons: $all_lasted s"
[ "$all_lasted" -le "${LESSONS_SECONDS:-900}" ]
check $? "all lessons together take $all_lasted s, and may take ${LESSONS_SECONDS:-900} s"
number() {  # number LESSON WHAT: what a lesson has measured
    grep -F "measured: $2 = " "$LESSONS_DIR/$1.txt" | head -n 1 |
        sed 's/.* = \([^ ]*\).*/\1/' | tr -d ,
}
while IFS=';' read -r lesson what least most; do
    value=$(number "$lesson" "$what")
    awk -v v="$value" -v a="$least" -v b="$most" \
        'BEGIN { exit !(v != "" && v + 0 >= a && v + 0 <= b) }'
    check $? "$lesson: $what is ${value:-not printed}, and should be from $least to $most"
done <<< "$claims"
# Claims that are relations
[ -n "$(number 5-ranks 'last loss on one rank')" ] &&
    [ "$(number 5-ranks 'last loss on one rank')" = "$(number 5-ranks 'last loss on two ranks')" ]
check $? "the losses of one rank and of two are the same digits"
[ "$passed" -gt 0 ] || failed=$((failed + 1))
echo "$passed passed, $failed failed"
[ $failed = 0 ]
