"""`clew cluster render`: image and scripts, the command itself, and what it says of bad input."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from manifests import STATIC, hyperpod, objects, texts

from clew.cloud.render import render
from clew.recipe import load_recipe

# ---- scripts


@pytest.mark.parametrize("kind", ["ray", "skyrl"])
def test_dockerfile(kind: str) -> None:
    text = texts(hyperpod(f"runtime.kind={kind}"))["image/Dockerfile"]
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {"FROM", "ARG", "RUN", "ENV", "COPY"}
    base = lines[0].split()[1]
    assert (lines[0].startswith("FROM ") and ":" in base) or kind == "skyrl"
    assert base.startswith("rayproject/ray:2.60.0" if kind == "ray" else "novaskyai/skyrl-train-ray-2.57.0")
    assert re.search(r"^ARG VISGYM_COMMIT=0289034[0-9a-f]{33}$", text, re.M)
    assert ("SKYRL_REF=skyrl-v0.4.0" in text) == (kind == "skyrl")
    assert "COPY --chown=1000:100 wheels/ " in text and "clew --version" in text
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n", "-c", line[4:]], check=True)
    versions = objects(hyperpod(f"runtime.kind={kind}"))["ray-job.yaml"]["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray-{versions}" in base or f"ray:{versions}" in base


def test_the_image_of_what_is_served() -> None:
    """vLLM in the version that Ray pins, then Clew, as in the environment of `make test-serve-llm`."""
    text = texts(hyperpod())["image/serve.Dockerfile"]
    runs = [line[4:] for line in text.replace("\\\n", " ").splitlines() if line.startswith("RUN ")]
    assert '"ray[default,serve,llm]==2.60.0"' in runs[0] and "[aws,ray]" in runs[1] and len(runs) == 3
    for command in runs:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_an_image_without_visgym() -> None:
    text = texts(load_recipe("gpu", ["runtime.shared_dir=/shared"]))["image/Dockerfile"]
    assert "VisGym" not in text and "[ray,aws,vllm]" in text


def test_an_image_has_the_toolkit_that_the_watch_for_hung_jobs_needs() -> None:
    """Its extra `aws`; SkyRL's workers have no such watch."""
    text = texts(hyperpod())["image/Dockerfile"]
    (extras,) = re.findall(r"clew-\*\.whl\)\[([a-z,]+)\]", text)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = [package for extra in extras.split(",") for package in needed[extra]]
    assert any(package.startswith("toolkit-for-ray-on-sagemaker-ai") for package in packages)
    assert any(package.startswith("boto3") for package in packages), "clew export --to s3://"


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Any]:
    """Runs image/build.sh with stand-ins of docker, aws, pip and git that write down how they are called."""
    render(hyperpod(), tmp_path / "cluster", ["hyperpod"])
    tools, source, calls = tmp_path / "tools", tmp_path / "source", tmp_path / "calls"
    tools.mkdir()
    source.mkdir()
    (source / "pyproject.toml").touch()
    for tool in ("docker", "aws", "pip", "git"):
        (tools / tool).write_text(
            f'#!/bin/sh\necho "{tool} $*" >> "{calls}"\ncase "$*" in *rev-parse*) echo 0123456789ab ;; esac\n'
        )
        (tools / tool).chmod(0o755)

    def run(**variables: str) -> tuple[int, str, str]:
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", **variables}
        script = tmp_path / "cluster/image/build.sh"
        done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stderr, calls.read_text() if calls.exists() else ""

    yield run


ACCOUNT = {"AWS_REGION": "us-west-2", "AWS_ACCOUNT_ID": "123456789012", "CLEW_SOURCE": "source"}


def test_build_pushes_one_name_each(build: Any, tmp_path: Path) -> None:
    code, err, calls = build(**ACCOUNT)
    assert code == 0, err
    image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/clew:0.1.0-0123456789ab"
    assert (tmp_path / "cluster/image/pushed").read_text() == f"{image}\n"
    assert f"docker build --platform linux/amd64 --tag {image} ." in calls and f"docker push {image}" in calls
    assert f"pip wheel --quiet --no-deps --wheel-dir wheels {tmp_path / 'source'}" in calls
    assert f"docker build --platform linux/amd64 --tag {image}-serve --file serve.Dockerfile ." in calls
    assert f"docker push {image}-serve" in calls and calls.rindex("docker build") < calls.index("docker push")
    assert (tmp_path / "cluster/image/pushed-serve").read_text() == f"{image}-serve\n"
    load_recipe("hyperpod", [f"cluster.image={image}", f"cluster.serve_image={image}-serve"])


@pytest.mark.parametrize("missing", ACCOUNT)
def test_build_says_what_is_not_set(build: Any, missing: str) -> None:
    code, err, calls = build(**{key: value for key, value in ACCOUNT.items() if key != missing})
    assert code != 0 and f"{missing}: set it to" in err and not calls


def test_scripts_parse_and_run(tmp_path: Path) -> None:
    render(hyperpod(), tmp_path / "cluster", ["hyperpod"])
    for script in (tmp_path / "cluster").rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.stat().st_mode & stat.S_IXUSR
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(script)], check=True)


# ---- the command


def test_render_writes_an_index_of_what_there_is(clew: Command) -> None:
    done = clew("cluster", "render", "hyperpod", "--to", "cluster", "--image", "host.example/clew:1", "cluster.queue=q")
    assert done.code == 0, done.err
    assert "to be set: cluster.subnet: " in done.out and "cluster.image" not in done.out
    folder = Path("cluster")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    readme = (folder / "README.md").read_text()
    assert there == {*re.findall(r"^\| \[([^]]+)\]", readme, re.M), "README.md"}
    assert "clew cluster render hyperpod cluster.queue=q --to cluster" in readme
    assert "image: host.example/clew:1" in (folder / "ray-job.yaml").read_text()


def test_render_again_replaces_all_of_it(clew: Command) -> None:
    assert clew("cluster", "render", "hyperpod", "--to", "cluster").code == 0
    Path("cluster/image/pushed").write_text("x\n")
    assert clew("cluster", "render", "hyperpod", "--to", "cluster", *STATIC).code == 0
    assert not Path("cluster/storage-class.yaml").exists() and Path("cluster/persistent-volume.yaml").exists()
    assert Path("cluster/image/pushed").exists()


def test_rendering_is_the_same_every_time() -> None:
    assert texts(hyperpod()) == texts(hyperpod())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["laptop"], 'runtime.kind = "local" needs no cluster'),
        (["gpu"], "runtime.shared_dir is left out"),
        (["gpu", "runtime.shared_dir=/a:b"], 'runtime.shared_dir = "/a:b" is no place to mount'),
        (["gpu", "runtime.shared_dir=shared"], 'runtime.shared_dir = "shared" is no place to mount'),
        (["hyperpod", "runtime.address=head:6379"], "runtime.address"),
        (["hyperpod", "model.path=./model"], 'model.path = "./model" is a folder of this machine'),
        (
            ["hyperpod", "environment.gymnasium.prompt=AKIA" + "Q" * 16],
            "environment.gymnasium.prompt looks like a secret",
        ),
        (["hyperpod", "model.lora.rank=600"], "model.lora.rank = 600: vLLM loads ranks up to 512"),
        (["hyperpod", "cluster.shm_gib=400"], "cluster.shm_gib = 400 is part of cluster.worker_memory_gib = 400"),
        (["hyperpod", "cluster.storage_gib=1300"], "cluster.storage_gib = 1300 is no size that FSx for Lustre has"),
        (["hyperpod", "cluster.name=Maze"], "cluster.name"),
        (["hyperpod", "cluster.queue=a b"], "cluster.queue"),
        (["hyperpod", "--image", "no image"], "cluster.image"),
        (["hyperpod", "cluster.adapters=/local"], "cluster.adapters"),
        (["hyperpod", "cluster.nodes=3"], "cluster.nodes"),
    ],
)
def test_bad_input_is_one_line(clew: Command, arguments: list[str], said: str) -> None:
    done = clew("cluster", "render", *arguments, "--to", "cluster")
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1, done.err
    assert not Path("cluster").exists()


def test_other_things_are_not_written_over(clew: Command) -> None:
    Path("full").mkdir()
    Path("full/README.md").write_text("mine")
    done = clew("cluster", "render", "hyperpod", "--to", "full")
    assert done.code == 2 and "--to full holds other things" in done.err
    done = clew("cluster", "render", "hyperpod", "--to", "full/README.md")
    assert done.code == 2 and "is a file" in done.err
    assert Path("full/README.md").read_text() == "mine"


def test_rendering_needs_no_torch() -> None:
    code = (
        "import sys, pathlib; from clew.recipe import load_recipe; from clew.cloud.render import rendered; "
        "rendered(load_recipe('hyperpod'), pathlib.Path('x'), ['hyperpod']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
