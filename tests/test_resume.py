"""Interruptions of every kind: the same command again gives the bits of a run that was never interrupted."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import Outcome, contents, finish_clew, start_clew

KILLS = 20


def wait_for(process: subprocess.Popen[str], *texts: str, timeout: float = 900) -> None:
    """Reads the output of a process up to the line that holds one of ``texts``."""
    assert process.stdout is not None
    watchdog = threading.Timer(timeout, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if any(text in line for text in texts):
                return
    finally:
        watchdog.cancel()
    raise AssertionError(f"the process ended before it said one of {texts}: {finish_clew(process)}")


def go_on(small_recipe: Path, run_dir: Path) -> Outcome:
    return finish_clew(start_clew("train", small_recipe, "--run", run_dir))


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(small_recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # Without regular checkpoints nothing but the interruption saves a step.
    process = start_clew("train", small_recipe, "--run", run_dir, "checkpoint.interval=100")
    wait_for(process, "step 1/4")
    process.send_signal(signal.SIGINT)
    outcome = finish_clew(process)
    assert outcome.code == 130, outcome
    assert "Traceback" not in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith("clew: stopped after step ")
    assert last.endswith(f"clew train {small_recipe} --run {run_dir} checkpoint.interval=100")
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1
    assert (run_dir / "report.html").is_file()
    assert not (run_dir / "summary.json").exists()

    outcome = finish_clew(start_clew("train", small_recipe, "--run", run_dir, "checkpoint.interval=100"))
    assert outcome.code == 0, outcome.err
    # The recipe and the checkpoints kept differ from those of the whole run, the results do not.
    resumed, whole = contents(run_dir), contents(finished_run)
    for name, digest in whole.items():
        if not name.startswith(("checkpoints/", "recipe.toml")):
            assert resumed[name] == digest, name


def test_second_ctrl_c_stops_at_once(small_recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_clew("train", small_recipe, "--run", run_dir)
    wait_for(process, "step 0 eval/all/pass_at_1")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    outcome = finish_clew(process)
    assert outcome.code == 130, outcome
    assert "Traceback" not in outcome.err
    assert "stopped at once" in outcome.err
    assert go_on(small_recipe, run_dir).code == 0
    assert contents(run_dir) == contents(finished_run)


@pytest.mark.slow
def test_kill_9_at_any_moment(small_recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    whole = contents(finished_run)
    process = start_clew("train", small_recipe, "--run", tmp_path / "timed")
    wait_for(process, "small: 4 steps")
    began = time.monotonic()
    assert finish_clew(process).code == 0
    span = time.monotonic() - began  # from loading the model to the end of the process
    assert contents(tmp_path / "timed") == whole

    rng = random.Random(20)
    kills = runs = 0
    saved_at_kill = []
    while kills < KILLS:
        run_dir = tmp_path / f"run-{runs}"
        while not (run_dir / "report.html").exists() and kills < KILLS:
            process = start_clew("train", small_recipe, "--run", run_dir)
            wait_for(process, "small: 4 steps", "this run is finished")
            try:
                assert finish_clew(process, timeout=rng.uniform(0, span)).code == 0
            except subprocess.TimeoutExpired:
                process.kill()
                finish_clew(process)
                kills += 1
                saved = (int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
                saved_at_kill.append(max(saved, default=0))
        outcome = go_on(small_recipe, run_dir)
        assert outcome.code == 0, outcome.err
        assert contents(run_dir) == whole, f"run {runs}, after {kills} kills"
        runs += 1
    print(f"{kills} kills in {runs} runs; newest step saved at each kill: {saved_at_kill}")
