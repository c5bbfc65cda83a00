"""OpenAI's answer objects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from clew.serving.errors import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Reply:
    """The frame of one answer.

    Attributes:
        model: as the request named it.
        prompt_tokens: of the prompt, image placeholders included.
    """

    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: str, tokens: int, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The answer in one piece."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish,
        }
        return {**self._frame("chat.completion"), "choices": [choice], "usage": self.usage(tokens)}

    def chunk(
        self, delta: dict[str, str], finish: str | None = None, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """A piece of a stream."""
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish,
        }
        return {**self._frame("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, tokens: int) -> dict[str, Any]:
        """The piece that ends a stream whose client asked for the counts."""
        return {**self._frame("chat.completion.chunk"), "choices": [], "usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        """The counts; ``tokens`` are those of the answer, its end of turn included."""
        total = self.prompt_tokens + tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens, "total_tokens": total}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


END = b"data: [DONE]\n\n"


def token_logprob(text: str, logprob: float) -> dict[str, Any]:
    """An entry of ``logprobs.content``."""
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def model_card(name: str, created: int, parent: str | None = None) -> dict[str, Any]:
    """An entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "clew", "parent": parent}


async def next_of(progress: AsyncIterator[T], until: float) -> T:
    """What an engine tells next.

    Args:
        until: time of the event loop, in seconds, at which it is given up.

    Raises:
        ApiError: the engine refuses, fails, or takes too long.
        StopAsyncIteration: nothing comes any more.
    """
    try:
        async with asyncio.timeout_at(until):
            return await anext(progress)
    except TimeoutError as error:
        raise ApiError(408, "the answer took too long: ask for fewer tokens", "timeout") from error
    except (ApiError, StopAsyncIteration):
        raise
    except Exception as error:  # Ray's: the engine's process died, or is being replaced
        log.exception("the engine failed")
        raise ApiError(503, "the engine failed: try again", "unavailable") from error


class Stream(StreamingResponse):
    """Server-sent events; what the stack holds is given back however the sending ends."""

    def __init__(self, events: AsyncIterator[bytes], stack: contextlib.AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        async with self._stack:
            await super().__call__(scope, receive, send)
