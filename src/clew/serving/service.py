"""What a RayService runs: the API of ``clew serve`` with Ray Serve LLM and vLLM, from the arguments of a manifest."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray.serve import Application

from clew.errors import UserError
from clew.serving.deployments import vllm_application
from clew.serving.engine import EngineSettings
from clew.serving.keys import read_server_key
from clew.serving.limits import KEY_VARIABLE
from clew.serving.llm import refuse_folder


class ServiceArguments(BaseModel):
    """What a manifest says of the service.

    Attributes:
        model: folder, the same one on every machine.
        name: of the base model in requests.
        adapters: ``s3://bucket/prefix``, or None.
        max_adapters: loaded at once by an engine.
        engines: one GPU each.
        device: ``cuda``; ``cpu`` where vLLM's CPU build is installed.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    name: str
    adapters: str | None = None
    max_adapters: int = Field(default=4, ge=1)
    engines: int = Field(default=1, ge=1)
    device: Literal["cuda", "cpu"] = "cuda"


def chat(arguments: dict[str, Any]) -> Application:
    """Builds the application: ``import_path: clew.serving.service:chat``, with ``ServiceArguments`` as ``args``.

    It is called where there may be no GPU, so the device is an argument. The proxy before the application has Clew's
    guard (key, limits) when the machines' environment holds ``clew.serving.limits.GUARDED``.

    Raises:
        UserError: there is no key, the model's folder is none, or the adapters are in no S3.
        pydantic.ValidationError: an argument is missing, unknown or of the wrong type.
    """
    asked = ServiceArguments.model_validate(arguments)
    if read_server_key(None) is None:
        raise UserError(f"{KEY_VARIABLE} is not set: whoever reaches the cluster could use the service")
    refuse_folder(asked.adapters)
    settings = EngineSettings(
        model=asked.model,
        adapters=asked.adapters,
        cache=str(Path(tempfile.gettempdir()) / "clew-adapters"),  # a pod's own
        max_adapters=asked.max_adapters,
        threads=1,  # of torch here, where nothing is computed
        device=asked.device,
    )
    return vllm_application(asked.name, settings, asked.engines)
