#!/usr/bin/env bash
# Makes the virtual environment in which Clew is tested beside the real SkyRL and TRL, on a machine without a GPU.
#   scripts/setup_skyrl.sh [FOLDER]     (default: .venvs/skyrl; PYTHON=python3.12 ... takes another interpreter)
# A second call does nothing, as long as this file and pyproject.toml stay what they are.
# It ends with 75 where the package registry cannot be reached, and with 1 after any other failure.
#
# This is no environment to train in: SkyRL's trainer needs CUDA, and comes with its published image.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venvs/skyrl}
stamp="$venv/installed-$(cat pyproject.toml "$0" | cksum | tr ' ' '-')"
if [ -e "$stamp" ]; then exit 0; fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Whether the registry is what a failed installation is due to: pip says when a connection broke, its exit code does not.
ended() {
    local status=$? said
    if [ "$status" -ne 0 ] && ! said=$(pip download --no-cache-dir --no-deps --retries 1 --dest "$venv/probe" \
        "skyrl-gym==0.4.0" 2>&1) && [[ $said == *"connection broken by"* ]]; then
        echo "$0: the package registry cannot be reached" >&2
        exit 75
    fi
}
trap ended EXIT

# By itself: where pip is shown a CPU build of this version, that is the one the rest then settles on.
pip install "torch==2.13.0"
# Clew in the versions that it is tested with. SkyRL asks for older ones of transformers and peft, of which the parts
# that are used here need nothing; so SkyRL comes without its dependencies, and what its modules import by name.
pip install --editable . "pytest>=8.4" "hypothesis>=6.130" "trl==1.16.0" "datasets==5.2.0" "ray==2.57.0" \
    "cloudpathlib==0.26.0" "fastapi==0.165.0" "func_timeout==4.3.5" "httpx==0.28.1" "hydra-core==1.3.8" "jaxtyping==0.3.11" \
    "loguru==0.7.3" "omegaconf==2.3.1" "orjson==3.13.0" "pandas==3.1.1" "polars==2.1.0" "pybase64==1.5.1" \
    "requests==2.34.2" "s3fs==2026.9.0" "tensordict==0.15.3" "torchdata==0.11.0" "uvicorn==0.54.0" "zstandard==0.25.0"
old=$("$venv/bin/python" -c 'import sys; print("yes" if sys.version_info < (3, 12) else "")')
pip install --no-deps ${old:+--ignore-requires-python} "skyrl==0.4.0" "skyrl-gym==0.4.0"
trap - EXIT

if [ -n "$old" ]; then
    # Pydantic refuses Python 3.11's own TypedDict, which SkyRL uses (it asks for 3.12). In site-packages, so that the
    # processes which Ray starts have the other one as well.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict" > "$site/typed_dict.pth"
fi

OMP_NUM_THREADS=1 "$venv/bin/python" -c '
import clew.rollout.transformers_engine, skyrl.train.entrypoints.main_base, skyrl.train.generators.skyrl_vlm_generator
import trl.trainer.grpo_trainer
from importlib.metadata import version
print("SkyRL", version("skyrl"), "and TRL", version("trl"), "are ready")'
rm -rf "$venv"/installed-* "$venv/probe"
touch "$stamp"
