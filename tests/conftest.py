"""What the tests share: the command line in this process or in another, a small model, a small run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving_server import ChatServer

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: threads of several processes on few cores spin against each other
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import settings

settings.register_profile("clew", deadline=None)  # a loaded machine is no bug
settings.load_profile("clew")

ROOT = Path(__file__).resolve().parent.parent

RECIPE = """\
name = "small"

[model]
path = "{model}"

[model.lora]
rank = 4

[environment]
size = [4, 4]
min_path = 2
max_path = 6
max_turns = 8

[rollout]
max_new_tokens = 8
max_tokens = 512

[algorithm]
group_size = 4

[training]
steps = 4
prompts_per_step = 3
learning_rate = 3e-3
seed = 5

[evaluation]
suites = ["heldout"]
size = 8
interval = 2
confirm_size = 8

[checkpoint]
interval = 1
export_interval = 2

[sft]
steps = 60
episode_steps = 20
frames_per_step = 48
frames_per_microbatch = 48
curriculum_steps = 30

[runtime]
threads = 1
"""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def clew(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """Runs a command in this process, in an empty working directory."""
    from clew.cli.main import run

    monkeypatch.chdir(tmp_path)

    def command(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    yield command
    if "torch" in sys.modules:  # a command may have asked for all cores
        sys.modules["torch"].set_num_threads(1)


def start_clew(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts a command in a process of its own (one thread, Ctrl-C not ignored); ``env`` adds to its environment."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "clew.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        # A shell that put the tests into the background made its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish_clew(process: subprocess.Popen[str], timeout: float = 900) -> Outcome:
    """Waits for the end of a command."""
    out, err = process.communicate(timeout=timeout)
    return Outcome(process.returncode, out, err)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder made by ``clew sft``: it answers in the right form and wins now and then."""
    from clew.cli.main import run

    folder = tmp_path_factory.mktemp("sft")
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE.format(model=folder / "model"))
    assert run(["sft", str(recipe), "--out", str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture(scope="session")
def small_recipe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of four steps that takes seconds."""
    path = tmp_path_factory.mktemp("recipe") / "small.toml"
    path.write_text(RECIPE.format(model=tiny_model))
    return path


@pytest.fixture(scope="session")
def quick_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of six short steps, from the shipped model: it learns, so runs can be told apart."""
    path = tmp_path_factory.mktemp("recipe") / "quick.toml"
    text = RECIPE.format(model="package:warm-start").replace('"small"', '"quick"')
    for old, new in (
        ("steps = 4", "steps = 6"),
        ("\nsize = 8", "\nsize = 4"),
        ("interval = 2\nconf", "interval = 6\nconf"),
    ):
        text = text.replace(old, new)
    path.write_text(text)
    return path


@pytest.fixture(scope="session")
def finished_run(small_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, made by a process of its own. Not to be changed: copy it."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    outcome = finish_clew(start_clew("train", small_recipe, "--run", run_dir))
    assert outcome.code == 0, outcome.err
    return run_dir


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Any]:
    """A Ray cluster of one machine that takes jobs (a ``ray_head.RayHead``), for all tests that need no other."""
    from ray_head import RayHead

    head = RayHead()
    yield head
    head.close()


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """A real `clew serve` with room for two adapters at once."""
    from serving_server import make_adapters, running

    folder = tmp_path_factory.mktemp("serve") / "adapters"
    make_adapters(folder)
    with running(folder, "--max-adapters", "2") as server:
        yield server


def contents(run_dir: Path) -> dict[str, str]:
    """Everything in a run directory that must not depend on interruptions: relative path -> SHA-256."""
    found = {}
    for pattern in (
        "metrics.jsonl",
        "recipe.toml",
        "adapters/**/*",
        "checkpoints/**/*",
        "eval/**/*",
        "replays/**/*",
    ):
        for path in run_dir.glob(pattern):
            if path.is_file():
                found[str(path.relative_to(run_dir))] = hashlib.sha256(path.read_bytes()).hexdigest()
    summary = json.loads((run_dir / "summary.json").read_text())
    timeless = {key: value for key, value in summary.items() if key not in ("wall_s", "cost")}
    return {**found, "summary.json": json.dumps(timeless)}


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Address of a real S3 server."""
    from s3_server import s3_server

    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of that server, with an empty bucket; the environment is that of its account."""
    from s3_server import BUCKET, account, boto3

    for key, value in account(s3).items():
        monkeypatch.setenv(key, value)
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    keys = [{"Key": entry["Key"]} for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())]
    if keys:
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
    client.delete_bucket(Bucket=BUCKET)
