#!/usr/bin/env bash
# The first hour on a machine with an NVIDIA GPU, in one command: tests, memory checks, kernels
# against their limits, training steps against PyTorch and the targets, losses against the CPU's. It
# ends with a Markdown report and a line for each target.
#   usage: scripts/first_hour.sh [--minutes N] [--only PART]… [--again] [--limits X] [--list]
#                                [--folder FOLDER] [--programs FOLDER]
#          (or make gpu-check [GPU_CHECK_ARGS='…'])
#   --minutes N        ends before a part whose time limit does not fit into N minutes, and says
#                      what is left (exit code 75)
#   --only PART        only this part, as --list names it; may be given several times
#   --again            repeats parts that are finished
#   --limits X         multiplies the time limits of the parts, for a slow machine
#   --list             prints the parts, their time limits and what became of them
#   --folder FOLDER    for the report and the logs (default: build/first-hour)
#   --programs FOLDER  takes train_gpt, test and compare from there. Default: build/bundle, if
#                      `make bundle TESTS=1` made it from this commit; else build/, after building
#                      them; if they cannot be built, those that are in either
# The parts most worth knowing come first; half an hour is enough for them. Called again, it
# continues: parts that are finished for the same programs and GPU are not repeated, and those that
# failed or ran out of time come last. It needs no network and no root.
# Environment:
#   PYTHON             a Python that has PyTorch with CUDA (default: build/venv's or python3, if it
#                      has)
#   GPUSIM=LIBRARIES   folder of the libraries that simulate a GPU: tries this script with tiny
#                      sizes, which measures nothing
# Exit codes: 0 all parts ran (targets may be missed); 1 a part failed, or there is no GPU; 2 wrong
# usage; 75 time is up; 130 Ctrl-C.
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
command -v python3 > /dev/null || {
    echo "error: scripts/first_hour.sh needs python3 (3.8 or newer), without packages;" \
        "install it" >&2
    exit 1
}
exec python3 scripts/first_hour.py "$@"
