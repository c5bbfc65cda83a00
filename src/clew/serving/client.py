"""A client of OpenAI-compatible endpoints: what is asked, what may go wrong, and when it is asked again."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx2

from clew.errors import UserError
from clew.rollout.engine import Sampling
from clew.serving.limits import KEY_VARIABLE

_ASKED_AGAIN = (408, 429, 500, 502, 503, 504)
_PAUSES_S = (0.25, 8.0)  # between two tries of one request: the first, the longest
_LONGEST_MESSAGE = 300  # characters of what a server says


class Unreachable(Exception):
    """The endpoint gave no answer, though it was asked again: infrastructure, nothing that the model did."""


class Refused(UserError):
    """The endpoint answered that it will not do this, so asking again would not help.

    Attributes:
        status: the HTTP status.
        code: the error's code in OpenAI's vocabulary, where it has one.
    """

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Answer:
    """One chat completion.

    Attributes:
        text: what the model said, without its end of turn.
        ended: whether the model ended its turn itself; otherwise the answer was cut at the token limit.
        prompt_tokens: length of the conversation before the answer, images included; None if the server doesn't say.
    """

    text: str
    ended: bool
    prompt_tokens: int | None


class ChatClient:
    """Talks to one endpoint. Safe between threads.

    A request that meets a busy or failing server (408, 429, 5xx, no connection, a timeout) is sent again after growing
    pauses, or after the one that the server asks for. It is given up when the server has given nobody an answer for
    ``patience_s``: one that is slow but at work is waited for, and one that is gone costs that time once.

    Args:
        url: of the server, e.g. ``http://127.0.0.1:8000``; a ``/v1`` at its end may be there or not.
        key: sent as the bearer token.
        timeout_s: of one try.
        transport: how bytes travel; for servers in this process.

    Raises:
        UserError: ``url`` is none.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_s: float = 120.0,
        patience_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.url = base_url(url)
        self.patience_s = patience_s
        self._key = key
        self._http = httpx2.Client(
            base_url=f"{self.url}/v1/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=None),  # whoever asks knows how many it is
            trust_env=httpx2.URL(self.url).host not in ("127.0.0.1", "localhost", "::1"),  # no proxy leads to oneself
            transport=transport,
        )
        self._closed = threading.Event()
        self._silent_since: float | None = None  # when the first of the tries began that all failed since
        self._lock = threading.Lock()

    def models(self) -> list[str]:
        """The ids of the models that the server offers. Asked once.

        Raises:
            Unreachable: no answer.
            Refused: the server wants a key, or is no OpenAI-compatible one.
        """
        listed = self._ask("GET", "models", again=False)
        try:
            return [str(entry["id"]) for entry in listed["data"]]
        except (KeyError, TypeError) as error:
            raise Refused(f"{self.url}/v1/models is no list of models as OpenAI's API has it", 200) from error

    def complete(self, model: str, messages: list[dict[str, Any]], sampling: Sampling, seed: int) -> Answer:
        """The next answer of a conversation.

        Args:
            seed: 64 bits, unsigned, that fix the draws (see ``wire_seed``).

        Raises:
            Unreachable: no answer.
            Refused: a key, a model, an adapter or a conversation that the server does not take.
        """
        body = {
            "model": model,
            "messages": messages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": wire_seed(seed),
        }
        completion = self._ask("POST", "chat/completions", body)
        try:
            (choice,) = completion["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"{self.url} answered with something that is no chat completion", 200) from error
        if reason not in ("stop", "length"):
            raise Refused(f"{self.url} ended an answer with {reason!r}, where only stop and length make sense", 200)
        tokens = (completion.get("usage") or {}).get("prompt_tokens")
        return Answer(text or "", reason == "stop", tokens if isinstance(tokens, int) else None)

    def close(self) -> None:
        """Drops all connections; a request that is waiting to be sent again gives up."""
        self._closed.set()
        self._http.close()

    def _ask(self, method: str, path: str, body: object = None, *, again: bool = True) -> Any:
        pause, longest = _PAUSES_S
        while True:
            began, asked_for = time.monotonic(), 0.0
            try:
                response = self._http.request(method, path, json=body)
            except (httpx2.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
                trouble = f"{self.url} gives no answer ({str(error) or type(error).__name__})"
            else:
                if response.status_code not in _ASKED_AGAIN:
                    with self._lock:
                        self._silent_since = None
                    return self._content(response)
                trouble = f"{self.url} answers {_status(response)}: {self._message(response)}"
                asked_for = _retry_after(response)
            if not again or not self._worth_waiting(began, max(pause, asked_for)):
                raise Unreachable(trouble)
            pause = min(2 * pause, longest)

    def _worth_waiting(self, began: float, pause: float) -> bool:
        """Waits before another try, unless the endpoint has been silent for too long."""
        with self._lock:
            since = self._silent_since = began if self._silent_since is None else self._silent_since
        left = since + self.patience_s - time.monotonic()
        return left > 0 and not self._closed.wait(min(pause, left))

    def _content(self, response: httpx2.Response) -> Any:
        if response.status_code in (401, 403):
            key = "refuses this API key" if self._key else "wants an API key"
            raise Refused(f"{self.url} {key}: set {KEY_VARIABLE} or --api-key-file", response.status_code)
        if not response.is_success:
            said = f"{self.url} answers {_status(response)}: {self._message(response)}"
            raise Refused(said, response.status_code, _error(response).get("code"))
        try:
            return response.json()
        except ValueError as error:
            raise Refused(f"{self.url} answers with something that is no JSON: is it a chat API?", 200) from error

    def _message(self, response: httpx2.Response) -> str:
        said = str(_error(response).get("message") or response.text)
        said = " ".join(re.sub(r"[^\x20-\x7e]+", " ", said).split())[:_LONGEST_MESSAGE] or "(nothing)"
        return said.replace(self._key, "(the key)") if self._key else said


def wire_seed(seed: int) -> int:
    """An unsigned 64-bit seed as a request holds it: the signed integer of the same 64 bits.

    ``seed % 2**64`` undoes it, so that the server's engine draws what the trainer's would have drawn.
    """
    return seed - 2**64 if seed >= 2**63 else seed


def base_url(url: str) -> str:
    """The address of a server without ``/v1`` and slashes at its end.

    Raises:
        UserError: it is no http(s) address, or holds a password, a query or a fragment.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise UserError(f"--url {url!r} is no address ({error}): give one like http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"--url {url!r} is no http address: give one like http://127.0.0.1:8000")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise UserError(f"--url must hold no user, password, query or fragment: give a key with {KEY_VARIABLE}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _status(response: httpx2.Response) -> str:
    try:
        return f"{response.status_code} {HTTPStatus(response.status_code).phrase}"
    except ValueError:
        return str(response.status_code)


def _error(response: httpx2.Response) -> dict[str, Any]:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _retry_after(response: httpx2.Response) -> float:
    """Seconds that the server asks to wait; 0 where it doesn't say so in seconds."""
    wanted = response.headers.get("Retry-After", "")
    return float(wanted) if re.fullmatch(r"\d{1,6}(\.\d{1,3})?", wanted) else 0.0
