#!/usr/bin/env bash
#SBATCH --job-name=headrace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=36
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=headrace-%j.log
#
# A run on the nodes of one job: a Ray cluster of their own, and the controller on the first of them.
# Written by: headrace plan RUN.toml --cluster CLUSTER.toml --deploy DIR
#
#   machine  GPU  part                   memory
#   -        -    controller
#   0        0-7  learner, ranks 0 to 7  29.1 GB on each: weights 2.0 GB, gradients 6.1 GB, optimizer 12.3 GB, gathered 6.2 GB, activations 2.4 GB
#   1        0    engine-0               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        1    engine-1               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        2    engine-2               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        3    engine-3               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        4    engine-4               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        5    engine-5               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        6    engine-6               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   1        7    engine-7               44.8 GB: weights 32.8 GB, cache up to 12.1 GB
#   An update takes 5.0 s for 258,690 tokens; a publication by group 6.3 s (copy 0.79 s, hash 0.14 s, agree 0.05 s, broadcast 1.3 s, verify 1.1 s, upload 2.9 s, commit 0.005 s).
#
#   sbatch deploy/slurm.sh RUN_FILE RUN_DIR [--set SECTION.KEY=VALUE ...]
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
folder=deploy
case $folder in
    /*) ;;
    *) folder=$SLURM_SUBMIT_DIR/$folder ;;
esac
here=${HEADRACE_DEPLOY:-$folder}
if [ ! -x "$here/train.sh" ]; then
    echo "$here/train.sh is not there: submit from the folder that has deploy/, or set HEADRACE_DEPLOY" >&2
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

"$here/train.sh" "$@" --set launch.kind=ray --set launch.ray.engine.gpus=1 --set launch.ray.learner.gpus=1 --set observe.view=plain &
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
