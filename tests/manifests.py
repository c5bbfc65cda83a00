"""What the tests of rendered manifests and the rehearsal share: an account's values, and the schemas.

KubeRay's own schemas (its three CRDs) are looked for in the folder that CLEW_KUBERAY_CRDS names, or in
shared/data/kuberay beside the repository.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from clew.cloud.render import rendered
from clew.recipe import Recipe, load_recipe

CRDS = Path(os.environ.get("CLEW_KUBERAY_CRDS") or Path(__file__).resolve().parents[2] / "shared/data/kuberay")

SET = [  # what the published recipe leaves to an account
    "cluster.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/clew:0.1.0-abc",
    "cluster.serve_image=123456789012.dkr.ecr.us-west-2.amazonaws.com/clew:0.1.0-abc-serve",
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


def cluster_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    return spec if manifest["kind"] == "RayCluster" else spec.get("rayClusterSpec") or spec["rayClusterConfig"]


def pods(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    spec = cluster_spec(manifest)
    yield "head", spec["headGroupSpec"]["template"]["spec"]
    (group,) = spec["workerGroupSpecs"]
    yield "worker", group["template"]["spec"]


@functools.cache
def kuberay_schema(kind: str) -> jsonschema.Draft202012Validator | None:
    """KubeRay's schema of a kind, in which fields that it does not know are errors; None if it is not here."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        return None
    crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"] if version["name"] == "v1")
    return jsonschema.Draft202012Validator(strict(schema))


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def check(manifest: dict[str, Any]) -> None:
    """Kubernetes' own schemas, strictly; of Ray's kinds the pods."""
    if manifest["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(manifest, "1.33", strict=True)
        return
    assert set(manifest["metadata"]) <= {"name", "namespace", "labels", "annotations"}
    for who, pod in pods(manifest):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": who}, "spec": pod}
        kubernetes_validate.validate(whole, "1.33", strict=True)
