#!/usr/bin/env bash
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@MACHINES@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@CPUS@
#SBATCH --gpus-per-node=@GPUS@
#SBATCH --time=@TIME@
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@NAME@-%j.log
#
# A run on the nodes of one job: a Ray cluster of their own, and the controller on the first of them.
# Written by: headrace plan RUN.toml --cluster CLUSTER.toml --deploy DIR
#
@MAP@
#
#   sbatch @FOLDER@/slurm.sh RUN_FILE RUN_DIR [--set SECTION.KEY=VALUE ...]
#
# RUN_DIR has to lie in a folder that every node sees. Flags of sbatch before the script replace those above.
# HEADRACE_ENV      a file that is sourced first: modules, a virtual environment with headrace[ray]
# HEADRACE_REQUEUE  0: a job whose time is up is not queued again
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: sbatch $0 RUN_FILE RUN_DIR [--set SECTION.KEY=VALUE ...]" >&2
    exit 2
fi
# Slurm runs a copy of this file: the others are beside the original, or where the job was submitted
folder=@FOLDER@
case $folder in
    /*) ;;
    *) folder=$SLURM_SUBMIT_DIR/$folder ;;
esac
here=${HEADRACE_DEPLOY:-$folder}
if [ ! -x "$here/train.sh" ]; then
    echo "$here/train.sh is not there: submit from the folder that has @FOLDER@/, or set HEADRACE_DEPLOY" >&2
    exit 2
fi
if [ -n "${HEADRACE_ENV:-}" ]; then
    # shellcheck disable=SC1090
    source "$HEADRACE_ENV"
fi

# the first address of this node that is not its loopback, of its name or else of its interfaces
address=$({ hostname --ip-address; hostname --all-ip-addresses; } | tr ' ' '\n' | grep -m 1 -Ev '^(127\.|$)|:')
port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node have different ones
export RAY_ADDRESS="$address:$port"
export RAY_AUTH_MODE=token  # Ray runs what its ports are told: only processes with this job's token may speak to them
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
ray_options=(--disable-usage-stats "--num-cpus=${SLURM_CPUS_PER_TASK:-1}" --block)

srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \
    ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false "${ray_options[@]}" &
tries=15
until timeout 20 ray status --address "$RAY_ADDRESS" > /dev/null 2>&1; do
    tries=$((tries - 1))
    if [ "$tries" = 0 ]; then
        echo "no Ray head has come up at $RAY_ADDRESS" >&2
        exit 1
    fi
    sleep 2
done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) \
        --exclude="$SLURMD_NODENAME" ray start --address="$RAY_ADDRESS" "${ray_options[@]}" &
fi

"$here/train.sh" "$@" @SETTINGS@ &
run=$!
time_is_up=0
# ends as with Ctrl-C: the steps that are ordered, a checkpoint. USR1: the time is nearly up; TERM: scancel
trap 'time_is_up=1; kill -TERM "$run" 2> /dev/null || true' USR1
trap 'kill -TERM "$run" 2> /dev/null || true' TERM
code=0
while kill -0 "$run" 2> /dev/null; do
    code=0
    wait "$run" || code=$?
done
if [ "$time_is_up" = 1 ] && [ "${HEADRACE_REQUEUE:-1}" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
