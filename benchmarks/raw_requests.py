"""What benchmarks/bad_requests.py is made of: HTTP as bytes, pictures, and a sender that watches what comes back."""

from __future__ import annotations

import base64
import io
import socket
import struct
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

CHAT = "/v1/chat/completions"


@dataclass
class BadRequest:
    """What is sent, and how the sender behaves then.

    Attributes:
        kind: in words, for the table.
        parts: bytes, sent one after the other.
        pause_s: between the parts.
        then: ``read`` waits for the answer, ``shut`` ends its own side first, ``leave`` hangs up without waiting.
    """

    kind: str
    parts: list[bytes] = field(default_factory=list)
    pause_s: float = 0.0
    then: str = "read"


def http(body: bytes, path: str = CHAT, method: str = "POST", **headers: str) -> bytes:
    """A well-formed HTTP request."""
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def good_body(model: str, image: bytes) -> dict[str, Any]:
    """A request that is answered."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": [image_part(image), {"type": "text", "text": "Which way?"}]}],
        "max_tokens": 8,
        "temperature": 0,
    }


def image_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"},
    }


def png(width: int = 96, height: int = 96, seed: int = 0) -> bytes:
    """A small picture."""
    image = Image.effect_noise((width, height), 40 + seed).convert("RGB")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def png_of_zeros(width: int, height: int, rows: int) -> bytes:
    """A PNG that says it is ``width`` x ``height`` and holds ``rows`` rows of zeros, which take almost no bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    packed = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def send(host: str, port: int, request: BadRequest, timeout_s: float = 60.0) -> str:
    """Sends it and returns what came of it: a status, ``closed``, or ``left``.

    Raises:
        TimeoutError: the server neither answers nor closes the connection.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        try:
            for part in request.parts:
                connection.sendall(part)
                if request.pause_s:
                    time.sleep(request.pause_s)
            if request.then == "leave":
                return "left"
            if request.then == "shut":
                connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            # The server has closed its side already; it may have said why.
        try:
            answer = b""
            while len(answer) < 12 and (more := connection.recv(4096)):
                answer += more
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            return "closed"
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"
