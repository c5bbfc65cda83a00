"""The OpenAI-compatible API as a FastAPI application, on top of anything that answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from clew.serving.errors import ApiError
from clew.serving.limits import Limits
from clew.serving.models import Models
from clew.serving.replies import model_card
from clew.serving.requests import ChatRequest, parse_request

Answer = Callable[[ChatRequest, str], Awaitable[Response]]
"""Answers a request with an adapter (empty: the base model); raises ApiError."""


def build_app(models: Models, answer: Answer, limits: Limits, ping: Callable[[], Any]) -> FastAPI:
    """The application.

    Args:
        models: the names that are served.
        ping: a coroutine function that returns when the engine answers, for ``/health``.
    """
    app = FastAPI(title="clew", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code)

    @app.get("/health")
    async def health() -> dict[str, str]:
        try:
            async with asyncio.timeout(5):
                await ping()
        except Exception as error:  # however the engine fails
            raise ApiError(503, "the engine does not answer", "unavailable") from error
        return {"status": "ok"}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        names = await models.adapters()
        cards = [model_card(f"{models.base}:{name}", started, models.base) for name in names]
        return {"object": "list", "data": [model_card(models.base, started), *cards]}

    @app.get("/v1/models/{name}")
    async def get_model(name: str) -> dict[str, Any]:
        adapter = await models.resolve(name)
        return model_card(name, started, models.base if adapter else None)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send application/json", "unsupported_media_type")
        asked = parse_request(await request.body(), limits)
        return await answer(asked, await models.resolve(asked.model))

    return app
