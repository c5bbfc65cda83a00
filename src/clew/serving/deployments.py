"""The applications on Ray Serve: the HTTP side and the engine, each in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from clew.policy.model import load_processor, load_skeleton
from clew.recipe import Recipe
from clew.serving.adapters import AdapterReader
from clew.serving.answers import Answers
from clew.serving.app import build_app
from clew.serving.engine import EngineSettings, Generation, Progress, replica_class
from clew.serving.limits import Limits
from clew.serving.llm import llm_config
from clew.serving.llm_answers import LlmAnswers
from clew.serving.models import Models
from clew.serving.page import page_app
from clew.serving.prompt import PromptBuilder
from clew.serving.store import AdapterStore, open_store

# Placement must not wait on a machine of two cores: what caps the processes is their threads.
_LITTLE = {"num_cpus": 0.01}
_ROOM = 2 * Limits().requests  # the guard bounds requests: nothing ever waits, or is refused, in Ray's own queues


def chat_application(name: str, settings: EngineSettings) -> Application:
    """The API under the name ``name``, with the transformers engine behind it."""
    engine: Any = serve.deployment(replica_class(settings.max_adapters))
    engine = engine.options(
        name="engine",
        max_ongoing_requests=_ROOM,
        ray_actor_options=_LITTLE | ({"num_gpus": 1} if settings.device == "cuda" else {}),
        graceful_shutdown_timeout_s=2,
    )
    return _web(Api, "api").bind(name, settings, engine.bind(settings))


def _web(kind: type, name: str) -> Any:
    """The deployment of a class that builds a FastAPI application."""
    deployment: Any = serve.deployment(serve.ingress()(kind))
    return deployment.options(
        name=name, max_ongoing_requests=_ROOM, ray_actor_options=_LITTLE, graceful_shutdown_timeout_s=2
    )


def vllm_application(name: str, settings: EngineSettings, replicas: int = 1) -> Application:
    """The same API with Ray Serve LLM and vLLM behind it; adapters are in S3 (see ``refuse_folder``).

    Args:
        replicas: engines.
    """
    limits = Limits()
    processor = load_processor(settings.model)
    context = PromptBuilder(processor, limits).context
    gpu = settings.device == "cuda"
    config = llm_config(name, processor, settings.adapters, settings.max_adapters, context, gpu, limits, replicas)
    from ray.serve.llm import LLMConfig, build_llm_deployment

    return _web(LlmApi, "api").bind(name, settings, build_llm_deployment(LLMConfig(**config)))


class Api:
    """Builds the FastAPI application in its replica, before the transformers engine."""

    def __init__(self, name: str, settings: EngineSettings, engine: DeploymentHandle) -> None:
        self._models = Models(name, _store(settings))
        self._prompts = PromptBuilder(load_processor(settings.model), Limits())
        self._engine = engine

    def __serve_build_asgi_app__(self) -> FastAPI:
        limits = Limits()
        return build_app(self._models, Answers(self._prompts, self._generate, limits), limits, self._ping)

    async def _generate(self, asked: Generation) -> AsyncGenerator[Progress]:
        handle = self._engine.options(stream=True, multiplexed_model_id=asked.adapter)
        progress: Any = handle.generate.remote(asked)
        try:
            async for one in progress:
                yield one
        finally:
            progress.cancel()  # where the client has gone, the engine gives its place to another

    async def _ping(self) -> None:
        await self._engine.ping.remote()


class LlmApi:
    """Builds it before Ray Serve LLM."""

    def __init__(self, name: str, settings: EngineSettings, llm: DeploymentHandle) -> None:
        self._models = Models(name, _store(settings))
        prompts = PromptBuilder(load_processor(settings.model), Limits())
        reader = AdapterReader(_store(settings), load_skeleton(settings.model))
        self._answers = LlmAnswers(prompts, reader, llm, Limits())
        self._llm = llm

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._models, self._answers, Limits(), self._ping)

    async def _ping(self) -> None:
        await self._llm.check_health.remote()


def _store(settings: EngineSettings) -> AdapterStore | None:
    return open_store(settings.adapters, Path(settings.cache)) if settings.adapters else None


def watch_application(recipe: Recipe, api_url: str) -> Application:
    """The page beside the API, which it reaches as ``api_url``; the mazes are those of the recipe."""
    return _web(Watch, "watch").bind(recipe, api_url)


class Watch:
    """Builds the page's application in its replica."""

    def __init__(self, recipe: Recipe, api_url: str) -> None:
        self._recipe, self._api_url = recipe, api_url

    def __serve_build_asgi_app__(self) -> FastAPI:
        return page_app(self._recipe, self._api_url)
