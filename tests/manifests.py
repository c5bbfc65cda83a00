"""What the tests of rendered manifests share: the published recipe with an account's values, and what it renders to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from clew.cloud.render import rendered
from clew.recipe import Recipe, load_recipe

SET = [  # what the published recipe leaves to an account
    "cluster.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/clew:0.1.0-abc",
    "cluster.serve_image=rayproject/ray-llm:2.60.0",
    "cluster.subnet=subnet-0123456789abcdef0",
    "cluster.security_group=sg-0123456789abcdef0",
    "cluster.adapters=s3://models/maze",
    f"model.revision={'a1' * 20}",
]
STATIC = [
    "cluster.file_system=fs-0123456789abcdef0",
    "cluster.mount_name=abcdefgh",
    "cluster.region=us-west-2",
]


def hyperpod(*overrides: str) -> Recipe:
    return load_recipe("hyperpod", [*SET, *overrides])


def texts(recipe: Recipe) -> dict[str, str]:
    return rendered(recipe, Path("cluster"), ["hyperpod"])[0]


def objects(recipe: Recipe) -> dict[str, Any]:
    """Every manifest by its file: one object each."""
    made = {}
    for name, text in texts(recipe).items():
        if name.endswith(".yaml"):
            (made[name],) = yaml.safe_load_all(text)
    return made
