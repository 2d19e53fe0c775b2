#!/usr/bin/env bash
# Begins the run of a run file, or continues it: what starts a job again need not know which.
#
#   train.sh RUN_FILE RUN_DIR [--set SECTION.KEY=VALUE ...]
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: $0 RUN_FILE RUN_DIR [--set SECTION.KEY=VALUE ...]" >&2
    exit 2
fi
run_file=$1 run_dir=$2
shift 2
resume=()
if [ -e "$run_dir/ledger.sqlite" ] || [ -e "$run_dir/ledger.redis" ]; then
    resume=(--resume)
fi
exec headrace train "$run_file" --set "run.dir=$run_dir" "$@" "${resume[@]}"
