"""``clew cluster render``: image, manifests and an index that put a recipe on HyperPod's EKS, made to be read."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from clew import __version__
from clew.checkpoint import write_file_atomic
from clew.cloud.command import entrypoint, refuse_own_folder, refuse_secrets
from clew.errors import UserError
from clew.recipe import WARM_START, Recipe
from clew.rollout.lora_room import LORA_RANKS
from clew.runtime.hub_folder import HubFolder
from clew.runtime.placement import place
from clew.runtime.run_directory import default_run_dir
from clew.serving.limits import GUARDED, HTTP_TIMES, KEY_VARIABLE, Limits

RAY, SKYRLS_RAY, SKYRL = "2.60.0", "2.57.0", "0.4.0"
"""Versions that Clew is tested with: Ray, the one that SkyRL pins, SkyRL."""
VISGYM_COMMIT = "0289034b0cefa6fbbad27f7dd8c01545df324afd"
BASES = {
    "ray_base": f"rayproject/ray:{RAY}-py312-gpu",
    "skyrl_base": f"novaskyai/skyrl-train-ray-{SKYRLS_RAY}-py3.12-cu13.0",
}
RECIPE_DIR = "/etc/clew"
RETRIES = 3
_NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # of YAML 1.1
_TEMPLATES = Path(__file__).parent / "templates"
_MARK = "<!-- Rendered by `clew cluster render`."

FILES = {
    "image/Dockerfile": "container image of head and workers",
    "image/serve.Dockerfile": "container image of what is served",
    "image/build.sh": "builds the images and pushes them to ECR",
    "service-account.yaml": "what the pods run as, and how it gets rights in AWS",
    "storage-class.yaml": "how a new FSx for Lustre file system is made",
    "persistent-volume.yaml": "the FSx for Lustre file system that exists",
    "volume-claim.yaml": "the shared file system, as the pods name it",
    "recipe.yaml": "the recipe, every value in force",
    "ray-job.yaml": "the run as one job with a cluster of its own",
    "ray-cluster.yaml": "instead: a cluster that stays, to submit jobs to",
    "ray-service.yaml": "base model and adapters, served",
}
"""Every file that may be rendered beside README.md, in the order of the index, and what it is."""


def render(recipe: Recipe, to: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Writes the files of a recipe's cluster into a folder; those of an earlier rendering are replaced.

    Args:
        to: folder to write to: new, empty, or rendered before.
        arguments: recipe and overrides, as they were given on the command line; the index repeats them.

    Returns:
        What is still to be set before it can be used: key of the recipe -> meaning.

    Raises:
        UserError: the recipe needs no cluster or can't run on one, or the folder holds other things.
    """
    texts, unset = rendered(recipe, to, arguments)
    _check_folder(to)
    for name in FILES.keys() - texts.keys():
        (to / name).unlink(missing_ok=True)
    for name, text in texts.items():
        write_file_atomic(to / name, text)
    (to / "image/build.sh").chmod(0o755)
    return unset


def rendered(recipe: Recipe, to: Path, arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The files' texts by their names, and what is still to be set; see ``render``."""
    _check_recipe(recipe)
    facts, unset = _facts(recipe, to, arguments)
    made = dict(FILES)
    del made["persistent-volume.yaml" if recipe.cluster.file_system is None else "storage-class.yaml"]
    if not facts["served"]:
        del made["ray-service.yaml"], made["image/serve.Dockerfile"]
    facts["files"] = made
    environment = Environment(  # manifests and scripts, no HTML
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quoted": quoted, "scalar": scalar}
    names = ["README.md", *made]
    return {name: environment.get_template(f"{Path(name).name}.j2").render(facts) for name in names}, unset


def printable(text: str) -> str:
    """A text of TOML, or in double quotes, whose odd characters are escaped, which TOML and YAML spell alike."""
    return "".join(
        letter if letter == "\n" or (letter.isprintable() and letter != "\ufeff") else f"\\U{ord(letter):08X}"
        for letter in text
    )


def quoted(text: str) -> str:
    """A text as YAML writes it in double quotes, on one line."""
    return printable(json.dumps(text, ensure_ascii=False))


def scalar(text: str) -> str:
    """A name as YAML writes it: plain, or in quotes where it would be read as a number, a truth value or nothing."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9._/:@-]*", text) and text.lower() not in _NO_TEXT
    return text if plain else quoted(text)


def _check_recipe(recipe: Recipe) -> None:
    runtime = recipe.runtime
    if runtime.kind == "local":
        raise UserError('runtime.kind = "local" needs no cluster: render with runtime.kind=ray or runtime.kind=skyrl')
    if runtime.shared_dir is None:
        raise UserError(
            "runtime.shared_dir is left out, but head and workers need a folder that all see: set it, e.g. /shared"
        )
    if not re.fullmatch(r"(/[A-Za-z0-9][A-Za-z0-9._-]*)+", runtime.shared_dir):
        raise UserError(
            f"runtime.shared_dir = {json.dumps(runtime.shared_dir)} is no place to mount a file system at: choose an "
            "absolute path of letters, digits, '.', '_' and '-', e.g. /shared"
        )
    if runtime.address is not None:
        raise UserError(
            f"runtime.address = {json.dumps(runtime.address)} is another cluster than the rendered one: leave it out"
        )
    if recipe.rollout.engine == "vllm" and recipe.model.lora.rank > LORA_RANKS[-1]:
        raise UserError(
            f"model.lora.rank = {recipe.model.lora.rank}: vLLM loads ranks up to {LORA_RANKS[-1]}; lower it"
        )
    refuse_own_folder(recipe)
    refuse_secrets(recipe)


def _check_folder(to: Path) -> None:
    try:
        if not to.exists() or not any(to.iterdir()):
            return
        readme = to / "README.md"
        if readme.is_file() and _MARK in readme.read_text("utf-8", "replace"):
            return
    except NotADirectoryError as error:
        raise UserError(f"--to {to} is a file: name a folder") from error
    except OSError as error:
        raise UserError(f"--to {to} cannot be read ({error.strerror}): name another folder") from error
    raise UserError(f"--to {to} holds other things: name a new folder, or one that was rendered before")


def cluster_name(recipe: Recipe) -> str:
    """The Ray cluster's name: ``cluster.name``, or what Kubernetes allows of the recipe's."""
    if recipe.cluster.name is not None:
        return recipe.cluster.name
    name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"clew-{name}")[:35].rstrip("-")


def _facts(recipe: Recipe, to: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Everything the templates name, and what is still to be set."""
    cluster, runtime, name = recipe.cluster, recipe.runtime, cluster_name(recipe)
    unset: dict[str, str] = {}

    def needed(key: str, meaning: str) -> str:
        value = getattr(cluster, key)
        if value is None:
            unset[f"cluster.{key}"] = meaning
        return value or f"SET-cluster.{key}"

    nodes = place(recipe).nodes
    gpus = 0 if recipe.model.device == "cpu" else max(len(node.devices) for node in nodes)
    shared_dir = str(runtime.shared_dir)
    run_dir = str(PurePosixPath(shared_dir) / default_run_dir(recipe))
    there = f"{RECIPE_DIR}/recipe.toml"
    not_served = _not_served(recipe, gpus)
    facts = {
        "recipe": recipe,
        "cluster": cluster,
        "title": printable(recipe.name).replace("\n", " "),
        "names": {
            "cluster": name,
            "job": f"{name}-job",
            "service": f"{name}-serve",
            "recipe": f"{name}-recipe",
            "storage": f"{name}-fsx",
        },
        "nodes": len(nodes),
        "gpus": gpus,
        "shared_dir": shared_dir,
        "run_dir": printable(run_dir),
        "recipe_dir": RECIPE_DIR,
        "recipe_toml": printable(recipe.to_toml()),
        "entrypoint": entrypoint(there, run_dir, prepare=True),
        "retries": RETRIES,
        "address": f"sagemaker_ray://{name}/{cluster.namespace}",
        "command": printable(shlex.join(["clew", "cluster", "render", *arguments, "--to", str(to)])),
        "folder": printable(shlex.quote(str(to))),
        "image": needed("image", "the image that image/build.sh pushed (`--image` sets it too)"),
        "ray_version": SKYRLS_RAY if runtime.kind == "skyrl" else RAY,
        "serve_ray_version": RAY,
        "skyrl_version": SKYRL,
        "skyrl_ref": f"skyrl-v{SKYRL}",
        "visgym_commit": VISGYM_COMMIT,
        "visgym": recipe.environment.id.startswith("visgym:"),
        "gym": recipe.environment.id.startswith(("visgym:", "gym:")),
        "extras": ",".join(_extras(recipe)),
        "version": __version__,
        "served": not_served is None,
        "not_served": not_served,
        **BASES,
        **_storage(recipe, needed),
    }
    if facts["served"]:
        facts |= _serving(recipe, needed, unset)
    return facts | {"unset": unset}, unset


def _extras(recipe: Recipe) -> list[str]:
    """Clew's extras that a run on Ray needs; `aws` for exporting to S3, and for the watch for hung jobs."""
    vllm = ["vllm"] if recipe.rollout.engine == "vllm" else []
    gym = ["gym"] if recipe.environment.id.startswith(("visgym:", "gym:")) else []
    return ["ray", "aws", *vllm, *gym]


def _storage(recipe: Recipe, needed: Callable[[str, str], str]) -> dict[str, Any]:
    if recipe.cluster.file_system is None:
        return {
            "storage_file": "storage-class.yaml",
            "subnet": needed("subnet", "the workers' subnet, for a new file system (or name one: cluster.file_system)"),
            "security_group": needed("security_group", "the security group of a new file system"),
        }
    return {
        "storage_file": "persistent-volume.yaml",
        "region": needed("region", "the region, which is part of the file system's address"),
        "mount_name": needed("mount_name", "what the file system calls its mount (`aws fsx describe-file-systems`)"),
    }


def _not_served(recipe: Recipe, gpus: int) -> str | None:
    """Why the recipe's model can't be served as the others are, as far as a recipe can tell; None if it can."""
    limits = Limits()
    if gpus == 0 or recipe.model.path == WARM_START:
        return f"Ray Serve LLM serves models of `{recipe.runtime.shared_dir}` on GPUs, which this recipe doesn't have"
    for key, wanted, most in (
        ("model.lora.rank", recipe.model.lora.rank, limits.lora_rank),
        ("environment.max_turns", recipe.environment.max_turns, limits.images),
        ("rollout.max_tokens", recipe.rollout.max_tokens, limits.context),
    ):
        if wanted > most:
            return f"`{key} = {wanted}` is more than the {most} that Clew's server takes"
    return None


def _serving(recipe: Recipe, needed: Callable[[str, str], str], unset: dict[str, str]) -> dict[str, Any]:
    model = recipe.model
    source = model.path
    if not source.startswith("/"):
        commit = model.revision if re.fullmatch(r"[0-9a-f]{40}", model.revision or "") else None
        if commit is None:
            unset["model.revision"] = "commit of the hub's model, to serve the one that `clew prepare` found"
        root = Path(str(recipe.runtime.shared_dir))
        found = HubFolder(source, (model.subfolder or "").strip("/"), model.revision or "main", root)
        source = str(found.folder(commit or "SET-model.revision"))
    return {
        "serve_image": needed("serve_image", "the image for serving that image/build.sh pushed"),
        "adapters": needed("adapters", "the S3 prefix that adapters are exported to, s3://bucket/prefix"),
        "model_id": model.served_name,
        "model_source": source,
        "guarded": GUARDED,
        "key_variable": KEY_VARIABLE,
        "http_times": HTTP_TIMES,
    }
