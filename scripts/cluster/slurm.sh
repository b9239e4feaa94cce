#!/usr/bin/env bash
# Trains on a Slurm cluster with one rank for each GPU. srun starts the ranks, which meet over TCP
# and need no MPI.
#   usage: sbatch [SBATCH OPTIONS] scripts/cluster/slurm.sh CONFIG [ARGUMENTS of train_gpt train…]
#          sbatch --nodes=4 scripts/cluster/slurm.sh configs/gpt2-124m.json --set run_dir=runs/124m
#          LAUNCHER_OPTIONS=--mpi=pmix sbatch scripts/cluster/slurm.sh configs/gpt2-124m.json
#              through MPI, by Slurm's PMIx
#          LAUNCHER=mpirun sbatch scripts/cluster/slurm.sh configs/gpt2-124m.json
#              through MPI, by Open MPI's mpirun
# Submit it in the repository's folder, on storage that all nodes see; edit the lines below for your
# cluster. It begins with a selfcheck and ends if a rank is slower than the others. Ten minutes
# before the time limit the ranks write a checkpoint, and the job is requeued to resume from it. It
# is also requeued whenever training stops early (exit code 75) or a node fails. An error ends the
# job. `scancel --batch --signal=TERM JOB` ends it after a checkpoint.
# Environment: LAUNCHER (srun, mpirun), LAUNCHER_OPTIONS (more arguments of it), TRAIN_GPT (the
# program; build/train_gpt), SELFCHECK (its arguments, such as "--tolerance 25"), TRAIN_GPT_SECRET
# (a new one), TRAIN_GPT_ADDRESS (node1-ib0:29500: rank 0's name in another network than the node's
# own name is of).
# Tried: bash -n, shellcheck, and as a whole with two ranks on one machine: Open MPI 4.1, and
# stand-ins for srun and scontrol.
# Not tried: Slurm itself, several nodes, GPUs.
#
#SBATCH --job-name=train_gpt
#SBATCH --output=train_gpt-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
# On CPUs: without --gpus-per-node, and with one task for each socket or NUMA domain of a node.
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,/^# Not tried/s/^# \{0,1\}//p' "$0"; exit ;; esac
[ $# -ge 1 ] || { echo "usage: sbatch $0 CONFIG [ARGUMENTS…]" >&2; exit 2; }

program=${TRAIN_GPT:-build/train_gpt}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# If nodes have several networks, set which one carries the gradients:
#   export NCCL_SOCKET_IFNAME=ib0    the interface over which NCCL's ranks find each other
#                                    (^docker0,lo: all but these)
#   export NCCL_IB_HCA=mlx5          the InfiniBand adapters that it uses; NCCL_IB_DISABLE=1: none
#   export NCCL_DEBUG=INFO           prints what NCCL found
# With mpirun, LAUNCHER_OPTIONS="-x NCCL_SOCKET_IFNAME -x NCCL_IB_HCA" passes these to the other
# nodes. There, ranks on CPUs communicate through MPI: export OMPI_MCA_btl_tcp_if_include=ib0

# The ranks of this job know each other by it.
export TRAIN_GPT_SECRET=${TRAIN_GPT_SECRET:-$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')}

# Each rank has its own cores. All ranks of a node see all its GPUs, and each takes one.
case ${LAUNCHER:=srun} in
    srun)
        launch=(srun --mpi=none --cpus-per-task="$OMP_NUM_THREADS" --cpu-bind=cores
            --gpu-bind=none --kill-on-bad-exit=1) ;;
    mpirun) launch=(mpirun --map-by "slot:PE=$OMP_NUM_THREADS" --bind-to core -x OMP_NUM_THREADS) ;;
    *) echo "error: LAUNCHER is \"$LAUNCHER\", but must be srun or mpirun" >&2; exit 2 ;;
esac
# shellcheck disable=SC2206  # the options are words
launch+=(${LAUNCHER_OPTIONS:-})

ranks() {  # ranks ARGUMENTS…: the program on each task
    "${launch[@]}" "$program" "$@" &
    launcher=$!
    # A signal ends a wait, not the ranks.
    while kill -0 "$launcher" 2> /dev/null; do wait "$launcher" || true; done
    wait "$launcher"
}

# Slurm signals only this script; SIGUSR1 makes the ranks write a checkpoint.
launcher=
ended=
trap 'kill -USR1 "$launcher" || true' USR1
trap 'ended=1; kill -USR1 "$launcher" || true' TERM

# shellcheck disable=SC2086
ranks selfcheck ${SELFCHECK:-}
code=0
ranks train "$@" || code=$?
# Stopped early with everything saved, and not because the user ended the job
if [ "$code" = 75 ] && [ -z "$ended" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
