"""Console progress, trackers and cost."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from clew.errors import UserError
from clew.report.cost import cost
from clew.report.progress import Progress, duration, sparkline, summary_table
from clew.report.tracking import TensorBoard, Tracker

METRICS = {"step": 10, "train/solve_rate": 0.25, "train/solved": 16, "train/episodes": 64,
           "train/reward_mean": 0.25, "policy/entropy": 1.25, "train/updates": 1}  # fmt: skip
TIMING = {"step": 10, "step_s": 12.0, "tokens_per_s": 6500.4}
SUMMARY = {
    "baseline": {"step": 0, "solved": 28, "total": 64}, "best": {"step": 160, "solved": 62, "total": 64},
    "best_confirmed": {"solved": 60, "total": 64, "unseen_solved": 118, "unseen_total": 128},
    "suites": [{"solved": 28, "total": 64, "ci95": [0.3229, 0.5590]}],
    "steps": 160, "wall_s": 3725.0, "cost": cost(3725.0, 1, 0.5, "USD", 65.0),
}  # fmt: skip
LINE = r"step 10 eval/all/pass_at_1 0\.4375 \(28/64, 95% CI 0\.32-0\.56\)"


def run(terminal: bool, width: int = 80) -> str:
    out = io.StringIO()
    with Progress(100, Console(file=out, force_terminal=terminal, width=width)) as progress:
        progress.step(METRICS, TIMING)
        progress.evaluation("heldout", "sampled", 28, 64, (0.3229, 0.5590))
        progress.evaluation("larger", "greedy", 3, 64, (0.01, 0.13), step=20)
        progress.note("saved [checkpoint] step-000010")
        progress.finish(SUMMARY)
    return out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [20, 80])
def test_lines_that_people_grep_for(terminal: bool, width: int) -> None:
    text = run(terminal, width)
    assert re.search(LINE, text)
    assert "step 20 eval/larger/greedy/solve_rate 0.0469 (3/64, 95% CI 0.01-0.13)" in text
    assert "saved [checkpoint] step-000010" in text


def test_plain_output_has_one_line_a_step_and_no_control_codes() -> None:
    text = run(False)
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("step 10/100 ")]
    assert lines == [
        "step 10/100 solved 25% (16/64)  reward 0.250  entropy 1.250  6,500 tokens/s  12.0 s a step  18 min 00 s left"
    ]


def test_the_live_panel_shows_progress_and_leaves_nothing_behind() -> None:
    text = run(True)
    assert "step 10/100" in text and "held out ▄ 43.8%" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is back


def test_the_panel_ends_when_training_fails() -> None:
    out = io.StringIO()
    with pytest.raises(RuntimeError), Progress(5, Console(file=out, force_terminal=True)):
        raise RuntimeError
    assert "\x1b[?25h" in out.getvalue()


def test_a_step_without_an_update_is_told() -> None:
    out = io.StringIO()
    Progress(5, Console(file=out)).step({"step": 1, "train/updates": 0}, {})
    assert out.getvalue() == "step 1/5 no update (equal rewards)\n"


def test_sparkline_and_duration() -> None:
    assert sparkline([0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0, 1.0], ascii_only=True) == "_@"
    assert [duration(s) for s in (59.4, 65, 3725)] == ["59 s", "1 min 05 s", "1 h 02 min"]


def test_the_summary_prints_counts_rates_and_intervals() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(SUMMARY))
    text = " ".join(out.getvalue().split())
    assert "before training (step 0) 28/64 43.8% 32.3% - 55.9%" in text
    assert "unseen mazes 118/128 92.2%" in text
    assert "1 h 02 min" in text and "0.517 USD" in text
    Console(file=out).print(summary_table({}))  # a run that ended before its first evaluation


def test_cost_follows_its_formulas() -> None:
    made = cost(7200, 6, 2.5, "USD", 600)
    assert (made["device_hours"], made["price"], made["energy_kwh"]) == (12.0, 30.0, 7.2)
    assert made["device_hours_formula"] == "7,200 s of wall clock x 6 devices / 3600 = 12 h"
    assert "assumed 600 W a device" in made["energy_formula"] and "assumed price" in made["price_formula"]
    json.dumps(made)


def test_cost_without_a_price_says_so() -> None:
    made = cost(60, 1, None, "USD", None)
    assert made["price"] is None and made["energy_kwh"] is None
    assert "no price" in made["price_formula"] and "no power" in made["energy_formula"]
    for bad in ((-1, 1, 1, "USD", 1), (1, 0, 1, "USD", 1), (1, 1, float("nan"), "USD", 1)):
        with pytest.raises(UserError):
            cost(*bad)  # type: ignore[arg-type]


class Kept:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def scalars(self, values, step) -> None:  # type: ignore[no-untyped-def]
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_sinks_get_the_finite_numbers_only() -> None:
    sink = Kept()
    odd = {"policy/version": "x", "policy/kl": None, "train/loss": float("nan"), "flag": True}
    with Tracker([sink]) as tracker:
        tracker.log(METRICS | odd, TIMING)
    assert sink.closed == 1
    (step, values), = sink.seen  # fmt: skip
    assert step == 10
    assert set(values) == {k for k in METRICS if k != "step"} | {"timing/step_s", "timing/tokens_per_s"}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker([TensorBoard(tmp_path / "tensorboard")]) as first:
        for step in range(1, 6):
            first.log({"step": step, "train/solve_rate": 0.1})
    with Tracker([TensorBoard(tmp_path / "tensorboard", 3)]) as second:
        for step in range(4, 7):
            second.log({"step": step, "train/solve_rate": 0.9})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/solve_rate")
    assert [(e.step, round(e.value, 1)) for e in scalars] == [
        (1, 0.1), (2, 0.1), (3, 0.1), (4, 0.9), (5, 0.9), (6, 0.9),
    ]  # fmt: skip
