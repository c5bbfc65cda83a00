"""kill -9 of real processes: what was saved is whole, what was not is absent, locks are free."""

import contextlib
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from clew.checkpoint import CheckpointStore, RunLock, clean_staging, durable, truncate_jsonl, verify
from clew.errors import UserError

SOURCE = str(Path(durable.__file__).parents[2])
ENV = {**os.environ, "PYTHONPATH": SOURCE}

# A run: resumes as Clew does, then saves steps for ever, telling each saved step only when it is saved.
RUN = """
import hashlib, itertools, os, sys
from pathlib import Path
from clew.checkpoint import CheckpointStore, RunLock
from clew.checkpoint import append_jsonl, clean_staging, truncate_jsonl, write_file_atomic

def content(step, name):
    return hashlib.sha256(f"{step}{name}".encode()).digest() * 2000

def writer(step):
    def write(folder):
        (folder / "policy").mkdir()
        for name in ("policy/a", "policy/b", "optimizer"):
            with open(folder / name, "wb", buffering=0) as file:
                data = content(step, name)
                for at in range(0, len(data), 8192):
                    file.write(data[at : at + 8192])
    return write

if __name__ == "__main__":
    run = Path(sys.argv[1])
    with RunLock(run):
        clean_staging(run)
        store = CheckpointStore(run / "checkpoints", 3)
        latest = store.latest()
        done = latest[0] if latest else 0
        truncate_jsonl(run / "metrics.jsonl", lambda row: row["step"] <= done)
        print("from", done, flush=True)
        for step in itertools.count(done + 1):
            append_jsonl(run / "metrics.jsonl", {"step": step, "pad": "x" * 3000})
            write_file_atomic(run / "summary.json", '{"steps": %d, "pad": "%s"}' % (step, "y" * 20000))
            store.save(step, writer(step), {})
            print("saved", step, flush=True)
"""


def check(run: Path, acknowledged: int, content) -> int:
    """After a kill: all that is visible is whole, nothing acknowledged is lost. The newest step."""
    store = CheckpointStore(run / "checkpoints", 3)
    for step in store.steps():
        manifest = verify(store.path(step))
        assert set(manifest.files) == {"policy/a", "policy/b", "optimizer"}
        for name in manifest.files:
            assert (store.path(step) / name).read_bytes() == content(step, name)
    latest = store.latest()
    newest = latest[0] if latest else 0
    assert acknowledged <= newest <= acknowledged + 1
    if newest:
        rows = (run / "metrics.jsonl").read_bytes().split(b"\n")
        assert [json.loads(row)["step"] for row in rows[:newest]] == list(range(1, newest + 1))
        assert json.loads((run / "summary.json").read_text())["steps"] in (newest, newest + 1)
    return newest


def test_killed_at_random_moments(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    space = runpy.run_path(str(script))
    run = tmp_path / "run"
    rng = random.Random(20)
    newest, leftovers, kills, one_save = 0, 0, 15, 0.05
    for _ in range(kills):
        child = subprocess.Popen([sys.executable, str(script), str(run)], env=ENV, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == f"from {newest}\n"
        began, saves = time.monotonic(), rng.randrange(3)
        heard = "".join(child.stdout.readline() for _ in range(saves))
        if saves:  # moments are spread over one save as this machine does it now
            one_save = (time.monotonic() - began) / saves
        time.sleep(rng.uniform(0, one_save))
        child.send_signal(signal.SIGKILL)
        said = re.findall(r"^saved (\d+)\n", heard + child.stdout.read(), re.M)
        child.wait()
        leftovers += len([p for p in run.rglob(".tmp-*")])
        newest = check(run, int(said[-1]) if said else newest, space["content"])
    assert newest > 0
    assert leftovers > 0, "no kill met a save in progress: this test tests nothing"
    with RunLock(run):
        clean_staging(run)
        truncate_jsonl(run / "metrics.jsonl", lambda row: row["step"] <= newest)
    assert list(run.rglob(".tmp-*")) == []
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") == newest
    store = CheckpointStore(run / "checkpoints", 3)
    store.save(newest + 1, space["writer"](newest + 1), {})
    assert store.steps() == [newest - 1, newest, newest + 1]


# Every call that changes the disk is a place to die, before it and in the middle of a write.
EACH = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import run as r
from clew.checkpoint import CheckpointStore, append_jsonl
root = Path(sys.argv[1])

def child(folder, fatal):
    calls = 0
    def dying(real, half=None):
        def call(*args, **more):
            nonlocal calls
            calls += 1
            if calls == fatal:
                if half:
                    half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)
        return call
    write = os.write
    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate"):
        setattr(os, name, dying(getattr(os, name)))
    os.write = dying(write, lambda fd, data: write(fd, bytes(data)[: len(data) // 2]))
    store = CheckpointStore(folder / "checkpoints", 1)
    append_jsonl(folder / "metrics.jsonl", {"step": 2})
    store.save(2, r.writer(2), {})
    os._exit(0)

fatal = 0
while True:
    fatal += 1
    folder = root / f"kill-{fatal:03d}"
    CheckpointStore(folder / "checkpoints", 1).save(1, r.writer(1), {})
    append_jsonl(folder / "metrics.jsonl", {"step": 1})
    pid = os.fork()
    if pid == 0:
        child(folder, fatal)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
print(fatal - 1)
"""


def test_killed_at_every_call(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    done = subprocess.run(
        [sys.executable, "-c", EACH, str(tmp_path), str(tmp_path)],
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    places = int(done.stdout)
    assert places >= 20
    outcomes = []
    for folder in sorted(tmp_path.glob("kill-*")):
        store = CheckpointStore(folder / "checkpoints", 1)
        for step in store.steps():
            verify(store.path(step))
        latest = store.latest()
        assert latest is not None
        outcomes.append(latest[0])
        clean_staging(folder)
        assert list(folder.rglob(".tmp-*")) == []
        truncate_jsonl(folder / "metrics.jsonl", lambda row, last=latest[0]: row["step"] <= last)
        rows = [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_bytes().splitlines()]
        assert rows == list(range(1, latest[0] + 1))
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}  # old until one call, new ever after


# --- the lock -----------------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from clew.checkpoint import RunLock
lock = RunLock(sys.argv[1]).acquire()
if "fork" in sys.argv:
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.close(1)
        os.write(tell, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
if "spawn" in sys.argv:
    import subprocess
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print("held", flush=True)
input()
lock.release()
print("released", flush=True)
input()
"""


def hold(run: Path, *how: str) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run), *how],
        env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def end(child: subprocess.Popen) -> None:
    """Kill the session that `hold` started: the child and what it forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("how", ["alone", "fork", "spawn"])
def test_a_killed_holder_frees_the_run_even_if_its_workers_live_on(tmp_path, how):
    child = hold(tmp_path / "run", how)
    try:
        with pytest.raises(UserError, match=rf"run is being written by process {child.pid} on ") as caught:
            RunLock(tmp_path / "run").acquire()
        assert "\n" not in str(caught.value)
        child.kill()
        child.wait()
        with RunLock(tmp_path / "run"):
            assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()
            if how != "alone":
                os.killpg(child.pid, 0)  # the worker is still there
    finally:
        end(child)


def test_a_released_lock_is_free_while_the_process_lives(tmp_path):
    child = hold(tmp_path)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "released\n"
        with RunLock(tmp_path):
            pass
    finally:
        end(child)


def test_one_process_cannot_lock_twice_and_reading_the_file_frees_nothing(tmp_path):
    first = RunLock(tmp_path)
    with first:
        assert first.acquire() is first  # the same lock again is no conflict
        (tmp_path / ".lock").read_text()  # would free a POSIX lock
        with pytest.raises(UserError, match=f"process {os.getpid()} on "):
            RunLock(tmp_path).acquire()
    first.release()
    with RunLock(tmp_path):
        pass


def test_a_stale_name_in_the_lock_file_is_not_blamed(tmp_path):
    child = hold(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    try:
        content = json.loads((tmp_path / ".lock").read_text())
        (tmp_path / ".lock").write_text(json.dumps({**content, "pid": dead.pid}))
        with pytest.raises(UserError, match="is being written by another process"):
            RunLock(tmp_path).acquire()
        (tmp_path / ".lock").write_text("")
        with pytest.raises(UserError, match="is being written by another process"):
            RunLock(tmp_path).acquire()
    finally:
        end(child)


def test_the_lock_of_a_lost_machine_is_waited_for(tmp_path, caplog):
    """A shared file system holds it until it has given the machine up; a process of this one is not waited for."""
    child = hold(tmp_path)
    try:
        with pytest.raises(UserError, match=f"process {child.pid} on "):
            RunLock(tmp_path, patience_s=60).acquire()
        content = json.loads((tmp_path / ".lock").read_text())
        (tmp_path / ".lock").write_text(json.dumps({**content, "host": "a-machine-that-is-gone"}))
        with pytest.raises(UserError, match="on a-machine-that-is-gone"):
            RunLock(tmp_path, patience_s=0.1).acquire()
        threading.Timer(0.5, child.kill).start()
        with RunLock(tmp_path, patience_s=60):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        assert "waiting for it" in caplog.text
    finally:
        end(child)


def test_a_machine_that_has_the_name_of_the_lost_one_waits_for_its_lock_too(tmp_path):
    """The pod of a head may be made anew under its old name; a process of the same number is none of the lost one's."""
    child = hold(tmp_path)
    try:
        content = json.loads((tmp_path / ".lock").read_text())
        (tmp_path / ".lock").write_text(json.dumps({**content, "start": "1"}))
        threading.Timer(1, child.kill).start()
        with RunLock(tmp_path, patience_s=60):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    finally:
        end(child)


def test_a_deleted_lock_file_does_not_lock_out_the_next(tmp_path):
    """`--fresh` by hand: the file goes while nobody holds it, the next finds it anew."""
    lock = RunLock(tmp_path / "run").acquire()
    lock.release()
    (tmp_path / "run" / ".lock").unlink()
    with RunLock(tmp_path / "run"), pytest.raises(UserError):
        RunLock(tmp_path / "run").acquire()


RACE = """
import sys, time
from pathlib import Path
from clew.checkpoint import RunLock
from clew.errors import UserError
run, entries = Path(sys.argv[1]), 0
while entries < 15:
    try:
        with RunLock(run):
            (run / "inside").mkdir()   # fails if anybody else is inside
            time.sleep(0.001)
            (run / "inside").rmdir()
            entries += 1
    except UserError:
        pass
"""


def test_never_two_inside(tmp_path):
    children = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], env=ENV) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
