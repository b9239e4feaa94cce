#!/usr/bin/env bash
# Trains on several hosts that ssh reaches without a password, and without MPI: ssh starts the ranks, which meet over TCP.
#   usage: scripts/cluster/ssh.sh CONFIG [ARGUMENTS of train_gpt train…]
#          HOSTFILE=hosts scripts/cluster/ssh.sh configs/gpt2-124m.json --set run_dir=runs/124m
# HOSTFILE has a line for each host, with its number of ranks (one per GPU, or one per socket to train on CPUs):
#   node1 slots=8
#   node2 slots=8
# Start it in the repository's folder, which must be on storage that all hosts see, at the same path. It begins with a selfcheck and
# ends if a rank is slower than the others. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the run after a checkpoint, with exit
# code 75 (Ctrl-C: 130); the same command resumes from it.
# Environment: HOSTFILE (hosts), TRAIN_GPT (the program; build/train_gpt), THREADS (cores of each rank; this host's cores
# divided by the most slots of a host), SELFCHECK (its arguments, such as "--tolerance 25"), TRAIN_GPT_ADDRESS (where the ranks meet;
# the first host, port 29500), TRAIN_GPT_SECRET_FILE (the job's secret; ~/.config/train_gpt/secret, which all hosts must see),
# SSH (ssh -o BatchMode=yes), and variables whose names begin with NCCL_, which the ranks get.
# Tried: bash -n, shellcheck, and with a stand-in for ssh and three ranks on the CPUs of one host: selfcheck, training, signals.
# Not tried: ssh itself, several hosts, GPUs.
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
hostfile=${HOSTFILE:-hosts}
[ $# -ge 1 ] || { echo "usage: HOSTFILE=hosts $0 CONFIG [ARGUMENTS…]" >&2; exit 2; }
[ -r "$hostfile" ] || { echo "error: there is no hostfile $hostfile; set HOSTFILE to the path of yours" >&2; exit 2; }

program=${TRAIN_GPT:-build/train_gpt}
hosts=()
most=1
while read -r host rest; do
    slots=$(sed -n 's/.*slots *= *\([0-9]*\).*/\1/p' <<< "$rest")
    for ((i = 0; i < ${slots:-1}; i++)); do hosts+=("$host"); done
    [ "${slots:-1}" -le "$most" ] || most=$slots
done < <(sed 's/#.*//' "$hostfile" | grep '[^ ]')
[ ${#hosts[@]} -gt 0 ] || { echo "error: $hostfile names no host" >&2; exit 2; }
cores() { lscpu -p=SOCKET,CORE | grep -v '^#' | sort -u | wc -l; }
threads=${THREADS:-$(($(cores) / most))}
[ "$threads" -ge 1 ] || threads=1
read -ra ssh <<< "${SSH:-ssh -o BatchMode=yes}"

variables=("OMP_NUM_THREADS=$threads" "TRAIN_GPT_WORLD=${#hosts[@]}" "TRAIN_GPT_ADDRESS=${TRAIN_GPT_ADDRESS:-${hosts[0]}:29500}")
[ -z "${TRAIN_GPT_SECRET_FILE-}" ] || variables+=("TRAIN_GPT_SECRET_FILE=$TRAIN_GPT_SECRET_FILE")
for name in $(compgen -e NCCL_ || true); do variables+=("$name=${!name}"); done

# ssh passes no signals on. So the shell around rank 0 sends it SIGUSR1 when its input ends, and all ranks stop after a checkpoint.
# shellcheck disable=SC2016  # expanded on the other host
with_stop='cd "$0" || exit; exec 4<&0; "$@" < /dev/null 4<&- & rank=$!; '
# shellcheck disable=SC2016
with_stop+='{ while read -r line; do :; done; kill -USR1 $rank; } <&4 2> /dev/null & reader=$!; '
# shellcheck disable=SC2016
with_stop+='wait $rank; code=$?; kill $reader 2> /dev/null; exit $code'
# shellcheck disable=SC2016
without='cd "$0" && exec "$@"'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkfifo "$work/stop"

# shellcheck disable=SC2317  # traps call it
stop() { exec 3>&-; }
by_ctrl_c=
trap stop TERM HUP USR1
trap 'by_ctrl_c=1; stop' INT

ranks() {  # ranks ARGUMENTS…: runs the program as all ranks, in sessions that Ctrl-C does not reach
    local processes=() code=0 its process rank input on_host
    exec 3<> "$work/stop"
    for ((rank = 0; rank < ${#hosts[@]}; rank++)); do
        input=/dev/null
        on_host=$without
        [ $rank != 0 ] || { input=$work/stop; on_host=$with_stop; }
        setsid "${ssh[@]}" "${hosts[rank]}" "$(printf '%q ' bash -c "$on_host" "$PWD" \
            env "${variables[@]}" "TRAIN_GPT_RANK=$rank" "$program" "$@")" < "$input" 3>&- &
        processes+=($!)
    done
    for process in "${processes[@]}"; do
        while kill -0 "$process" 2> /dev/null; do wait "$process" || true; done  # a signal ends a wait, not the ranks
        its=0
        wait "$process" || its=$?
        [ $code != 0 ] || code=$its
    done
    return $code
}

# shellcheck disable=SC2086
ranks selfcheck ${SELFCHECK:-}
code=0
ranks train "$@" || code=$?
[ "$code" != 75 ] || [ -z "$by_ctrl_c" ] || code=130
exit "$code"
