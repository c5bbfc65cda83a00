"""The vLLM engine: continuous batching, a prefix cache across turns, adapters loaded from folders."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from safetensors import safe_open

from clew.agent.ledger import Trajectory
from clew.checkpoint import verify
from clew.errors import UserError
from clew.policy.adapter import CONFIG_FILE, WEIGHTS_FILE, StoredAdapter
from clew.policy.model import ModelProcessor
from clew.rollout.engine import Completion, Sampling
from clew.rollout.vllm_options import VllmSettings, engine_options

_TEMPERATURES = (0.01, 2.0)  # anything between 0 and the lower one vLLM would raise to it, with a warning only
_KEY = re.compile(
    r"base_model\.model\.model\.language_model\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+)\.lora_([AB])\.weight"
)


@dataclass
class _Request:
    """An answer that vLLM is asked for."""

    trajectory: Trajectory
    sampling: Sampling
    seed: int
    sent_again: bool = False


class VllmEngine:
    """Samples with vLLM, which batches requests as they come and keeps the keys and values of earlier turns.

    vLLM's prefix cache is keyed by adapter version and image content, so nothing in it is ever outdated. An image is
    known by a hash of its content: it is cut into patches, and sent to the process that computes, when it is first
    seen (or seen again after the bounded cache dropped it), and encoded when the prefix cache does not cover it.
    """

    patience_s = 0.005  # whoever comes later joins the running batch

    def __init__(self, processor: ModelProcessor, settings: VllmSettings, device: str) -> None:
        """Starts vLLM: seconds for a tiny model, minutes for a large one.

        Raises:
            UserError: vLLM is not installed, or is built for another device.
        """
        if find_spec("vllm") is None:
            raise UserError('rollout.engine: "vllm" is not installed; pip install "clew[vllm]", or use "transformers"')
        arguments, environment = engine_options(processor, settings, device)
        os.environ.update(environment)
        import vllm
        from vllm.platforms import current_platform

        if current_platform.device_type != device:
            raise UserError(
                f"rollout.engine: the installed vLLM is built for {current_platform.device_type}, not for the "
                f'{device} of this run; set model.device or use the "transformers" engine'
            )
        self.version = "base"
        self.processor, self.settings = processor, settings
        self._vllm: Any = vllm
        self._llm: Any = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        self._can_sleep, self._asleep = bool(arguments.get("enable_sleep_mode")), False
        self._lora: Any = None
        self._request_ids, self._lora_ids = itertools.count(1), itertools.count(1)
        self._running: dict[str, _Request] = {}
        # By the identity of a trajectory, which is kept alive so that no other can take its place.
        self._images: dict[int, tuple[Trajectory, list[str]]] = {}

    def load_adapter(self, adapter: StoredAdapter | None) -> None:
        """Samples under this version from now on (None: the base model); wakes the engine.

        The version before it makes room. vLLM reads the folder again should it ever need it, so it must stay.

        Raises:
            UserError: the folder is damaged, or holds what vLLM would leave out or could not apply: an adapter of
                which a part is ignored is silently another policy.
        """
        if self._running:
            raise RuntimeError(f"{len(self._running)} answers of version {self.version} are still being sampled")
        self.wake()
        if adapter is None:
            self.version, self._lora = "base", None
        elif adapter.name != self.version:
            check_adapter(adapter, self.processor, self.settings.lora_rank)
            from vllm.lora.request import LoRARequest

            lora = LoRARequest(adapter.name, next(self._lora_ids), str(adapter.folder.resolve()))
            self._llm.add_lora(lora)
            self.version, self._lora = adapter.name, lora

    def submit(self, trajectory: Trajectory, sampling: Sampling, seed: int) -> None:
        """See ``Engine.submit``.

        Raises:
            UserError: vLLM does not sample at this temperature.
            ValueError: what vLLM makes of the prompt is not the ledger.
        """
        lowest, highest = _TEMPERATURES
        if sampling.temperature != 0 and not lowest <= sampling.temperature <= highest:
            raise UserError(
                f"rollout.temperature: vLLM samples at {lowest} to {highest}, or greedily (0), not at "
                f"{sampling.temperature}"
            )
        self._send(_Request(trajectory, sampling, seed))

    def _send(self, request: _Request) -> None:
        trajectory, sampling = request.trajectory, request.sampling
        image_id = self.processor.template.image_token_id
        prompt = {
            "prompt_token_ids": collapse(trajectory.token_ids, image_id),
            "multi_modal_data": {"image": [turn.frame for turn in trajectory.turns]},
            "multi_modal_uuids": {"image": self._image_names(trajectory)},
        }
        (rendered,) = self._llm.renderer.render_cmpl([prompt])
        parameters = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=request.seed & (2**63 - 1),  # signed 64 bits, and -1 would mean none
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=[self.processor.template.end_of_turn_id],
            ignore_eos=True,  # the end of turn alone ends an answer, whatever the model's configuration says
            logprobs=0,  # those of the sampled tokens
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(self._request_ids))
        self._llm.add_request(request_id, rendered, parameters, lora_request=self._lora)
        if rendered["prompt_token_ids"] != trajectory.token_ids:
            self._llm.abort_request([request_id])  # not held back: both ends must count the same images as sent
            raise ValueError(
                f"vLLM expands the prompt to {len(rendered['prompt_token_ids'])} tokens which are not the "
                f"{len(trajectory.token_ids)} of the ledger (task {trajectory.task})"
            )
        self._running[request_id] = request

    def _image_names(self, trajectory: Trajectory) -> list[str]:
        _, names = self._images.setdefault(id(trajectory), (trajectory, []))
        names += [_content_name(turn.frame) for turn in trajectory.turns[len(names) :]]
        return names

    def collect(self) -> list[tuple[Trajectory, Completion]]:
        """See ``Engine.collect``: computes until an answer ends, and returns all that have ended by then."""
        found: list[tuple[Trajectory, Completion]] = []
        while self._running and not found:
            for output in self._llm.step():
                request = self._running.pop(output.request_id)
                (answer,) = output.outputs
                if answer.finish_reason in ("stop", "length"):
                    ids = list(answer.token_ids)
                    logprobs = [at[token].logprob for at, token in zip(answer.logprobs, ids, strict=True)]
                    found.append((request.trajectory, Completion(ids, logprobs, answer.finish_reason == "stop")))
                elif not request.sent_again:
                    # Its two processes disagreed on which images are cached; that is put right by now.
                    request.sent_again = True
                    self._send(request)
                else:
                    raise RuntimeError(f"vLLM ended a request with {answer.finish_reason!r} twice")
        return found

    def abandon(self, trajectory: Trajectory) -> None:
        """See ``Engine.abandon``."""
        self._images.pop(id(trajectory), None)
        ids = [key for key, request in self._running.items() if request.trajectory is trajectory]
        for key in ids:
            del self._running[key]
        if ids:
            self._llm.abort_request(ids)

    def release(self) -> None:
        """Forgets all trajectories and images. The prefix cache stays: another version never finds its entries."""
        for request in list(self._running.values()):
            self.abandon(request.trajectory)
        self._images.clear()
        self._llm.reset_mm_cache()

    def sleep(self) -> None:
        """Gives the device's memory to a colocated trainer: weights go to the host, the cache is dropped.

        Nothing happens where the engine isn't colocated, or on a CPU.
        """
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Takes the device's memory back; does nothing when the engine isn't asleep."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


def check_adapter(adapter: StoredAdapter, processor: ModelProcessor, max_rank: int) -> None:
    """Compares an adapter's weights, by name and shape, with the layers that they are meant for.

    vLLM leaves out names that it has no layer for, and pads weights that are too small, without an error.

    Raises:
        UserError: the folder is damaged, or holds anything but LoRA pairs that fit this model's decoder layers.
    """
    missing = {WEIGHTS_FILE, CONFIG_FILE} - set(verify(adapter.folder).files)
    if missing:
        raise UserError(f"{adapter.folder}: no PEFT adapter, {' and '.join(sorted(missing))} is not in its manifest")
    rank = json.loads((adapter.folder / CONFIG_FILE).read_text())["r"]
    if rank > max_rank:
        raise UserError(f"adapter {adapter.name} has rank {rank}; this engine was started for rank {max_rank}")
    text = processor.config.text_config
    hidden, inner = text.hidden_size, text.intermediate_size
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    halves: dict[tuple[str, str], set[str]] = {}
    with safe_open(adapter.folder / WEIGHTS_FILE, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            match = _KEY.fullmatch(name)
            layer, module, half = match.groups() if match else ("", "", "")
            if module not in sizes or int(layer) >= text.num_hidden_layers:
                raise UserError(f"adapter {adapter.name}: vLLM can't apply {name}; it adapts {', '.join(sizes)}")
            n_in, n_out = sizes[module]
            shape, expected = file.get_slice(name).get_shape(), [rank, n_in] if half == "A" else [n_out, rank]
            if shape != expected:
                raise UserError(
                    f"adapter {adapter.name} does not fit the model {processor.path}: {name} has shape "
                    f"{shape}, not {expected}"
                )
            halves.setdefault((layer, module), set()).add(half)
    alone = sorted(key for key, found in halves.items() if len(found) != 2)
    if alone or not halves:
        raise UserError(f"adapter {adapter.name}: {alone[0] if alone else 'every layer'} lacks lora_A or lora_B")


def collapse(token_ids: list[int], image_token_id: int) -> list[int]:
    """A ledger's ids with one placeholder an image, as vLLM wants them: it expands them itself.

    Images never touch: their start and end tokens are between them.
    """
    before = itertools.chain([None], token_ids)
    return [token for token, last in zip(token_ids, before, strict=False) if token != image_token_id or last != token]


def _content_name(frame: np.ndarray) -> str:
    return hashlib.blake2b(frame.tobytes(), digest_size=16, key=repr(frame.shape).encode()).hexdigest()
