"""What the tests of the numeric core share: small model folders, conversations, references, environments.

Two folders, each made once a process: ``tiny_folder`` is the package's own tiny model; ``qwen_folder`` is a
shrunken Qwen3-VL-8B-Instruct (its token ids, template, temporal patches, grouped-query attention, untied
embeddings). Their weights are random but sharpened: answers differ, end after a few tokens, and depend on
what came before.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from clew.agent.ledger import StopReason, Trajectory, Turn
from clew.envs.base import Observation, Task
from clew.envs.maze_env import MazeEnv
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.vision import FeatureCache
from clew.recipe import SftTable
from clew.rollout.engine import Completion, LockstepEngine, Sampling, derive_seed
from clew.training.sft import new_model

torch.set_num_threads(1)  # these models are too small for threads: two of them spin more than they compute

END = "<|im_end|>"


def _folder(name: str) -> Path:
    root = Path(tempfile.mkdtemp(prefix=f"clew-{name}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root / name


@functools.cache
def tiny_folder() -> Path:
    """The package's untrained tiny model, sharpened."""
    folder = _folder("tiny")
    new_model(folder, SftTable(seed=0), MazeEnv())
    vlm = load_model(folder)
    with torch.no_grad():
        vlm.model.lm_head.weight.mul_(2.0)  # tied: the embeddings too
    words = ("<action>", "</action>", "up", "down", "left", "right")
    favour(vlm, {END: 26.0, **dict.fromkeys(words, 18.0)})
    vlm.model.save_pretrained(folder)
    return folder


def tiny() -> VisionLanguageModel:
    """A fresh copy of the tiny model."""
    return load_model(tiny_folder())


@functools.cache
def shared_tiny() -> VisionLanguageModel:
    """The tiny model for tests that change nothing in it."""
    return tiny()


@torch.no_grad()
def favour(vlm: VisionLanguageModel, bonus: dict[str, float]) -> None:
    """Raises the logits of some tokens by about ``bonus`` wherever an answer may go on."""
    ids = vlm.tokenizer("<|im_start|>assistant\nup the left down", return_tensors="pt")["input_ids"]
    hidden = vlm.model.model.language_model(input_ids=ids).last_hidden_state[0]
    mean = hidden[2:].mean(0)
    for token, value in bonus.items():
        vlm.model.lm_head.weight[vlm.tokenizer.convert_tokens_to_ids(token)] += value * mean / mean.square().sum()


# --- a shrunken Qwen3-VL-8B-Instruct ---------------------------------------------------------------------

_SPECIAL = ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end")
_SPECIAL += ("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
_FILL = ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
_TAGS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_SPECIAL = [f"<|{name}|>" for name in _SPECIAL]
QWEN_ADDED = ["<tool_call>", "</tool_call>", *(f"<|{name}|>" for name in _FILL), *_TAGS]
FIRST_SPECIAL = 151643
QWEN_IDS = {token: FIRST_SPECIAL + i for i, token in enumerate(QWEN_SPECIAL + QWEN_ADDED)}

# The published template's way of writing turns: line breaks and indents that its tags trim, a branch a role.
QWEN_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set image_count = namespace(value=0) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content in message.content %}
                {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                    {%- set image_count.value = image_count.value + 1 %}
                    {%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif 'text' in content %}
                    {{- content.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {{- message.content }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def qwen_tokenizer_files(folder: Path) -> None:
    """A byte-level tokenizer with Qwen's ids: 151,643 plain entries (few are reached), then special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(f"w{i}" for i in range(len(alphabet), FIRST_SPECIAL))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in QWEN_ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)


def qwen_config(**text: Any) -> Qwen3VLConfig:
    """Qwen3-VL-8B-Instruct with small numbers: same ids, same ratios."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]},
            "eos_token_id": QWEN_IDS[END],
            "initializer_range": 0.2,
            **text,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
            "initializer_range": 0.2,
        },
        image_token_id=QWEN_IDS["<|image_pad|>"],
        video_token_id=QWEN_IDS["<|video_pad|>"],
        vision_start_token_id=QWEN_IDS["<|vision_start|>"],
        vision_end_token_id=QWEN_IDS["<|vision_end|>"],
        tie_word_embeddings=False,
    )


@functools.cache
def qwen_folder() -> Path:
    """The shrunken Qwen3-VL-8B-Instruct."""
    folder = _folder("qwen")
    folder.mkdir(parents=True)
    qwen_tokenizer_files(folder)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        Qwen3VLForConditionalGeneration(qwen_config()).save_pretrained(folder)
    processor = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor["size"] = {"shortest_edge": 48 * 48, "longest_edge": 256 * 256}
    content = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        **processor,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    content = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        **processor,
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(content))
    vlm = load_model(folder)
    favour(vlm, {END: 34.0, "<think>": 26.0, "a": 26.0, "b": 26.0})
    vlm.model.save_pretrained(folder)
    return folder


# --- conversations ---------------------------------------------------------------------------------------


def noise(seed: int, height: int = 64, width: int = 64) -> np.ndarray:
    """A frame of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def conversation(
    vlm: VisionLanguageModel,
    answers: list[str],
    seed: int = 0,
    size: tuple[int, int] = (64, 64),
    task: str = "task",
) -> Trajectory:
    """A trajectory with given answers (log-probabilities 0) and a frame of noise a turn."""
    trajectory = Trajectory(Task("test", seed, task), 0, stop_reason=StopReason.TURN_CAP)
    for i, answer in enumerate(answers):
        show(vlm, trajectory, noise(1000 * seed + i, *size), f"turn {i}" if i else "Go!")
        reply(vlm, trajectory, answer)
    return trajectory


def show(vlm: VisionLanguageModel, trajectory: Trajectory, frame: np.ndarray, text: str, ended: bool = True) -> None:
    grid = vlm.patcher.grid(frame)
    count = grid[0] * grid[1] * grid[2] // vlm.merge_size**2
    if trajectory.turns:
        ids = vlm.template.continuation(text, count, ended=ended)
    else:
        ids = vlm.template.opening("Look at it.", text, count)
    trajectory.append_prompt(ids, grid)
    trajectory.turns.append(Turn(text, frame))


def reply(vlm: VisionLanguageModel, trajectory: Trajectory, answer: str) -> None:
    ids = [*vlm.tokenizer(answer, add_special_tokens=False)["input_ids"], vlm.template.end_of_turn_id]
    turn = trajectory.turns[-1]
    turn.start, turn.answer = len(trajectory.token_ids), answer
    trajectory.append_sampled(ids, [0.0] * len(ids))
    turn.end = len(trajectory.token_ids)


def plain_inputs(vlm: VisionLanguageModel, token_ids: list[int], frames: list[np.ndarray]) -> dict[str, Tensor]:
    """What Hugging Face's own forward takes for a conversation: ids and pixels, nothing of Clew's."""
    images = vlm.patcher.processor(images=frames, return_tensors="pt")
    ids = torch.tensor([token_ids])
    kinds = (ids == vlm.model.config.image_token_id).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **images}


def plain_logprobs(
    vlm: VisionLanguageModel, model: Any, trajectory: Trajectory, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [sampled tokens] and entropies by Hugging Face's forward of it all."""
    frames = [turn.frame for turn in trajectory.turns]
    model.model.rope_deltas = None
    logits = model(**plain_inputs(vlm, trajectory.token_ids, frames), use_cache=False).logits[0].double()
    logits[:, vlm.forbidden_ids] = -float("inf")
    logprobs = torch.log_softmax(logits / temperature, -1)
    at = [i for i, sampled in enumerate(trajectory.sampled) if sampled]
    before = logprobs[[i - 1 for i in at]]
    entropy = -(before.exp() * before.clamp(min=-1e5)).sum(-1)
    return before[torch.arange(len(at)), torch.tensor([trajectory.token_ids[i] for i in at])], entropy


# --- environments and engines ----------------------------------------------------------------------------


class WordEnv:
    """Frames of noise that depend on all that was answered; ends at random, by content, within ``max_turns``.

    Args:
        raises: called with (seed, turn) at the start of each step (turn from 1) and at reset (turn 0).
    """

    env_id = "test/Word"
    prompt = "Look at it."
    action_names = ("a", "b")

    def __init__(
        self,
        max_turns: int = 4,
        sizes: tuple[tuple[int, int], ...] = ((64, 64),),
        raises: Any = lambda seed, turn: None,
    ) -> None:
        self.max_turns, self.sizes, self.raises = max_turns, sizes, raises
        self.closed = False

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        self.raises(seed, 0)
        self.seed, self.history, self.turn = seed, f"{seed}", 0
        return self._look(""), {"content_hash": self.task(seed).content_hash, "path_length": 1 + seed % 3}

    def task(self, seed: int) -> Task:
        return Task(self.env_id, seed, f"word-{seed}")

    def _digest(self) -> int:
        return derive_seed(self.history)

    def _look(self, text: str) -> Observation:
        frame_seed = self._digest()
        return Observation(noise(frame_seed, *self.sizes[frame_seed % len(self.sizes)]), text)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        self.raises(self.seed, self.turn)
        self.history += "|" + action
        luck = self._digest() // 7 % 6
        success, wrong = luck == 0, luck == 1
        truncated = not (success or wrong) and self.turn >= self.max_turns
        text = ["Moved.", "Blocked by a wall.", "Not understood."][self._digest() % 3]
        info = {"success": success, "feedback": "moved"}
        return self._look(text), float(success), success or wrong, truncated, info

    def oracle_action(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class ScriptedEngine(LockstepEngine):
    """Answers with the text that ``say(trajectory)`` gives (None: an answer that is cut)."""

    version = "scripted"

    def __init__(self, vlm: VisionLanguageModel, say: Callable[[Trajectory], str | None]) -> None:
        super().__init__()
        self.vlm, self.template, self.say = vlm, vlm.template, say
        self.calls: list[int] = []

    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        self.calls.append(len(trajectories))
        return [self._answer(self.say(t), sampling) for t in trajectories]

    def _answer(self, text: str | None, sampling: Sampling) -> Completion:
        encode = self.template.tokenizer
        if text is None:
            ids = (encode("up" * 99, add_special_tokens=False)["input_ids"] * 9)[: sampling.max_new_tokens]
        else:
            ids = [*encode(text, add_special_tokens=False)["input_ids"], self.template.end_of_turn_id]
        return Completion(ids, [-1.0] * len(ids), text is not None)

    def release(self) -> None:
        pass


def feature_cache(vlm: VisionLanguageModel) -> FeatureCache:
    return FeatureCache(vlm.model.model.visual, vlm.patcher)


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()
