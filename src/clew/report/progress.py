"""Live progress of training on the console: a panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clew.console import say
from clew.report.reader import Run, Score, number

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"


class Progress:
    """What training says while it runs. Use as a context manager, so that a fault leaves the terminal whole.

    Lines that people and scripts search for are printed the same way in both modes, never wrapped:
    ``step 10 eval/all/pass_at_1 0.4375 (28/64, 95% CI 0.32-0.56)``.

    Args:
        total_steps: training steps of the whole run.
        console: where to write; standard output by default.
        first_step: the last step already done, when a run is continued.
        heldout: the suite whose sampled solve rate is ``eval/all/pass_at_1``.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        first_step: int = 0,
        heldout: str = "heldout",
    ) -> None:
        self.console = console or Console()
        self._total, self._at, self._heldout = total_steps, first_step, heldout
        self._rates: list[float] = []
        self._recent: deque[float] = deque(maxlen=20)  # seconds; long enough to hold an evaluation or two
        self._metrics: Mapping[str, Any] = {}
        self._timing: Mapping[str, Any] = {}
        self._started = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal and self._live is None:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def evaluation(
        self,
        suite: str,
        mode: str,
        solved: int,
        total: int,
        ci: Sequence[float],
        *,
        step: int | None = None,
    ) -> None:
        """Prints one evaluation.

        Args:
            suite, mode: what was played and how.
            solved, total: counts.
            ci: the 95 % interval as fractions, ``(low, high)``.
            step: the step it belongs to; the last finished step if not given.
        """
        rate = solved / total if total else 0.0
        name = f"eval/{suite}/{mode}/solve_rate"
        if (suite, mode) == (self._heldout, "sampled"):
            name = "eval/all/pass_at_1"
            self._rates.append(rate)
        at = self._at if step is None else step
        self._print(f"step {at} {name} {rate:.4f} ({solved}/{total}, 95% CI {ci[0]:.2f}-{ci[1]:.2f})")

    def step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Takes in a finished step: its lines of ``metrics.jsonl`` and ``timing.jsonl``."""
        self._metrics, self._timing = metrics, timing
        self._at = int(metrics["step"])
        seconds = number(timing.get("step_s"))
        if seconds is not None:
            self._recent.append(seconds)
        if self._live is None:
            self._print(f"step {self._at}/{self._total} " + "  ".join(self._facts()))

    def note(self, text: str) -> None:
        """Prints one line: a checkpoint was saved, a warning, how to go on after an interrupt."""
        self._print(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Ends the live panel and prints the summary."""
        self._stop()
        self.console.print(summary_table(summary))

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        say(self.console, text)

    def _seconds_left(self) -> float | None:
        if not self._recent:
            return None
        return (self._total - self._at) * sum(self._recent) / len(self._recent)

    def _facts(self) -> list[str]:
        """Short phrases about the last step; what is unknown is left out."""
        m, t, facts = self._metrics, self._timing, []
        rate, solved, episodes = (number(m.get(f"train/{k}")) for k in ("solve_rate", "solved", "episodes"))
        if rate is not None:
            counts = f" ({solved:.0f}/{episodes:.0f})" if solved is not None and episodes is not None else ""
            facts.append(f"solved {rate:.0%}{counts}")
        for key, pattern in (("train/reward_mean", "reward {:.3f}"), ("policy/entropy", "entropy {:.3f}")):
            value = number(m.get(key))
            if value is not None:
                facts.append(pattern.format(value))
        if m.get("train/updates") == 0:
            facts.append("no update (equal rewards)")
        for key, pattern in (("tokens_per_s", "{:,.0f} tokens/s"), ("step_s", "{:.1f} s a step")):
            value = number(t.get(key))
            if value is not None:
                facts.append(pattern.format(value))
        left = self._seconds_left()
        if left is not None:
            facts.append(f"{duration(left)} left")
        return facts

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        elapsed = Text(duration(time.monotonic() - self._started), style="dim")
        head.add_row(
            Text(f"step {self._at}/{self._total}", style="bold"),
            ProgressBar(total=max(1, self._total), completed=self._at, width=30),
            elapsed,
        )
        parts: list[RenderableType] = [head]
        facts = self._facts()
        if facts:
            parts.append(Text("  ".join(facts)))
        if self._rates:
            line = sparkline(self._rates[-40:], ascii_only=self.console.options.ascii_only)
            parts.append(Text(f"held out {line} {self._rates[-1]:.1%}, best {max(self._rates):.1%}"))
        return Group(*parts)


def sparkline(rates: Sequence[float], ascii_only: bool = False) -> str:
    """Fractions as a row of bars on a fixed scale of 0 to 1."""
    bars = _ASCII if ascii_only else _BLOCKS
    return "".join(bars[min(len(bars) - 1, max(0, int(r * len(bars))))] for r in rates)


def duration(seconds: float) -> str:
    """Seconds in words: ``45 s``, ``12 min 05 s``, ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """``summary.json`` as a table for the console; parts that are missing are left out."""
    look_up = Run(Path(), summary=dict(summary))  # no files: only to find intervals of equal counts
    table = Table(box=box.SIMPLE_HEAD, title="Result", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("solved", "rate", "95 % interval"):
        table.add_column(name, justify="right")
    confirmed = summary.get("best_confirmed")
    rows: list[tuple[str, Score | None]] = [
        (_at(summary, "baseline", "before training"), look_up.score(summary.get("baseline"))),
        (_at(summary, "best", "best evaluation"), look_up.score(summary.get("best"))),
        ("best, again with fresh sampling seeds", look_up.score(confirmed)),
        ("best, on unseen mazes", look_up.score(confirmed, "unseen_")),
        (_at(summary, "final", "last"), look_up.score(summary.get("final"))),
    ]
    for name, score in rows:
        if score is not None:
            ci = f"{score.ci95[0]:.1%} - {score.ci95[1]:.1%}" if score.ci95 else ""
            table.add_row(Text(name), f"{score.solved}/{score.total}", f"{score.rate:.1%}", ci)
    return Group(table, Text(_facts_line(summary), style="dim"))


def _at(summary: Mapping[str, Any], key: str, name: str) -> str:
    entry = summary.get(key)
    step = entry.get("step") if isinstance(entry, Mapping) else None
    return name if step is None else f"{name} (step {step})"


def _facts_line(summary: Mapping[str, Any]) -> str:
    facts = []
    for key in ("steps", "trajectories", "tokens"):
        value = number(summary.get(key))
        if value is not None:
            facts.append(f"{value:,.0f} {key}")
    wall = number(summary.get("wall_s"))
    if wall is not None:
        facts.append(duration(wall))
    if summary.get("device"):
        facts.append(str(summary["device"]))
    cost = summary.get("cost")
    if isinstance(cost, Mapping):
        hours, price, energy = (number(cost.get(k)) for k in ("device_hours", "price", "energy_kwh"))
        if hours is not None:
            facts.append(f"{hours:.3g} device hours")
        if price is not None:
            facts.append(f"{price:.3g} {cost.get('currency', '')}".strip())
        if energy is not None:
            facts.append(f"{energy:.3g} kWh")
    return "  ".join(facts)
