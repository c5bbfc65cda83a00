"""Memory of a recipe's devices, item by item, from the real configuration; refuses what cannot fit.

An upper estimate, not a promise: every item says how it is computed, and what is assumed is called so. A step has two
phases. While it plays, engines hold weights and key/value cache; while it updates, a vLLM engine that shares its GPU
with a policy worker sleeps. Encoding frames comes before an update and takes less than it. All sizes are in bytes;
1 GB is 10^9 bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clew.errors import UserError
from clew.evaluation.suites import longest_episode
from clew.recipe import Recipe
from clew.runtime.placement import Placement, place
from clew.runtime.sizes import (
    FP32,
    EpisodeSizes,
    ModelSizes,
    ModelSource,
    activation_bytes,
    amount,
    cache_bytes_per_token,
    check_lengths,
    episode_sizes,
    find_model,
    layer_activation_bytes,
    logit_bytes,
    model_sizes,
)

GB = 1e9
ADAMW_STATES = 2
POLICY_OVERHEAD = int(2.5 * GB)
"""Assumed: CUDA context, NCCL buffers and fragmentation of a policy worker."""
ENGINE_OVERHEAD = int(2.5 * GB)
"""Assumed: CUDA context and graphs, a batch's activations and the sampler's logits of a vLLM engine; stays in sleep."""
PROCESS = int(0.5 * GB)
"""A process on a CPU: Python with torch, transformers, peft and ray took 0.41 GB where it was measured."""
RAY = int(0.6 * GB)
"""Ray's own processes on a machine, as measured."""
CACHE_GROWTH = 1.5
"""The transformers engine's cache grows by half, so up to a third of it may be unused."""


@dataclass(frozen=True)
class Item:
    """One item of a device's memory, in bytes, in both phases of a step."""

    name: str
    playing: int
    updating: int
    how: str

    def times(self, count: int, of: str) -> Item:
        """The same for several processes on one machine."""
        if count == 1:
            return self
        return Item(self.name, count * self.playing, count * self.updating, f"{count} {of} x ({self.how})")


@dataclass(frozen=True)
class Budget:
    """What one kind of device holds, and what it has.

    Attributes:
        device: which device, in words.
        memory: its memory.
    """

    device: str
    memory: int
    items: tuple[Item, ...]

    @property
    def playing(self) -> int:
        return sum(item.playing for item in self.items)

    @property
    def updating(self) -> int:
        return sum(item.updating for item in self.items)

    @property
    def peak(self) -> int:
        """The larger phase."""
        return max(self.playing, self.updating)


@dataclass(frozen=True)
class CacheRoom:
    """Key/value cache of one engine.

    Attributes:
        token: bytes of one token.
        pool: bytes there are (or, where nothing bounds it, that are needed).
        episode_tokens: most tokens of an episode.
        wanted: episodes that the engine plays at a time.
    """

    token: int
    pool: int
    episode_tokens: int
    wanted: int

    @property
    def whole_episodes(self) -> int:
        """Longest possible episodes that fit at once."""
        return self.pool // (self.token * self.episode_tokens)

    @property
    def tokens_each(self) -> int:
        """Tokens that each of the wanted episodes may have for all to fit at once."""
        return self.pool // (self.token * self.wanted)


@dataclass(frozen=True)
class Plan:
    """A recipe on its machines.

    Attributes:
        gpu: whether its devices are GPUs.
        budgets: one for each kind of device; on CPUs one for the machine.
        adapter: bytes of the adapter that moves at every sync (float32).
        head_lora: bytes in which a head that consolidates the LoRA shards holds weights and AdamW states.
        head_model: bytes in which it would hold the whole model with the adapter (float32).
    """

    recipe: Recipe
    placement: Placement
    source: ModelSource
    model: ModelSizes
    episode: EpisodeSizes
    gpu: bool
    budgets: tuple[Budget, ...]
    cache: CacheRoom
    adapter: int
    head_lora: int
    head_model: int

    @property
    def trajectories(self) -> int:
        """Trajectories of a step."""
        return trajectories_per_step(self.recipe)


def make_plan(recipe: Recipe) -> Plan:
    """Places a recipe and computes its memory.

    Raises:
        UserError: it cannot fit; the message names the numbers and the remedy. Or the model or environment is unknown.
    """
    source = find_model(recipe)
    model, episode = model_sizes(source, recipe), episode_sizes(source, recipe)
    check_lengths(recipe, source, episode)
    gpu = on_gpu(recipe)
    placement = place(recipe)
    policy = _policy_items(recipe, source.config, model, episode)
    engine, cache = _engine_items(recipe, source.config, model, episode, gpu)
    budgets = _budgets(recipe, placement, policy, engine, gpu)
    for budget in budgets:
        _check_fit(recipe, budget, gpu)
    return Plan(
        recipe=recipe,
        placement=placement,
        source=source,
        model=model,
        episode=episode,
        gpu=gpu,
        budgets=budgets,
        cache=cache,
        adapter=FP32 * model.lora,
        head_lora=FP32 * (1 + ADAMW_STATES) * model.lora,
        head_model=FP32 * (model.base + model.lora),
    )


def on_gpu(recipe: Recipe) -> bool:
    """Whether a recipe's devices are GPUs; ``auto`` asks this machine."""
    device = recipe.model.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def machine_memory(recipe: Recipe) -> int:
    """Memory of this machine; what the recipe says of a device where the system doesn't tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return int(recipe.runtime.device_memory_gb * GB)


def trajectories_per_step(recipe: Recipe) -> int:
    return recipe.training.prompts_per_step * recipe.algorithm.group_size


# --- items -----------------------------------------------------------------------------------------------


def microbatch_tokens(recipe: Recipe, episode: EpisodeSizes) -> tuple[int, int]:
    """(tokens, scored tokens) of the largest micro-batch that one policy worker can get.

    Scored are at most as many as where every answer is as long as it may be.
    """
    training = recipe.training
    share = math.ceil(trajectories_per_step(recipe) // training.minibatches / _ranks(recipe))
    tokens = min(training.tokens_per_microbatch, share * min(episode.longest, recipe.rollout.max_tokens))
    return tokens, math.ceil(tokens * episode.answer / (episode.answer + episode.turn))


def _policy_items(recipe: Recipe, config: Any, model: ModelSizes, episode: EpisodeSizes) -> list[Item]:
    """One policy worker. A single one is not sharded."""
    lora, text, ranks, itemsize = recipe.model.lora, config.text_config, _ranks(recipe), _itemsize(recipe)
    over = f" over {ranks} ranks" if ranks > 1 else ""
    items = []
    if ranks > 1:
        sharded = model.base - model.root
        weights = math.ceil(FP32 * sharded / ranks)
        items.append(Item("base, sharded", weights, weights, f"{amount(sharded)} x 4 B (float32){over}"))
        whole = itemsize * model.root
        how = f"{amount(model.root)} x {itemsize} B (norms, mergers, embeddings where tied)"
        items.append(Item("base, whole on each", whole, whole, how))
    else:
        weights = itemsize * model.base
        items.append(Item("base", weights, weights, f"{amount(model.base)} x {itemsize} B"))
    states = math.ceil(FP32 * (2 + ADAMW_STATES) * model.lora / ranks)
    how = f"{amount(model.lora)} x 16 B (weight, gradient, 2 AdamW states, float32){over}"
    items.append(Item("LoRA and optimizer", states, states, how))
    if ranks > 1:
        gathered = itemsize * 2 * model.largest
        how = f"2 x {model.largest_name} of {amount(model.largest)} x {itemsize} B: one in use, one fetched ahead"
        items.append(Item("gathered by FSDP", 0, gathered, how))
    shared = recipe.runtime.kind == "local"  # one cache for the policy and the engine
    items.append(_features("visual features", recipe, config, episode, ranks, playing=shared, updating=True))
    tokens, scored = microbatch_tokens(recipe, episode)
    checkpointing = recipe.training.gradient_checkpointing
    # FSDP casts LoRA to the dtype of the computation, PEFT alone keeps it in float32.
    layer = layer_activation_bytes(text, lora.rank, itemsize, itemsize if ranks > 1 else FP32, lora.dropout)
    kept = activation_bytes(text, tokens, layer, itemsize, checkpointing=checkpointing)
    layers = text.num_hidden_layers
    each = f"({layers} + 1 for gradients) layers x {layer:,} B"
    if checkpointing:
        each = f"{layers} inputs x {text.hidden_size * itemsize:,} B + 2 (one for gradients) x {layer:,} B"
    items.append(Item("activations", 0, kept, f"{tokens:,} tokens x ({each})"))
    how = f"{scored:,} scored tokens x {text.vocab_size:,} x ({itemsize} + 16) B: log-probabilities and entropy"
    items.append(Item("logits", 0, logit_bytes(scored, text.vocab_size, itemsize), how))
    return items


def _engine_items(
    recipe: Recipe, config: Any, model: ModelSizes, episode: EpisodeSizes, gpu: bool
) -> tuple[list[Item], CacheRoom]:
    """One engine.

    Raises:
        UserError: its share of the device does not hold its weights and one whole episode.
    """
    rollout, itemsize = recipe.rollout, _itemsize(recipe)
    tokens = min(episode.longest, rollout.max_tokens)
    wanted = min(rollout.concurrent_episodes, math.ceil(trajectories_per_step(recipe) / recipe.runtime.engines))
    token = cache_bytes_per_token(config.text_config, itemsize)
    if rollout.engine == "transformers":
        own = 0 if recipe.runtime.kind == "local" else model.base
        parts = f"language model {amount(model.language)} + originals of merged layers {amount(model.adapted)}"
        whole = f"model {amount(own)} + " if own else ""
        weights = itemsize * (own + model.language + model.adapted)
        pool = int(CACHE_GROWTH * wanted * tokens * token)
        needs = f"{wanted} episodes x {tokens:,} tokens x {token:,} B x {CACHE_GROWTH} (it grows by half)"
        items = [
            Item("engine: weights", weights, weights, f"({whole}{parts}) x {itemsize} B"),
            Item("engine: key/value", pool, pool, needs),
        ]
        if own:
            engines = recipe.runtime.engines
            items.append(_features("engine: features", recipe, config, episode, engines, playing=True, updating=True))
        return items, CacheRoom(token, pool, tokens, wanted)

    weights = itemsize * (model.base + model.lora)
    how = f"({amount(model.base)} + an adapter of {amount(model.lora)}) x {itemsize} B"
    # vLLM refuses to start where one request of the longest kind does not fit, evaluation suites included.
    most, concurrent = longest_episode(recipe)[0], rollout.concurrent_episodes
    longest = most * token
    if not gpu:
        pool = concurrent * longest
        needs = f"rollout.concurrent_episodes = {concurrent} x {most:,} tokens x {token:,} B"
        return [
            Item("engine: weights", weights, weights, how),
            Item("engine: key/value", pool, pool, needs),
        ], CacheRoom(token, pool, tokens, wanted)

    memory = recipe.runtime.device_memory_gb
    share = int(rollout.memory_utilization * memory * GB)
    pool = share - weights - ENGINE_OVERHEAD
    if pool < longest:
        least = weights + ENGINE_OVERHEAD + longest
        raise UserError(
            f"rollout.memory_utilization = {rollout.memory_utilization} gives an engine {share / GB:.1f} GB of "
            f"runtime.device_memory_gb = {memory:g}, but it needs {least / GB:.1f} GB: {weights / GB:.1f} of weights, "
            f"{ENGINE_OVERHEAD / GB:.1f} to work with and {longest / GB:.1f} of key/value cache for one episode of "
            f"{most} tokens (rollout.max_tokens = {rollout.max_tokens}, more in suites of larger mazes); raise "
            "memory_utilization or lower max_tokens"
        )
    awake = not recipe.runtime.colocate  # in the update
    sleeps = "" if awake else "; asleep in the update"
    rest = f"the rest of {rollout.memory_utilization} x {memory:g} GB{sleeps}"
    return [
        Item("engine: weights", weights, weights * awake, how + sleeps),
        Item("engine: working", ENGINE_OVERHEAD, ENGINE_OVERHEAD, "assumed: CUDA context, graphs, sampler"),
        Item("engine: key/value", pool, pool * awake, rest),
    ], CacheRoom(token, pool, tokens, wanted)


def _features(
    name: str, recipe: Recipe, config: Any, episode: EpisodeSizes, parts: int, *, playing: bool, updating: bool
) -> Item:
    """Features of the frames of a process's share of a step, each frame once: embeddings and DeepStack's."""
    frames = math.ceil(trajectories_per_step(recipe) / parts) * episode.turns
    layers, hidden = 1 + len(config.vision_config.deepstack_visual_indexes), config.text_config.hidden_size
    itemsize = _itemsize(recipe)
    size = frames * episode.frame_tokens * layers * hidden * itemsize
    how = f"{frames:,} frames x {episode.frame_tokens} tokens x {layers} x {hidden:,} x {itemsize} B"
    return Item(name, size * playing, size * updating, how)


def _budgets(
    recipe: Recipe, placement: Placement, policy: Sequence[Item], engine: Sequence[Item], gpu: bool
) -> tuple[Budget, ...]:
    working = Item("policy: working", POLICY_OVERHEAD, POLICY_OVERHEAD, "assumed: CUDA context, NCCL, fragmentation")
    memory = int(recipe.runtime.device_memory_gb * GB)
    if gpu and placement.colocate:
        return (Budget("each device, policy worker and engine", memory, (*policy, working, *engine)),)
    if gpu:
        return (
            Budget("each policy worker's device", memory, (*policy, working)),
            Budget("each engine's device", memory, tuple(engine)),
        )
    ranks, engines, ray = len(placement.ranks), len(placement.engines), recipe.runtime.kind != "local"
    processes = ranks + engines + 1 if ray else 1
    used = PROCESS * processes
    how = f"{processes} x {PROCESS / GB} GB: Python, torch, transformers"
    items = [item.times(ranks, "workers") for item in policy] + [item.times(engines, "engines") for item in engine]
    items.append(Item("processes", used, used, how))
    if ray:
        items.append(Item("Ray itself", RAY, RAY, "as measured"))
    return (Budget("this machine, all processes", machine_memory(recipe), tuple(items)),)


# --- refusals --------------------------------------------------------------------------------------------


def _check_fit(recipe: Recipe, budget: Budget, gpu: bool) -> None:
    if budget.peak <= budget.memory:
        return
    phase = "playing" if budget.playing >= budget.updating else "updating"
    largest = sorted(budget.items, key=lambda item: getattr(item, phase), reverse=True)[:3]
    named = ", ".join(f"{item.name} {getattr(item, phase) / GB:.1f}" for item in largest)
    limit = "runtime.device_memory_gb" if gpu else "this machine's memory in GB"
    raise UserError(
        f"{limit} = {budget.memory / GB:.4g} is too little for {budget.device}: it takes {budget.peak / GB:.1f} GB "
        f"while {phase} (the largest: {named}); {_remedy(recipe, largest[0].name, gpu)}"
    )


def _remedy(recipe: Recipe, item: str, gpu: bool) -> str:
    training, rollout = recipe.training, recipe.rollout
    if item == "activations" and not training.gradient_checkpointing:
        return "set training.gradient_checkpointing = true"
    if item in ("activations", "logits"):
        if training.tokens_per_microbatch > rollout.max_tokens:
            return f"lower training.tokens_per_microbatch (to rollout.max_tokens = {rollout.max_tokens} at least)"
        return "lower rollout.max_tokens and training.tokens_per_microbatch"
    if item == "engine: key/value":
        key = "memory_utilization" if gpu and rollout.engine == "vllm" else "concurrent_episodes"
        return f"lower rollout.{key}"
    if gpu:
        return "use more policy workers (runtime.nodes, runtime.workers_per_node), larger devices or a smaller model"
    return "use fewer processes (runtime.workers_per_node, runtime.engines) or a smaller model"


def _ranks(recipe: Recipe) -> int:
    return recipe.runtime.nodes * recipe.runtime.workers_per_node


def _itemsize(recipe: Recipe) -> int:
    return 2 if recipe.model.dtype == "bfloat16" else FP32
