"""Supervised fine-tuning: the tiny model learns to see, to plan and to answer by imitation.

Two stages under one learning-rate schedule. First, short windows of perfect play from random rooms, near the goal
at first: they teach perception and planning. Then whole episodes of a fallible navigator, as VisGym's
demonstrations wander too: they teach what it does, mistakes included. The result knows more than it shows, which
is what reinforcement learning then brings out.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clew.checkpoint import CheckpointStore
from clew.envs.base import ImageEnv
from clew.envs.maze_env import ACTIONS, ENV_ID, FEEDBACK, PROMPTS
from clew.envs.navigators import uniform
from clew.policy.model import VisionLanguageModel, collate, score
from clew.policy.tiny import build_tiny_model
from clew.policy.vision import encode
from clew.recipe import SftTable
from clew.training.demonstrations import Demonstration, Demonstrator

CHECKPOINT_EVERY = 100


@dataclass(frozen=True)
class SftProgress:
    """One logged step.

    Attributes:
        loss: nats a token of the answers.
        answer_probability: probability of a demonstrated answer (geometric mean over answers).
    """

    step: int
    loss: float
    answer_probability: float
    seconds: float


def tokenizer_corpus(env: ImageEnv) -> list[str]:
    """Texts the tiny tokenizer is trained on: all that the environment says, weighted to become whole tokens."""
    roles = "user\nassistant\nsystem\n"
    if env.env_id == ENV_ID:
        return [*PROMPTS.values(), *FEEDBACK.values(), roles, *ACTIONS] * 50
    return [env.prompt, *_said(env), roles, *env.action_names] * 50


def _said(env: ImageEnv) -> list[str]:
    """Feedback heard in a few episodes of random actions and one nonsense."""
    rng = random.Random(0)
    heard: dict[str, None] = {}
    for seed in range(4):
        env.reset(seed)
        answers = ["?", *(uniform(env, rng) for _ in range(env.max_turns))]
        for answer in answers:
            observation, _, terminated, truncated, _ = env.step(answer)
            heard[observation.text] = None
            if terminated or truncated:
                break
    return list(heard)


def new_model(folder: Path, table: SftTable, env: ImageEnv) -> None:
    """Builds the untrained tiny model for an environment."""
    build_tiny_model(folder, tokenizer_corpus(env), table.seed, table.max_pixels)


def train_sft(
    vlm: VisionLanguageModel,
    env: ImageEnv,
    table: SftTable,
    held_out: frozenset[str],
    checkpoints: CheckpointStore,
    report: Callable[[SftProgress], None],
) -> None:
    """Trains all parameters of ``vlm`` in place; continues from the newest whole checkpoint.

    Args:
        held_out: content hashes that must not be demonstrated.
        checkpoints: where training state is kept every ``CHECKPOINT_EVERY`` steps.
        report: called after every step.
    """
    model = vlm.model.train()
    demonstrator = Demonstrator(vlm, env, held_out)
    matrices, others = split_parameters(model)
    muon = torch.optim.Muon(
        matrices,
        lr=table.muon_learning_rate,
        momentum=0.95,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=table.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    first = 1
    if (latest := checkpoints.latest()) is not None:
        step, folder = latest
        state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adamw.load_state_dict(state["adamw"])
        first = step + 1
    for step in range(first, table.steps + 1):
        began = time.monotonic()
        scale = learning_rate_scale(step, table.steps)
        for optimizer, rate in ((muon, table.muon_learning_rate), (adamw, table.adamw_learning_rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        demonstrations = draw(demonstrator, table, step)
        loss, probability = accumulate_gradients(vlm, demonstrations, table.frames_per_microbatch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if step % CHECKPOINT_EVERY == 0 and step < table.steps:
            state = {"model": model.state_dict(), "muon": muon.state_dict(), "adamw": adamw.state_dict()}
            checkpoints.save(step, partial(_write_state, state), {})
        report(SftProgress(step, loss, probability, time.monotonic() - began))
    model.eval()


def _write_state(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / "state.pt")


def draw(demonstrator: Demonstrator, table: SftTable, step: int) -> list[Demonstration]:
    """The demonstrations of a step; they depend on the seed and the step alone."""
    rng = random.Random(f"{table.seed}/{step}")
    windows = step <= table.steps - table.episode_steps
    # Near goals first: the way from far rooms is learned once the last moves are.
    farthest = 2 + step * 30 // max(table.curriculum_steps, 1)
    drawn: list[Demonstration] = []
    while sum(len(d.frames) for d in drawn) < table.frames_per_step:
        if windows:
            drawn.append(demonstrator.window(rng, table.window_turns, farthest))
        else:
            drawn.append(demonstrator.episode(rng, table.random_moves))
    return drawn


def accumulate_gradients(
    vlm: VisionLanguageModel, demonstrations: list[Demonstration], frames_per_microbatch: int
) -> tuple[float, float]:
    """Adds the gradients of the mean loss of all answer tokens; returns that loss and the answers' probability."""
    n_tokens = sum(sum(d.answered) for d in demonstrations)
    by_length = sorted(demonstrations, key=lambda d: len(d.token_ids))
    loss_sum = torch.zeros(())
    while by_length:
        part = [by_length.pop()]
        while by_length and sum(len(d.frames) for d in part) + len(by_length[-1].frames) <= frames_per_microbatch:
            part.append(by_length.pop())
        batch = collate([(d.token_ids, d.answered, d.grids) for d in part], vlm.template.image_token_id, vlm.merge_size)
        patches = [vlm.patcher(frame) for d in part for frame in d.frames]
        scores = score(vlm, batch, encode(vlm.model.model.visual, patches), temperature=1.0)
        loss = -scores.logprobs_N.sum() / n_tokens
        loss.backward()
        loss_sum += loss.detach()
    n_answers = sum(len(d.frames) for d in demonstrations)
    return float(loss_sum), math.exp(-float(loss_sum) * n_tokens / n_answers)


def split_parameters(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of the blocks (for Muon), and embeddings, convolutions and vectors (for AdamW)."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


def learning_rate_scale(step: int, steps: int, warmup: int = 20, decay: float = 0.6) -> float:
    """Warm-up, plateau, then linear to zero over the last ``decay`` of the run; ``step`` counts from 1."""
    return min(1.0, step / warmup, (steps - step + 1) / (steps * decay))
