#!/usr/bin/env bash
# A 6B-class reward model with random weights on one GPU: see gpu_reward.py; --quick tries it small, on any machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" examples/benchmarks/gpu_reward.py "$@"
