"""Answers of Ray Serve LLM: requests are checked as those of the other engine are, then handed on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, Response
from ray.serve.handle import DeploymentHandle

from clew.errors import UserError
from clew.serving.adapters import AdapterReader
from clew.serving.client import wire_seed
from clew.serving.errors import ApiError
from clew.serving.limits import Limits
from clew.serving.prompt import PromptBuilder
from clew.serving.replies import Stream, event, next_of
from clew.serving.requests import ChatRequest

log = logging.getLogger(__name__)
_KNOWN = 1000  # adapters that are remembered to be sound: a name never means other weights


class LlmAnswers:
    """Has requests answered by an ``LLMServer`` deployment.

    By itself it answers a broken adapter with a 500, loads any name into vLLM, and takes special tokens in texts for
    what they say; so a request gets there only when its model and its messages were found sound.

    Args:
        llm: handle of the deployment.
    """

    def __init__(self, prompts: PromptBuilder, adapters: AdapterReader, llm: DeploymentHandle, limits: Limits) -> None:
        self._prompts, self._adapters, self._llm, self._limits = prompts, adapters, llm, limits
        self._sound: dict[str, None] = {}

    async def __call__(self, asked: ChatRequest, adapter: str) -> Response:
        """Answers a request.

        Raises:
            ApiError: it is refused, or the engine fails.
        """
        until = asyncio.get_running_loop().time() + self._limits.request_s
        prompt = await self._prompts.build_apart(asked)
        if adapter:
            await self._check(adapter)
        room = self._prompts.context - len(prompt.token_ids)
        llm = self._llm.options(stream=True)
        if adapter:
            llm = llm.options(multiplexed_model_id=asked.model)
        async with contextlib.AsyncExitStack() as stack:
            replies: Any = llm.chat.remote(_request(asked, room), None)
            stack.callback(replies.cancel)  # where the client has gone, the engine gives its place to another
            try:
                first = await _next(replies, until)
            except StopAsyncIteration as error:
                raise ApiError(503, "the engine broke off: try again", "unavailable") from error
            if not asked.stream:
                return JSONResponse(first[0].model_dump())
            return Stream(_events(first, replies, until), stack.pop_all())

    async def _check(self, name: str) -> None:
        if name in self._sound:
            return
        with self._adapters.refusing(name):
            adapter = await asyncio.to_thread(self._adapters.read, name)
            if adapter.config["r"] > (most := self._limits.lora_rank):
                raise UserError(f"adapter {name} has rank {adapter.config['r']}; this server takes {most} at most")
        if len(self._sound) >= _KNOWN:
            self._sound.clear()
        self._sound[name] = None


def _request(asked: ChatRequest, room: int) -> Any:
    from ray.serve.llm.openai_api_models import ChatCompletionRequest

    return ChatCompletionRequest(
        model=asked.model,
        messages=[message.model_dump() for message in asked.messages],
        temperature=1.0 if asked.temperature is None else asked.temperature,
        max_completion_tokens=asked.wanted_tokens or room,
        seed=None if asked.seed is None else wire_seed(asked.seed),  # vLLM's are signed
        stream=bool(asked.stream),
        stream_options=asked.stream_options.model_dump() if asked.stream and asked.stream_options else None,
        logprobs=bool(asked.logprobs),
        skip_special_tokens=False,  # an answer comes back as the model said it
    )


async def _next(replies: Any, until: float) -> list[Any]:
    """What comes next, a batch of it. Raises: see ``next_of``."""
    from ray.serve.llm.openai_api_models import ErrorResponse

    reply = await next_of(replies, until)
    batch = reply if isinstance(reply, list) else [reply]
    for one in batch:
        if isinstance(one, ErrorResponse):
            if 400 <= int(one.error.code) < 500:
                raise ApiError(int(one.error.code), one.error.message, "refused_by_engine")
            log.error("the engine failed: %s", one.error.message)
            raise ApiError(503, "the engine failed: try again", "unavailable")
    return batch


async def _events(first: list[str], replies: Any, until: float) -> AsyncIterator[bytes]:
    """vLLM's own server-sent events; an error that comes in the middle is an event too."""
    batch = first
    try:
        while True:
            for text in batch:
                yield text.encode()
            batch = await _next(replies, until)
    except StopAsyncIteration:
        return
    except ApiError as error:
        yield event(error.body())
