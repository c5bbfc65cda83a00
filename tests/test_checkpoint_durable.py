"""Directories and files that are whole or absent: damage is named, order is kept, full disks are survived."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clew.checkpoint import (
    DamagedCheckpoint,
    append_jsonl,
    durable,
    truncate_jsonl,
    verify,
    write_directory,
    write_file_atomic,
)
from clew.errors import UserError

CONTENT = {"adapter.safetensors": b"\x00\x01" * 5000, "state/optimizer.pt": b"moments", "empty": b""}
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
names = st.text("abcXYZ 0._-é", min_size=1, max_size=8).filter(lambda n: n.strip(".") and n != durable.MANIFEST)
contents = st.dictionaries(names, st.binary(max_size=300), min_size=1, max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
facts_json = st.dictionaries(
    st.text(max_size=5),
    st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)),
    max_size=4,
)


def writer(content):
    def write(folder: Path) -> None:
        for name, data in content.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return write


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def fresh(tmp_path: Path) -> Path:
    """A new folder an example: hypothesis shares tmp_path among its examples."""
    return tmp_path / f"example-{len(list(tmp_path.iterdir()))}"


# --- round trips and damage ---------------------------------------------------------------------------------


@quick
@given(content=contents, facts=facts_json)
def test_what_is_written_is_what_is_verified(tmp_path, content, facts):
    root = fresh(tmp_path)
    final = write_directory(root / "a" / "step-000001", writer(content), facts)
    manifest = verify(final)
    assert manifest.facts == facts
    assert {n: (r.size, len(r.sha256)) for n, r in manifest.files.items()} == {
        n: (len(d), 64) for n, d in content.items()
    }
    found = tree(final)
    del found["manifest.json"]
    assert found == content
    assert [p.name for p in final.parent.iterdir()] == ["step-000001"]


def test_the_manifest_agrees_with_sha256sum(tmp_path):
    final = write_directory(tmp_path / "x", writer(CONTENT), {})
    listed = json.loads((final / "manifest.json").read_text())["files"]
    sums = "".join(f"{record['sha256']}  {name}\n" for name, record in listed.items())
    subprocess.run(["sha256sum", "--check", "--strict"], cwd=final, input=sums, text=True, check=True)


@quick
@given(content=contents, data=st.data())
def test_any_damage_is_found_and_named(tmp_path, content, data):
    final = write_directory(fresh(tmp_path) / "step-000001", writer(content), {"step": 1})
    before = verify(final)
    name = data.draw(st.sampled_from(sorted([*content, "manifest.json"])))
    raw = (final / name).read_bytes()
    kind = data.draw(st.sampled_from(["missing", "grown"] + (["cut", "flip"] if raw else [])))
    if kind == "missing":
        (final / name).unlink()
    elif kind == "grown":
        (final / name).write_bytes(raw + b"}")
    elif kind == "cut":
        (final / name).write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    else:
        at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
        (final / name).write_bytes(raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :])
    try:
        after = verify(final)
    except DamagedCheckpoint as damage:
        assert name in str(damage) and str(final) in str(damage)
        assert isinstance(damage, UserError)
        assert len(damage.problems) == 1 and "\n" not in str(damage)
    else:  # white space in the manifest means nothing
        assert name == "manifest.json" and after == before


def test_each_kind_of_damage_has_its_words(tmp_path):
    def broken(number, change):
        final = write_directory(tmp_path / f"step-{number:06d}", writer(CONTENT), {})
        change(final)
        with pytest.raises(DamagedCheckpoint) as caught:
            verify(final)
        return caught.value.problems

    flipped = b"\x01" + CONTENT["adapter.safetensors"][1:]
    assert broken(1, lambda d: (d / "state/optimizer.pt").unlink()) == ["state/optimizer.pt is missing"]
    assert broken(2, lambda d: shutil.rmtree(d / "state")) == ["state/optimizer.pt is missing"]
    assert broken(3, lambda d: os.truncate(d / "adapter.safetensors", 7)) == [
        "adapter.safetensors has 7 bytes instead of 10000"
    ]
    assert broken(4, lambda d: (d / "adapter.safetensors").write_bytes(flipped)) == [
        "adapter.safetensors has a wrong sha256 (its content changed)"
    ]
    assert broken(5, lambda d: (d / "manifest.json").unlink()) == ["manifest.json is missing"]
    assert broken(6, lambda d: ((d / "empty").unlink(), (d / "empty").mkdir())) == ["empty is not a file"]
    assert broken(7, lambda d: [(d / n).unlink() for n in CONTENT]) == [f"{n} is missing" for n in sorted(CONTENT)]
    text = '{"format": 1, "files": {}, "facts": {"step": 2}, "sha256": "0"}'
    assert broken(8, lambda d: (d / "manifest.json").write_text(text)) == [
        "manifest.json does not match its own sha256"
    ]
    for number, junk in enumerate([b"", b"[]", b"null", b"\x00" * 400, b'{"sha256": 1, "files": 3}'], 9):
        (problem,) = broken(number, lambda d, junk=junk: (d / "manifest.json").write_bytes(junk))
        assert problem.startswith("manifest.json cannot be read")


def test_extra_files_do_not_make_a_directory_partial(tmp_path):
    final = write_directory(tmp_path / "x", writer(CONTENT), {})
    (final / "notes.txt").write_text("mine")
    assert set(verify(final).files) == set(CONTENT)


# --- immutability and replacement ---------------------------------------------------------------------------


def test_a_whole_directory_is_never_overwritten(tmp_path):
    final = write_directory(tmp_path / "step-000020-1-abc", writer(CONTENT), {"step": 20})
    before, inode = tree(final), final.stat().st_ino
    assert write_directory(final, writer(CONTENT), {"step": 20}) == final  # the same again is fine
    with pytest.raises(UserError, match=r"already holds other content \(state/optimizer.pt\)"):
        write_directory(final, writer({**CONTENT, "state/optimizer.pt": b"Moments"}), {"step": 20})
    with pytest.raises(UserError, match=r"already holds other content \(new\)"):
        write_directory(final, writer({**CONTENT, "new": b""}), {"step": 20})
    with pytest.raises(UserError, match=r"already holds other content \(other facts\)"):
        write_directory(final, writer(CONTENT), {"step": 21})
    assert tree(final) == before and final.stat().st_ino == inode
    assert os.listdir(tmp_path) == [final.name]


@pytest.mark.parametrize("kind", ["no manifest", "cut", "empty"])
def test_a_partial_directory_is_replaced_and_what_was_in_it_kept(tmp_path, kind, caplog):
    final = tmp_path / "step-000020"
    if kind == "empty":
        final.mkdir()
    else:
        write_directory(final, writer(CONTENT), {})
        (final / "manifest.json").unlink() if kind == "no manifest" else os.truncate(final / "empty", 1)
        (final / "user.txt").write_text("precious")
    write_directory(final, writer({"new": b"1"}), {})
    assert set(verify(final).files) == {"new"}
    if kind == "empty":
        assert os.listdir(tmp_path) == [final.name]
    else:
        assert (tmp_path / "step-000020.damaged-1" / "user.txt").read_text() == "precious"
        assert "damaged-1" in caplog.text


def test_a_failing_writer_takes_nothing_with_it_that_it_linked(tmp_path):
    base = tmp_path / "base.safetensors"
    base.write_bytes(b"weights")

    def links(folder):
        os.link(base, folder / "base.safetensors")
        raise RuntimeError("later")

    with pytest.raises(RuntimeError):
        write_directory(tmp_path / "x", links, {})
    assert base.read_bytes() == b"weights" and os.listdir(tmp_path) == [base.name]


def test_a_failing_writer_leaves_nothing(tmp_path):
    def fails(folder):
        (folder / "half").write_bytes(b"1234")
        raise RuntimeError("out of memory")

    def interrupted(folder):
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="out of memory"):
        write_directory(tmp_path / "x", fails, {})
    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path / "x", interrupted, {})
    with pytest.raises(ValueError, match="link"):
        write_directory(tmp_path / "x", lambda d: (d / "link").symlink_to("/etc"), {})
    with pytest.raises(ValueError, match="reserved"):
        write_directory(tmp_path / "x", lambda d: (d / "manifest.json").touch(), {})
    with pytest.raises(ValueError):
        write_directory(tmp_path / "x", writer(CONTENT), {"loss": math.nan})
    assert os.listdir(tmp_path) == []


# --- the order that survives a power cut --------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch):
    """Calls in order: ("fsync", path) with the path the descriptor has at that time, ("rename", from, to)."""
    seen = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(descriptor):
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source, target):
        real_rename(source, target)  # a refused rename is no event
        seen.append(("rename", str(source), str(target)))

    def replace(source, target):
        real_replace(source, target)
        seen.append(("rename", str(source), str(target)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    return seen


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")


@linux
def test_order_of_write_directory(tmp_path, events):
    (tmp_path / "run").mkdir()
    final = write_directory(tmp_path / "run" / "checkpoints" / "step-000001", writer(CONTENT), {})
    ((at, staged),) = [(i, e[1]) for i, e in enumerate(events) if e[0] == "rename"]
    before = [e[1] for e in events[:at]]
    assert before[0] == str(tmp_path / "run")  # the new folder "checkpoints" is on the device first
    inside = [Path(p).relative_to(staged).as_posix() for p in before[1:]]
    assert sorted(inside[:-2]) == sorted([*CONTENT, "state"]) and inside[-2:] == ["manifest.json", "."]
    assert inside.index("state/optimizer.pt") < inside.index("state")
    assert events[at] == ("rename", staged, str(final))
    assert events[at + 1 :] == [("fsync", str(final.parent))]


@linux
def test_a_power_cut_shows_a_whole_directory_or_none(tmp_path, events, monkeypatch):
    """A pessimistic disk: content is zeros until its file is flushed, names are lost until their folder is,
    yet a rename may reach the device at once. Whatever the cut leaves there must verify."""
    final = tmp_path / "run" / "step-000001"
    shown = []

    def cut():
        renames = [e for e in events if e[0] == "rename"]
        if not renames:
            return
        flushed = {e[1].replace(renames[0][1], str(final)) for e in events if e[0] == "fsync"}
        disk = tmp_path / f"disk-{len(shown)}" / final.name
        for folder, _, files in os.walk(final):
            for name in files:
                path = Path(folder, name)
                chain = [p for p in path.parents if p == final or final in p.parents]
                if all(str(p) in flushed for p in chain):
                    data = path.read_bytes()
                    target = disk / path.relative_to(final)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data if str(path) in flushed else bytes(len(data)))
        shown.append(verify(disk))

    recording = os.fsync

    def fsync_then_cut(descriptor):
        cut()  # the cut may come just before this flush ...
        recording(descriptor)
        cut()  # ... or just after

    monkeypatch.setattr(os, "fsync", fsync_then_cut)
    write_directory(final, writer(CONTENT), {"step": 1})
    assert len(shown) == 2 and all(m == verify(final) for m in shown)


@linux
def test_order_of_atomic_files_and_lines(tmp_path, events):
    write_file_atomic(tmp_path / "summary.json", "{}")
    assert [e[0] for e in events] == ["fsync", "rename", "fsync"]
    assert events[0][1] == events[1][1] and events[1][2] == str(tmp_path / "summary.json")
    assert events[2][1] == str(tmp_path)
    del events[:]
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
    assert events == [("fsync", str(tmp_path / "metrics.jsonl")), ("fsync", str(tmp_path))]
    del events[:]
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 2})
    assert events == [("fsync", str(tmp_path / "metrics.jsonl"))]


# --- JSON lines ---------------------------------------------------------------------------------------------


@quick
@given(rows=st.lists(facts_json, max_size=6), cut=st.integers(0, 400), last=st.integers(-1, 6))
def test_lines_survive_a_torn_end_and_a_resume(tmp_path, rows, cut, last):
    path = fresh(tmp_path) / "metrics.jsonl"
    rows = [{**row, "step": i} for i, row in enumerate(rows)]
    for row in rows:
        append_jsonl(path, row)
    raw = path.read_bytes() if rows else b""
    assert [json.loads(line) for line in raw.splitlines()] == rows
    if rows:
        os.truncate(path, max(0, len(raw) - cut))  # a crash: any number of bytes of the end never came
    left = raw[: max(0, len(raw) - cut)]
    whole = left.count(b"\n") + (left[-1:] == b"}" and json_object(left.rpartition(b"\n")[2]))
    truncate_jsonl(path, lambda row: row["step"] <= last)
    expected = rows[: min(whole, last + 1)]
    after = path.read_bytes() if rows else b""
    assert after == raw[: len(after)]  # kept lines are the same bytes
    assert [json.loads(line) for line in after.splitlines()] == expected
    append_jsonl(path, {"step": "next"})
    assert path.read_bytes() == after + b'{"step": "next"}\n'


def json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def test_appending_after_a_torn_line_does_not_glue(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    append_jsonl(path, {"step": 2, "loss": 0.5, "kl": math.nan, "s": [math.inf, "line\nbreak\u2028"]})
    assert path.read_text() == (
        '{"step": 1}\n{"step": 2, "loss": 0.5, "kl": null, "s": [null, "line\\nbreak\\u2028"]}\n'
    )


def test_a_bad_line_in_the_middle_is_no_crash_trace(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(raw := b'{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is no JSON object"):
        truncate_jsonl(path, lambda row: True)
    assert path.read_bytes() == raw
    path.write_bytes(b'{"step": 1}\n' + bytes(50))  # what some file systems leave after a power cut
    assert truncate_jsonl(path, lambda row: True) == 1
    assert path.read_bytes() == b'{"step": 1}\n'
    assert truncate_jsonl(tmp_path / "absent.jsonl", lambda row: False) == 0


@quick
@given(first=st.binary(max_size=100), second=st.text(max_size=50))
def test_atomic_files_round_trip(tmp_path, first, second):
    path = fresh(tmp_path) / "deep" / "file"
    write_file_atomic(path, first)
    assert path.read_bytes() == first
    write_file_atomic(path, second)
    assert path.read_bytes() == second.encode()
    assert os.listdir(path.parent) == ["file"]


def test_files_are_readable_by_others_as_the_umask_says(tmp_path):
    write_file_atomic(tmp_path / "a", "x")
    plain = tmp_path / "b"
    plain.write_text("x")
    assert (tmp_path / "a").stat().st_mode == plain.stat().st_mode
