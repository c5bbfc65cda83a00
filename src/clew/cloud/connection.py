"""A cluster's job server, through lost connections, ended sessions and machines that are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from clew.cloud.address import TOOLKIT
from clew.cloud.ray_client import JobClient, SessionEnded, Unreachable, connect
from clew.errors import UserError

T = TypeVar("T")
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class Connection:
    """Asks a job server, with a new client whenever the last one's session or connection is over.

    Args:
        address: a checked one (see ``check_address``).
        note: told when the cluster does not answer, and when it does again.
    """

    def __init__(self, address: str, note: Callable[[str], None]) -> None:
        self.address, self.note = address, note
        self._client: JobClient | None = None

    def client(self) -> JobClient:
        """The client of the moment; signs in if there is none.

        Raises:
            Unreachable, SessionEnded, UserError: see ``connect``.
        """
        if self._client is None:
            self._client = connect(self.address)
        return self._client

    def ask(self, question: Callable[[JobClient], T], patience_s: float = 0.0) -> T:
        """Asks until there is an answer.

        Args:
            question: called with a client, again after each failure.
            patience_s: seconds for which a cluster that does not answer is waited for.

        Raises:
            Unreachable: nobody answered for so long.
            UserError: the session can't be renewed.
            NoSuchJob: as raised by the question.
        """
        until, pause, waiting, renewed = time.monotonic() + patience_s, _PAUSE_S, False, False
        while True:
            try:
                answer = question(self.client())
            except SessionEnded as ended:
                self._client = None
                if renewed or not self.address.startswith(TOOLKIT):
                    raise self._not_let_in(ended) from ended
                renewed = True
            except Unreachable as silence:
                self._client = None  # the same name may lead to another machine now
                if time.monotonic() + pause > until:
                    raise
                if not waiting:
                    self.note(
                        f"{self.address} does not answer ({silence}); waiting for it, up to {_minutes(patience_s)}"
                    )
                waiting = True
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            except UserError as refusal:
                if renewed:  # it was let in before
                    raise UserError(
                        f"{refusal}; what was submitted goes on, and the same command follows it"
                    ) from refusal
                raise
            else:
                if waiting:
                    self.note(f"{self.address} answers again")
                return answer

    def _not_let_in(self, ended: SessionEnded) -> UserError:
        if self.address.startswith(TOOLKIT):
            return UserError(
                f"--address {self.address}: the gateway ended the session and signing in again did not help ({ended}); "
                "renew your AWS credentials; what was submitted goes on, and the same command follows it"
            )
        return UserError(
            f"--address {self.address}: the dashboard lets nobody in without signing in ({ended}); give "
            f"{TOOLKIT}://CLUSTER/NAMESPACE, or, for Ray's own tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
