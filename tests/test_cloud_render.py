"""`clew cluster render`: manifests that Kubernetes and KubeRay accept, and the facts a HyperPod cluster rests on."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import CRDS, SET, STATIC, check, cluster_spec, hyperpod, kuberay_schema, objects, pods, texts

from clew.cloud.render import FILES, cluster_name, quoted, rendered
from clew.recipe import load_recipe, parse_recipe
from clew.serving.limits import GUARDED, KEY_VARIABLE

RAY_FILES = ["ray-cluster.yaml", "ray-job.yaml", "ray-service.yaml"]


# ---- schemas


def kuberay(kind: str) -> jsonschema.Draft202012Validator:
    """KubeRay's schema of a kind; without it the test is skipped."""
    if (schema := kuberay_schema(kind)) is None:
        pytest.skip(f"KubeRay's schemas are not in {CRDS}: CLEW_KUBERAY_CRDS names their folder")
    return schema


VARIANTS = {
    "published": [],
    "existing file system": STATIC,
    "skyrl": ["runtime.kind=skyrl"],
    "a queue": ["cluster.queue=research", "cluster.access=public", "cluster.namespace=vision"],
    "on CPUs": ["model.device=cpu", "model.path=package:warm-start"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_manifest_is_valid(variant: str) -> None:
    made = objects(hyperpod(*VARIANTS[variant]))
    assert len(made) == len(FILES) - (5 if variant == "on CPUs" else 4)
    for name, manifest in made.items():
        check(manifest)
        assert manifest["kind"].lower() in name.replace("-", "") or name in ("volume-claim.yaml", "recipe.yaml")


@pytest.mark.parametrize("variant", VARIANTS)
def test_kuberay_knows_every_field(variant: str) -> None:
    for name, manifest in objects(hyperpod(*VARIANTS[variant])).items():
        if name in RAY_FILES:
            kuberay(manifest["kind"]).validate(manifest)


def test_unset_values_are_refused_by_what_reads_them() -> None:
    """They are no valid names of images, subnets or buckets: nothing of somebody else's is used by mistake."""
    recipe = load_recipe("hyperpod")
    made, unset = rendered(recipe, Path("cluster"), ["hyperpod"])
    assert set(unset) == {key.partition("=")[0] for key in SET}
    for key in unset:
        assert f"- `{key}`: " in made["README.md"]
        assert any(f"SET-{key}" in text for text in made.values()), key
    assert not rendered(hyperpod(), Path("cluster"), ["hyperpod"])[1]
    assert not any("SET-" in text for text in texts(hyperpod()).values())


@pytest.mark.parametrize(
    "path", ["spec.headGroupSpec.replicas", "spec.workerGroupSpecs.0.template.spec.gpus", "spec.x"]
)
def test_the_strict_schema_notices_a_misspelt_field(path: str) -> None:
    manifest = objects(hyperpod())["ray-cluster.yaml"]
    *way, last = path.split(".")
    place: Any = manifest
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = 1
    with pytest.raises(jsonschema.ValidationError, match="Additional properties are not allowed"):
        kuberay("RayCluster").validate(manifest)


# ---- the facts of a HyperPod cluster


@pytest.mark.parametrize("name", RAY_FILES)
def test_head_and_workers(name: str) -> None:
    manifest = objects(hyperpod())[name]
    spec = cluster_spec(manifest)
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "dashboard-host": "0.0.0.0"}
    (group,) = spec["workerGroupSpecs"]
    count = 1 if name == "ray-service.yaml" else 3
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (count, count, count)
    (head,), (worker,) = (pod["containers"] for _, pod in pods(manifest))
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert sorted(ports.values()) == [6379, 8000, 8080, 8265, 10001] and ports["metrics"] == 8080
    assert {"name": "metrics", "containerPort": 8080} in worker["ports"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    for amounts in (worker["resources"]["requests"], worker["resources"]["limits"]):
        assert amounts == {"cpu": "40", "memory": "400Gi", "nvidia.com/gpu": "2"}


@pytest.mark.parametrize("name", RAY_FILES)
def test_where_pods_run_and_what_they_see(name: str) -> None:
    instances = {"head": "ml.r5d.16xlarge", "worker": "ml.g7e.12xlarge"}
    for who, pod in pods(objects(hyperpod())[name]):
        assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": instances[who]}
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        ((expression,),) = (term["matchExpressions"] for term in required["nodeSelectorTerms"])
        key = "sagemaker.amazonaws.com/node-health-status"
        assert expression == {"key": key, "operator": "In", "values": ["Schedulable"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/shared"]]["persistentVolumeClaim"] == {"claimName": "fsx-claim"}
        host = {"name": "HYPERPOD_JMA_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
        assert host in container["env"]
        assert pod["serviceAccountName"] == "clew"
        if who == "worker":
            assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "120Gi"}


@pytest.mark.parametrize("name", RAY_FILES)
def test_access_and_queue(name: str) -> None:
    access = "access.sagemaker.amazonaws.com"
    metadata = objects(hyperpod())[name]["metadata"]
    assert metadata["annotations"] == {
        f"{access}/enabled": "true",
        f"{access}/access-strategy": "ray-access-strategy-private",
    }
    assert "labels" not in metadata
    metadata = objects(hyperpod("cluster.access=public", "cluster.queue=research"))[name]["metadata"]
    assert metadata["annotations"][f"{access}/access-strategy"] == "ray-access-strategy-public"
    assert metadata["labels"] == {"kueue.x-k8s.io/queue-name": "research"}


def test_a_new_file_system() -> None:
    made = objects(hyperpod())
    storage, claim = made["storage-class.yaml"], made["volume-claim.yaml"]
    assert storage["provisioner"] == "fsx.csi.aws.com" and storage["mountOptions"] == ["flock"]
    assert storage["parameters"]["deploymentType"] == "PERSISTENT_2"
    assert storage["parameters"]["subnetId"] == "subnet-0123456789abcdef0"
    assert storage["reclaimPolicy"] == "Retain"
    assert claim["metadata"]["name"] == "fsx-claim"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["storageClassName"] == storage["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1200Gi"
    assert "persistent-volume.yaml" not in made


def test_a_file_system_that_exists() -> None:
    made = objects(hyperpod(*STATIC))
    volume, claim = made["persistent-volume.yaml"], made["volume-claim.yaml"]
    assert volume["spec"]["mountOptions"] == ["flock"]
    assert volume["spec"]["csi"] == {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": "fs-0123456789abcdef0",
        "volumeAttributes": {
            "dnsname": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
            "mountname": "abcdefgh",
        },
    }
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {"namespace": "default", "name": "fsx-claim"}
    assert "storage-class.yaml" not in made


def test_the_job_runs_the_recipe_that_is_mounted() -> None:
    recipe = hyperpod()
    made = objects(recipe)
    spec = made["ray-job.yaml"]["spec"]
    path = "/etc/clew/recipe.toml"
    assert spec["entrypoint"] == f"clew prepare {path} && clew train {path} --run /shared/runs/hyperpod-seed0"
    assert (spec["backoffLimit"], spec["submitterConfig"]["backoffLimit"]) == (3, 0)
    assert spec["shutdownAfterJobFinishes"] is True and "jobId" not in spec  # an id of its own for each attempt
    (_, head), _ = pods(made["ray-job.yaml"])
    (volume,) = (volume for volume in head["volumes"] if volume["name"] == "recipe")
    assert volume["configMap"]["name"] == made["recipe.yaml"]["metadata"]["name"]
    carried = made["recipe.yaml"]["data"]["recipe.toml"]
    assert parse_recipe(carried, source="ConfigMap", name="x") == recipe


def test_what_is_served() -> None:
    """Whoever applies it has the server of `make test-serve-llm`: guard, key and limits are those of `clew serve`."""
    manifest = objects(hyperpod())["ray-service.yaml"]
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    pytest.importorskip("ray.serve.schema").ServeDeploySchema.model_validate(config)
    (app,) = config["applications"]
    module, _, function = app["import_path"].partition(":")
    service = importlib.import_module(module)
    assert callable(getattr(service, function))
    asked = service.ServiceArguments.model_validate(app["args"])
    assert (asked.adapters, asked.engines, asked.device) == ("s3://models/maze", 2, "cuda")
    assert asked.model == f"/shared/models/VisGym--visgym_model/{'a1' * 20}/mixed_qwen3vl"
    assert ":" not in asked.name  # BASE:ADAPTER
    secret = {"secretKeyRef": {"name": "maze-serve-key", "key": "key"}}
    for _, pod in pods(manifest):
        (container,) = pod["containers"]
        environment = {entry["name"]: entry.get("value") or entry["valueFrom"] for entry in container["env"]}
        assert environment.items() >= (GUARDED | {KEY_VARIABLE: secret}).items()
    names = {
        entry["name"] for _, pod in pods(objects(hyperpod())["ray-job.yaml"]) for entry in pod["containers"][0]["env"]
    }
    assert not names & {KEY_VARIABLE, *GUARDED}, "a run has nothing to do with it"


@pytest.mark.parametrize("change", ["model.lora.rank=65", "environment.max_turns=65", "rollout.max_tokens=16385"])
def test_what_the_server_would_refuse_is_not_rendered_and_the_index_says_why(change: str) -> None:
    key, _, value = change.partition("=")
    room = "training.tokens_per_microbatch=20000"
    made = texts(hyperpod(change, room))
    assert "ray-service.yaml" not in made and "image/serve.Dockerfile" not in made
    assert (
        f"There is no `ray-service.yaml`: `{key} = {value}` is more than the {int(value) - 1} that" in made["README.md"]
    )
    assert "pushed-serve" not in made["README.md"] and "serve.Dockerfile" not in made["image/build.sh"]
    assert "ray-service.yaml" in texts(hyperpod(f"{key}={int(value) - 1}", room))


# ---- any recipe

name_part = st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z0-9]", fullmatch=True)


@given(st.data())
@settings(max_examples=25)
def test_any_layout_renders_to_what_it_says(data: st.DataObject) -> None:
    nodes, workers = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 8))
    colocate = data.draw(st.booleans())
    engines = data.draw(st.integers(1, nodes * workers if colocate else 2 * nodes))
    shared = "/" + "/".join(
        data.draw(st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True), min_size=1))
    )
    namespace, claim = data.draw(name_part), data.draw(name_part)
    recipe = hyperpod(
        f"runtime.nodes={nodes}",
        f"runtime.workers_per_node={workers}",
        f"runtime.engines={engines}",
        f"runtime.colocate={str(colocate).lower()}",
        f'runtime.shared_dir="{shared}"',
        f'cluster.namespace="{namespace}"',
        f'cluster.claim="{claim}"',
        "training.prompts_per_step=400",
    )
    made = objects(recipe)
    gpus = workers + (0 if colocate else -(-engines // nodes))
    (group,) = made["ray-job.yaml"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    assert group["replicas"] == nodes and worker["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
    assert shared in [mount["mountPath"] for mount in worker["volumeMounts"]]
    for name, manifest in made.items():
        if name not in ("storage-class.yaml", "persistent-volume.yaml"):  # those belong to the whole cluster
            assert manifest["metadata"]["namespace"] == namespace
    kubernetes_validate.validate(made["volume-claim.yaml"], "1.33", strict=True)


@pytest.mark.parametrize("word", ["on", "null", "123", "1e3", "0x1f", "y", "12-30"])
def test_names_that_yaml_reads_as_something_else(word: str) -> None:
    keys = ("namespace", "claim", "service_account", "queue")
    made = objects(hyperpod(*STATIC, *(f'cluster.{key}="{word}"' for key in keys), f'cluster.mount_name="{word}"'))
    for manifest in made.values():
        check(manifest)
    metadata = made["ray-job.yaml"]["metadata"]
    assert metadata["namespace"] == metadata["labels"]["kueue.x-k8s.io/queue-name"] == word
    assert made["volume-claim.yaml"]["metadata"]["name"] == word
    assert made["persistent-volume.yaml"]["spec"]["csi"]["volumeAttributes"]["mountname"] == word
    assert made["service-account.yaml"]["metadata"]["name"] == word


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=60)
def test_any_name_and_text_survive(name: str, text: str) -> None:
    """Line breaks, quotes, YAML's and TOML's own characters, control characters, letters of any script."""
    recipe = hyperpod()
    environment = recipe.environment.model_copy(
        update={"gymnasium": recipe.environment.gymnasium.model_copy(update={"prompt": text or "x"})}
    )
    recipe = recipe.model_copy(
        update={"name": name, "environment": environment, "cluster": recipe.cluster.model_copy(update={"name": None})}
    )
    made = objects(recipe)
    assert tomllib.loads(made["recipe.yaml"]["data"]["recipe.toml"]) == tomllib.loads(recipe.to_toml())
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,33}[a-z0-9])?", cluster_name(recipe))
    words = made["ray-job.yaml"]["spec"]["entrypoint"]
    read = subprocess.run(
        ["bash", "-c", f"clew() {{ printf '%s\\n' \"$#\"; }}; {words}"], capture_output=True, text=True
    )
    assert read.stdout == "2\n4\n", words  # two commands with whole arguments
    assert yaml.safe_load(quoted(text)) == text
