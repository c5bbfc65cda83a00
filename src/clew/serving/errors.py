"""What a client is told when a request can't be answered: OpenAI's error objects."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: for the client: no path of this machine, no secret.
        code: a word that programs can test, as OpenAI's API has them.
        param: the part of the request that is meant.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def headers(self) -> dict[str, str]:
        """Beside the content type."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": "1"} if self.status == 503 else {}

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, code, param)


def overloaded() -> ApiError:
    """A 503 that asks to try again."""
    return ApiError(503, "the server is at work for as many requests as it takes at once: try again", "overloaded")
