"""The door: what every request passes before Ray Serve sees it. Runs in the process of Ray's HTTP proxy.

Ray's proxy keeps a body in memory however long it is, waits for a slow sender for ever, and obeys headers of its own
that any client may send (an endless time limit, a model to be loaded, a request id that is no UTF-8). So this stands
before it: an HTTP/1.1 protocol with a time limit for heads and a bound on connections, and a middleware that checks the
key, reads the body within its bounds, and passes on a complete request with the few headers that the applications need.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import config as uvicorn_config
from uvicorn.protocols.http.h11_impl import H11Protocol

from clew.errors import UserError
from clew.serving.errors import ApiError, overloaded
from clew.serving.keys import read_server_key
from clew.serving.limits import KEY_VARIABLE, Budget, Limits

WATCH = "/watch"
_PROBED = {"/health", "/-/healthz"}  # ours, and Ray's own, which KubeRay asks
_PASSED_ON = {b"accept", b"content-type", b"host", b"if-modified-since", b"if-none-match", b"origin", b"range"}
_METHODS = {"GET", "HEAD", "POST"}  # a name is a label of Ray's metrics: not any word a client makes up
_GRACE_S = 5.0  # beyond a request's own time limit, within which the application itself should have ended it


def middlewares() -> list[Middleware]:
    """What Ray's proxy calls at its start (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``).

    Raises:
        UserError: the environment has a key that is none. Whoever sets one wants one: nothing is served without it.
    """
    key = read_server_key(None)
    if key is None and KEY_VARIABLE in os.environ:
        raise UserError(f"{KEY_VARIABLE} is empty: set it to a key (openssl rand -hex 32), or not at all")
    uvicorn_config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{GuardedProtocol.__name__}"
    uvicorn_config.WS_PROTOCOLS["auto"] = None  # nothing here speaks WebSocket
    return [Middleware(Guard, Limits(), key)]


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 (its heads have 64 KiB at most) with a time limit for heads and a bound on connections.

    A connection that was closed goes on while its client leaves unread what was sent, so it is cut off after a while.
    """

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None
    _watcher: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.abort()
        else:
            self._start_timer()
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if not self._in_request and self._timer is None:
            self._start_timer()
        super().data_received(data)
        if self._in_request:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_timer()
        if self._watcher is not None:
            self._watcher.cancel()
        super().connection_lost(exc)

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self, closing: bool = False) -> None:
        if closing and self.transport.is_closing():  # as it was the last time already
            self.transport.abort()
        else:
            self._watcher = self.loop.call_later(self.limits.head_s, self._watch, self.transport.is_closing())

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.limits.head_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Guard:
    """ASGI middleware: key, path, method, bounds of the body, number of requests, time.

    Args:
        app: what is guarded.
        limits: the bounds.
        key: bearer token that requests must carry; None lets everybody in.
    """

    def __init__(self, app: ASGIApp, limits: Limits, key: str | None) -> None:
        self.app, self.limits = app, limits
        self._key = key.encode() if key else None
        self._requests = 0
        self._budget = Budget(limits.held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")  # the protocol above lets none through
        exchange = _Exchange(send)
        body = _Body(receive, self.limits, self._budget)
        try:
            headers = dict(scope["headers"])
            body.declare(headers)
            try:
                self._check(scope["path"], scope["method"], headers, body)
                if self._key is None and _is_loopback(scope["server"]):
                    _check_host(headers)
            except ApiError:
                if b"expect" not in headers:  # else the client waits for leave to send
                    await body.discard()
                raise
            await body.read()
            if self._requests >= self.limits.requests:
                raise overloaded()
            self._requests += 1
            try:
                await self._pass_on(scope, body, exchange)
            finally:
                self._requests -= 1
        except ApiError as error:
            await exchange.refuse(error, close=not body.complete)
        except _Gone:
            pass
        finally:
            body.release()

    def _check(self, path: str, method: str, headers: dict[bytes, bytes], body: _Body) -> None:
        page = path == WATCH or path.startswith(f"{WATCH}/")
        file = page and not path.startswith(f"{WATCH}/api/")  # the page's own files
        # Reading costs little; a body takes of the room that all requests share.
        public = (path in _PROBED or file) and method in ("GET", "HEAD") and body.complete
        if self._key is not None and not public and not self._admits(headers.get(b"authorization", b"")):
            raise ApiError(401, "give the server's key: Authorization: Bearer KEY", "invalid_api_key")
        if not (path in _PROBED or page or path.startswith("/v1/")):
            raise ApiError(404, "there is nothing at this path: the API is under /v1, the page at /watch", "not_found")
        if method not in _METHODS:
            raise ApiError(405, "use GET or POST", "method_not_allowed")

    def _admits(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        assert self._key is not None
        return hmac.compare_digest(given.strip(), self._key) and scheme.lower() == b"bearer"

    async def _pass_on(self, scope: Scope, body: _Body, exchange: _Exchange) -> None:
        # The page asks the API in its visitor's name; nobody else behind this needs the key.
        passed_on = _PASSED_ON | {b"authorization"} if scope["path"].startswith(WATCH) else _PASSED_ON
        kept = [(name, value) for name, value in scope["headers"] if name in passed_on]
        kept.append((b"content-length", str(len(body.data)).encode()))
        try:
            async with asyncio.timeout(self.limits.request_s + _GRACE_S):
                await self.app({**scope, "headers": kept}, body.replay, exchange.send)
        except TimeoutError as error:
            if exchange.started:
                raise  # uvicorn closes the connection: the rest of the answer is missing
            raise ApiError(408, "the request took too long", "timeout") from error
        if not exchange.started:
            raise ApiError(503, "the server could not answer: try again", "unavailable")


def _is_loopback(address: tuple[str, int | None] | None) -> bool:
    return address is not None and ipaddress.ip_address(address[0]).is_loopback


def _check_host(headers: dict[bytes, bytes]) -> None:
    """Refuses names other than this machine's own for itself.

    A page in a browser on this machine may ask whatever its own name leads to, and its owner may have that name lead
    here (DNS rebinding). What is no name can't be led elsewhere.
    """
    host = headers.get(b"host", b"localhost").decode("latin-1").lower()
    name = re.sub(r":\d*$", "", host).strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name != "localhost":
            raise ApiError(
                403, "without a key this server is localhost and nothing else: give it a key", "forbidden_host"
            ) from None


class _Gone(Exception):
    """The client has hung up."""


class _Body:
    """A request's body, read as a whole within the limits, and handed on as a single message."""

    def __init__(self, receive: Receive, limits: Limits, budget: Budget) -> None:
        self._receive, self._limits, self._budget = receive, limits, budget
        self._declared = self._taken = 0
        self._handed_on = False
        self.data = b""
        self.complete = False

    def declare(self, headers: dict[bytes, bytes]) -> None:
        """Takes in what the head says of it (h11 has checked that a length is a number)."""
        self._declared = int(headers.get(b"content-length", b"0")[:15])
        self.complete = self._declared == 0 and b"transfer-encoding" not in headers

    async def read(self) -> None:
        """Reads it.

        Raises:
            ApiError: it is too long, too slow, or there is no room for it now.
            _Gone: the client has hung up.
        """
        if self._declared > 4 * self._limits.body_bytes:
            raise self._too_long()
        try:
            async with asyncio.timeout(self._limits.body_s):
                await self._read()
        except TimeoutError as error:
            raise ApiError(408, "the body came too slowly", "timeout") from error

    async def discard(self) -> None:
        """Reads what is refused and keeps nothing of it: whoever is still sending would hear of a reset, not of why.

        Raises:
            _Gone: the client has hung up.
        """
        length = 0
        with contextlib.suppress(TimeoutError):  # then it is refused in the middle
            async with asyncio.timeout(self._limits.head_s):
                while not self.complete and max(length, self._declared) <= 4 * self._limits.body_bytes:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    length += len(message.get("body", b""))
                    self.complete = not message.get("more_body", False)

    async def _read(self) -> None:
        parts: list[bytes] = []
        length = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            length += len(part)
            if length <= self._limits.body_bytes:
                if not self._budget.take(len(part)):
                    raise overloaded()
                self._taken += len(part)
                parts.append(part)
            elif length > 4 * self._limits.body_bytes:  # until then it is read, so that the client hears of it
                raise self._too_long()
            if not message.get("more_body", False):
                self.complete = True
                break
        if length > self._limits.body_bytes:
            raise self._too_long()
        self.data = b"".join(parts)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._limits.body_bytes} bytes", "request_too_large")

    async def replay(self) -> Message:
        """``receive`` for whoever comes behind."""
        if self._handed_on:
            return await self._receive()
        self._handed_on = True
        return {"type": "http.request", "body": self.data, "more_body": False}

    def release(self) -> None:
        """Gives back what it took of the budget."""
        self._budget.give(self._taken)
        self._taken = 0


class _Exchange:
    """The answer's side: whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, message: Message) -> None:
        """Passes a message on."""
        self.started = self.started or message["type"] == "http.response.start"
        await self._send(message)

    async def refuse(self, error: ApiError, close: bool) -> None:
        """Sends an error, unless the answer has begun."""
        if self.started:
            return
        content = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers}
        if close:
            headers["connection"] = "close"
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": content})
