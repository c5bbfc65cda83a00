"""What is said when a server can't start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray comes with clew[ray]")

from ray import serve
from ray.serve.schema import LoggingConfig

from clew.errors import UserError
from clew.recipe import load_recipe
from clew.serving.serve import Options, _run, free_port

CAUSE = """The deployment failed to start 3 times in a row. Error:
  File "/somewhere/clew/policy/model.py", line 123, in _load
    raise UserError(f"model.path: {path} can't be loaded ({reason})") from error
clew.errors.UserError: model.path: warm can't be loaded (incomplete metadata)"""


def test_what_a_process_of_rays_found_wrong_is_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(application: Any, **options: Any) -> None:
        raise RuntimeError("Failed to update the deployments ['engine'].")

    messages = ["", CAUSE]
    deployments = {str(n): SimpleNamespace(message=message) for n, message in enumerate(messages)}
    status = SimpleNamespace(applications={"chat": SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(serve, "run", fail)
    monkeypatch.setattr(serve, "status", lambda: status)
    application: Any = None
    with pytest.raises(UserError) as told:
        _run(application, "chat", "/", LoggingConfig())
    assert str(told.value) == "model.path: warm can't be loaded (incomplete metadata)"
    deployments["1"].message = "killed"
    with pytest.raises(RuntimeError, match="Failed to update"):
        _run(application, "chat", "/", LoggingConfig())


@pytest.mark.parametrize("host", ["a" * 70, "..", "no\0host"])
def test_a_host_that_can_be_none(host: str) -> None:
    with pytest.raises(UserError, match=r"--host .* can't be used"):
        free_port(host, 0)


def test_options_do_not_show_the_key() -> None:
    key = "0123456789abcdef-not-a-real-key"
    options = Options("model", "name", None, "127.0.0.1", 0, 4, key, "transformers", load_recipe("laptop"))
    assert key not in repr(options)
