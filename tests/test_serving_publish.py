"""`clew export --to s3://...`: whole or not seen, never overwritten, proven to do something, no secret told."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import RECIPE, ROOT, Command
from peft import PeftModel
from s3_server import BUCKET, KEY_ID, SECRET, connection

from clew.errors import UserError
from clew.policy.adapter import attach_lora, current_adapter, read_adapter
from clew.policy.export import export_adapter
from clew.policy.paths import base_fingerprint
from clew.recipe import load_recipe
from clew.runtime.publishing import make_publishable, published_name
from clew.serving.names import check_adapter_name, parse_s3
from clew.serving.publish import publish
from clew.serving.store import open_store

PLACE = f"s3://{BUCKET}/maze"
FILES = ["adapter_model.safetensors", "README.md", "manifest.json", "adapter_config.json"]  # in the order they go up


def learned(seed: int = 0) -> PeftModel:
    policy = attach_lora(tiny.tiny(), 4, 8, 0.0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: step 4 is the best and was confirmed, step 2 has no effect. Not to be changed."""
    run = tmp_path_factory.mktemp("published") / "run"
    base = str(tiny.tiny_folder())
    card = {"base_model": base, "base_sha256": base_fingerprint(base), "recipe": "small", "seed": 5, "environment": {}}
    effects = {2: 0.0, 4: 0.25, 6: 0.5}
    for step, effect in effects.items():
        adapter = current_adapter(learned(step), step)
        export_adapter(adapter, run / f"adapters/step-{step:06d}", {**card, "step": step}, effect)
    lines = [{"step": step, "eval/all/pass_at_1": rate} for step, rate in ((2, 0.25), (4, 0.75), (6, 0.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "eval/step-000004").mkdir(parents=True)
    for suite, solved, total in (
        ("heldout.sampled", 6, 8),
        ("heldout.sampled-confirm", 5, 8),
        ("unseen.sampled-confirm", 9, 16),
    ):
        counts = {"solved": solved, "total": total, "ci95": [0.25, 0.75]}
        (run / f"eval/step-000004/{suite}.json").write_text(json.dumps(counts))
    recipe = tmp_path_factory.mktemp("recipe") / "small.toml"
    recipe.write_text(RECIPE.format(model=base))
    (run / "recipe.toml").write_text(load_recipe(str(recipe)).to_toml())
    return run


@pytest.fixture(scope="module")
def ready(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter that can be published."""
    return make_publishable(run, "best", tmp_path_factory.mktemp("ready")).folder


def keys(bucket: Any) -> dict[str, str]:
    """What is in the bucket: key -> ETag and time, which every write changes."""
    found = bucket.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    return {entry["Key"]: f"{entry['ETag']} {entry['LastModified']}" for entry in found}


def test_the_best_adapter_is_published_and_comes_back(run: Path, bucket: Any, clew: Command, tmp_path: Path) -> None:
    outcome = clew("export", run, "--step", "best", "--to", f"{PLACE}/")
    assert outcome.code == 0, outcome.err
    own = read_adapter(run / "adapters/step-000004")
    name = f"small-s5-step000004-{own.content_hash[:12]}"
    base = tiny.tiny_folder().name
    assert outcome.out == f"published: {PLACE}/{name}\nserved as: {base}:{name}\n"
    store = open_store(PLACE, tmp_path / "cache")
    assert store.names() == [name]
    fetched = store.fetch(name)
    back = read_adapter(fetched)
    assert back.config == own.config and back.content_hash == own.content_hash
    assert all(torch.equal(back.tensors[key], tensor) for key, tensor in own.tensors.items())

    card = (fetched / "README.md").read_text()
    for fact in (
        name,
        str(tiny.tiny_folder()),
        base_fingerprint(str(tiny.tiny_folder())),
        own.content_hash,
        "| training step | 4 |",
        "| recipe, seed | small, 5 |",
        '"id": "clew/Maze-v0", "size": [4, 4]',
        "6/8 of the held-out tasks",
        "5/8 of the same tasks with fresh draws, 9/16 of tasks never looked at before",
        "largest change of a logit on the first prompt: 0.25",
    ):
        assert fact in card
    before = keys(bucket)
    again = clew("export", run, "--to", PLACE)
    assert again.code == 0 and again.out.startswith(f"published before, unchanged: {PLACE}/{name}\n")
    assert keys(bucket) == before
    # Another step is another name; the first stays.
    assert clew("export", run, "--step", "6", "--to", PLACE).code == 0
    assert len(store.names()) == 2 and before.items() <= keys(bucket).items()


@pytest.mark.parametrize("last", range(4))
def test_a_publisher_killed_after_any_file_is_completed(
    last: int, ready: Path, bucket: Any, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str, body: bytes) -> bytes:
        if method == "PUT" and path.endswith(FILES[last]):
            arrived.set()
            go_on.wait(60)
        return body

    code = (
        "import sys; from pathlib import Path; from clew.serving.names import parse_s3; "
        "from clew.serving.publish import publish; publish(Path(sys.argv[1]), parse_s3(sys.argv[2]))"
    )
    with connection(s3, hold) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
        process = subprocess.Popen([sys.executable, "-c", code, str(ready), PLACE])
        assert arrived.wait(60)
        process.kill()
        process.wait()
        go_on.set()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    store = open_store(PLACE, tmp_path / "cache")
    before = keys(bucket)
    assert sorted(before) == sorted(f"maze/{ready.name}/{file}" for file in FILES[: last + 1])
    assert store.names() == ([ready.name] if last == 3 else [])
    assert publish(ready, parse_s3(PLACE)) == (last < 3)
    assert store.names() == [ready.name] and before.items() <= keys(bucket).items()
    assert read_adapter(store.fetch(ready.name)).content_hash == read_adapter(ready).content_hash


def test_every_write_is_conditional_and_carries_its_hash(
    ready: Path, bucket: Any, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(ready, parse_s3(PLACE))
    for file in FILES:
        head = bucket.head_object(Bucket=BUCKET, Key=f"maze/{ready.name}/{file}", ChecksumMode="ENABLED")
        assert head["ChecksumSHA256"] and head["ContentLength"] == (ready / file).stat().st_size
    with connection(s3, lambda method, path, body: body) as (url, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        publish(ready, parse_s3(f"s3://{BUCKET}/other"))
    assert [request.rpartition("/")[2].partition("?")[0] for request in seen if request.startswith("PUT")] == FILES


@pytest.mark.parametrize("by", ["clew", "hand"])
@pytest.mark.parametrize("file", FILES)
def test_other_content_under_the_same_name_is_refused(file: str, by: str, ready: Path, bucket: Any) -> None:
    """Weights and configuration of a whole adapter count; of a half one, every file."""
    key, foreign = f"maze/{ready.name}/{file}", b"x" * (ready / file).stat().st_size
    checksum = {"ChecksumAlgorithm": "SHA256"} if by == "clew" else {"ChecksumAlgorithm": "CRC32"}
    bucket.put_object(Bucket=BUCKET, Key=key, Body=foreign, **checksum)
    with pytest.raises(UserError, match=f"holds another {re.escape(file)} already.*never changes"):
        publish(ready, parse_s3(PLACE))
    assert bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read() == foreign


def test_what_was_put_there_by_hand_is_accepted_if_it_is_the_same(ready: Path, bucket: Any, tmp_path: Path) -> None:
    for file in FILES[:2]:
        bucket.put_object(Bucket=BUCKET, Key=f"maze/{ready.name}/{file}", Body=(ready / file).read_bytes())
    assert publish(ready, parse_s3(PLACE))
    assert open_store(PLACE, tmp_path).names() == [ready.name]


def test_a_later_card_is_no_other_adapter(run: Path, ready: Path, bucket: Any, tmp_path: Path) -> None:
    """Published while the run goes on, and again when its best step was confirmed."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/eval/step-000004/unseen.sampled-confirm.json").unlink()
    early = make_publishable(tmp_path / "run", "best", tmp_path / "early").folder
    assert early.name == ready.name and "confirmed" not in (early / "README.md").read_text()
    assert publish(early, parse_s3(PLACE)) and not publish(ready, parse_s3(PLACE))


def test_two_publishers_at_once(ready: Path, bucket: Any, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            publish(ready, parse_s3(PLACE))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and open_store(PLACE, tmp_path).fetch(ready.name).is_dir()


def test_an_adapter_without_effect_is_refused(run: Path, bucket: Any, clew: Command) -> None:
    outcome = clew("export", run, "--step", "2", "--to", PLACE)
    assert outcome.code == 2 and "changes no logit of its base model" in outcome.err and "later --step" in outcome.err
    assert not keys(bucket)


@pytest.mark.parametrize("zero", [False, True])
def test_the_effect_of_a_skyrl_export_is_measured(zero: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = run / "exports/global_step_20/policy"
    policy = attach_lora(tiny.tiny(), 4, 8, 0.0) if zero else learned()
    policy.save_pretrained(folder, safe_serialization=True)
    evals = run / "exports/dumped_evals/global_step_20_evals"
    evals.mkdir(parents=True)
    suite = "eval/all/environment/heldout"
    (evals / "aggregated_results.jsonl").write_text(json.dumps({f"{suite}/solved": 3.0, f"{suite}/episodes": 8.0}))
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE.format(model=tiny.tiny_folder()))
    (run / "recipe.toml").write_text(load_recipe(str(recipe)).to_toml())
    if zero:
        with pytest.raises(UserError, match="changes no logit"):
            make_publishable(run, "best", tmp_path / "ready")
        return
    ready = make_publishable(run, "best", tmp_path / "ready").folder
    card = (ready / "README.md").read_text()
    assert "3/8 of the held-out tasks" in card and "with SkyRL" in card and "NO EFFECT" not in card
    facts = json.loads((ready / "manifest.json").read_text())["facts"]
    assert facts["effect"] > 0.001 and facts["base_sha256"] == base_fingerprint(str(tiny.tiny_folder()))


def test_a_base_model_that_is_not_here_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/adapters")
    folder = tmp_path / "run/adapters/step-000004"
    shutil.copytree(run / "adapters/step-000004", folder)
    from clew.checkpoint import write_directory

    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/model"}))
    (folder / "manifest.json").unlink()
    shutil.move(folder, tmp_path / "old")
    write_directory(folder, lambda staging: shutil.copytree(tmp_path / "old", staging, dirs_exist_ok=True) and None, {})
    recipe = (tmp_path / "run/recipe.toml").read_text()
    (tmp_path / "run/recipe.toml").write_text(re.sub(r'(?m)^path = ".*"', 'path = "/gone/model"', recipe, count=1))
    with pytest.raises(UserError, match=r"must be tried on its base model first.*/gone/model"):
        make_publishable(tmp_path / "run", "4", tmp_path / "ready")


def test_numbers_that_are_not_finite_are_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    own = read_adapter(run / "adapters/step-000006")
    next(iter(own.tensors.values())).view(-1)[0] = float("nan")
    shutil.rmtree(tmp_path / "run/adapters/step-000006")
    card = {"base_model": "b", "base_sha256": "0" * 64, "step": 6, "recipe": "small", "seed": 5, "environment": {}}
    export_adapter(own, tmp_path / "run/adapters/step-000006", card, 0.5)
    with pytest.raises(UserError, match="not finite"):
        make_publishable(tmp_path / "run", "6", tmp_path / "ready")


@pytest.mark.parametrize("recipe", ["small", "a name/with: odd Ünicode..letters", "-", "x" * 300])
def test_published_names_are_names_of_adapters(recipe: str) -> None:
    name = published_name(recipe, 2**63, 10**7, "0123456789abcdef")
    assert check_adapter_name(name) == name and name.endswith("-step10000000-0123456789ab")


def test_what_can_not_be_reached_is_said_before_and_without_secrets(
    run: Path, bucket: Any, s3: str, clew: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [clew("export", run, "--to", "s3://other-models/maze"), clew("export", run, "--to", f"s3://{BUCKET}")]

    def deny(method: str, path: str, body: bytes) -> tuple[int, bytes] | bytes:
        text = f"<Error><Code>AccessDenied</Code><Message>{SECRET} {KEY_ID}</Message></Error>".encode()
        return (403, text) if method == "PUT" else body

    with connection(s3, deny) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        outcomes.append(clew("export", run, "--to", PLACE))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    outcomes.append(clew("export", run, "--to", PLACE))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    outcomes.append(clew("export", run, "--to", PLACE))
    expected = (
        "no bucket other-models",
        "give s3://bucket/prefix",
        "does not allow to write",
        "can't be reached",
        "NoCredentials",
    )
    for outcome, text in zip(outcomes, expected, strict=True):
        assert outcome.code == 2 and text in outcome.err and outcome.err.count("\n") == 1
        assert SECRET not in outcome.err + outcome.out and KEY_ID not in outcome.err + outcome.out
