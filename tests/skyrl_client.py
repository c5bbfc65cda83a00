"""A stand-in for vLLM behind SkyRL's generator: Hugging Face renders, Clew's transformers engine answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clew.agent.ledger import Trajectory, Turn
from clew.envs.base import Task
from clew.policy.model import VisionLanguageModel
from clew.rollout.engine import Completion, Engine, Sampling, derive_seed

Sample = Callable[[Trajectory, Sampling, int], Completion]
SEED_PARTS = ("beside", "skyrl")


def sampler(engine: Engine) -> Sample:
    """One answer of an engine."""

    def sample(trajectory: Trajectory, sampling: Sampling, seed: int) -> Completion:
        engine.submit(trajectory, sampling, seed)
        ((_, completion),) = engine.collect()
        return completion

    return sample


class StandInClient:
    """What SkyRL's generator asks of its inference client, for a model of Clew's.

    It draws with the seeds that ``clew.rollout.episodes.play`` would use with ``SEED_PARTS``.

    Attributes:
        prompts: the ids that each session was conditioned on, a list a turn.
        finished: the sessions that SkyRL has let go.
    """

    model_name = "tiny"

    def __init__(self, vlm: VisionLanguageModel, sample: Sample, rows: list[dict[str, Any]]) -> None:
        self.vlm, self.sample, self.rows = vlm, sample, rows
        self.prompts: dict[str, list[list[int]]] = {}
        self.finished: list[str] = []
        self._frames: dict[str, np.ndarray] = {}
        self._images: dict[str, Any] = {}

    async def render_chat_completion(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The conversation as ids, image placeholders expanded, and what the images are: as vLLM renders it."""
        await asyncio.sleep(0)
        messages = payload["json"]["messages"]
        urls = [part["image_url"]["url"] for m in messages for part in m["content"] if "image_url" in part]
        hashes = [hashlib.sha256(url.encode()).hexdigest() for url in urls]
        for name, url in zip(hashes, urls, strict=True):
            if name not in self._frames:
                self._frames[name] = _decoded(url)
                self._images[name] = self.vlm.patcher.processor(images=[self._frames[name]], return_tensors="pt")
        images = [self._images[name] for name in hashes]
        text = self.vlm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        counts = iter([int(image["image_grid_thw"].prod()) // self.vlm.merge_size**2 for image in images])
        token_ids: list[int] = []
        for i in self.vlm.tokenizer(text, add_special_tokens=False)["input_ids"]:
            token_ids += [i] * (next(counts) if i == self.vlm.template.image_token_id else 1)
        return {
            "token_ids": token_ids,
            "features": {"mm_hashes": {"image": hashes}, "kwargs_data": {"image": [_packed(i) for i in images]}},
        }

    async def generate(self, engine_input: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        """Answers one prompt."""
        await asyncio.sleep(0)
        (ids,), (session,), (features,) = (engine_input[k] for k in ("prompt_token_ids", "session_ids", "mm_features"))
        self.prompts.setdefault(session, []).append(ids)
        row, _, sample = session.rpartition("_")
        task = self.task(int(row))
        frames = [self._frames[h] for h in features["mm_hashes"]["image"]]
        trajectory = Trajectory(task, int(sample), turns=[Turn("", frame) for frame in frames])
        trajectory.append_prompt(ids)
        trajectory.grids = [self.vlm.patcher.grid(frame) for frame in frames]
        trajectory.check_images(self.vlm.template.image_token_id, self.vlm.merge_size)
        parameters = engine_input["sampling_params"]
        sampling = Sampling(parameters["temperature"], parameters["max_tokens"])
        seed = derive_seed(*SEED_PARTS, task.content_hash, trajectory.sample, len(frames))
        completion = self.sample(trajectory, sampling, seed)
        return {
            "responses": [self.vlm.tokenizer.decode(completion.ids, skip_special_tokens=True)],
            "response_ids": [list(completion.ids)],
            "stop_reasons": ["stop" if completion.ended else "length"],
            "response_logprobs": [list(completion.logprobs)],
        }

    async def finish_session(self, session: str) -> None:
        """Notes it."""
        self.finished.append(session)

    def task(self, row: int) -> Task:
        """The task of a row of the data set."""
        return Task(self.rows[row]["env_id"], self.rows[row]["seed"], self.rows[row]["content_hash"])


def generate(
    client: StandInClient,
    samples: int,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 8,
    max_input_length: int = 100_000,
    max_turns: int = 100,
) -> dict[str, Any]:
    """Plays every row ``samples`` times with SkyRL's own generator, from its input to its output."""
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
    from skyrl.train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
    from skyrl.train.generators.skyrl_vlm_generator import SkyRLVLMGymGenerator
    from skyrl.train.generators.utils import prepare_generator_input

    from clew.runtime.skyrl.env import register_env

    register_env()
    sampling = SamplingParams(temperature=temperature, max_generate_length=max_new_tokens)
    config = GeneratorConfig(
        max_turns=max_turns,
        max_input_length=max_input_length,
        n_samples_per_prompt=samples,
        sampling_params=sampling,
        vision_language_generator=True,
    )
    prompts = []
    for uid, row in enumerate(client.rows):
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        prompts.append({"prompt": row["prompt"], "env_class": row["env_class"], "env_extras": extras, "uid": str(uid)})
    parameters = get_sampling_params_for_backend("vllm", sampling)
    inputs, uids = prepare_generator_input(prompts, samples, parameters, "clew", "train", 1)
    generator = SkyRLVLMGymGenerator(config, SkyRLGymConfig(), client, client.vlm.tokenizer)
    output = asyncio.run(generator.generate(inputs, disable_tqdm=True))
    assert sorted(client.finished) == sorted(t.to_string() for t in inputs["trajectory_ids"])
    return {**output, "uids": uids}


def install_image_codec(patch: pytest.MonkeyPatch) -> None:
    """SkyRL unpacks images with a module of vLLM, which is not installed here; packed by ``_packed``, this one does."""
    name = "vllm.entrypoints.scale_out.token_in_token_out.mm_serde"
    module = ModuleType(name)
    unpack: Any = lambda text: SimpleNamespace(  # noqa: E731
        get_data=lambda: torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    )
    module.decode_mm_kwargs_item = unpack  # type: ignore[attr-defined]
    patch.setitem(sys.modules, name, module)


def _packed(image: Iterable[str]) -> str:
    file = io.BytesIO()
    torch.save({name: image[name] for name in ("pixel_values", "image_grid_thw")}, file)  # type: ignore[index]
    return base64.b64encode(file.getvalue()).decode("ascii")


def _decoded(url: str) -> np.ndarray:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
