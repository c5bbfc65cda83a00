"""The body of ``/v1/chat/completions``: what is read of it, and what is refused because it would be ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clew.serving.errors import ApiError, bad
from clew.serving.limits import Limits

# Fields of OpenAI's API, and of servers like it, that would change the answer: value with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_p": (1,),
    "web_search_options": (),
}
_COOLEST = 0.01  # below it, logits divided by the temperature leave the range of numbers


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ImageUrl(_Strict):
    """An image as a data: URL."""

    url: str


class TextPart(_Strict):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    """An image among the pieces of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(_Strict):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str | list[Part]


class StreamOptions(_Strict):
    """How a stream is sent."""

    include_usage: bool | None = None


class ChatRequest(_Strict):
    """A request. Fields it does not name are tolerated, unless they would change the answer (``parse_request``)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have, if the request says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse_request(body: bytes, limits: Limits) -> ChatRequest:
    """Reads a body.

    Raises:
        ApiError: 400 with the field that is wrong.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    for field, value in (request.model_extra or {}).items():
        neutral = _NEUTRAL.get(field)
        if neutral is not None and value is not None and not any(_same(value, one) for one in neutral):
            raise bad(f"{field} is not supported by this server: leave it out", field, "unsupported_parameter")
    if request.temperature is not None and 0 < request.temperature < _COOLEST:
        raise bad(f"temperature must be 0 (greedy) or at least {_COOLEST}", "temperature", "invalid_value")
    if len(request.messages) > limits.messages:
        raise bad(f"{len(request.messages)} messages; at most {limits.messages} are taken", "messages", "invalid_value")
    if request.messages[-1].role == "assistant":
        raise bad("the last message must be one that the model is to answer: user or system", "messages")
    return request


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _explain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:64] for part in first["loc"])[:200]
    message = first["msg"][:300]
    return bad(f"{place}: {message}" if place else message, place or None, "invalid_value" if place else "invalid_json")
