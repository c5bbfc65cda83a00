"""What the speed benchmarks share: a recipe's model, tasks and player, and medians of repeated timings."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from clew.agent.ledger import Trajectory
from clew.envs.base import ImageEnv, Task
from clew.envs.registry import make_env
from clew.envs.suites import training_tasks
from clew.evaluation.suites import environment_settings
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.paths import resolve_model_path
from clew.recipe import WARM_START, ModelTable, Recipe, load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every speed benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=WARM_START, help="Hugging Face folder (default: the shipped warm start)")
    made.add_argument("--mazes", type=int, default=16, help="groups (a group is 8 trajectories of one maze)")
    made.add_argument("--repeats", type=int, default=5, help="timed repeats, after one that is not counted")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch")
    return made


@dataclass
class Bench:
    """A recipe's parts, ready to be timed."""

    recipe: Recipe
    path: str
    vlm: VisionLanguageModel
    player: Player
    sampling: Sampling
    limits: Limits
    settings: dict[str, Any]

    def make_env(self) -> ImageEnv:
        """The recipe's environment."""
        return make_env(self.recipe.environment.id, **self.settings)

    def env_maker(self, changes: dict[str, Any]) -> Callable[[], ImageEnv]:
        """Makes the recipe's environment with some settings changed."""
        return lambda: make_env(self.recipe.environment.id, **self.settings | changes)

    def tasks(self, n: int, changes: dict[str, Any] | None = None) -> list[Task]:
        """The first ``n`` training mazes (under changed settings, if any)."""
        stream = training_tasks(self.env_maker(changes or {})(), frozenset(), seed=0)
        return [task for _, task in itertools.islice(stream, n)]

    def attempts(self, mazes: int) -> list[tuple[Task, int]]:
        """(task, sample) pairs of the first ``mazes`` training mazes, each by a whole group."""
        return [(task, k) for task in self.tasks(mazes) for k in range(self.recipe.algorithm.group_size)]


def prepare(model: str, threads: int) -> Bench:
    """Sets torch's threads, loads the laptop recipe and the model, and says on what this runs."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    recipe = load_recipe("laptop")
    path = resolve_model_path(ModelTable(path=model))
    vlm = load_model(path)
    parameters = sum(p.numel() for p in vlm.model.parameters())
    print(
        f"{platform.machine()}, {threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, "
        f"model of {parameters / 1e6:.2f} M parameters, float32"
    )
    return Bench(
        recipe=recipe,
        path=path,
        vlm=vlm,
        player=Player(vlm.template, vlm.patcher),
        sampling=Sampling(recipe.rollout.temperature, recipe.rollout.max_new_tokens),
        limits=Limits(recipe.rollout.max_tokens),
        settings=environment_settings(recipe),
    )


class Stopwatch:
    """Seconds that the repeats of each named contestant took."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def spread(self, name: str) -> str:
        """The repeats' range, in seconds."""
        return f"{min(self.seconds[name]):.3f} to {max(self.seconds[name]):.3f}"


@dataclass
class Work:
    """What was done in all counted repeats of one contestant, to compare the work itself."""

    trajectories: int = 0
    turns: int = 0
    sampled: int = 0
    tokens: int = 0
    solved: int = 0

    def add(self, trajectories: list[Trajectory]) -> None:
        self.trajectories += len(trajectories)
        self.turns += sum(len(t.turns) for t in trajectories)
        self.sampled += sum(sum(t.sampled) for t in trajectories)
        self.tokens += sum(len(t.token_ids) for t in trajectories)
        self.solved += sum(t.success for t in trajectories)

    def __str__(self) -> str:
        n = self.trajectories
        return (
            f"{self.turns / n:5.2f} turns, {self.sampled / n:5.1f} sampled and {self.tokens / n:6.1f} tokens "
            f"a trajectory; solved {self.solved}/{n} ({self.solved / n:.1%})"
        )


class ImageProcessor(Qwen3VLProcessor):
    """Qwen3-VL's own processor for text and images; its video part needs torchvision and is left out."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        """Accepts None as the video processor."""
        return type(argument)


def hugging_face_processor(path: str) -> ImageProcessor:
    """What ``AutoProcessor.from_pretrained`` gives, without the video part."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    images = transformers.AutoImageProcessor.from_pretrained(path)
    return ImageProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
