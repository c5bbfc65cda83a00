"""``clew prepare`` against a real HTTP server that stands in for the hub, with real processes killed and waiting."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from conftest import Command, Outcome, finish_clew, start_clew
from hub_server import SIGNATURE, Fault, Hub, folder_files, is_large, serve
from huggingface_hub import constants
from test_cli import refused
from test_resume import wait_for
from tiny import tiny_folder, weights_digest

from clew.checkpoint import verify
from clew.envs.registry import make_env
from clew.errors import UserError
from clew.policy.model import load_model
from clew.recipe import Recipe, load_recipe
from clew.runtime import hub as hub_module
from clew.runtime.prepare import prepared_dir, prepared_model

REPOSITORY, SUBFOLDER = "VisGym/visgym_model", "mixed_qwen3vl"
MODEL = (f"model.path={REPOSITORY}", f"model.subfolder={SUBFOLDER}")
TOKEN = "hf_t0kenThatNobodyMayPrint"
FEW = ("training.steps=2", "training.prompts_per_step=3", "evaluation.size=4", "evaluation.confirm_size=4")
HOME = Path("prepared/models/VisGym--visgym_model")


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A real small model, its weights in several files."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(tiny_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    load_model(tiny_folder()).model.save_pretrained(folder, max_shard_size="2MB")
    files = folder_files(folder)
    assert len(shards(files)) >= 3
    return files


def shards(files: dict[str, bytes]) -> list[str]:
    return sorted(path for path in files if is_large(path))


@pytest.fixture
def hub(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The hub with the model in a subfolder, beside another one; commands of this process and others go to it."""
    with serve() as server:
        server.push(REPOSITORY, repository_files(model_files))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home" / "hub"))
        monkeypatch.setattr(hub_module, "_PAUSES_S", (0.0, 0.0, 0.0))
        point_at(server.endpoint, monkeypatch)
        huggingface_hub.close_session()  # it may hold another test's settings
        yield server


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


def repository_files(model_files: dict[str, bytes]) -> dict[str, bytes]:
    decoy = {f"other/{path}": b"decoy" if is_large(path) else data for path, data in model_files.items()}
    return {**{f"{SUBFOLDER}/{path}": data for path, data in model_files.items()}, **decoy, "README.md": b"# Models"}


def recipe(*overrides: str) -> Recipe:
    return load_recipe("laptop", [*MODEL, *FEW, *overrides])


def prepare(clew: Command, *overrides: str) -> Outcome:
    outcome = clew("prepare", "laptop", *MODEL, *FEW, *overrides)
    for secret in (TOKEN, SIGNATURE):
        assert secret not in outcome.out + outcome.err
    return outcome


def start(folder: Path) -> subprocess.Popen[str]:
    return start_clew("prepare", "laptop", *MODEL, *FEW, f"runtime.shared_dir={folder}")


# --- downloading -----------------------------------------------------------------------------------------


def test_the_subfolder_lands_whole_and_is_the_same_model(
    clew: Command, hub: Hub, model_files: dict[str, bytes]
) -> None:
    assert prepared_model(recipe()) is None
    outcome = prepare(clew)
    assert outcome.code == 0, outcome
    folder = prepared_model(recipe())
    commit = hub.refs[REPOSITORY]["main"]
    assert folder == (HOME / commit / SUBFOLDER).resolve()
    assert {**folder_files(folder), "manifest.json": b""} == {**model_files, "manifest.json": b""}
    assert {path.name for path in folder.parent.iterdir()} == {SUBFOLDER}  # no other folder, no notes of the library
    manifest = verify(folder)
    assert set(manifest.files) == set(model_files)
    assert manifest.facts == {"repository": REPOSITORY, "commit": commit, "subfolder": SUBFOLDER}
    assert weights_digest(load_model(folder).model) == weights_digest(load_model(tiny_folder()).model)
    *_, where, how = outcome.out.splitlines()
    assert str(HOME / commit / SUBFOLDER) in where
    assert how == f"to start: clew train laptop {' '.join((*MODEL, *FEW))}"
    # The decoy was not asked for; the host that large files come from was not shown the token.
    assert {request.path.split(f"{commit}/")[1] for request in hub.bodies()} == {
        f"{SUBFOLDER}/{path}" for path in model_files
    }
    assert not any(request.token for request in hub.requests if request.host == "store")


def test_a_second_call_asks_the_hub_for_nothing(clew: Command, hub: Hub) -> None:
    first = prepare(clew)
    before = {path: path.stat().st_mtime_ns for path in HOME.rglob("*") if path.name != ".lock"}
    hub.requests.clear()
    second = prepare(clew)
    assert second.code == 0 and hub.requests == []
    assert "nothing to download" in second.out and "nothing to download" not in first.out
    assert {path: path.stat().st_mtime_ns for path in HOME.rglob("*") if path.name != ".lock"} == before


def test_a_revision_is_kept_to_the_commit_it_was_first(clew: Command, hub: Hub, model_files: dict[str, bytes]) -> None:
    old = hub.refs[REPOSITORY]["main"]
    assert prepare(clew).code == 0
    changed = {**model_files, "README.md": b"newer"}
    new = hub.push(REPOSITORY, repository_files(changed))
    hub.refs[REPOSITORY]["v2"] = new
    hub.requests.clear()
    assert old in prepare(clew).out and hub.requests == []
    shutil.rmtree(HOME / old)  # the record counts, not what is on the disk
    assert old in prepare(clew).out
    assert prepared_model(recipe()).parent.name == old
    for revision in ("v2", new):
        assert prepared_model(recipe(f"model.revision={revision}")) in (None, (HOME / new / SUBFOLDER).resolve())
        assert new in prepare(clew, f"model.revision={revision}").out
        assert (prepared_model(recipe(f"model.revision={revision}")) / "README.md").read_bytes() == b"newer"
    assert prepared_model(recipe()).parent.name == old


def test_the_pinned_commit_holds_when_main_moves_before_the_download_is_complete(
    clew: Command, hub: Hub, model_files: dict[str, bytes]
) -> None:
    old = hub.refs[REPOSITORY]["main"]
    hub.faults[f"{SUBFOLDER}/{shards(model_files)[1]}"] = [Fault(status=404)]
    refused(prepare(clew), "model.path", "404")
    hub.push(REPOSITORY, repository_files({**model_files, "README.md": b"newer"}))
    assert prepare(clew).code == 0
    assert prepared_model(recipe()).parent.name == old


def test_a_repository_that_is_a_model_itself(clew: Command, hub: Hub, model_files: dict[str, bytes]) -> None:
    """It and a folder inside it are prepared beside each other, sharing files; its own manifest.json is no matter."""
    hub.push("me/model", {**model_files, "manifest.json": b"{}", **repository_files(model_files)})
    plain = ("model.path=me/model", *FEW)
    for folder in (SUBFOLDER, None):
        outcome = clew("prepare", "laptop", *plain, *([f"model.subfolder={folder}"] if folder else []))
        assert outcome.code == 0, outcome
    whole = prepared_model(load_recipe("laptop", plain))
    inner = prepared_model(load_recipe("laptop", [*plain, f"model.subfolder={SUBFOLDER}"]))
    assert inner == whole / SUBFOLDER
    assert {f"other/{shards(model_files)[0]}", "config.json"} < set(verify(whole).files)
    assert set(verify(inner).files) == set(model_files)
    assert len(hub.bodies(f"{SUBFOLDER}/config.json")) == 1


def test_a_place_of_ones_own(clew: Command, hub: Hub, tmp_path: Path) -> None:
    outcome = prepare(clew, "--to", str(tmp_path / "place"))
    assert outcome.code == 0
    assert prepared_model(recipe()) is None  # training looks elsewhere, so it is told
    start = outcome.out.splitlines()[-1]
    arguments = start.removeprefix("to start: clew train laptop ").split()
    own = load_recipe("laptop", arguments)
    assert (Path(own.model.path) / own.model.subfolder / "config.json").is_file()
    shared = recipe(f"runtime.shared_dir={tmp_path / 'place'}")
    assert prepared_dir(shared) == tmp_path / "place"
    assert prepared_model(shared) == Path(own.model.path) / own.model.subfolder


# --- what goes wrong on the way --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(cut=100_000), ""),  # the library goes on by itself
        (Fault(reset=100_000), "the connection failed"),
        (Fault(corrupt=70_000), "it arrived damaged"),
        (Fault(status=503), "the hub answers 503"),
    ],
    ids=["cut", "reset", "corrupt", "503"],
)
def test_what_passes_is_tried_again(
    clew: Command,
    hub: Hub,
    model_files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    said: str,
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 8192)  # of files of gigabytes: 10 MB
    path = f"{SUBFOLDER}/{shards(model_files)[1]}"
    hub.faults[path] = [fault]
    outcome = prepare(clew)
    assert outcome.code == 0 and outcome.err == "", outcome
    assert SIGNATURE not in caplog.text  # the library would name the address
    assert (f"{path}: {said}" in outcome.out) if said else ("again" not in outcome.out)
    asked = hub.bodies(path)
    assert len(asked) == 2 and all(len(hub.bodies(f"{SUBFOLDER}/{p}")) == 1 for p in model_files if p not in path)
    if fault.cut:
        assert asked[1].range is not None and 0 < int(asked[1].range[6:-1]) <= fault.cut
    assert set(verify(prepared_model(recipe())).files) == set(model_files)


def test_the_hub_itself_may_stumble(clew: Command, hub: Hub) -> None:
    hub.faults["info"] = [Fault(status=503)]
    outcome = prepare(clew)
    assert outcome.code == 0 and "the hub answers 503; trying again" in outcome.out


def test_a_file_that_stays_damaged_is_never_taken(clew: Command, hub: Hub, model_files: dict[str, bytes]) -> None:
    path = f"{SUBFOLDER}/{shards(model_files)[0]}"
    hub.faults[path] = [Fault(corrupt=9) for _ in range(4)]
    refused(prepare(clew), "model.path", path, "arrives damaged every time")
    assert prepared_model(recipe()) is None
    hub.requests.clear()
    assert prepare(clew).code == 0
    assert len(hub.bodies(path)) == 1


def test_small_files_are_checked_too(clew: Command, hub: Hub) -> None:
    hub.faults[f"{SUBFOLDER}/config.json"] = [Fault(corrupt=0)]
    outcome = prepare(clew)
    assert outcome.code == 0 and f"{SUBFOLDER}/config.json: it arrived damaged" in outcome.out


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_call_is_gone_on_with(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path, how: signal.Signals
) -> None:
    held = f"{SUBFOLDER}/{shards(model_files)[1]}"
    fault = Fault(hold=120_000)
    hub.faults[held] = [fault]
    process = start(tmp_path)
    assert fault.reached.wait(120), finish_clew(process)
    process.send_signal(how)
    outcome = finish_clew(process)
    assert outcome.code == (130 if how == signal.SIGINT else -9)
    fault.release.set()
    shared = recipe(f"runtime.shared_dir={tmp_path}")
    assert prepared_model(shared) is None
    finished = [request.path for request in hub.bodies() if not request.path.endswith(held)]
    assert any(is_large(path) for path in finished)

    again = finish_clew(start(tmp_path))
    assert again.code == 0, again
    assert len(hub.bodies(held)) == 2
    paths = [request.path for request in hub.bodies() if not request.path.endswith(held)]
    assert len(paths) == len(set(paths)) == len(model_files) - 1  # what was complete is not downloaded again
    folder = prepared_model(shared)
    assert {path for path in folder.parent.rglob("*") if path.is_file()} == {
        folder / name for name in (*verify(folder).files, "manifest.json")
    }  # nothing torn is left


def test_two_at_once_download_once(hub: Hub, model_files: dict[str, bytes], tmp_path: Path) -> None:
    held = f"{SUBFOLDER}/{shards(model_files)[0]}"
    fault = Fault(hold=120_000)
    hub.faults[held] = [fault]
    first = start(tmp_path)
    assert fault.reached.wait(120), finish_clew(first)
    second = start(tmp_path)
    wait_for(second, f"waiting: {tmp_path / HOME.relative_to('prepared')} is being written by process {first.pid} on")
    fault.release.set()
    outcomes = finish_clew(first), finish_clew(second)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "nothing to download" in outcomes[1].out
    paths = [request.path for request in hub.bodies()]
    assert len(paths) == len(set(paths)) == len(model_files)


# --- damage found later ----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, "has a wrong sha256"),
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    ],
    ids=["flipped", "deleted", "cut"],
)
def test_damage_is_named_and_mended(
    clew: Command, hub: Hub, model_files: dict[str, bytes], damage: object, named: str
) -> None:
    prepare(clew)
    folder = prepared_model(recipe())
    broken = shards(model_files)[1]
    damage(folder / broken)
    if named != "has a wrong sha256":  # a start compares sizes and reads no gigabytes
        with pytest.raises(UserError, match=rf"{re.escape(broken)}.*`clew prepare` mends it"):
            prepared_model(recipe())
    hub.requests.clear()
    outcome = prepare(clew)
    assert outcome.code == 0
    assert re.search(rf"damaged: .*: {re.escape(broken)} .*{named}", outcome.out)
    assert [request.path.endswith(broken) for request in hub.bodies()] == [True]
    assert (folder / broken).read_bytes() == model_files[broken]
    verify(prepared_model(recipe()))


def test_a_damaged_manifest_is_made_anew(clew: Command, hub: Hub) -> None:
    prepare(clew)
    folder = prepared_model(recipe())
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:100])
    with pytest.raises(UserError, match=r"manifest.json cannot be read .*`clew prepare` mends it"):
        prepared_model(recipe())
    hub.requests.clear()
    assert prepare(clew).code == 0
    assert hub.bodies() == []  # the files are still what the hub says
    verify(prepared_model(recipe()))


def test_a_damaged_record_of_revisions_is_named(clew: Command, hub: Hub) -> None:
    prepare(clew)
    for text in ("{", "[]", '{"main": "../../elsewhere"}', '{"main": 3}'):
        (HOME / "revisions.json").write_text(text)
        refused(prepare(clew), "revisions.json is damaged", "delete it")


# --- what the user can mend ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "fragments"),
    [
        ("gated", ("is gated", "HF_TOKEN")),
        ("private", ("HF_TOKEN",)),
        ("forbidden", ("refuses", "403", "HF_TOKEN")),
    ],
)
def test_no_access(
    clew: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch, access: str, fragments: tuple[str, ...]
) -> None:
    hub.access[REPOSITORY] = access
    if access != "forbidden":
        monkeypatch.delenv("HF_TOKEN")
    refused(prepare(clew), "model.path", REPOSITORY, *fragments)
    assert prepared_model(recipe()) is None
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (prepare(clew).code == 0) == (access != "forbidden")


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("model.path=VisGym/nothing", ("model.path", "no repository VisGym/nothing")),
        ("model.path=Vis--Gym/x", ("model.path", "Vis--Gym/x can't be a hub repository")),
        ("model.revision=v9", ("model.revision", "no revision v9")),
        (f"model.revision={'a' * 40}", ("model.revision", "no revision aaaa")),
        ("model.subfolder=mixed", ("model.subfolder", "no folder mixed at", f"models in: {SUBFOLDER}, other")),
        ("model.path=./nowhere", ("model.path", "./nowhere")),
    ],
)
def test_what_the_hub_does_not_have(clew: Command, hub: Hub, override: str, fragments: tuple[str, ...]) -> None:
    refused(prepare(clew, override), *fragments)
    assert hub.bodies() == [] and list(Path("prepared").rglob("manifest.json")) == list(
        Path("prepared/tasks").rglob("manifest.json")
    )


def test_a_repository_whose_top_folder_has_no_model(clew: Command, hub: Hub) -> None:
    outcome = clew("prepare", "laptop", f"model.path={REPOSITORY}", *FEW)
    refused(outcome, "model.subfolder", "no model in its top folder", SUBFOLDER)
    assert hub.bodies() == []


def test_no_network(clew: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_at(f"http://127.0.0.1:{unused.getsockname()[1]}", monkeypatch)
        refused(prepare(clew), "model.path", "127.0.0.1 can't be reached (Connection refused)")
    point_at(hub.endpoint, monkeypatch)
    assert prepare(clew).code == 0
    point_at("http://127.0.0.1:1", monkeypatch)
    assert prepare(clew).code == 0  # none is needed once it is here


def test_offline_by_order(clew: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(prepare(clew), "model.path", "HF_HUB_OFFLINE")
    assert hub.requests == []


def test_a_hub_that_stays_down(clew: Command, hub: Hub) -> None:
    hub.faults["info"] = [Fault(status=502) for _ in range(4)]
    refused(prepare(clew), "model.path", "answers 502", "run the same command again")


def test_no_room(clew: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    torn = HOME / hub.refs[REPOSITORY]["main"] / ".cache/huggingface/download/torn.incomplete"
    torn.parent.mkdir(parents=True)
    torn.touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(prepare(clew), "1.0 kB free", "--to or runtime.shared_dir")
    assert hub.bodies() == []
    assert not torn.exists()  # what a killed call left is given back first


def test_the_disk_refuses_midway(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands for a disk that fills up: both are an errno of write(2)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        process = start(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(finish_clew(process), "cannot write", "the largest allowed file size is reached", "run the same command")
    assert prepared_model(recipe(f"runtime.shared_dir={tmp_path}")) is None
    assert finish_clew(start(tmp_path)).code == 0


def test_a_repository_that_reaches_outside_itself(clew: Command, hub: Hub, model_files: dict[str, bytes]) -> None:
    Path("precious").write_text("mine")
    deep = "/".join([".."] * 6)
    hub.push(REPOSITORY, {**repository_files(model_files), f"{SUBFOLDER}/{deep}/precious": b"theirs"})
    refused(prepare(clew), "model.path", "outside itself")
    assert hub.bodies() == [] and Path("precious").read_text() == "mine"


def test_a_model_of_another_kind(clew: Command, hub: Hub) -> None:
    hub.push("me/gpt", {"config.json": b'{"model_type": "gpt2"}'})
    refused(clew("prepare", "laptop", "model.path=me/gpt", *FEW), "model.path", "gpt2", "qwen3_vl")


# --- models that are here --------------------------------------------------------------------------------


def test_models_on_this_machine_need_no_hub(clew: Command, hub: Hub, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "mine" / "model")
    for path in ("package:warm-start", "mine/model", str(tmp_path / "mine/model")):
        outcome = clew("prepare", "laptop", f"model.path={path}", *FEW)
        assert outcome.code == 0 and f"model: {path} is on this machine; nothing to download" in outcome.out
        assert prepared_model(load_recipe("laptop", [f"model.path={path}"])) is None
    refused(clew("prepare", "laptop", "model.path=./mine", *FEW), "model.path", "mine")
    assert hub.requests == [] and not Path("prepared/models").exists()


# --- task lists ------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_task_lists_are_what_the_environment_makes(clew: Command) -> None:
    few = ("training.steps=4", "training.prompts_per_step=3", "evaluation.size=5", "evaluation.confirm_size=7")
    first = clew("prepare", "laptop", *few)
    [folder] = Path("prepared/tasks").iterdir()
    assert first.code == 0 and str(folder) in first.out
    facts = verify(folder).facts
    suites = load_recipe("laptop").evaluation.suites
    assert {path.stem for path in folder.glob("*.jsonl")} == {*suites, "unseen", "train"}
    contents = {name: lines(folder / f"{name}.jsonl") for name in (*suites, "unseen", "train")}
    assert {name: len(tasks) for name, tasks in contents.items()} == {
        **dict.fromkeys(suites, 5),
        "unseen": 7,
        "train": 12,
    }
    for name, tasks in contents.items():
        env = make_env(facts["environment"], **facts["settings"][name])
        for task in tasks:
            assert set(task) == {"env_id", "seed", "content_hash"}
            assert env.reset(task["seed"])[1]["content_hash"] == task["content_hash"]
    hashes = {name: {task["content_hash"] for task in tasks} for name, tasks in contents.items()}
    assert all(not hashes["train"] & hashes[name] for name in (*suites, "unseen"))
    for at in range(0, 12, 3):  # a step shows a maze once
        assert len({task["content_hash"] for task in contents["train"][at : at + 3]}) == 3

    before = folder.stat().st_mtime_ns
    assert clew("prepare", "laptop", *few).out == first.out
    assert folder.stat().st_mtime_ns == before
    clew("prepare", "laptop", *few, "training.seed=1")
    assert len(list(Path("prepared/tasks").iterdir())) == 2


def test_task_lists_are_what_a_run_plays(clew: Command, finished_run: Path, tmp_path: Path) -> None:
    assert clew("prepare", finished_run / "recipe.toml", "--to", tmp_path).code == 0
    [folder] = (tmp_path / "tasks").iterdir()
    played = json.loads((finished_run / "eval/step-000000/heldout.sampled.json").read_text())["episodes"]
    assert [task["seed"] for task in lines(folder / "heldout.jsonl")] == [episode["seed"] for episode in played]
    train = lines(folder / "train.jsonl")
    state = json.loads((finished_run / "checkpoints/step-000004/state.json").read_text())
    assert len(train) == 4 * 3
    assert train[-1]["seed"] % 10_000_000 + 1 == state["position"]


def test_an_environment_that_is_not_installed(clew: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEW_VISGYM", raising=False)
    outcome = prepare(clew, "environment.id=visgym:maze_2d/easy", "environment.goal=stop")
    assert outcome.code == 0
    assert "tasks: no lists" in outcome.out and "visgym:maze_2d/easy" in outcome.out
    assert prepared_model(recipe()) is not None and not Path("prepared/tasks").exists()


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (("environment.palette=neon",), "neon"),
        (("environment.id=clew/Labyrinth-v0",), "environment.id"),
        (("environment.size=2", "environment.min_path=1", "environment.max_path=3"), "evaluation.size"),
    ],
)
def test_a_recipe_whose_tasks_cannot_be_made_downloads_nothing(
    clew: Command, hub: Hub, overrides: tuple[str, ...], fragment: str
) -> None:
    refused(prepare(clew, "evaluation.size=1000", *overrides), fragment)
    assert hub.requests == []
