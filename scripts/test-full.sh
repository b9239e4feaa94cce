#!/usr/bin/env bash
# Runs every test: the suite as `make test` runs it, the long cases, the suite under
# AddressSanitizer and UBSan, and the data loader, the verification of shards and the watchdog under
# ThreadSanitizer (other code runs on OpenMP teams, whose barriers ThreadSanitizer does not see).
# With GPUSIM (a simulated GPU), also GPU kernels, with checks for races and for missing
# dependencies between streams. Fuzzes each file reader for a minute. Checks models against
# transformers, scores on tasks against lm-evaluation-harness, reads runs with TensorBoard and
# Parquet files with pyarrow, if Python has the packages or can install them. Opens reports in
# Chromium, if it is installed. Runs the commands of the docs and checks what they name, and the
# lessons. Asks cuDNN for its plans, if it is here. A dozen deliberate faults, chosen at random,
# must be caught. Installs missing packages first, and names the optional programs that are missing.
#   usage: scripts/test-full.sh [native|simulated], or make test-full [GPUSIM=LIBRARIES]
# native and simulated are its two halves, which two machines can run at the same time. The last
# line that it prints is "N passed, M failed" for all of these together.
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
. scripts/count-tests.sh
make=${MAKE:-make}
gpusim=${GPUSIM:-}
half=${1:-both}
case $half in
    both | native | simulated) ;;
    *) echo "usage: scripts/test-full.sh [native|simulated]" >&2; exit 2 ;;
esac

GPUSIM=$gpusim scripts/setup.sh build test || exit
missing=()
command -v bible > /dev/null || scripts/setup.sh quickstart || missing+=(bible-kjv)
[ -n "${CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome > /dev/null ||
    missing+=(chromium)
for program in zsh fish groff; do
    command -v "$program" > /dev/null || missing+=("$program")
done
[ ${#missing[@]} = 0 ] ||
    echo "optional: ${missing[*]} (bible-kjv is the lessons' text, chromium opens reports; zsh," \
        "fish and groff read completions and the manual page); apt-get install ${missing[*]}"

# run LABEL MAKE-ARGUMENTS…: without the simulator, which builds under a sanitizer know nothing of
run() {
    echo "== $1"
    counted "$make" --no-print-directory test GPUSIM= "${@:2}"
}
simulated() {  # simulated LABEL TESTS: on the simulated GPU alone
    echo "== $1"
    SIMULATED=only counted "$make" --no-print-directory test GPUSIM="$gpusim" TEST_ARGS="$2"
}

[ $half = simulated ] || run "as built"
if [ -n "$gpusim" ] && [ $half != native ]; then
    simulated "GPU kernels on a simulated GPU" '[cuda]~[.]'
    simulated "the program on a simulated GPU" '[cli]~[.]'
    simulated "long cases on a simulated GPU" '[long][cuda]'
    # The tests of ranks on several GPUs choose lazy order themselves.
    GPUSIM_RACECHECK=1 simulated "races between threads of a block" '[cuda]~[training]~[.]'
    GPUSIM_APPROX=1 GPUSIM_SEED=5 simulated "approximate instructions that err as hardware's do" \
        '[cuda]~[training]~[.]'
    GPUSIM_SMS=132 GPUSIM_NCCL_MEMORY=0.1 simulated "NCCL holds multiprocessors and takes memory" \
        '[communicator][cuda]~[.],[mesh][pipeline][cuda]~[.]'
    for seed in 0 1 2 3; do
        GPUSIM_STREAMS=lazy GPUSIM_SEED=$seed simulated \
            "streams in an adverse order, seed $seed" '[cuda]~[training]~[.]'
    done
fi
[ $half != simulated ] || finish
echo "== comparison with transformers"
counted scripts/check-transformers.sh
echo "== comparison with lm-evaluation-harness"
counted scripts/check-harness.sh
echo "== TensorBoard"
counted scripts/check-tensorboard.sh
echo "== Parquet"
counted scripts/check-parquet.sh
echo "== reports in a browser"
counted scripts/check-report.sh
echo "== the docs"
MAKE=$make counted scripts/check-docs.sh
echo "== lessons"
counted scripts/check-lessons.sh
echo "== cuDNN's plans"
counted scripts/check-cudnn.sh
run "long cases" TEST_ARGS='[long]'
run "AddressSanitizer and UBSan" SANITIZE=address,undefined CUDA=0 WERROR=1
of_threads='loader_test shard_test permutation_test watchdog_test shard_watch_test'
# PRECOMPILE=0 and UNITY=0 find missing #includes of the program; `make lint` also those of tests.
# shellcheck disable=SC2086  # the names are words
run "ThreadSanitizer" SANITIZE=thread CUDA=0 WERROR=1 PRECOMPILE=0 UNITY=0 ONLY="$of_threads" \
    TEST_ARGS="-# $(printf '[#%s],' $of_threads)"
echo "== a dozen deliberate faults"
GPUSIM='' MAKE=$make counted scripts/mutants.sh --random 12
echo "== fuzzing"
MAKE=$make counted scripts/fuzz.sh
finish
