"""Adapters by name from folders and from a real S3 server: what is offered, what is refused, what fails and how."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, KEY_ID, SECRET, connection

from clew.checkpoint import write_directory
from clew.errors import UserError
from clew.serving.names import parse_s3
from clew.serving.s3 import S3Store
from clew.serving.store import LIMITS, BrokenAdapter, StorageTrouble, UnknownAdapter, open_store

PLACE = f"s3://{BUCKET}/maze"


# ---- folders and S3 alike


def write_adapter(folder: Path, scale: float = 1.0) -> Path:
    """A small adapter as Clew exports them."""
    import numpy as np
    from safetensors.numpy import save_file

    def write(staging: Path) -> None:
        save_file(
            {"base_model.model.x.lora_B.weight": np.full((4, 2), scale, "float32")},
            staging / "adapter_model.safetensors",
        )
        (staging / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, "peft_type": "LORA"}))
        (staging / "README.md").write_text("card")

    return write_directory(folder, write, {"adapter": folder.name})


def upload(client: Any, folder: Path, name: str | None = None) -> None:
    for file in folder.iterdir():
        client.put_object(Bucket=BUCKET, Key=f"maze/{name or folder.name}/{file.name}", Body=file.read_bytes())


@pytest.fixture(params=["folder", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Any]:
    """Makes the store of a folder of adapters: the folder itself, or what it is in S3."""

    def make(folder: Path) -> Any:
        if request.param == "folder":
            return open_store(str(folder), tmp_path / "cache")
        client = request.getfixturevalue("bucket")
        for adapter in folder.iterdir():
            upload(client, adapter)
        return open_store(PLACE, tmp_path / "cache")

    return make


def test_whole_adapters_are_listed_and_fetched(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    for name in ("b", "a.1", "step-000010"):
        write_adapter(folder / name)
    write_adapter(folder / "half")
    (folder / "half/adapter_config.json").unlink()
    store = opened(folder)
    assert store.names() == ["a.1", "b", "step-000010"]
    fetched = store.fetch("b")
    for file in ("adapter_config.json", "adapter_model.safetensors", "README.md", "manifest.json"):
        assert (fetched / file).read_bytes() == (folder / "b" / file).read_bytes()
    for name in ("half", "c", "", "../b", "a.1/../b", "b/", "/etc", "b\0", "x" * 500):
        with pytest.raises(UnknownAdapter):
            store.fetch(name)


def oversize(file: str, size: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "manifest.json").unlink()
        (folder / file).write_bytes(b" " * size)

    return spoil


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def content(file: str, data: bytes, manifest: bool = False) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / file).write_bytes(data)
        if not manifest:
            (folder / "manifest.json").unlink()

    return spoil


def cut_weights(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def listing_elsewhere(folder: Path) -> None:
    (folder.parent.parent / "elsewhere").write_text("secret")
    shutil.rmtree(folder)
    write_adapter(folder)
    from clew.checkpoint.durable import FileRecord, Manifest, read_manifest

    own = read_manifest(folder)
    files = {**own.files, "../../elsewhere": FileRecord(6, "0" * 64)}
    (folder / "manifest.json").write_text(Manifest(files, own.facts).to_json())


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "a pickle": (pickled, "adapter_model.bin, which is never loaded"),
    "no JSON": (content("adapter_config.json", b"{"), "is no JSON"),
    "deep JSON": (content("adapter_config.json", b"[" * 100_000), "is no JSON"),
    "another JSON": (content("adapter_config.json", b"[1]"), "needs r and lora_alpha"),
    "no rank": (content("adapter_config.json", b'{"r": "2", "lora_alpha": 4}'), "needs r and lora_alpha"),
    "no number": (content("adapter_config.json", b'{"r": 2, "lora_alpha": NaN}'), "needs r and lora_alpha"),
    "a huge number": (
        content("adapter_config.json", b'{"r": 2, "lora_alpha": 1' + b"0" * 400 + b"}"),
        "needs r and lora_alpha",
    ),
    "no safetensors": (content("adapter_model.safetensors", b"PK\3\4 a pickle of torch"), "damaged, or no safetensors"),
    "a header beyond the end": (content("adapter_model.safetensors", b"\xff" * 16), "damaged, or no safetensors"),
    "empty weights": (content("adapter_model.safetensors", b""), "damaged, or no safetensors"),
    "no tensors": (content("adapter_model.safetensors", (2).to_bytes(8, "little") + b"{}"), "holds no tensors"),
    "cut weights": (cut_weights, "damaged, or no safetensors"),
    "a large configuration": (oversize("adapter_config.json", (1 << 20) + 1), "more than the 1048576"),
    "a large card": (oversize("README.md", (1 << 20) + 1), "more than the 1048576"),
    "changed weights": (content("adapter_model.safetensors", b"?" * 100, manifest=True), "is damaged: adapter_model"),
    "changed manifest": (content("manifest.json", b'{"format": 1}', manifest=True), "is damaged: manifest.json"),
    "a manifest of other files": (listing_elsewhere, "which is no file of its folder"),
}


OF_BOTH = ("no weights", "a pickle", "no safetensors", "a large configuration", "changed weights")


@pytest.mark.parametrize(
    ("opened", "kind"),
    [*(("folder", kind) for kind in BROKEN), *(("s3", kind) for kind in OF_BOTH)],
    indirect=["opened"],
)
def test_broken_adapters_are_named_and_hurt_no_other(kind: str, opened: Callable[[Path], Any], tmp_path: Path) -> None:
    spoil, message = BROKEN[kind]
    write_adapter(tmp_path / "adapters/good")
    spoil(write_adapter(tmp_path / "adapters/bad"))
    store = opened(tmp_path / "adapters")
    for _ in range(2):
        with pytest.raises(BrokenAdapter, match=message) as broken:
            store.fetch("bad")
        assert str(tmp_path) not in str(broken.value) and str(broken.value).startswith("adapter bad")
    assert (store.fetch("good") / "adapter_config.json").is_file()


def test_an_adapter_without_a_manifest_is_served(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    (write_adapter(tmp_path / "adapters/plain") / "manifest.json").unlink()
    (tmp_path / "adapters/plain/README.md").unlink()
    store = opened(tmp_path / "adapters")
    assert (store.fetch("plain") / "adapter_model.safetensors").is_file()


# ---- folders


def test_what_a_run_set_aside_is_not_offered(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    for name in ("step-000010", "step-000010.superseded-1", "step-000020.damaged-2", ".tmp-step-000030~h~1~2~3"):
        write_adapter(folder / name)
    (folder / "notes.txt").touch()
    store = open_store(str(folder), tmp_path)
    assert store.names() == ["step-000010"]
    with pytest.raises(UnknownAdapter):
        store.fetch("step-000010.superseded-1")


def test_a_run_and_a_single_adapter(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_adapter(run / "adapters/step-000010")
    (run / "recipe.toml").touch()
    assert open_store(str(run), tmp_path).names() == ["step-000010"]
    single = open_store(str(run / "adapters/step-000010"), tmp_path)
    write_adapter(run / "adapters/step-000020")
    assert single.names() == ["step-000010"] and single.fetch("step-000010") == run / "adapters/step-000010"
    with pytest.raises(UnknownAdapter):
        single.fetch("step-000020")


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "adapters", write_adapter(tmp_path / "outside")
    write_adapter(folder / "own")
    (folder / "best").symlink_to("own")
    (folder / "linked").symlink_to(outside)
    shutil.copytree(outside, folder / "weights")
    (folder / "weights/adapter_model.safetensors").unlink()
    (folder / "weights/adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    store = open_store(str(folder), tmp_path)
    assert store.names() == ["best", "own"] and store.fetch("best").is_dir()
    for name in ("linked", "weights"):
        with pytest.raises(UnknownAdapter):
            store.fetch(name)
    with pytest.raises(UserError, match="links to outside"):
        open_store(str(folder / "weights"), tmp_path)


def test_places_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.toml").touch()
    for place, message in (
        (str(tmp_path / "none"), "no such folder"),
        (str(tmp_path / "file"), "no such folder"),
        (str(tmp_path / "run"), "exported no adapter yet"),
        ("s3://models", "give s3://bucket/prefix"),
        ("https://models/maze", "give s3://bucket/prefix"),
    ):
        with pytest.raises(UserError, match=message):
            open_store(place, tmp_path / "cache")
    (tmp_path / "run/exports").mkdir()
    with pytest.raises(UserError, match="clew export"):
        open_store(str(tmp_path / "run"), tmp_path / "cache")


# ---- S3


def test_a_long_listing_has_several_pages(bucket: Any, tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(5)]
    for key in (f"maze/{name}/{file}" for name in names for file in ("README.md", "adapter_config.json")):
        bucket.put_object(Bucket=BUCKET, Key=key, Body=b"{}")
    for odd in (
        "maze/adapter_config.json",
        "maze/x/y/adapter_config.json",
        "maze/a b/adapter_config.json",
        "mazes/z/a",
    ):
        bucket.put_object(Bucket=BUCKET, Key=odd, Body=b"{}")
    store = S3Store(parse_s3(PLACE), tmp_path)
    store._client.meta.events.register(
        "before-parameter-build.s3.ListObjectsV2", lambda params, **_: params.update(MaxKeys=3)
    )
    assert store.names() == names


def test_only_an_adapters_own_files_are_downloaded_and_nobody_else_reads_them(bucket: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "optimizer.pt").write_bytes(b"x" * 100)
    (folder / "tokenizer.json").write_text("{}")
    upload(bucket, folder)
    bucket.put_object(Bucket=BUCKET, Key="maze/a/sub/adapter_model.bin", Body=b"x")
    fetched = open_store(PLACE, tmp_path / "cache").fetch("a")
    files = {entry.name for entry in fetched.iterdir() if not entry.name.startswith(".")}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md", "manifest.json"}
    assert stat.S_IMODE(fetched.parent.stat().st_mode) == stat.S_IMODE(fetched.stat().st_mode) == 0o700


def test_one_download_for_all_who_ask_at_once(
    bucket: Any, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(bucket, write_adapter(tmp_path / "a"))
    with connection(s3, lambda method, path, body: body) as (url, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        stores = [open_store(PLACE, tmp_path / "cache") for _ in range(4)]  # as the processes of one machine would
        found: list[Path] = []
        threads = [threading.Thread(target=lambda store=store: found.append(store.fetch("a"))) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1 and len(found) == 4
        assert open_store(PLACE, tmp_path / "cache").fetch("a") == found[0]
    assert sum("adapter_model.safetensors" in request for request in seen) == 1


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "README.md"])
def test_an_overwritten_name_is_noticed(file: str, bucket: Any, tmp_path: Path) -> None:
    upload(bucket, write_adapter(tmp_path / "a"))
    store = open_store(PLACE, tmp_path / "cache")
    first = store.fetch("a")
    bucket.put_object(Bucket=BUCKET, Key=f"maze/a/{file}", Body=(first / file).read_bytes()[::-1])
    with pytest.raises(BrokenAdapter, match="changed in S3 after it had been loaded; adapters are immutable"):
        store.fetch("a")
    bucket.delete_object(Bucket=BUCKET, Key="maze/a/adapter_config.json")
    with pytest.raises(UnknownAdapter):
        store.fetch("a")


@pytest.mark.parametrize("file", ["adapter_model.safetensors", ".source.json"])
def test_what_was_tidied_away_is_downloaded_again(file: str, bucket: Any, tmp_path: Path) -> None:
    upload(bucket, write_adapter(tmp_path / "a"))
    store = open_store(PLACE, tmp_path / "cache")
    (store.fetch("a") / file).unlink()
    assert (store.fetch("a") / file).stat().st_size > 100


def test_too_large_is_refused_before_the_download(
    bucket: Any, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(bucket, write_adapter(tmp_path / "a"))
    monkeypatch.setitem(LIMITS, "adapter_model.safetensors", 64)
    with connection(s3, lambda method, path, body: body) as (url, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(BrokenAdapter, match="more than the 64 that are allowed"):
            open_store(PLACE, tmp_path / "cache").fetch("a")
    assert len(seen) == 1 and "list-type=2" in seen[0]


@pytest.mark.parametrize("times", [2, 100])
def test_a_download_that_is_cut_off(
    times: int, bucket: Any, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: it is downloaded again. Always: it is trouble, and nothing half is left or taken for the adapter."""
    upload(bucket, write_adapter(tmp_path / "a"))
    left = [times]

    def cut(method: str, path: str, body: bytes) -> bytes | None:
        if not path.endswith("/adapter_model.safetensors") or left[0] == 0:
            return body
        left[0] -= 1
        return body[: len(body) // 2]

    with connection(s3, cut) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = open_store(PLACE, tmp_path / "cache")
        if times == 2:
            assert (store.fetch("a") / "adapter_model.safetensors").stat().st_size > 100
            return
        for _ in range(2):
            with pytest.raises(StorageTrouble, match="can't be"):
                store.fetch("a")
        assert not [path for path in (tmp_path / "cache").rglob("*") if "adapter_model" in path.name]
        left[0] = 0
        assert store.fetch("a").is_dir()


def test_trouble_is_told_without_secrets(bucket: Any, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(bucket, write_adapter(tmp_path / "a"))
    texts = []

    def trouble(match: str) -> None:
        store = open_store(PLACE, tmp_path / "cache")
        with pytest.raises(StorageTrouble, match=match) as told:
            store.names() if len(texts) % 2 else store.fetch("a")
        assert told.value.__suppress_context__
        texts.append(str(told.value))

    def deny(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        text = f"<Code>{answer[1]}</Code><Message>{SECRET}</Message><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId>"
        return answer[0], f"<Error>{text}</Error>".encode()

    with connection(s3, lambda method, path, body: None) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        trouble("can't be reached to read s3://models/maze")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{KEY_ID}:{SECRET}@127.0.0.1:9")
    trouble("can't be")
    with connection(s3, deny) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for answer in ((403, "SignatureDoesNotMatch"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId")):
            trouble(f"does not allow to read s3://models/maze .{answer[1]}")
        answer = 503, "SlowDown"
        trouble("failed to read s3://models/maze .SlowDown")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    trouble("can't be asked to read s3://models/maze .NoCredentialsError")
    monkeypatch.setenv("AWS_PROFILE", SECRET)
    with pytest.raises(UserError, match="AWS_PROFILE") as refused:
        open_store(PLACE, tmp_path / "cache")
    texts.append(str(refused.value))
    assert not [text for text in texts if SECRET in text or KEY_ID in text]


def test_a_bucket_that_is_not_there(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(StorageTrouble, match="no bucket other-models"):
        open_store("s3://other-models/maze", tmp_path).names()


def test_a_cache_of_somebody_else_is_not_used(bucket: Any, tmp_path: Path) -> None:
    (folder,) = open_store(PLACE, tmp_path / "cache") and (tmp_path / "cache").iterdir()
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="another user's, or a link"):
        open_store(PLACE, tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't be made"):
        open_store(PLACE, tmp_path / "file")


def test_without_boto3_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"clew\[aws\]"):
        open_store(PLACE, tmp_path)
