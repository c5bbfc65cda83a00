"""Answers of the transformers engine, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi.responses import JSONResponse, Response

from clew.rollout.engine import Sampling
from clew.serving.engine import Generation, Progress
from clew.serving.errors import ApiError, overloaded
from clew.serving.limits import Budget, Limits
from clew.serving.prompt import Prompt, PromptBuilder
from clew.serving.replies import END, Reply, Stream, event, next_of, token_logprob
from clew.serving.requests import ChatRequest
from clew.serving.text import Detokenizer

Generate = Callable[[Generation], AsyncGenerator[Progress]]
"""Answers one request; closing the iterator gives the answer up."""


class Answers:
    """Has requests answered by anything that generates tokens."""

    def __init__(self, prompts: PromptBuilder, generate: Generate, limits: Limits) -> None:
        self._prompts, self._generate, self._limits = prompts, generate, limits
        self._held = Budget(limits.held_bytes)

    async def __call__(self, asked: ChatRequest, adapter: str) -> Response:
        """Answers a request.

        Raises:
            ApiError: it is refused, or the engine fails.
        """
        async with contextlib.AsyncExitStack() as stack:
            prompt = await self._prompts.build_apart(asked)
            size = sum(frame.nbytes for frame in prompt.frames)
            if not self._held.take(size):
                raise overloaded()
            stack.callback(self._held.give, size)
            generation = _generation(asked, adapter, prompt, self._prompts.context)
            reply = Reply(asked.model, len(prompt.token_ids))
            progress = self._generate(generation)
            stack.push_async_callback(progress.aclose)
            answer = _Answer(reply, progress, self._prompts, asked, self._limits.request_s)
            if not asked.stream:
                return JSONResponse(await answer.whole())
            first = await answer.next()  # what is refused is refused with its status
            return Stream(answer.events(first), stack.pop_all())


def _generation(asked: ChatRequest, adapter: str, prompt: Prompt, context: int) -> Generation:
    room = context - len(prompt.token_ids)
    temperature = 1.0 if asked.temperature is None else float(asked.temperature)
    seed = secrets.randbits(64) if asked.seed is None else asked.seed % 2**64
    return Generation(adapter, prompt, Sampling(temperature, asked.wanted_tokens or room), seed, bool(asked.stream))


class _Answer:
    """One answer on its way to the client."""

    def __init__(
        self,
        reply: Reply,
        progress: AsyncIterator[Progress],
        prompts: PromptBuilder,
        asked: ChatRequest,
        request_s: float,
    ) -> None:
        self._reply, self._progress, self._asked = reply, progress, asked
        self._tokenizer = prompts.template.tokenizer
        self._text = Detokenizer(self._tokenizer)
        self._until = asyncio.get_running_loop().time() + request_s

    async def next(self) -> Progress:
        """What comes next.

        Raises:
            ApiError: the engine refuses, fails, or takes too long.
        """
        try:
            progress = await next_of(self._progress, self._until)
        except StopAsyncIteration as error:
            raise ApiError(503, "the engine broke off: try again", "unavailable") from error
        if progress.error is not None:
            status, message, code = progress.error
            raise ApiError(status, message, code or None, "model" if status in (404, 422) else None)
        return progress

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        progress = await self.next()
        text = self._text.add(progress.ids, last=True)
        return self._reply.whole(text, progress.finish or "length", progress.tokens, self._logprobs(progress))

    async def events(self, progress: Progress) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error that comes in the middle is an event too."""
        yield event(self._reply.chunk({"role": "assistant", "content": ""}))
        try:
            while True:
                text = self._text.add(progress.ids, last=progress.finish is not None)
                if text or progress.ids:
                    yield event(self._reply.chunk({"content": text}, logprobs=self._logprobs(progress)))
                if progress.finish is not None:
                    break
                progress = await self.next()
        except ApiError as error:
            yield event(error.body())
            return
        yield event(self._reply.chunk({}, progress.finish))
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield event(self._reply.usage_chunk(progress.tokens))
        yield END

    def _logprobs(self, progress: Progress) -> list[dict[str, Any]] | None:
        if not self._asked.logprobs:
            return None
        texts = [self._tokenizer.decode([token]) for token in progress.ids]
        return [token_logprob(text, value) for text, value in zip(texts, progress.logprobs, strict=True)]
