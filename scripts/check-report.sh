#!/usr/bin/env bash
# Opens reports in a browser (Chromium, headless): no script fails, the drawn points are those of
# metrics.jsonl, and pointing, zooming and the switches work (scripts/check_report.py). The same for
# the pages of `train_gpt look` (scripts/check_look.py). Writes screenshots (light, dark, on a
# phone) and a PDF to build/report/.
# `make test-full` calls it.
#   usage: scripts/check-report.sh [RUN…]     folders of runs to photograph; default: runs that the
#                                             script makes up
#   TRAIN_GPT=program     default: build/train_gpt
#   CHROMIUM=program      default: chromium, chromium-browser or google-chrome, whichever is found
# Without a browser or Python, prints that and skips. The last line that it prints is
# "N passed, M failed".
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -u
cd "$(dirname "$0")/.." || exit
skip() { echo "skipped: reports in a browser, since $1"; echo "0 passed, 0 failed"; exit; }

browser=${CHROMIUM:-$(command -v chromium chromium-browser google-chrome | head -n 1)}
[ -n "$browser" ] || skip "there is no Chromium (on Debian: apt-get install chromium)"
command -v python3 > /dev/null || skip "there is no python3"
"$browser" --headless --no-sandbox --disable-gpu --dump-dom about:blank 2> /dev/null |
    grep -q '<html' || skip "$browser does not start here"
program=${TRAIN_GPT:-build/train_gpt}
[ $# = 0 ] || exec python3 scripts/check_report.py "$program" "$browser" build/report "$@"
. scripts/count-tests.sh
rm -rf build/report/look  # its models would be resumed with another vocabulary
counted python3 scripts/check_report.py "$program" "$browser" build/report
counted python3 scripts/check_look.py "$program" "$browser" build/report/look
finish
