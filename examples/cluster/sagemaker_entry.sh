#!/bin/bash
# Runs in every SageMaker container; SM_* say which one this is. Arguments are settings of rlhf ppo.
set -euo pipefail

hosts=$(python -c 'import json, os; print(len(json.loads(os.environ["SM_HOSTS"])))')
head=$(python -c 'import json, os; print(sorted(json.loads(os.environ["SM_HOSTS"]))[0])')
exec torchrun --nnodes="$hosts" --nproc-per-node="$SM_NUM_GPUS" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$TRAINING_JOB_NAME" \
  -m rlhf.cli ppo "$@" --resume
