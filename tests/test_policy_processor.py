"""The shipped folder through Hugging Face's own front door: AutoProcessor, which needs torchvision.

Clew itself needs no torchvision (its video processor is never used), so it lies apart, in ``.venvs/torchvision``
(``make test-slow`` puts it there). The registry's build is for CUDA: beside a CPU build of torch its compiled part
does not load, and the schemas of its operators are declared here instead. Its Python part, which is all that is
needed, works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCHVISION = Path(__file__).parents[1] / ".venvs" / "torchvision"

SCRIPT = r"""
import json, sys
import numpy as np, torch

schemas = torch.library.Library("torchvision", "DEF")
for schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    *(f"{name}(Tensor input) -> Tensor" for name in (
        "roi_align", "qroi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool",
        "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward")),
):
    schemas.define(schema)
from transformers import AutoModelForImageTextToText, AutoProcessor
from clew.envs import MazeEnv

folder = sys.argv[1]
processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder)
env = MazeEnv(size=(4, 6), min_path=7, max_path=12)
frame = env.reset(0)[0].image
messages = [{"role": "user", "content": [{"type": "image", "image": frame.transpose(2, 0, 1)},
                                         {"type": "text", "text": env.prompt}]}]
inputs = processor.apply_chat_template(
    messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1]:]
print(json.dumps({
    "processor": type(processor).__name__,
    "ids": inputs["input_ids"][0].tolist(),
    "answer": processor.decode(answer, skip_special_tokens=True),
    "best": [env.move_text(d) for d in env.best_moves()],
}))
"""


@pytest.mark.slow
def test_auto_processor_loads_the_shipped_folder_and_the_model_answers() -> None:
    if not TORCHVISION.is_dir():
        pytest.skip("torchvision is not in .venvs/torchvision: run `make test-slow`")
    from clew.policy.model import load_model
    from clew.policy.paths import resolve_model_path
    from clew.recipe import WARM_START, ModelTable

    folder = resolve_model_path(ModelTable(path=WARM_START))
    path = os.pathsep.join([str(TORCHVISION), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["processor"] == "Qwen3VLProcessor"
    # The same tokens as Clew's own template and patch counts give.
    vlm = load_model(folder)
    from clew.envs import MazeEnv

    prompt = MazeEnv(size=(4, 6), min_path=7, max_path=12).prompt
    assert found["ids"] == vlm.template.opening(prompt, "", 6)
    assert found["answer"] in found["best"]
