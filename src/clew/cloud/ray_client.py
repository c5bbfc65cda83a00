"""Ray's job client with an end to its patience, and with names for the ways in which a cluster does not answer."""

from __future__ import annotations

import io
import logging
import os
from typing import Any

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from clew.cloud.address import TOOLKIT
from clew.errors import UserError

CONNECT_S, ANSWER_S = 10, 60
"""Seconds for a connection, and for an answer that has begun; Ray's own client waits for ever."""
_OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
_LATER = (408, 425, 429)  # beside all of 5xx: not now
_TRANSIENT = (
    *("unable to connect", "could not connect", "timed out", "temporarily unavailable", "request failed"),
    *("(http 5", "(http 429", "resource not found", "does not contain a connection url"),  # the last two: not yet there
)
"""What the toolkit says when a network or a cluster is away that may come back."""

for _part in ("dashboard_sdk", "job.sdk"):  # they tell of every package and every socket
    logging.getLogger(f"ray.dashboard.modules.{_part}").setLevel(logging.WARNING)
logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.WARNING)


class Unreachable(Exception):
    """Nobody answers there now, or only the gateway in front of it."""


class NoDashboard(Unreachable):
    """What answers there is something else: a gateway whose cluster is being made anew, or a wrong address."""


class SessionEnded(Exception):
    """The session that the gateway gave is over, or never was one."""


class NoSuchJob(Exception):
    """The cluster knows no such job."""


class JobClient(JobSubmissionClient):
    """Ray's client, whose requests raise ``Unreachable``, ``SessionEnded`` or ``NoSuchJob`` where that happened."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        # A redirect is a gateway's way to a sign-in page; what follows it would be taken for an answer.
        options = {"timeout": (CONNECT_S, ANSWER_S), "allow_redirects": False, **options}
        try:
            answer = super()._do_request(method, endpoint, **options)
        except AuthenticationError as error:
            raise SessionEnded(f"HTTP {401 if 'required' in str(error) else 403}") from error
        except requests.exceptions.SSLError as error:
            raise UserError(
                f"--address: the certificate of {self._address} is not trusted ({_reason(error)}); if it is your own, "
                "name its file in REQUESTS_CA_BUNDLE and SSL_CERT_FILE"
            ) from error
        except requests.RequestException as error:
            raise Unreachable(_reason(error)) from error
        if answer.is_redirect:
            target = answer.headers["Location"].partition("?")[0]  # what comes after it may be a secret
            raise SessionEnded(f"HTTP {answer.status_code}, which sends to {target}")
        status, about_jobs = answer.status_code, endpoint.startswith("/api/jobs/")
        if status == 404 and about_jobs and "does not exist" in answer.text:  # Ray's words; a gateway has others
            raise NoSuchJob(endpoint.removeprefix("/api/jobs/").partition("/")[0])
        refused_read = method == "GET" and about_jobs and status >= 400  # Ray would have answered it
        if status >= 500 or status in _LATER or refused_read:
            last = [line for line in answer.text.splitlines() if line.strip(" .")][-1:] or [""]
            raise Unreachable(f"HTTP {status} {last[0].strip()[:200]}".strip())
        if answer.ok and about_jobs and "json" not in answer.headers.get("Content-Type", ""):
            raise NoDashboard("what answers there is no Ray dashboard: a page, where jobs were asked for")
        return answer

    def get_job_logs(self, job_id: str) -> str:
        """See Ray's; of a log that is not all UTF-8 too, which Ray's way to it can't decode."""
        try:
            return super().get_job_logs(job_id)
        except Unreachable as error:
            if "UnicodeDecodeError" not in str(error):
                raise
        place = f"node_id={self.get_job_info(job_id).driver_node_id}&filename=job-driver-{job_id}.log"
        answer = self._do_request("GET", f"/api/v0/logs/file?{place}&lines=-1")
        if not answer.ok:
            raise Unreachable(f"HTTP {answer.status_code} for the log")
        # With the line ends that Ray's other ways make: what was shown of the log is counted in letters.
        return io.TextIOWrapper(io.BytesIO(answer.content), "utf-8", errors="replace").read()


def connect(address: str) -> JobClient:
    """A client of a checked address; signs in where the address is the toolkit's.

    Raises:
        Unreachable, SessionEnded: it may work later.
        UserError: it won't: who asks is not let in.
    """
    # Ray would let these decide where jobs go, whatever the address says.
    aside = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
    if address.startswith(TOOLKIT):  # a token of clusters on this machine is none of the gateway's business
        aside |= {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "")}
        os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        return JobClient(address)
    except (Unreachable, SessionEnded, UserError):
        raise
    except Exception as error:
        raise _understood(error, address) from error
    finally:
        for name, value in aside.items():
            if value:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


def _understood(error: Exception, address: str) -> Exception:
    """What an error in the making of a client means."""
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("toolkit_for_ray_on_sagemaker_ai"):
        if any(sign in text.lower() for sign in _TRANSIENT):
            return Unreachable(text)
        return UserError(f"--address {address}: {text}")
    if address.startswith(TOOLKIT) and isinstance(error, KeyError | TypeError | AttributeError | OSError):
        return UserError(
            f"--address {address}: the kubeconfig can't be used ({type(error).__name__}: {text}); write it anew with "
            "`aws eks update-kubeconfig`"
        )
    return NoDashboard(f"what answers there is no Ray dashboard: {text[:200]}")


def _reason(error: BaseException) -> str:
    """The innermost reason of a failed request, without addresses and objects around it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split())[:200] or type(error).__name__
