#!/usr/bin/env bash
# Makes the virtual environment of benchmarks/grpo_step.py: TRL beside Clew (TRL is no dependency of Clew).
#   benchmarks/setup_trl.sh [FOLDER]     (default: .venvs/trl)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venvs/trl}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "torch==2.13.0"
"$venv/bin/python" -m pip install --quiet "trl==1.16.0" "transformers==5.24.0" --editable .
"$venv/bin/python" -c 'import clew, trl; print("TRL", trl.__version__, "is ready")'
