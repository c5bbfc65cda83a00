"""What a request may be and may use: the bounds that keep one client from harming the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEY_VARIABLE = "CLEW_API_KEY"
"""Environment variable with the key that requests must carry."""
GUARDED = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "clew.serving.guard:middlewares",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
}
"""Environment of a Ray whose HTTP proxy has the guard in it, and past which no other HTTP leads to what is served."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a server. Sizes are bytes, times seconds.

    Attributes:
        connections: open at once; more are closed.
        head_s: from a connection's (or a request's) first byte to the end of its headers.
        body_bytes, body_s: of one request's body, and how long its sender may take.
        requests: in work at once; more get 503.
        request_s: how long an answer may take, all of it.
        held_bytes: bodies and decoded images of all requests at once; what does not fit gets 503.
        messages, images: of one request.
        image_bytes: of one encoded image.
        pixels: of all images of a request together, read from their headers before any is decoded.
        characters: of all texts of a request together, counted before they are made tokens.
        context: tokens of prompt and answer; a model that has fewer positions has fewer.
        lora_rank: of an adapter, where vLLM serves it, which makes room beforehand; the published run has 32.
    """

    connections: int = 1024
    head_s: float = 10.0
    body_bytes: int = 16 << 20
    body_s: float = 30.0
    requests: int = 256
    request_s: float = 120.0
    held_bytes: int = 512 << 20
    messages: int = 512
    images: int = 64
    image_bytes: int = 8 << 20
    pixels: int = 16_000_000
    characters: int = 1 << 20
    context: int = 16_384
    lora_rank: int = 64


HTTP_TIMES: dict[str, Any] = {"request_timeout_s": Limits().request_s + 10, "keep_alive_timeout_s": 15}
"""What Ray's HTTP proxy is told of time, in seconds: more than the guard gives a request."""


class Budget:
    """A number of bytes that requests share. Not for several threads."""

    def __init__(self, total: int) -> None:
        self.left = total

    def take(self, amount: int) -> bool:
        """Takes it, if so much is left."""
        if amount > self.left:
            return False
        self.left -= amount
        return True

    def give(self, amount: int) -> None:
        """Gives it back."""
        self.left += amount
