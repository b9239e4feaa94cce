#!/usr/bin/env bash
# Lesson 5: two ranks compute the bits of one
#
# Large models are trained by many processes, the ranks. Each computes the gradients of some of a
# step's sequences, and then they add them up. In floating point a + (b + c) is not (a + b) + c, so
# that usually the number of ranks changes the result a little, and after some thousand steps a lot.
# This program rounds each micro-batch's gradients to integers before it adds them up: sums of
# integers are the same in any order (docs/many-ranks.md).
#
# This lesson trains 20 steps on one rank, and the same on two, of which each has its own process.
# Then it compares every loss, every gradient norm and the hashes of all weights.

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

shards 4096
options=(--set schedule.steps=20 --set batch.micro_batch=4 --set log.fingerprint_every=5
    --set parallel.sums=exact)
train one-rank scripts/lessons/small.json "${options[@]}"
port=$((20000 + RANDOM % 10000))
rank() {  # rank NUMBER: one of the two, which meet at a port of this machine
    run "two-ranks-$1.log" env TRAIN_GPT_RANK="$1" TRAIN_GPT_WORLD=2 \
        TRAIN_GPT_ADDRESS=127.0.0.1:$port "$program" train scripts/lessons/small.json \
        --data "$work/data-4096" --set run_dir="$work/two-ranks" "${options[@]}"
}
rank 0 &
rank 1
wait $!
code=0
echo "\$ $program report $work/one-rank $work/two-ranks --tolerance 0"
"$program" report "$work/one-rank" "$work/two-ranks" --tolerance 0 || code=$?
measured "exit code of the comparison" $code
ranks=$(grep -o '"ranks":[0-9]*' "$work/two-ranks/history.jsonl" | head -n 1 | cut -d : -f 2)
measured "ranks of the second run" "$ranks"
# With all their digits
for ranks in one-rank two-ranks; do
    echo "measured: last loss on ${ranks/-/ } = $(last $ranks loss)"
done

cat <<'END'

The exit code 0 says that no bit differs. So a run can continue on another number of ranks, and
whoever repeats a result can use the machine that is there.
END
