"""Where jobs go: an address is understood and checked here, before Ray or the toolkit make something else of it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from urllib.parse import urlsplit

from clew.errors import UserError

TOOLKIT = "sagemaker_ray"
"""Module of toolkit-for-ray-on-sagemaker-ai, and the scheme of its addresses."""
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_FORMS = "http://HOST:8265, https://HOST, or sagemaker_ray://CLUSTER/NAMESPACE"


def check_address(address: str) -> str:
    """Returns an address that Ray's job client takes as it is meant.

    Args:
        address: ``http://HOST:PORT``, ``https://HOST[:PORT]`` (either with a path, behind a gateway),
            ``sagemaker_ray://CLUSTER[/NAMESPACE]`` or ``sagemaker_ray://DASHBOARD-HOST``.

    Raises:
        UserError: it is something else, or its toolkit is not installed.
    """
    # These two first: no other message may repeat what could let somebody in.
    if "@" in address:
        raise UserError(
            "--address holds a user or a password, which logs would show: leave them out (a cluster with token "
            "authentication takes RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH)"
        )
    if re.search(r"[?#]", address):
        raise UserError(
            "--address ends in a query, as a browser's sign-in link does: give the dashboard's own address, "
            "http://HOST:8265 or https://HOST, or sagemaker_ray://CLUSTER/NAMESPACE, which signs in by itself"
        )
    if re.search(r"\s|[^!-~]", address):
        raise UserError(f"--address {address!r} holds spaces or odd characters: give {_FORMS}")
    scheme, separator, rest = address.partition("://")
    if not separator:
        hint = f"http://{address}" if re.fullmatch(r"[\w.-]+:\d+", address) else _FORMS
        raise UserError(f"--address {address} has no scheme: give {hint}")
    if scheme in ("http", "https"):
        return _dashboard(address)
    if scheme == TOOLKIT:
        return _toolkits(address, rest.removesuffix("/"))
    if scheme == "ray":
        host = rest.partition(":")[0] or "HOST"
        raise UserError(
            f"--address {address} is a Ray Client's; jobs go to the dashboard: give http://{host}:8265 (the port "
            "that `ray start` shows for it)"
        )
    raise UserError(f"--address {address}: jobs can't be sent by {scheme}://; give {_FORMS}")


def _dashboard(address: str) -> str:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise UserError(f"--address {address} is no address ({error}): give {_FORMS}") from error
    host = parts.hostname or ""
    if not _HOST.fullmatch(host) and not re.fullmatch(r"[0-9a-f:]*:[0-9a-f:.]*", host):  # a name, IPv4 or IPv6
        raise UserError(f"--address {address} names no host: give {_FORMS}")
    if parts.scheme == "http" and port is None:
        raise UserError(
            f"--address {address} has no port: the dashboard's is usually 8265, {parts.scheme}://{host}:8265"
        )
    return address.rstrip("/")


def _toolkits(address: str, rest: str) -> str:
    cluster, slash, namespace = rest.partition("/")
    if not cluster:
        raise UserError(f"--address {address} names no cluster: give {TOOLKIT}://CLUSTER/NAMESPACE")
    if "/" in namespace:
        raise UserError(
            f"--address {address} has too many parts: give {TOOLKIT}://CLUSTER/NAMESPACE, e.g. "
            f"{TOOLKIT}://{cluster}/{namespace.partition('/')[0]}"
        )
    if "." in cluster:  # the host of a dashboard
        if slash or not _HOST.fullmatch(cluster):
            raise UserError(f"--address {address}: give {TOOLKIT}://CLUSTER/NAMESPACE, or {TOOLKIT}://DASHBOARD-HOST")
    else:
        for what, name in (("cluster", cluster), *((("namespace", namespace),) if slash else ())):
            if not re.fullmatch(_LABEL, name):
                raise UserError(
                    f"--address {address}: {name!r} is no name of a {what}, which has at most 63 of a-z, 0-9 and -: "
                    f"give {TOOLKIT}://CLUSTER/NAMESPACE"
                )
    if find_spec(TOOLKIT) is None:
        raise UserError(
            f'--address {address} needs the toolkit for Ray on SageMaker, which is missing: pip install "clew[aws]"'
        )
    return f"{TOOLKIT}://{rest}"
