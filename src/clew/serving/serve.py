"""``clew serve``: a Ray of its own on this machine, the applications on it, until Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import ipaddress
import logging
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clew.console import say
from clew.errors import UserError
from clew.serving.limits import GUARDED, HTTP_TIMES, KEY_VARIABLE
from clew.serving.llm import refuse_folder
from clew.serving.store import StorageTrouble, open_store

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import LoggingConfig
    from rich.console import Console

    from clew.recipe import Recipe

_SHOWN = 20  # adapters that are listed on the console
_CPUS = 8  # for Ray to count with, however many there are: Serve LLM's parts want whole ones, and would wait for ever


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        model: folder.
        name: of the base model in requests.
        adapters: a folder or s3://bucket/prefix, or None.
        host, port: to listen at; port 0 takes a free one.
        max_adapters: loaded at once.
        key: bearer token, or None.
        engine: ``transformers`` or ``vllm``.
        recipe: whose mazes the page shows.
    """

    model: str
    name: str
    adapters: str | None
    host: str
    port: int
    max_adapters: int
    key: str | None = field(repr=False)
    engine: str
    recipe: Recipe


def is_local(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(host: str, port: int) -> int:
    """The port to listen at.

    Raises:
        UserError: it is taken, or the host is none of this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:  # Ray's proxy would share the port with whoever has it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (OSError, ValueError) as error:  # ValueError: a name that can be none, which is never looked up
        raise UserError(f"--host {host} --port {port} can't be used ({error}): name another") from error


@contextlib.contextmanager
def ray_of_our_own(engine: str) -> Iterator[None]:
    """A Ray for nobody else, that ends with this process."""
    os.environ.update(GUARDED)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # as on those: every port of Ray's is on 127.0.0.1
    if engine == "transformers":  # its replicas never block their loops: one thread less on the way of every request
        os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
        os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let any other program halt the server
    # Never without: Serve's replicas listen on every address for pickles of each other's, whatever else is said here.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # and so no token file at home
    import ray  # reads these variables when it is imported

    ray.init(
        address="local",
        num_cpus=_CPUS,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


def serve(options: Options, console: Console) -> None:
    """Serves until Ctrl-C or SIGTERM.

    Raises:
        UserError: something that is asked for isn't there.
        KeyboardInterrupt: it was stopped before it served.
    """
    from clew.policy.model import load_processor

    if options.engine == "vllm":
        refuse_folder(options.adapters)
    load_processor(options.model)  # says now what is wrong with the folder
    cache = _cache()
    names: list[str] = []
    if options.adapters is not None:
        try:
            names = open_store(options.adapters, cache).names()
        except StorageTrouble as error:
            raise UserError(f"--adapters {options.adapters}: {error}") from error
    say(console, f"starting {options.name}: seconds for a small model, minutes for a large one")
    with serving(options, cache) as url:
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has a handler of its own until then
        try:
            announce(options, url, names, console)
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            console.print("stopping: takes some seconds")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def serving(options: Options, cache: Path) -> Iterator[str]:
    """The server, for as long as the context lasts; yields its URL."""
    port = free_port(options.host, options.port)
    if options.key is None:
        os.environ.pop(KEY_VARIABLE, None)
    else:
        os.environ[KEY_VARIABLE] = options.key  # Ray's proxy reads it there
    with ray_of_our_own(options.engine):
        from ray import serve
        from ray.serve.config import HTTPOptions
        from ray.serve.schema import LoggingConfig

        from clew.serving.deployments import watch_application

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        http = HTTPOptions(host=options.host, port=port, **HTTP_TIMES)
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
        try:
            _run(_chat(options, cache), "chat", "/", quiet)
            shown = "127.0.0.1" if options.host in ("localhost", "0.0.0.0") else options.host
            url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
            page = watch_application(options.recipe, url)
            _run(page, "watch", "/watch", quiet)
            yield url
        finally:
            # Ray prints what its parts say of each other's end, though it was told to be quiet.
            with contextlib.redirect_stdout(io.StringIO()):
                serve.shutdown()


def _run(application: Application, name: str, route_prefix: str, logging_config: LoggingConfig) -> None:
    """Starts an application and waits until it serves.

    Raises:
        UserError: what the application's process found wrong with what it was given.
    """
    from ray import serve

    try:
        serve.run(application, name=name, route_prefix=route_prefix, logging_config=logging_config)
    except RuntimeError as error:  # which says only that it failed
        deployments = serve.status().applications[name].deployments.values()
        said = re.search(
            r"^clew\.errors\.UserError: (.+)", "\n".join(deployment.message for deployment in deployments), re.M
        )
        if said is None:
            raise
        raise UserError(said[1]) from error


def _chat(options: Options, cache: Path) -> Application:
    """The API, with the engine that was chosen."""
    import torch

    from clew.serving.deployments import chat_application, vllm_application
    from clew.serving.engine import EngineSettings, default_threads

    settings = EngineSettings(
        model=options.model,
        adapters=options.adapters,
        cache=str(cache),
        max_adapters=options.max_adapters,
        threads=default_threads(),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    application = vllm_application if options.engine == "vllm" else chat_application
    return application(options.name, settings)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
    return Path(root) / "clew" / "adapters"


def announce(options: Options, url: str, names: list[str], console: Console) -> None:
    """Says what is served and how to ask for it."""
    lines = [f"serving {options.name} at {url}/v1 (Ctrl-C ends it)", f"models: {options.name}"]
    lines[1:] += [f"        {options.name}:{name}" for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        lines.append(f"        and {len(names) - _SHOWN} more: {url}/v1/models")
    lines.append(f"watch:  {url}/watch")
    message = '{"model": "%s", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if options.key else ""
    model = f"{options.name}:{names[-1]}" if names else options.name
    lines.append(
        f"try:    curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{message % model}'"
    )
    if not is_local(options.host) and options.key is None:
        lines.append(
            f"warning: anybody who reaches {options.host} may use this server: set {KEY_VARIABLE} or --api-key-file"
        )
    for line in lines:
        say(console, line)


def choose_engine(asked: str) -> str:
    """``transformers`` or ``vllm``.

    Raises:
        UserError: there is no such engine, or it is not installed.
    """
    if asked not in ("auto", "transformers", "vllm"):
        raise UserError(f"--engine {asked}: there is no such engine; there are transformers and vllm")
    installed = importlib.util.find_spec("vllm") is not None
    if asked == "vllm" and not installed:
        raise UserError("--engine vllm: vLLM is not installed; install it, or use --engine transformers")
    if asked == "auto":
        import torch

        return "vllm" if installed and torch.cuda.is_available() else "transformers"
    return asked
