# shellcheck shell=bash
# What scripts share that do things which last.

# visibly WHAT COMMAND…: says what is done, and every 10 s that it still lasts; ends with the
# command's exit code
visibly() {
    local what=$1 begun=$SECONDS ticker status=0
    shift
    echo "$what"
    while sleep 10 > /dev/null 2>&1 && kill -0 $$ 2> /dev/null; do
        echo "$what: $((SECONDS - begun)) s"
    done &
    ticker=$!
    "$@" || status=$?
    kill $ticker 2> /dev/null || true
    wait $ticker 2> /dev/null || true
    return $status
}
