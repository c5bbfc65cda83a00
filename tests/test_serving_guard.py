"""The door: key, bounds, time limits, and what is passed on. A real uvicorn, raw sockets, small limits."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from clew.errors import UserError
from clew.serving.guard import Guard, GuardedProtocol, middlewares
from clew.serving.limits import KEY_VARIABLE, Limits

SMALL = Limits(
    connections=8, head_s=0.5, body_bytes=1000, body_s=0.5, requests=2, request_s=-3.0, held_bytes=2500
)  # request_s with the guard's grace: 2 s
KEY = "correct horse battery"


class Echo:
    """Answers with what it is given; ``/v1/slow`` never answers, ``/v1/half`` breaks off, ``/v1/none`` says nothing."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/v1/none":
            return
        if path == "/v1/wait":
            await self.free.wait()
        if path == "/v1/free":
            self.free.set()
        if path == "/v1/slow":
            await asyncio.sleep(60)
        message = await receive()
        seen = {"headers": {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}}
        content = json.dumps({**seen, "body": message["body"].decode(), "more": message["more_body"]}).encode()
        length = [] if path == "/v1/half" else [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": content, "more_body": path == "/v1/half"})
        if path == "/v1/half":
            await asyncio.sleep(60)


@contextmanager
def running(key: str | None, app: Any = None, limits: Limits = SMALL) -> Iterator[int]:
    config = uvicorn.Config(
        Guard(app or Echo(), limits, key),
        port=0,
        http=type("SmallProtocol", (GuardedProtocol,), {"limits": limits}),
        ws="none",
        log_config=None,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.force_exit = server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(None) as open_port:
        yield open_port


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    with running(KEY) as locked_port:
        yield locked_port


def exchange(port: int, data: bytes) -> bytes:
    """Sends and reads until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while more := connection.recv(65536):
                answer += more
        except ConnectionError:
            pass
        return answer


def request(path: str, body: bytes = b"", method: str = "POST", *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close", *lines]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def content(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def test_a_complete_request_is_passed_on_with_few_headers(port: int) -> None:
    """What Ray's proxy would obey, or choke on, does not reach it."""
    lines = [
        "X-Request-Id: \xff\xfe",
        "serve_multiplexed_model_id: x",
        "x-request-timeout-seconds: 0",
        "traceparent: \xff",
    ]
    lines += ["Content-Type: application/json", "Authorization: Bearer secret", "Cookie: x"]
    seen = content(exchange(port, request("/v1/echo", b"hello", "POST", *lines)))
    assert seen == {
        "headers": {"host": "localhost", "content-type": "application/json", "content-length": "5"},
        "body": "hello",
        "more": False,
    }
    chunked = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    seen = content(exchange(port, chunked + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"))
    assert (seen["body"], seen["headers"]["content-length"]) == ("hello", "5")


@pytest.mark.parametrize("sent", [1001, 3000, 100_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused(port: int, sent: int, chunked: bool) -> None:
    data = request("/v1/echo", b"x" * sent)
    if chunked:
        head = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        data = head + b"".join(b"1f4\r\n" + b"x" * 500 + b"\r\n" for _ in range(sent // 500 + 1)) + b"0\r\n\r\n"
    answer = exchange(port, data)
    # Of a sender that does not stop, the connection is closed: it may be too busy to hear why.
    assert status(answer) == 413 or (sent == 100_000 and answer == b"")


def test_a_slow_sender_is_not_waited_for(port: int) -> None:
    assert exchange(port, b"POST /v1/echo HTTP/1.1\r\nHo") == b""
    assert exchange(port, b"") == b""
    assert status(exchange(port, request("/v1/echo", b"x" * 100)[:-50])) == 408


def test_an_answer_that_takes_too_long_ends(port: int) -> None:
    assert status(exchange(port, request("/v1/slow"))) == 408
    half = exchange(port, request("/v1/half"))
    assert status(half) == 200 and not half.endswith(b"0\r\n\r\n"), "it must not look whole"
    assert status(exchange(port, request("/v1/none"))) == 503


def test_no_more_requests_than_places(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as a, socket.create_connection(("127.0.0.1", port)) as b:
        a.sendall(request("/v1/wait"))
        b.sendall(request("/v1/wait"))
        while status(answer := exchange(port, request("/v1/echo"))) == 200:  # until both have arrived
            time.sleep(0.01)
        assert status(answer) == 503 and b"retry-after" in answer
        a.close()
        b.close()
    while status(answer := exchange(port, request("/v1/echo"))) != 200:  # their places are free again
        assert status(answer) == 503
        time.sleep(0.05)


def test_no_more_connections_than_allowed() -> None:
    """Of three connections that do nothing, the third is closed at once, and no request is heard until one ends."""
    with running(None, limits=Limits(connections=2, head_s=60)) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(2)]
        assert exchange(port, request("/v1/echo")) == b""
        idle[0].close()
        while status(exchange(port, request("/v1/echo"))) != 200:
            time.sleep(0.01)
        idle[1].close()


class Flood:
    """Answers with more than any buffer holds, or a little more than nothing."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 40 << 20 if scope["path"] == "/v1/flood" else 1
        head = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": bytes(size)})


def test_who_does_not_read_loses_the_connection() -> None:
    """All connections there are ask for much and read nothing of it: in the end others have their places."""
    with running(None, Flood(), Limits(connections=2, head_s=0.2)) as port:
        unread = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(2)]
        for connection in unread:
            connection.sendall(request("/v1/flood"))
        until = time.monotonic() + 60
        while status(exchange(port, request("/v1/little"))) != 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        for connection in unread:
            connection.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_name_that_leads_here_is_not_this_server(port: int, locked: int, host: str) -> None:
    """A page of another site asks under its own name (DNS rebinding); with a key it has nothing to gain."""
    data = request("/v1/echo").replace(b"localhost", host.encode())
    refused = exchange(port, data)
    assert status(refused) == 403 and content(refused)["error"]["code"] == "forbidden_host"
    assert status(exchange(locked, data)) == 401
    keyed = request("/v1/echo", b"", "POST", f"Authorization: Bearer {KEY}").replace(b"localhost", host.encode())
    assert status(exchange(locked, keyed)) == 200
    for own in (b"127.0.0.1", b"127.0.0.1:8000", b"[::1]:8000", b"LOCALHOST:1"):
        assert status(exchange(port, request("/v1/echo").replace(b"localhost", own))) == 200


@pytest.mark.parametrize(
    "path", ["/", "/-/routes", "/-/healthz/", "/docs", "/watchx", "/v2/x", "//v1/echo", "/healthz"]
)
def test_other_paths_do_not_exist(port: int, path: str) -> None:
    assert status(exchange(port, request(path, b"", "GET"))) == 404


def test_methods_and_upgrades(port: int) -> None:
    assert status(exchange(port, request("/v1/echo", b"", "BREW"))) == 405
    upgrade = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13"]
    assert b"101" not in exchange(port, request("/v1/echo", b"", "GET", *upgrade))[:20]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Authorization: Bearer",
        f"Authorization: {KEY}",
        f"Authorization: Basic {KEY}",
        f"Authorization: Bearer {KEY}x",
        f"Authorization: Bearer {KEY[:-1]}",
        "Authorization: Bearer \xff\xfe",
        f"X-Api-Key: {KEY}",
    ],
)
def test_without_the_key_nothing_is_read(locked: int, header: str) -> None:
    for path in ("/v1/echo", "/watch/api/walk", "/nowhere"):
        answer = exchange(locked, request(path, b"x", "POST", *([header] if header else [])))
        assert status(answer) == 401 and b"www-authenticate: Bearer" in answer and KEY.encode() not in answer


def test_who_sends_much_with_a_wrong_key_hears_of_the_key() -> None:
    """A client that is still sending images when it is refused would see a connection reset, and look elsewhere."""
    large = Limits(body_bytes=16 << 20, head_s=2.0)
    with running(KEY, limits=large) as open_port:
        answer = exchange(open_port, request("/v1/echo", bytes(12 << 20), "POST", "Authorization: Bearer wrong"))
        assert status(answer) == 401 and content(answer)["error"]["code"] == "invalid_api_key"
        started = time.monotonic()
        head = request("/v1/echo", b"", "POST").replace(b"Content-Length: 0", b"Content-Length: 9")
        assert status(exchange(open_port, head)) == 401, "one that sends nothing hears of it too, if later"
        assert time.monotonic() - started < 20
        waits = head.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        assert exchange(open_port, waits).startswith(b"HTTP/1.1 401"), "nor is anything asked for that is not wanted"


def test_with_the_key(locked: int) -> None:
    """The page's own files need none; its requests carry the key on, others leave it at the door."""
    bearer = f"Authorization: bearer {KEY}"
    assert "authorization" not in content(exchange(locked, request("/v1/echo", b"", "POST", bearer)))["headers"]
    seen = content(exchange(locked, request("/watch/api/walk", b"", "POST", bearer)))
    assert seen["headers"]["authorization"] == f"bearer {KEY}"
    for path in ("/health", "/-/healthz", "/watch", "/watch/", "/watch/style.css"):
        assert status(exchange(locked, request(path, b"", "GET"))) == 200
        for method, body in (("POST", b""), ("POST", b"x"), ("GET", b"x")):  # a body takes room from those who have it
            assert status(exchange(locked, request(path, body, method))) == 401


@pytest.mark.parametrize("wrong", ["", " \n", "short", "15-letters-long", "a key of many words", "\u00e4" * 20])
def test_a_key_that_is_none_opens_nothing(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A secret may be empty, and then nobody may come in rather than everybody."""
    monkeypatch.setenv(KEY_VARIABLE, wrong)
    with pytest.raises(UserError, match=KEY_VARIABLE):
        middlewares()


def test_the_key_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert middlewares()[0].args[1] is None
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef\n")  # as `kubectl create secret --from-file` makes it
    assert middlewares()[0].args[1] == "0123456789abcdef"
