"""Requests that no server should like: a seeded stream of them, as the bytes that go over the socket.

Every one must end in a 4xx or in a closed connection. Used by benchmarks/serving.py (ten thousand of them) and by the
tests (a few hundred).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from raw_requests import CHAT, BadRequest, good_body, http, image_part, png, png_of_zeros


class Stream:
    """Bad requests without end, the same for the same seed."""

    def __init__(self, model: str, seed: int, slow: bool = True) -> None:
        self.rng = random.Random(seed)
        self.model = model
        self.good_image = png()
        self.bombs = [
            png_of_zeros(15_000, 15_000, 2_000),
            png_of_zeros(60_000, 60_000, 1),
            png_of_zeros(4_200, 4_000, 4_000),
        ]
        self.kinds: list[tuple[int, Callable[[], BadRequest]]] = [
            (8, self.random_bytes),
            (8, self.mangled_http),
            (16, self.wrong_type),
            (10, self.any_json),
            (10, self.unknown_model),
            (8, self.path_trick),
            (6, self.truncated),
            (10, self.bad_header),
            (4, self.bad_chunks),
            (4, self.deep_json),
            (3, self.no_numbers),
            (4, self.no_utf8),
            (3, self.content_type),
            (10, self.bad_image),
            (4, self.bomb),
            (4, self.special_token),
            (3, self.too_much),
            (4, self.unsupported),
            (3, self.method),
            (2, self.websocket),
            (3, self.leaves),
            (1, self.huge_body),
        ]
        if slow:
            self.kinds.append((1, self.slow))

    def __iter__(self) -> Iterator[BadRequest]:
        weights = [weight for weight, _ in self.kinds]
        while True:
            ((_, make),) = self.rng.choices(self.kinds, weights)
            yield make()

    # --- helpers

    def body(self, **changes: Any) -> dict[str, Any]:
        return {**good_body(self.model, self.good_image), **changes}

    def sent(self, kind: str, body: Any) -> BadRequest:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return BadRequest(kind, [http(data)])

    def bytes(self, most: int) -> bytes:
        return self.rng.randbytes(self.rng.randint(1, most))

    def value(self, depth: int = 3) -> Any:
        """Any JSON value."""
        simple: list[Any] = [
            None,
            True,
            False,
            0,
            -1,
            2**70,
            1.5,
            -1e308,
            "",
            "x" * 50,
            "\u0000",
            "\U0001f600",
            "model",
        ]
        pick = self.rng.random()
        if depth == 0 or pick < 0.5:
            return self.rng.choice(simple)
        if pick < 0.75:
            return [self.value(depth - 1) for _ in range(self.rng.randint(0, 4))]
        keys = ["role", "content", "type", "text", "url", "image_url", "model", "messages", "stream", ""]
        return {self.rng.choice(keys): self.value(depth - 1) for _ in range(self.rng.randint(0, 4))}

    # --- kinds

    def random_bytes(self) -> BadRequest:
        return BadRequest("random bytes", [self.bytes(2000)], then="read" if self.rng.random() < 0.03 else "shut")

    def mangled_http(self) -> BadRequest:
        data = bytearray(http(json.dumps(self.body()).encode()))
        head = data.index(b"\r\n\r\n")
        line = data.index(b"\r\n")
        data[self.rng.randrange(line)] = self.rng.choice([0, 1, 10, 127, 128, 255])  # the request line is broken
        for _ in range(self.rng.randint(0, 5)):
            data[self.rng.randrange(head)] = self.rng.randrange(256)
        return BadRequest("mangled HTTP", [bytes(data)], then="shut")

    def wrong_type(self) -> BadRequest:
        wrong: dict[str, list[Any]] = {
            "model": [None, 1, [], {}, True, ""],
            "messages": [None, 1, "hi", {}, [], [1], [None], [{}], [[]], [{"role": "user"}], [{"content": "x"}]],
            "temperature": ["hot", -1, 3, [], {}, True, 1e400, 1e-9],
            "max_tokens": ["8", 0, -5, 1.5, [], True, 2**80, 10**9],
            "max_completion_tokens": ["8", 0, {}, 10**9],
            "seed": ["1", 1.5, 2**64, -(2**63) - 1, [], True],
            "stream": ["yes", 1, [], {}],
            "stream_options": [1, "x", [], {"include_usage": "x"}],
            "logprobs": [1, "x", []],
        }
        key = self.rng.choice(sorted(wrong))
        return self.sent("wrong type", self.body(**{key: self.rng.choice(wrong[key])}))

    def any_json(self) -> BadRequest:
        what = self.rng.random()
        if what < 0.4:
            return self.sent("any JSON", self.value())
        message = {
            "role": self.rng.choice(["user", "tool", "", "robot", 3]),
            "content": self.value(),
            "x": self.value(),
        }
        if message["role"] == "user" and isinstance(message["content"], str):
            message["content"] = [{"type": "audio"}]
        if message["role"] == "user" and message["content"] == []:
            message["content"] = 5
        return self.sent("any JSON", self.body(messages=[message]))

    def unknown_model(self) -> BadRequest:
        names = ["gpt-4o", "", ":", f"{self.model}:", f":{self.model}", f"{self.model}:nobody", self.model.upper()]
        names += [
            f"{self.model}:{trick}" for trick in ("../../etc/passwd", "..", "/etc", "a/b", "a\\b", "%2e%2e", "\u0000")
        ]
        names += [f"{self.model}:s3://bucket/x", f"{self.model}:{'a' * 100_000}", f"{self.model}:{'a' * 128}", "\u202e"]
        names += [f"{self.model}:{self.rng.getrandbits(64):x}", f"{self.model}:step:1", "../" + self.model]
        name = self.rng.choice(names)
        if self.rng.random() < 0.2:
            quoted = "".join(f"%{byte:02x}" for byte in name.encode()[:3000]) or "%20"
            return BadRequest("unknown model", [http(b"", f"/v1/models/{quoted}", "GET")])
        return self.sent("unknown model", self.body(model=name))

    def path_trick(self) -> BadRequest:
        paths = [
            "/../../etc/passwd",
            "/v1/../../etc/passwd",
            "/v1/models/../../x",
            "/-/routes",
            "/-/healthz/",
            "//",
            "/%00",
        ]
        paths += [
            "/v1/%2e%2e/%2e%2e/etc/passwd",
            "/etc/passwd",
            "/v1",
            "/v1//chat/completions",
            "/" + "a" * 8000,
            "/docs",
        ]
        paths += [
            "/openapi.json",
            "/v1/chat/completions/..",
            "/metrics",
            "/v1/\xff\xfe",
            "/?%ff",
            "/health/x",
            "*",
            "http://x/",
        ]
        return BadRequest("path trick", [http(b"{}", self.rng.choice(paths), self.rng.choice(["GET", "POST"]))])

    def truncated(self) -> BadRequest:
        data = http(json.dumps(self.body()).encode())
        cut = data[: self.rng.randrange(1, len(data))]
        return BadRequest("truncated", [cut], then=self.rng.choice(["shut", "shut", "leave"]))

    def bad_header(self) -> BadRequest:
        lines = [
            "no colon here",
            ": no name",
            "a b: c",
            "x\x00y: z",
            f"x: {'y' * 100_000}",
            "x: \x01",
            "x : y",
            " folded: x",
        ]
        lines += [
            "Content-Length: -1",
            "Content-Length: 1e9",
            "Content-Length: 5, 6",
            "Content-Length: 99999999999999999999",
        ]
        lines += ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked, chunked", "Transfer-Encoding: \xff"]
        # These are lawful: they are sent with a body that isn't.
        lawful = ["x-request-id: \xff\xfe", "x-request-timeout-seconds: 0", "x-request-timeout-seconds: \xff"]
        lawful += ["serve_multiplexed_model_id: \xff", "serve-multiplexed-model-id: ../../x", "x-session-id: \xff"]
        lawful += [
            "x-request-disconnect-disabled: ?1",
            "traceparent: \xff",
            "Authorization: \xff",
            "Content-Encoding: gzip",
        ]
        many = "".join(f"x-{i}: y\r\n" for i in range(self.rng.choice([50, 500, 6000])))
        chosen = self.rng.choice([*lines, *lawful, "many"])
        added = many if chosen == "many" else f"{chosen}\r\n"
        body = b"{" if chosen not in lines else json.dumps(self.body()).encode()
        head, _, rest = http(body).partition(b"\r\n")
        return BadRequest("bad header", [head + b"\r\n" + added.encode("latin-1") + rest], then="shut")

    def bad_chunks(self) -> BadRequest:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        tails = [
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"-5\r\n{}\r\n",
            b"ffffffffffffffffffff\r\n{}",
            b"2\r\n{}0\r\n\r\n",
            b"5\r\n{}",
            b"\r\n\r\n",
        ]
        tails += [b"2\r\n{}\r\n0\r\n\r\n", b"1;" + b"x" * 70_000 + b"\r\n"]
        return BadRequest("bad chunks", [head + self.rng.choice(tails)], then="shut")

    def deep_json(self) -> BadRequest:
        depth = self.rng.choice([200, 5_000, 100_000])
        opened, closed = self.rng.choice([("[", "]"), ('{"a":', "}"), ('{"messages":[', "]}")])
        nested = opened * depth + ("1" if opened != "[" else "") + closed * depth
        if self.rng.random() < 0.5:
            return self.sent("deep JSON", nested.encode())
        return self.sent("deep JSON", json.dumps(self.body()).encode()[:-1] + b',"seed":' + nested.encode() + b"}")

    def no_numbers(self) -> BadRequest:
        text = json.dumps(self.body(temperature="@")).replace(
            '"@"', self.rng.choice(["NaN", "Infinity", "-Infinity", "1e999"])
        )
        return self.sent("NaN, Infinity", text.encode())

    def no_utf8(self) -> BadRequest:
        data = bytearray(json.dumps(self.body(user="here")).encode())
        at = data.index(b"Which")
        data[at : at + 2] = self.rng.choice([b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\\ud800", b"\x00\x01"])
        return self.sent("no UTF-8", bytes(data))

    def content_type(self) -> BadRequest:
        kinds = [
            "text/plain",
            "",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "\xff",
            "image/png",
        ]
        data = json.dumps(self.body()).encode()
        return BadRequest("content type", [http(data, Content_Type=self.rng.choice(kinds))])

    def bad_image(self) -> BadRequest:
        whole = self.good_image
        urls: list[Any] = [
            "http://127.0.0.1:1/x.png",
            "file:///etc/passwd",
            "data:image/png;base64,####",
            "data:,x",
            "",
            None,
        ]
        urls += [
            "data:image/png;base64,",
            "data:image/svg+xml;base64,PHN2Zy8+",
            "data:image/gif;base64,R0lGODlh",
            "s3://a/b",
            7,
        ]
        urls += [
            image_part(self.bytes(500))["image_url"]["url"],
            image_part(whole[: len(whole) // 2])["image_url"]["url"],
        ]
        urls += [
            image_part(whole, "jpeg")["image_url"]["url"],
            image_part(b"RIFF\x24\0\0\0WEBPVP8X" + self.bytes(40), "webp")["image_url"]["url"],
        ]
        urls += [
            image_part(b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff" + bytes(30), "webp")[
                "image_url"
            ]["url"]
        ]
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[self.rng.randrange(60, len(whole) - 20)] ^= 0xFF
        urls.append(image_part(bytes(damaged))["image_url"]["url"])
        part = {"type": "image_url", "image_url": {"url": self.rng.choice(urls)}}
        return self.sent("bad image", self.body(messages=[{"role": "user", "content": [part]}]))

    def bomb(self) -> BadRequest:
        image = image_part(self.rng.choice(self.bombs))
        return self.sent("image bomb", self.body(messages=[{"role": "user", "content": [image]}]))

    def special_token(self) -> BadRequest:
        token = self.rng.choice(
            ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>", "<|video_pad|>"]
        )
        content: Any = f"hello {token} there"
        if self.rng.random() < 0.5:
            content = [image_part(self.good_image), {"type": "text", "text": content}]
        return self.sent("special token", self.body(messages=[{"role": "user", "content": content}]))

    def too_much(self) -> BadRequest:
        small = image_part(self.good_image)
        choices: list[Any] = [
            [{"role": "user", "content": "word " * 30_000}],
            [{"role": "user", "content": "x"}] * 600,
            [{"role": "user", "content": [small] * 70}],
            [{"role": "user", "content": [image_part(png(1500, 1500))] * 20}],
            [{"role": "user", "content": [image_part(png(1, 900))]}],
        ]
        return self.sent("too much", self.body(messages=self.rng.choice(choices)))

    def unsupported(self) -> BadRequest:
        fields: dict[str, Any] = {
            "n": 2,
            "tools": [{}],
            "stop": ["x"],
            "top_p": 0.5,
            "logit_bias": {"1": 1},
            "top_logprobs": 3,
        }
        fields |= {"functions": [{}], "response_format": {"type": "json_object"}, "presence_penalty": 1, "audio": {}}
        key = self.rng.choice(sorted(fields))
        return self.sent("unsupported", self.body(**{key: fields[key]}))

    def method(self) -> BadRequest:
        name = self.rng.choice(["PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW", "GET", "HEAD", "A" * 300])
        return BadRequest("method", [http(b"", CHAT, name)])

    def websocket(self) -> BadRequest:
        data = http(
            b"",
            CHAT,
            "GET",
            Upgrade="websocket",
            Connection="Upgrade",
            Sec_WebSocket_Version="13",
            Sec_WebSocket_Key="eA==",
        )
        return BadRequest("websocket", [data])

    def leaves(self) -> BadRequest:
        """A lawful request whose sender does not wait."""
        stream = self.rng.random() < 0.5
        data = http(json.dumps(self.body(stream=stream, max_tokens=400, temperature=1)).encode())
        return BadRequest("leaves", [data], then="leave")

    def huge_body(self) -> BadRequest:
        if self.rng.random() < 0.5:
            data = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n{"
            return BadRequest("huge body", [data])
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        return BadRequest("huge body", [head, *[chunk] * 18, b"0\r\n\r\n"])

    def slow(self) -> BadRequest:
        """Stops in the middle of its head or its body."""
        data = http(json.dumps(self.body()).encode())
        cut = self.rng.choice([5, 40, len(data) - 200])
        return BadRequest("slow sender", [data[:cut], *[b" "] * self.rng.choice([0, 3])], pause_s=1.0)
