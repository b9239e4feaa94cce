#!/usr/bin/env bash
# Draws the loss curves of a run, RUN_DIR/metrics.jsonl, as RUN_DIR/loss.png.
#   usage: scripts/plot.sh RUN_DIR
set -eu
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
[ $# = 1 ] || { echo "usage: scripts/plot.sh RUN_DIR" >&2; exit 2; }
metrics=$1/metrics.jsonl
picture=$1/loss.png
[ -s "$metrics" ] || { echo "error: $metrics is missing or empty; is $1 the folder of a run?" >&2; exit 1; }
command -v gnuplot > /dev/null ||
    { echo "error: drawing $picture needs gnuplot; install it with: scripts/setup.sh quickstart" >&2; exit 1; }

export LC_ALL=C.UTF-8  # awk and gnuplot read and write numbers with a point
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Each line of metrics.jsonl is one flat object. Values that are not numbers (null) are left out.
points() {  # points KEY: "step value" of the lines that have the key
    awk -v key="$1" '
        function number(name) {
            if (!match($0, "\"" name "\"[ ]*:[ ]*-?[0-9][-+0-9.eE]*")) return ""
            text = substr($0, RSTART, RLENGTH)
            sub(/^[^:]*:[ ]*/, "", text)
            return text
        }
        { step = number("step"); value = number(key); if (step != "" && value != "") print step, value }' "$metrics"
}
points loss > "$work/train"
points val_loss > "$work/val"
[ -s "$work/train" ] || { echo "error: $metrics holds no training loss yet" >&2; exit 1; }

# The running mean over the points before and after each point. Near the first point it takes only as many after as before,
# since the curve falls steeply there.
running_mean() {
    awk '{ step[NR] = $1; sum[NR] = sum[NR - 1] + $2 }
        END {
            for (i = 1; i <= NR; ++i) {
                reach = int(NR / 25)
                if (reach > i - 1) reach = i - 1
                last = i + reach < NR ? i + reach : NR
                print step[i], (sum[last] - sum[i - reach - 1]) / (last - i + reach + 1)
            }
        }'
}
running_mean < "$work/train" > "$work/smooth"

curves="'$work/train' using 1:2 with lines linewidth 1 linecolor rgb '#c6dbef' title 'training'"
curves+=", '$work/smooth' using 1:2 with lines linewidth 2 linecolor rgb '#2171b5' title 'training, running mean'"
[ ! -s "$work/val" ] ||
    curves+=", '$work/val' using 1:2 with linespoints pointtype 7 pointsize 1.5 linewidth 2 linecolor rgb '#d94801' title 'validation'"
gnuplot << TXT
set terminal pngcairo size 960,600 background rgb 'white'
set output '$work/loss.png'
set title 'Loss of $(basename "$1" | tr -d "'\\\\")' noenhanced
set xlabel 'step'
set ylabel 'nats per token'
set grid linecolor rgb '#dddddd'
set key top right
plot $curves
TXT
mv "$work/loss.png" "$picture"
echo "drew $picture"
