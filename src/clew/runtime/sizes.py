"""How large a recipe's model and episodes are: parameters, tokens, bytes a token. No weights are loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from clew.agent.template import ChatTemplate
from clew.envs.maze_env import ENV_ID, FEEDBACK
from clew.envs.registry import make_env
from clew.errors import UserError
from clew.evaluation.suites import environment_settings
from clew.policy.adapter import attach_lora
from clew.policy.model import VisionLanguageModel
from clew.policy.paths import resolve_model_path
from clew.policy.vision import FramePatcher
from clew.recipe import WARM_START, Recipe
from clew.runtime.prepare import prepared_model

FP32 = 4  # bytes

_CONFIGS = Path(str(resources.files("clew") / "assets" / "configs"))
# (model.path, model.subfolder) -> the file in assets/configs that describes it (see the README there).
_KNOWN = {
    ("Qwen/Qwen3-VL-2B-Instruct", None): "qwen3-vl-2b-instruct",
    ("Qwen/Qwen3-VL-4B-Instruct", None): "qwen3-vl-4b-instruct",
    ("Qwen/Qwen3-VL-8B-Instruct", None): "qwen3-vl-8b-instruct",
    ("VisGym/visgym_model", "mixed_qwen3vl"): "qwen3-vl-8b-instruct",
}


@dataclass(frozen=True)
class ModelSource:
    """A model's configuration, and where it was found.

    Attributes:
        folder: the model folder, or None where only the configuration shipped with Clew is at hand.
        config: Qwen3-VL configuration.
        processor: Hugging Face image processor.
        origin: where the configuration comes from, in words.
    """

    folder: Path | None
    config: Any
    processor: Any
    origin: str


def find_model(recipe: Recipe) -> ModelSource:
    """The configuration of a recipe's model: its folder's own, or the one shipped with Clew for a known hub model.

    A hub model that ``clew prepare`` made ready is a folder.

    Raises:
        UserError: the folder is missing or holds no Qwen3-VL, or a hub model is neither known nor on this machine.
    """
    model = recipe.model
    folder = prepared_model(recipe) or Path(resolve_model_path(model))
    if folder.is_dir():
        try:
            config = AutoConfig.from_pretrained(folder)
            processor = AutoImageProcessor.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"model.path: {folder} can't be read as a Hugging Face model folder ({reason})") from error
        if config.model_type != "qwen3_vl":
            raise UserError(f"model.path: {folder} is a {config.model_type} model; Clew trains qwen3_vl models")
        return ModelSource(folder, config, processor, WARM_START if model.path == WARM_START else str(folder))
    name = _KNOWN.get((model.path, model.subfolder))
    if name is None:
        shown = f"{model.path} (folder {model.subfolder})" if model.subfolder else model.path
        raise UserError(
            f"model.path: {shown} is not on this machine and Clew has no configuration of it: run `clew prepare` "
            f"first, or name a folder (known without it: {', '.join(sorted({path for path, _ in _KNOWN}))})"
        )
    config = Qwen3VLConfig(**json.loads((_CONFIGS / f"{name}.json").read_text()))
    return ModelSource(None, config, AutoImageProcessor.from_pretrained(_CONFIGS), f"shipped with Clew ({name})")


@dataclass(frozen=True)
class ModelSizes:
    """Parameters of a model with its adapter, counted on the meta device.

    Attributes:
        base: all of the base model (tied weights once).
        vision: of those, the vision tower's.
        head: of those, the output layer's (the embeddings where they are tied).
        adapted: of those, the weights of layers that have an adapter.
        lora: the adapter's own, all that is trained.
        largest: base and adapter parameters of the largest FSDP group (a decoder layer, a vision block, and where they
            are untied the embeddings and the output layer).
        largest_name: what that group is.
        root: parameters in none of these groups: they stay gathered throughout an update.
    """

    base: int
    vision: int
    head: int
    adapted: int
    lora: int
    largest: int
    largest_name: str
    root: int

    @property
    def language(self) -> int:
        """Base parameters outside the vision tower."""
        return self.base - self.vision


def model_sizes(source: ModelSource, recipe: Recipe) -> ModelSizes:
    """Builds the model with its adapter on the meta device (shapes, no memory) and counts.

    Raises:
        UserError: ``model.lora.target`` names no layer of it.
    """
    lora = recipe.model.lora
    with torch.device("meta"):
        model: Any = Qwen3VLForConditionalGeneration(source.config)
        # All that attaching needs of a loaded model. The path is what PEFT would take for its name anyway.
        vlm = cast(VisionLanguageModel, SimpleNamespace(path=model.name_or_path or None, model=model))
        base, vision, head = _count(model), _count(model.model.visual), _count(model.lm_head)
        attach_lora(vlm, lora.rank, lora.alpha, lora.dropout, lora.target, lora.vision)
    language = model.model.language_model
    groups = {"decoder layer": _count(language.layers[0]), "vision block": _count(model.model.visual.blocks[0])}
    grouped = sum(_count(block) for block in [*language.layers, *model.model.visual.blocks])
    if model.lm_head.weight is not language.embed_tokens.weight:
        groups |= {"embeddings": _count(language.embed_tokens), "output layer": _count(model.lm_head)}
        grouped += groups["embeddings"] + groups["output layer"]
    largest_name = max(groups, key=lambda name: groups[name])
    return ModelSizes(
        base=base,
        vision=vision,
        head=head,
        adapted=sum(m.base_layer.weight.numel() for m in model.modules() if hasattr(m, "base_layer")),
        lora=sum(p.numel() for p in model.parameters() if p.requires_grad),
        largest=groups[largest_name],
        largest_name=largest_name,
        root=_count(model) - grouped,
    )


def amount(parameters: int) -> str:
    """A number of parameters to read: 8.77 B, 87.3 M, 81.4 k."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return str(parameters)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- episodes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpisodeSizes:
    """Tokens of an episode.

    Attributes:
        frame: (height, width) of a frame, in pixels.
        frame_tokens: visual tokens of a frame, after the image processor's resizing and the patch merger.
        opening: tokens before the first answer: a frame, the instructions, the chat format.
        turn: tokens between two answers: a frame, the longest feedback, the chat format.
        answer: most tokens of an answer.
        turns: most answers.
        estimated: whether texts were not at hand or not tokenised, but estimated from their length.
    """

    frame: tuple[int, int]
    frame_tokens: int
    opening: int
    turn: int
    answer: int
    turns: int
    estimated: bool

    @property
    def longest(self) -> int:
        """Tokens of an episode with all its turns, each answer as long as it may be."""
        return self.opening + (self.turns - 1) * self.turn + self.turns * self.answer


class _Scene(NamedTuple):
    """What an environment shows: (height, width), and its texts or, where they are not at hand, their lengths."""

    frame: tuple[int, int]
    prompt: str | int
    feedback: tuple[str, ...] | int


# VisGym's maze_2d, which need not be installed to plan: 25 pixels a cell; characters of its instructions and of the
# longest feedback that Clew passes on.
_VISGYM = {
    "visgym:maze_2d/easy": _Scene((225, 225), 700, 400),
    "visgym:maze_2d/hard": _Scene((275, 275), 700, 400),
}
_LONGEST_FEEDBACK = 180  # characters, of an environment that does not list its texts
_CHARACTERS_PER_TOKEN = 3  # fewer than the four or so of Qwen's tokenizer on English: an estimate on the safe side
# Qwen's chat format around one image and one text: before the first answer, and between two answers.
_OPENING_MARKS, _TURN_MARKS = 10, 11


def episode_sizes(source: ModelSource, recipe: Recipe) -> EpisodeSizes:
    """What an episode of a recipe costs in tokens, its frames under the model's own image processor.

    Raises:
        UserError: there is no such environment.
    """
    scene = _scene(recipe)
    patcher = FramePatcher(source.processor)
    t, h, w = patcher.grid(np.zeros((*scene.frame, 3), np.uint8))
    frame_tokens = t * h * w // patcher.merge**2
    opening_marks, turn_marks, tokenizer = _OPENING_MARKS, _TURN_MARKS, None
    if source.folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        template = ChatTemplate(tokenizer)
        opening_marks = len(template.opening("", "", 0))
        turn_marks = len(template.continuation("", 0, ended=True))
    feedback = scene.feedback if isinstance(scene.feedback, tuple) else (scene.feedback,)
    return EpisodeSizes(
        frame=scene.frame,
        frame_tokens=frame_tokens,
        opening=opening_marks + frame_tokens + _text_tokens(scene.prompt, tokenizer),
        turn=turn_marks + frame_tokens + max(_text_tokens(text, tokenizer) for text in feedback),
        answer=recipe.rollout.max_new_tokens,
        turns=recipe.environment.max_turns,
        estimated=tokenizer is None or isinstance(scene.prompt, int) or isinstance(scene.feedback, int),
    )


def _scene(recipe: Recipe) -> _Scene:
    table = recipe.environment
    if table.id in _VISGYM:
        return _VISGYM[table.id]
    env = make_env(table.id, **environment_settings(recipe))
    try:
        height, width = env.reset(0)[0].image.shape[:2]
        feedback = tuple(FEEDBACK.values()) if table.id == ENV_ID else _LONGEST_FEEDBACK
        return _Scene((height, width), env.prompt, feedback)
    finally:
        env.close()


def _text_tokens(text: str | int, tokenizer: Any) -> int:
    if isinstance(text, str) and tokenizer is not None:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return math.ceil((len(text) if isinstance(text, str) else text) / _CHARACTERS_PER_TOKEN)


def check_lengths(recipe: Recipe, source: ModelSource, episode: EpisodeSizes) -> None:
    """Refuses a token budget that the model or the first answer does not fit.

    Raises:
        UserError: names the numbers.
    """
    rollout, limit = recipe.rollout, source.config.text_config.max_position_embeddings
    if rollout.max_tokens > limit:
        raise UserError(
            f"rollout.max_tokens = {rollout.max_tokens} is more than the {limit} positions of the model "
            f"{recipe.model.path}: lower max_tokens"
        )
    if episode.opening + episode.answer > rollout.max_tokens:
        raise UserError(
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a first answer: the opening takes "
            f"{episode.opening} tokens ({episode.frame_tokens} of them the frame) and an answer up to "
            f"rollout.max_new_tokens = {episode.answer}; raise max_tokens"
        )


# --- bytes a token ---------------------------------------------------------------------------------------


def cache_bytes_per_token(text_config: Any, itemsize: int) -> int:
    """Key/value cache of one token: a key and a value for each layer and key/value head (grouped-query attention)."""
    layers, heads = text_config.num_hidden_layers, text_config.num_key_value_heads
    return 2 * layers * heads * text_config.head_dim * itemsize


def layer_activation_bytes(text_config: Any, rank: int, itemsize: int, lora_itemsize: int, dropout: float = 0.0) -> int:
    """What one decoder layer keeps for its backward pass, a token.

    Counted as in section 4.1 of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
    Models"), for Qwen3's layer with a frozen base and LoRA on all its linear layers. With h, q, k, f the widths of the
    residual stream, queries, keys and MLP, and b, l the bytes of a number in base and LoRA:

    - both RMSNorms: their input in float32, 8h;
    - queries: the norm's float32 input, the rotated ones, attention's output, q (4 + 2b); keys and values: k (4 + 2b);
    - gated MLP: gate, activated gate, up: 3fb;
    - inputs of LoRA's A, where it shares them (b = l): both norms' outputs and the MLP's product, b (2h + f);
      otherwise a copy for each adapted layer, l (5h + q + f), and with dropout a mask as large (on CPUs);
    - outputs of A: 7rl; reciprocal deviations and attention's log-sum-exp in float32.

    Flash or SDPA attention keeps no scores, so nothing grows with the square of the length.
    """
    c, b, l_ = text_config, itemsize, lora_itemsize
    h, f = c.hidden_size, c.intermediate_size
    q, k = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    copies = l_ * (5 * h + q + f)
    inputs = 2 * copies if dropout else copies if b != l_ else b * (2 * h + f)
    statistics = FP32 * (2 + 2 * c.num_attention_heads + c.num_key_value_heads)
    return 2 * FP32 * h + (q + k) * (FP32 + 2 * b) + 3 * f * b + inputs + 7 * rank * l_ + statistics


def activation_bytes(text_config: Any, tokens: int, layer: int, itemsize: int, *, checkpointing: bool) -> int:
    """Peak of the language model's forward and backward pass over ``tokens`` tokens.

    What all layers keep and the last norm's float32 input, and for the gradients of the layer that is being
    differentiated as much as it keeps. With gradient checkpointing a layer keeps its input only, and one at a time is
    computed again.

    Args:
        layer: bytes that a layer keeps of a token, see ``layer_activation_bytes``.
    """
    hidden, layers = text_config.hidden_size, text_config.num_hidden_layers
    kept = layers * hidden * itemsize + layer if checkpointing else layers * layer
    return tokens * (kept + layer + FP32 * hidden)


def logit_bytes(scored: int, vocab: int, itemsize: int) -> int:
    """Peak of scoring: the logits and four float32 tensors as large (log-probabilities, three for the entropy)."""
    return scored * vocab * (itemsize + 4 * FP32)
