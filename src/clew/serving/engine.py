"""The deployment that computes: the base model and adapters merged into it, loaded on request and evicted."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch

from clew.policy.model import load_model
from clew.policy.vision import FeatureCache
from clew.rollout.continuous import Answer, ContinuousEngine
from clew.rollout.engine import Sampling
from clew.serving.adapters import AdapterReader
from clew.serving.computing import Computing
from clew.serving.errors import ApiError
from clew.serving.prompt import Prompt
from clew.serving.store import open_store

_LOOK_S = 0.05  # between two looks for a free place


@dataclass(frozen=True)
class EngineSettings:
    """What the engine is made of.

    Attributes:
        model: folder.
        adapters: where they are (see ``open_store``), or None.
        cache: folder for downloads.
        max_adapters: merged at once.
        threads: of torch.
        device: ``cpu`` or ``cuda``.
    """

    model: str
    adapters: str | None
    cache: str
    max_adapters: int
    threads: int
    device: str


@dataclass(frozen=True)
class Generation:
    """What one answer is asked for.

    Attributes:
        adapter: name, or empty for the base model.
        seed: unsigned 64 bits.
        stream: whether tokens are wanted as they come, and not all at the end.
    """

    adapter: str
    prompt: Prompt
    sampling: Sampling
    seed: int
    stream: bool


@dataclass(frozen=True)
class Progress:
    """What has come of it since the last one.

    Attributes:
        ids, logprobs: new tokens, without the end of turn.
        tokens: sampled so far, the end of turn included.
        finish: ``stop``, ``length``, or None while it goes on.
        error: (status, message, code) instead of all that.
    """

    ids: list[int]
    logprobs: list[float]
    tokens: int
    finish: str | None
    error: tuple[int, str, str] | None = None


class TransformersReplica:
    """Loads adapters and answers. Everything but torch runs on the event loop; torch runs on one thread.

    What a request does wrong comes back as ``Progress.error``, not as an exception: those would lose their kind on
    their way through Ray.
    """

    def __init__(self, settings: EngineSettings) -> None:
        torch.set_num_threads(settings.threads)
        dtype = torch.float32 if settings.device == "cpu" else torch.bfloat16
        self._vlm = load_model(settings.model, dtype, settings.device)
        self._vlm.model.requires_grad_(False)
        store = open_store(settings.adapters, Path(settings.cache)) if settings.adapters else None
        self._reader = AdapterReader(store, self._vlm)
        self._features = FeatureCache(self._vlm.model.model.visual, self._vlm.patcher)
        self._computing = Computing()
        self._base = ContinuousEngine(self._vlm, self._features)
        self._living: weakref.WeakValueDictionary[str, ContinuousEngine] = weakref.WeakValueDictionary()
        self._ready: dict[str, ContinuousEngine] = {}
        self._kept: OrderedDict[str, None] = OrderedDict()  # what Ray's decorator keeps: asked for last
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._max_adapters, self._merging = settings.max_adapters, asyncio.Lock()

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        if not self._computing.alive:
            raise RuntimeError("the computing thread has died")

    async def ping(self) -> str:
        """Says that it is there."""
        return "pong"

    async def generate(self, asked: Generation) -> AsyncIterator[Progress]:
        """Answers; the first ``Progress`` comes with the first token, or with all of them."""
        try:
            engine = await self._engine(asked.adapter) if asked.adapter else self._base
        except ApiError as error:
            yield Progress([], [], 0, None, (error.status, error.message, error.code or ""))
            return
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        # What may be read, in one assignment: the computing thread may be in the middle of the next token.
        state: tuple[int, str | None] = (0, None)

        def on_token(answer: Answer) -> None:  # on the computing thread
            nonlocal state
            state = len(answer.logprobs), "stop" if answer.ended else "length" if answer.cut else None
            if asked.stream or not answer.living:
                loop.call_soon_threadsafe(news.set)

        prompt = asked.prompt
        answer = Answer(prompt.token_ids, prompt.grids, prompt.frames, asked.sampling, asked.seed, on_token)
        self._computing.ask(engine, answer)
        told = 0
        try:
            while True:
                await news.wait()
                news.clear()
                if answer.failed:
                    yield Progress([], [], 0, None, (503, f"the engine failed ({answer.failed}): try again", "failed"))
                    return
                now, last = state
                if now > told and (asked.stream or last is not None):
                    part = slice(told, now - 1 if last == "stop" else now)
                    yield Progress(answer.ids[part], answer.logprobs[part], now, last)
                    told = now
                if last is not None:
                    return
        finally:
            answer.dropped = True  # the client is served, or gone

    async def _engine(self, name: str) -> ContinuousEngine:
        """The engine with an adapter merged; loads it when it isn't there.

        It is made, and found to be whole, before Ray's decorator hears of it: that one throws the least recently used
        one out first and then asks for the new one, so a broken adapter would cost a good one its place.
        """
        async with self._locks[name]:
            # One that made room and still answers queues too while others wait for its place: steady requests for it
            # would keep them out for ever.
            if name not in self._living or (name not in self._kept and self._merging.locked()):
                self._ready[name] = self._living[name] = await self._load(name)
        try:
            engine = await self.adapter(name)
        finally:
            self._ready.pop(name, None)
        self._kept[name] = None
        self._kept.move_to_end(name)
        if len(self._kept) > self._max_adapters:
            self._kept.popitem(last=False)
        return engine

    async def adapter(self, name: str) -> ContinuousEngine:
        """The engine of an adapter. ``replica_class`` puts Ray's decorator around it."""
        # One that lives and is not ready is in use by answers: it was evicted, and is asked for again.
        engine = self._ready.get(name) or self._living.get(name)
        if engine is None:
            engine = self._living[name] = await self._load(name)
        return engine

    async def _load(self, name: str) -> ContinuousEngine:
        """Raises: ApiError."""
        with self._reader.refusing(name):
            adapter = await asyncio.to_thread(self._reader.read, name)
            async with self._merging:
                # One more than may stay, as it is made before another gives up its place; those that have, and still
                # answer, are waited for.
                while name not in self._living and len(self._living) > self._max_adapters:
                    await asyncio.sleep(_LOOK_S)
                if (engine := self._living.get(name)) is not None:
                    return engine
                engine = await asyncio.to_thread(ContinuousEngine, self._vlm, self._features)
                await asyncio.wrap_future(self._computing.work(engine.merging(adapter)))
        return engine


def replica_class(max_adapters: int) -> type[TransformersReplica]:
    """The class to deploy: Ray keeps its most recently used adapters and routes requests to whoever has theirs."""
    from ray import serve

    class Replica(TransformersReplica):
        @serve.multiplexed(max_num_models_per_replica=max_adapters)
        async def adapter(self, name: str) -> ContinuousEngine:
            return await super().adapter(name)

    return Replica


def default_threads() -> int:
    """Of torch: half the cores, the others are for HTTP and images; OMP_NUM_THREADS may say otherwise."""
    if (said := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(1, int(said))
    return max(1, len(os.sched_getaffinity(0)) // 2)
