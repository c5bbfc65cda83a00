"""Disks that are full, closed or limited, and what killed processes leave behind."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from clew.checkpoint import (
    append_jsonl,
    clean_staging,
    durable,
    staging,
    verify,
    write_directory,
    write_file_atomic,
)
from clew.errors import UserError


def small(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"\x00\x01" * 5000)
    (folder / "state").mkdir()
    (folder / "state" / "optimizer.pt").write_bytes(b"moments")


@contextmanager
def tmpfs(place: Path, options: str):
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


needs_mount = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("mount") is None, reason="needs mount(8) for a real small disk"
)


# --- disks that are full, closed, or limited ----------------------------------------------------------------


def big(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 400_000)


def big_torch(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(100_000)}, folder / "weights.pt")


def big_safetensors(folder: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": pytest.importorskip("numpy").zeros(100_000, "float32")}, folder / "w.safetensors")


@needs_mount
@pytest.mark.parametrize("huge", [big, big_torch, big_safetensors])
def test_a_really_full_disk(tmp_path, huge):
    with tmpfs(tmp_path / "disk", "size=200k") as disk:
        first = write_directory(disk / "step-000001", small, {})
        append_jsonl(disk / "metrics.jsonl", {"step": 1})
        write_file_atomic(disk / "summary.json", "old")
        with pytest.raises(UserError, match=r"cannot write .*step-000002: the disk is full") as caught:
            write_directory(disk / "step-000002", huge, {})
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError, match="the disk is full"):
            write_file_atomic(disk / "summary.json", "new" * 100_000)
        with pytest.raises(UserError, match="the disk is full"):
            append_jsonl(disk / "metrics.jsonl", {"step": 2, "long": "x" * 300_000})
        verify(first)
        assert (disk / "summary.json").read_text() == "old"
        assert (disk / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert sorted(os.listdir(disk)) == ["metrics.jsonl", "step-000001", "summary.json"]
        write_directory(disk / "step-000002", small, {})  # room again, the run goes on
        append_jsonl(disk / "metrics.jsonl", {"step": 2})


@needs_mount
def test_a_read_only_disk(tmp_path):
    with tmpfs(tmp_path / "disk", "size=200k") as disk:
        final = write_directory(disk / "step-000001", small, {})
        (disk / "metrics.jsonl").write_text("")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for action in (
            lambda: write_directory(disk / "step-000002", big, {}),
            lambda: write_file_atomic(disk / "summary.json", "x"),
            lambda: append_jsonl(disk / "metrics.jsonl", {}),
        ):
            with pytest.raises(UserError, match="the file system is read-only"):
                action()
        verify(final)


LIMITED = """
import resource, sys
from pathlib import Path
from clew.checkpoint import append_jsonl, write_directory, write_file_atomic
from clew.errors import UserError
root = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
append_jsonl(root / "m.jsonl", {"step": 1})
for action in (
    lambda: write_directory(root / "d", lambda f: (f / "w").write_bytes(bytes(5000)), {}),
    lambda: write_file_atomic(root / "f", bytes(5000)),
    lambda: append_jsonl(root / "m.jsonl", {"long": "x" * 5000}),
):
    try:
        action()
    except UserError as err:
        print(err)
"""


def test_a_limited_file_size_as_a_short_write(tmp_path):
    """RLIMIT_FSIZE makes write(2) take a part first and fail on the rest, as a nearly full disk does."""
    source = str(Path(durable.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("the largest allowed file size is reached" in line for line in lines)
    assert os.listdir(tmp_path) == ["m.jsonl"]
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_at_the_flush(tmp_path, monkeypatch, code):
    """Network file systems allocate late: write succeeds and fsync reports the quota."""

    def full(descriptor):
        raise OSError(code, os.strerror(code))

    write_file_atomic(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", full)
    for action in (
        lambda: write_directory(tmp_path / "d", small, {}),
        lambda: write_file_atomic(tmp_path / "a", "new"),
        lambda: append_jsonl(tmp_path / "m.jsonl", {"step": 1}),
    ):
        with pytest.raises(UserError, match=r"the disk is full|the disk quota is used up"):
            action()
    assert (tmp_path / "a").read_text() == "old" and not (tmp_path / "d").exists()
    assert (tmp_path / "m.jsonl").read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == ["a", "m.jsonl"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    for action in (
        lambda: write_directory(tmp_path / "file", big, {}),
        lambda: write_directory(tmp_path / "file" / "step-000001", big, {}),
        lambda: write_file_atomic(tmp_path / "file" / "x", ""),
        lambda: append_jsonl(tmp_path / "file" / "x.jsonl", {}),
    ):
        with pytest.raises(UserError, match=r"cannot write .*director") as caught:
            action()
        assert "\n" not in str(caught.value)
    (tmp_path / "dir").mkdir()
    with pytest.raises(UserError, match="this is a directory"):
        write_file_atomic(tmp_path / "dir", "")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["dir", "file"]


CLOSED = """
import os, sys
from pathlib import Path
from clew.checkpoint import RunLock, append_jsonl, write_directory, write_file_atomic
from clew.errors import UserError
root = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
for action in (
    lambda: write_directory(root / "d", lambda f: None, {}),
    lambda: write_file_atomic(root / "f", ""),
    lambda: append_jsonl(root / "m.jsonl", {}),
    lambda: RunLock(root).acquire(),
):
    try:
        action()
    except UserError as err:
        print(err)
"""


def test_a_directory_of_somebody_else(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    tmp_path.chmod(0o755)
    source = str(Path(durable.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, str(closed)],
        env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count("no permission to write there") == len(done.stdout.splitlines()) == 4
    assert os.listdir(closed) == []


# --- leftovers ----------------------------------------------------------------------------------------------


def test_only_leftovers_of_the_dead_are_cleaned(tmp_path, monkeypatch):
    host, pid = staging._host(), os.getpid()
    start = staging.process_start(pid)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def leftover(name, owner, folder="checkpoints"):
        entry = tmp_path / folder / f".tmp-{name}~{owner}~0"
        entry.mkdir(parents=True)
        (entry / "weights").write_bytes(b"1")
        return entry

    gone = [
        leftover("step-000001", f"{host}~{dead.pid}~0"),
        leftover("x", f"{host}~{dead.pid}~0", "adapters"),
        leftover("step-000002", f"{host}~{zombie.pid}~0"),
        leftover("step-000003", f"{host}~{pid}~{int(start) + 1}"),  # the process id was used again
        leftover("step-000004", "another_node~1~5"),
    ]
    old = time.time() - staging.FOREIGN_IDLE_S - 60
    for path in (gone[-1] / "weights", gone[-1]):
        os.utime(path, (old, old))
    stays = [
        leftover("step-000005", f"{host}~{living.pid}~{staging.process_start(living.pid)}"),
        leftover("step-000006", f"{host}~{pid}~{start}"),
        leftover("step-000007", "another_node~1~5"),
        leftover("step-000008", f"{socket.gethostname()}_other_container~1~5"),
        tmp_path / "checkpoints" / ".tmp-not-ours",
    ]
    stays[-1].mkdir()
    file = tmp_path / f".tmp-metrics.jsonl~{host}~{dead.pid}~0~3"
    file.write_text("half")
    assert sorted(clean_staging(tmp_path)) == sorted([*gone, file])
    assert all(p.exists() for p in stays) and not any(p.exists() for p in [*gone, file])
    assert clean_staging(tmp_path / "absent") == []
    zombie.wait()
    living.communicate()
    assert clean_staging(tmp_path) == [stays[0]]


def test_names_of_leftovers_fit_any_name(tmp_path):
    path = staging.staging_path(tmp_path / "metrics~1.jsonl")
    path.write_text("")
    assert not staging._abandoned(path) and staging._NAME.fullmatch(path.name)
