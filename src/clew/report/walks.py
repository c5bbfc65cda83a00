"""A few of the episodes that were just played, each as an animated GIF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clew.agent.ledger import Trajectory
from clew.checkpoint import write_file_atomic
from clew.report.episodes import action, short
from clew.report.gif import Side, walk_gif

_EACH = 3  # solved, and as many that were not


def write_gifs(folder: Path, label: str, suite: str, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Writes SUITE-NUMBER-solved.gif and SUITE-NUMBER-failed.gif of the first few of each kind; returns their paths.

    Args:
        label: what played, written over each picture.
        suite: the suite's name as it stands in file names; NUMBER is the episode's place in it, from 0.
    """
    shown = [(place, t) for place, t in enumerate(trajectories) if t.turns]
    solved = [item for item in shown if item[1].success][:_EACH]
    failed = [item for item in shown if not item[1].success][:_EACH]
    written = []
    for place, trajectory in sorted([*solved, *failed], key=lambda item: item[0]):
        path = folder / f"{suite}-{place:03d}-{'solved' if trajectory.success else 'failed'}.gif"
        write_file_atomic(path, walk_gif([_side(label, trajectory)]))
        written.append(path)
    return written


def _side(label: str, trajectory: Trajectory) -> Side:
    turns, last = trajectory.turns, trajectory.final_frame
    count = sum(turn.answered for turn in turns)
    return Side(
        frames=[*(turn.frame for turn in turns), *([] if last is None else [last])],
        label=label,
        captions=[f"{short(action(t.answer), 24)}: {short(t.feedback, 16)}".strip(": ") for t in turns],
        verdict=f"solved in {count} turns" if trajectory.success else f"not solved, {count} turns",
        solved=trajectory.success,
    )
