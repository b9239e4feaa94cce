#!/usr/bin/env bash
# From a fresh clone to a trained model: installs missing packages, builds, prepares a text, trains
# on it and reports on it.
#   usage: make quickstart [DATA=my.txt [FIELD=text]] [STEPS=960]
#      or: DATA=my.txt STEPS=960 scripts/quickstart.sh
# Environment:
#   DATA             your text, plain or JSON Lines, also compressed, or Parquet (default: the King
#                    James Bible from the Debian package bible-kjv)
#   FIELD            the field of JSON Lines, or the column of Parquet, that has the text (default:
#                    text)
#   RUN_DIR          the run's folder (default: a folder in runs/)
#   STEPS            how many steps to train; a run that exists is lengthened to as many
#   QUICKSTART_ARGS  more arguments for `train_gpt train`
#   DATA_DIR         where prepared texts are kept (default: data)
#   TRAIN_GPT        a program that is already built; nothing is then installed or built
# It measures a few steps and picks the shortest of five runs that trains for at least two minutes,
# whatever the build took: 60 steps, 120, 240, 480 (configs/quickstart.json) or 960, which read the
# text about four times. Called again, it resumes the run with the same length, or lengthens it to
# STEPS.
set -eu
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
[ $# = 0 ] || {
    echo "error: unknown argument $1; to use your own text set DATA=my.txt in the environment" \
        "(see --help)" >&2
    exit 2
}
DATA=${DATA:+$(realpath -ms -- "$DATA")}
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8  # awk and printf use a decimal point

# shellcheck source=scripts/visibly.sh
. scripts/visibly.sh

say() { printf '\n== %3d s: %s\n' $SECONDS "$*"; }

FIELD=${FIELD:-}
STEPS=${STEPS:-}
[[ $STEPS =~ ^([1-9][0-9]{0,8})?$ ]] || {
    echo "error: STEPS=$STEPS is not a number of steps, such as STEPS=960" >&2
    exit 2
}
program=${TRAIN_GPT:-build/train_gpt}
# So many steps read the King James Bible 3.8 times. More of them would learn little more from it.
longest=960
more_text="scripts/data.sh tinystories && $program train tinystories"
name=quickstart
if [ -n "$DATA" ]; then
    [ -f "$DATA" ] && [ -r "$DATA" ] || {
        echo "error: DATA=$DATA is not a readable file; check the path" >&2
        exit 1
    }
    # Each text has its own run, and so has a file whose content has changed.
    file=$(basename -- "$DATA")
    name=quickstart-$(echo "${file%.*}${FIELD:+-$FIELD}" | tr -c 'A-Za-z0-9\n' -)
    name+=-$(cksum < "$DATA" | cut -d ' ' -f 1)
fi
folder=${DATA_DIR:-data}/$name
run_dir=${RUN_DIR:-runs/$name}
work=$(mktemp -d)
rest=  # the process that installs packages in the background
trap '[ -z "$rest" ] || wait "$rest" || true; rm -rf "$work"' EXIT
trap 'exit 130' INT

# Without a GPU, GPU kernels are not compiled unless CUDA=1 is given.
build() { CUDA=${CUDA:-auto} ${MAKE:-make} --no-print-directory; }

install_and_build() {
    say "packages"
    if [ "$(id -u)" = 0 ] || [ "${CI:-}" = true ]; then
        scripts/setup.sh build
        scripts/setup.sh quickstart &  # the rest comes while the compiler is at work
        rest=$!
        say "build"
        build
        wait $rest || true  # without rsvg-convert there is no picture, but a model
    else
        scripts/setup.sh build quickstart
        say "build"
        build
    fi
}

# Prints the King James Bible, one verse per line, without verse numbers. Each chapter is a
# document, so that the validation text comes from the same books as the training text.
chapters() (
    set -o pipefail
    bible -l 10000 gen1:1-rev22:21 < /dev/null |
        awk '/^[^ ]/ { if (n++) print "<|endoftext|>"; print $0 "\n" } sub(/^ +[0-9]+ /, "")'
)

prepare_text() {
    mkdir -p "$folder"
    text=$DATA
    if [ -z "$DATA" ]; then
        text=$folder/king-james-bible.txt
        [ -s "$text" ] || command -v bible > /dev/null || {
            echo "error: the package bible-kjv is not installed; make quickstart DATA=my.txt uses" \
                "your own text" >&2
            exit 1
        }
        [ -s "$text" ] || { chapters > "$text.tmp" && mv "$text.tmp" "$text"; }
    fi
}

train() { # train ARGUMENTS…
    # shellcheck disable=SC2086  # the arguments are words
    "$program" train configs/quickstart.json "${settings[@]}" ${QUICKSTART_ARGS:-} "$@"
}

# Sets `ms` to the milliseconds of a step: the median of a few. It stays empty if they fail; the run
# itself will then say why.
measure_step() {
    ms=
    train --set "run_dir=$work/run" --set schedule.steps=6 --set schedule.warmup_steps=1 \
        --set data.val= --set checkpoint.every=0 --set sampling.every=0 \
        --set sampling.samples=0 --set log.every=1 > "$work/log" 2>&1 || return 0
    ms=$(sed -n 's/.*"ms":\([0-9.]*\).*/\1/p' "$work/run/metrics.jsonl" 2> /dev/null |
        tail -n +2 | sort -g |
        awk '{ ms[NR] = $1 } END { if (NR) print ms[int((NR + 1) / 2)] }')
}

# Adds the settings of another length to `settings`; configs/quickstart.json has those of 480 steps.
# 960 and every other length have four checkpoints and evaluations, and the longer ones as many
# steps of warm-up as 480 have.
set_length() { # set_length STEPS
    local warmup save evaluate
    case $1 in
        480) return ;;
        240) warmup=30 save=80 evaluate=60 ;;
        120) warmup=15 save=60 evaluate=60 ;;
        60) warmup=8 save=30 evaluate=30 ;;
        *)
            warmup=$(($1 < 480 ? ($1 + 7) / 8 : 60))
            save=$((($1 + 3) / 4)) evaluate=$((($1 + 3) / 4)) ;;
    esac
    settings+=(--set "schedule.steps=$1" --set "schedule.warmup_steps=$warmup"
        --set "checkpoint.every=$save" --set "evaluation.every=$evaluate"
        --set "sampling.every=$((($1 + 3) / 4))")
}

# Whether QUICKSTART_ARGS has the run's length.
given_length() { [[ ${QUICKSTART_ARGS:-} =~ schedule\.(steps|tokens|epochs)= ]]; }

# The bits per byte are from docs/measurements.md.
choose_length() {
    local length bits ms seconds before=
    steps=
    given_length && return
    [ ! -s "$run_dir/config.json" ] ||
        before=$(sed -n 's/^ *"steps": *\([0-9]*\).*/\1/p' "$run_dir/config.json")
    # Without steps, the run's length was given as tokens or epochs.
    if [ "$before" = 0 ] && [ -z "$STEPS" ]; then
        echo "error: the length of the run in $run_dir was given as schedule.tokens or" \
            "schedule.epochs; give the same QUICKSTART_ARGS again, or STEPS=$longest" >&2
        exit 1
    fi
    before=${before#0}
    if [ -n "$STEPS" ]; then
        if [ "$STEPS" -lt "${before:-0}" ]; then
            echo "error: the run in $run_dir has $before steps, and STEPS=$STEPS are fewer;" \
                "give more, or another RUN_DIR" >&2
            exit 1
        fi
        [ -z "$before" ] || [ "$STEPS" = "$before" ] ||
            echo "$run_dir is lengthened from $before steps to $STEPS"
        steps=$STEPS
        set_length "$steps"
        return
    fi
    if [ -n "$before" ]; then
        steps=$before
        set_length "$steps"
        echo "$run_dir exists already and keeps its length"
        return
    fi
    visibly "measuring how long a step takes" measure_step
    [ -n "$ms" ] || return 0
    # Evaluations, samples and checkpoints take about as long as 25 steps.
    minutes() { awk "BEGIN { printf \"%.1f\", ($1 + 25) * $ms / 60000 }"; }
    long_enough() { awk "BEGIN { exit ($steps + 25) * $ms / 60000 < 2 }"; }
    for length in 60:1.63 120:1.50 240:1.35 480:1.23 960:1.17; do
        steps=${length%:*} bits=${length#*:}
        if long_enough; then break; fi
    done
    set_length "$steps"
    printf 'a step takes %.0f ms here: training for %d steps, about %s minutes' \
        "$ms" "$steps" "$(minutes "$steps")"
    if [ "$steps" -lt $longest ]; then
        echo " ($((2 * steps)) steps would take $(minutes $((2 * steps))))"
    else
        echo
    fi
    if ! long_enough; then
        seconds=$(awk "BEGIN { printf \"%.0f\", ($steps + 25) * $ms / 1000 }")
        if [ -n "$DATA" ]; then
            echo "this machine trains $steps steps in $seconds seconds;" \
                "STEPS=$((2 * steps)) trains longer"
        else
            echo "this machine reads the text four times in $seconds seconds;" \
                "for a longer run: $more_text"
        fi
    fi
    [ -n "$DATA" ] || [ -z "$bits" ] ||
        echo "expect about $bits bits per byte on the chapters that are kept for validation"
}

[ -n "${TRAIN_GPT:-}" ] || install_and_build

say "data"
prepare_text
shards() { ls "$folder"/"$1"_*.bin > /dev/null 2>&1; }
if [ "$folder/tokenizer.json" -nt "$text" ] && shards train && shards val; then
    echo "$folder is already prepared"
else
    status=0
    "$program" tokenize "$text" ${FIELD:+--field "$FIELD"} --train-vocab 4096 --out "$folder" \
        --val-fraction 0.05 || status=$?
    [ -z "$DATA" ] || [ $status = 0 ] || [ $status -gt 2 ] ||
        echo "with make quickstart, --field NAME is FIELD=NAME" >&2
    [ $status = 0 ] || exit $status
fi

settings=(--set "run_dir=$run_dir" --set "tokenizer.path=$folder/tokenizer.json"
    --set "data.train=$folder/train_*.bin" --set "data.val=$folder/val_*.bin")
# With a large text, evaluations of all of it would take longer than the training.
[ -z "$DATA" ] || settings+=(--set sampling.prompt= --set evaluation.max_tokens=60000)

say "training"
choose_length
train

say "done"
pages=report.html
if "$program" report "$run_dir" --picture "$work/loss.svg" > "$work/log"; then
    if rsvg-convert -o "$run_dir/loss.png" "$work/loss.svg"; then
        pages="report.html, loss.png"
    else
        echo "loss.png is not drawn: that needs rsvg-convert, which scripts/setup.sh quickstart" \
            "installs" >&2
    fi
fi
# What the user gave goes on in the commands that are named.
given_arguments=
[ -z "${QUICKSTART_ARGS:-}" ] || given_arguments=" QUICKSTART_ARGS=${QUICKSTART_ARGS@Q}"
longer="make quickstart"
for given in DATA FIELD RUN_DIR DATA_DIR; do
    [ -z "${!given:-}" ] || longer+=" $given=$(printf %q "${!given}")"
done
longer+="$given_arguments STEPS=$((2 * ${steps:-480}))"
if given_length; then
    longer="with another length in QUICKSTART_ARGS"
elif [ -z "$DATA" ] && [ $((2 * ${steps:-480})) -gt $longest ]; then
    longer="on more text: $more_text"
fi
checkpoint=$(ls -d "$run_dir"/step-*[0-9] 2> /dev/null | tail -n 1 || true)
cat << TXT

The run is in $run_dir: metrics.jsonl, $pages, and the model in ${checkpoint:-step-*}.
  look at it             $run_dir/report.html, in a browser
  generate text          $program sample ${checkpoint:-CHECKPOINT} --prompt "In the beginning"
  continue training      $longer
  train on your text     make quickstart DATA=my.txt$given_arguments
  change the settings    configs/quickstart.json, or --set key=value ($program train --help)
TXT
