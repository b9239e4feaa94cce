#!/usr/bin/env bash
# Trains on several hosts that ssh reaches without a password. Open MPI's mpirun starts the ranks.
#   usage: scripts/cluster/hostfile.sh CONFIG [ARGUMENTS of train_gpt train…]
#          HOSTFILE=hosts scripts/cluster/hostfile.sh configs/gpt2-124m.json --set run_dir=runs/124m
# HOSTFILE has a line for each host, with its number of ranks (one per GPU, or one per socket to
# train on CPUs):
#   node1 slots=8
#   node2 slots=8
# Start it in the repository's folder, which must be on storage that all hosts see, at the same
# path. It begins with a selfcheck and ends if a rank is slower than the others. Ctrl-C, SIGTERM,
# SIGHUP and SIGUSR1 end the run after a checkpoint, with exit code 75 (Ctrl-C: 130); the same
# command resumes from it.
# Environment: HOSTFILE (hosts), TRAIN_GPT (the program; build/train_gpt), THREADS (cores of each
# rank; this host's cores divided by the most slots of a host), SELFCHECK (its arguments, such as
# "--tolerance 25"), MPIRUN (more arguments of mpirun).
# Tried: bash -n, shellcheck, and with Open MPI 4.1 and two ranks on the CPUs of one host:
# selfcheck, training, a signal, resume.
# Not tried: several hosts, GPUs.
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
hostfile=${HOSTFILE:-hosts}
[ $# -ge 1 ] || { echo "usage: HOSTFILE=hosts $0 CONFIG [ARGUMENTS…]" >&2; exit 2; }
[ -r "$hostfile" ] || {
    echo "error: there is no hostfile $hostfile; set HOSTFILE to the path of yours" >&2
    exit 2
}

program=${TRAIN_GPT:-build/train_gpt}
slots=$(sed -n 's/^[^#]*slots *= *\([0-9]*\).*/\1/p' "$hostfile" | sort -n | tail -n 1)
cores() { lscpu -p=SOCKET,CORE | grep -v '^#' | sort -u | wc -l; }
export OMP_NUM_THREADS=${THREADS:-$(($(cores) / ${slots:-1}))}
[ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1

options=(
    --hostfile "$hostfile"
    # Consecutive ranks get consecutive cores. Rank r of a host takes GPU r, which is then mostly
    # near its cores.
    --map-by "slot:PE=$OMP_NUM_THREADS" --bind-to core
    -x OMP_NUM_THREADS
    # If hosts have several networks, add which one to use:
    #   --mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0    for MPI, which also
    #                                                                carries the gradients of ranks
    #                                                                on CPUs
    #   -x NCCL_SOCKET_IFNAME=ib0 -x NCCL_IB_HCA=mlx5                for NCCL; with
    #                                                                -x NCCL_DEBUG=INFO it prints
    #                                                                what it found
)
# shellcheck disable=SC2206  # the arguments are words
options+=(${MPIRUN:-})

# mpirun passes SIGUSR1 on to the ranks, which write a checkpoint and end. SIGTERM does not work:
# Open MPI passes it on too, but kills the ranks a second later. A larger odls_base_sigkill_timeout
# does not help: Open MPI always waits for all of it, twice, even after a rank has failed.
launcher=
by_ctrl_c=
trap 'kill -USR1 "$launcher" || true' TERM HUP USR1
trap 'by_ctrl_c=1; kill -USR1 "$launcher" || true' INT

# ranks ARGUMENTS…: runs the program on each slot, in a session that Ctrl-C does not reach
ranks() {
    setsid mpirun "${options[@]}" "$program" "$@" &
    launcher=$!
    # A signal ends a wait, not the ranks.
    while kill -0 "$launcher" 2> /dev/null; do wait "$launcher" || true; done
    wait "$launcher"
}

# shellcheck disable=SC2086
ranks selfcheck ${SELFCHECK:-}
code=0
ranks train "$@" || code=$?
[ "$code" != 75 ] || [ -z "$by_ctrl_c" ] || code=130
exit "$code"
