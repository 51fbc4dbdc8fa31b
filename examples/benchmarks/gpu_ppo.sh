#!/usr/bin/env bash
# PPO of a 6B-class policy with random weights on one GPU: see gpu_ppo.py; --quick tries it small, on any machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" examples/benchmarks/gpu_ppo.py "$@"
