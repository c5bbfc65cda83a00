"""The page on which two models walk the same maze side by side, and the few requests that it makes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clew.envs.base import Suite
from clew.envs.maze_env import ENV_ID
from clew.envs.registry import make_env
from clew.evaluation.evaluate import png_base64
from clew.evaluation.suites import RecipeSuites, suite_world
from clew.recipe import Recipe
from clew.serving.client import ChatClient, Refused, Unreachable
from clew.serving.remote import RemoteRollouts
from clew.serving.watch import Event, Walk, start_walk

FILES = Path(__file__).with_name("page")
_WALKS = 8  # at a time
_WALK_S = 100.0
_PATIENCE_S = 10.0  # with a server that gives no answer: somebody is watching
_BODY_BYTES = 4096
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class WalkRequest(BaseModel):
    """One walk: the task by its place in a suite, the model as the server names it, and how it answers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    suite: Annotated[str, Field(max_length=200)]
    index: Annotated[int, Field(ge=0)]
    model: Annotated[str, Field(min_length=1, max_length=300)]
    mode: Literal["greedy", "sampled"] = "greedy"
    attempt: Annotated[int, Field(ge=0, lt=10_000)] = 0


def page_app(recipe: Recipe, api_url: str) -> FastAPI:
    """The page and its requests, at the root of the application: it may be mounted anywhere.

    Nothing of a visitor's is kept: the API key that a browser sends is passed on to the API, which judges it, and
    forgotten with the request.

    Args:
        recipe: whose suites are walked, under its settings.
        api_url: the OpenAI-compatible API that has the models, as this process reaches it.

    Raises:
        UserError: a suite or the address is unknown.
    """
    ChatClient(api_url).close()  # says now that it is no address
    tasks = _Tasks(recipe)
    app = FastAPI(title="Clew: watch", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Door)
    pool = ThreadPoolExecutor(_WALKS, thread_name_prefix="walk")
    places = threading.BoundedSemaphore(_WALKS)

    @app.get("/api/setup")
    def setup() -> dict[str, Any]:
        return {
            "noun": "maze" if recipe.environment.id == ENV_ID else "task",
            "suites": [{"name": name, "size": recipe.evaluation.size} for name in tasks.names],
            "temperature": recipe.rollout.temperature,
        }

    @app.get("/api/models")
    def models(request: Request) -> dict[str, Any]:
        with contextlib.closing(ChatClient(api_url, _key(request))) as client:
            return {"models": _models(client)}

    @app.get("/api/maze")
    def maze(suite: str, index: int) -> dict[str, Any]:
        return tasks.picture(suite, index)

    @app.post("/api/walk")
    async def walk(wanted: WalkRequest, request: Request) -> StreamingResponse:
        suite = await run_in_threadpool(tasks.suite, wanted.suite, wanted.index)
        client = ChatClient(api_url, _key(request), patience_s=_PATIENCE_S)
        try:  # a walk closes it at its end
            if wanted.model not in await run_in_threadpool(_models, client):
                raise HTTPException(404, "the server has no such model")
            if not places.acquire(blocking=False):
                raise HTTPException(503, f"{_WALKS} walks are going on: wait a moment", {"Retry-After": "5"})
        except BaseException:  # a client that has gone, too
            client.close()
            raise
        events = start_walk(
            Walk(suite, wanted.index, wanted.mode, wanted.attempt),
            recipe,
            RemoteRollouts(client, wanted.model, clients=1),
            pool,
            _WALK_S,
            places.release,
        )
        return StreamingResponse(_lines(events), media_type="application/x-ndjson")

    @app.exception_handler(HTTPException)
    def refuse(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    def refuse_form(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    app.mount("/", StaticFiles(directory=FILES, html=True))
    return app


async def _lines(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    async for event in events:
        yield to_json(event) + b"\n"


def _models(client: ChatClient) -> list[str]:
    try:
        return client.models()
    except Unreachable as error:
        raise HTTPException(502, "the model server gives no answer") from error
    except Refused as error:
        if error.status in (401, 403):
            raise HTTPException(401, "the server wants an API key") from error
        raise HTTPException(502, "the model server gives no list of models") from error


def _key(request: Request) -> str | None:
    found = re.fullmatch(r"Bearer ([\x21-\x7e]{1,512})", request.headers.get("authorization", ""))
    return found[1] if found else None


class _Tasks:
    """The suites that may be walked. Safe between threads."""

    def __init__(self, recipe: Recipe) -> None:
        self.names = list(recipe.evaluation.suites)
        for name in self.names:
            suite_world(recipe, name)
        self._suites, self._lock = RecipeSuites(recipe), threading.Lock()

    def suite(self, name: str, index: int) -> Suite:
        if name not in self.names:
            raise HTTPException(404, "there is no such suite")
        with self._lock:
            suite = self._suites.suite(name)
        if not 0 <= index < len(suite.tasks):
            raise HTTPException(422, f"choose a number from 0 to {len(suite.tasks) - 1}")
        return suite

    def picture(self, name: str, index: int) -> dict[str, Any]:
        suite = self.suite(name, index)
        with contextlib.closing(make_env(suite.env_id, **suite.env_kwargs)) as env:
            observation, info = env.reset(suite.tasks[index].seed)
            return {
                "frame": png_base64(observation.image),
                "path_length": info.get("path_length"),
                "max_turns": suite.env_kwargs["max_turns"],
                "prompt": env.prompt,
            }


class _Door:
    """Headers on every answer, bounds on every body, and a slash at the end of the page's own address."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        respond: ASGIApp = self.app
        if b"transfer-encoding" in headers or not length.isdigit() or int(length[:9]) > _BODY_BYTES:
            respond = JSONResponse({"error": f"a request has at most {_BODY_BYTES} bytes"}, 413)
        elif scope["path"] == scope.get("root_path", "") != "":
            respond = JSONResponse(None, 307, {"Location": scope["path"].rsplit("/", 1)[1] + "/"})
        await respond(scope, receive, answer)
