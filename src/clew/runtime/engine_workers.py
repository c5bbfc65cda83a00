"""An engine on a Ray cluster: an actor that plays the episodes it is given and hands each back as it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
import torch

from clew.agent.ledger import Trajectory
from clew.evaluation.suites import longest_episode
from clew.policy.adapter import StoredAdapter
from clew.policy.model import load_model, load_processor
from clew.policy.paths import resolve_dtype, resolve_model_path
from clew.policy.vision import FeatureCache
from clew.recipe import Recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import FrameFilter, Limits, MakeEnv, Player, play_feed
from clew.rollout.feed import Attempt, Feed
from clew.rollout.transformers_engine import TransformersEngine
from clew.runtime.devices import Whereabouts, whereabouts
from clew.runtime.process import configure_environments


@dataclass(frozen=True)
class Job:
    """How a batch of episodes is played (see ``clew.rollout.episodes.play``); ``number`` tells batches apart."""

    number: int
    make_env: MakeEnv
    sampling: Sampling
    limits: Limits
    seed_parts: tuple[int | str, ...]
    see: FrameFilter | None


FEEDING = "feeding"
"""Ray's concurrency group of what is called while ``play`` is running; everything else takes turns on one thread.

One, because each thread that computes gets a team of OpenMP threads of its own, and a process with more of those than
cores lets them sleep between any two operations: rollouts of a small model then take half as long again.
"""


class EngineWorker:
    """One engine, in a process of its own."""

    def __init__(self, recipe: Recipe, device: str, threads: int, colocated: bool) -> None:
        self.recipe, self.device, self.threads, self.colocated = recipe, device, threads, colocated
        configure_environments(recipe)
        self._feeds: dict[int, Feed] = {}
        self._lock = threading.Lock()

    def start(self, version: StoredAdapter | None) -> Whereabouts:
        """Loads the model, and an adapter version.

        Raises:
            UserError: as the engine and the model loader raise it.
        """
        recipe = self.recipe
        torch.set_num_threads(self.threads)
        path = resolve_model_path(recipe.model)
        if recipe.rollout.engine == "vllm":
            from clew.rollout.vllm_engine import VllmEngine, VllmSettings

            processor = load_processor(path)
            max_tokens, max_turns = longest_episode(recipe)
            settings = VllmSettings(
                dtype=recipe.model.dtype,
                max_tokens=max_tokens,
                max_images=max_turns,
                concurrent=recipe.rollout.concurrent_episodes,
                lora_rank=recipe.model.lora.rank,
                memory_utilization=recipe.rollout.memory_utilization,
                colocated=self.colocated,
                seed=recipe.training.seed,
            )
            self.engine: TransformersEngine | VllmEngine = VllmEngine(processor, settings, self.device)
            self.player = Player(processor.template, processor.patcher)
        else:
            vlm = load_model(path, resolve_dtype(recipe), self.device)
            self.engine = TransformersEngine(vlm, FeatureCache(vlm.model.model.visual, vlm.patcher))
            self.player = Player(vlm.template, vlm.patcher)
        self.engine.load_adapter(version)
        return whereabouts(self.device)

    def load(self, version: StoredAdapter | None) -> str:
        """Checks a version's files and samples with it from here on; returns the name of what is loaded.

        Raises:
            DamagedCheckpoint: the files are not what was published.
        """
        self.engine.load_adapter(version)
        return self.engine.version

    def play(self, job: Job, attempts: Sequence[Attempt]) -> Iterator[list[tuple[int, Trajectory]]]:
        """Plays ``attempts`` and what is fed later, until ``finish``; yields (place, trajectory) of episodes that end.

        Those that end together travel together: to Ray, each yield is an object of its own.
        """
        torch.set_num_threads(self.threads)  # of the thread that runs this
        feed = self._feed(job.number)
        feed.add(attempts)
        try:
            yield from play_feed(
                self.engine, self.player, job.make_env, feed, job.sampling, job.limits, job.seed_parts, job.see
            )
        finally:
            with self._lock:
                del self._feeds[job.number]
            self.engine.release()

    @ray.method(concurrency_group=FEEDING)
    def feed(self, job: int, attempts: Sequence[Attempt]) -> None:
        """More to play."""
        self._feed(job).add(attempts)

    @ray.method(concurrency_group=FEEDING)
    def finish(self, job: int) -> None:
        """Nothing more will be fed."""
        self._feed(job).close()

    def sleep(self) -> None:
        """See ``Engine.sleep``."""
        self.engine.sleep()

    def wake(self) -> None:
        """See ``Engine.wake``."""
        self.engine.wake()

    def _feed(self, job: int) -> Feed:
        with self._lock:
            return self._feeds.setdefault(job, Feed())
