"""Does the recipe learn as much on Ray as in one process? 40 steps of `laptop`, several seeds on each runtime.

    python benchmarks/ray_learning.py --out runs/ray-learning

Local runs use seeds 0 to 4; Ray runs use 2 policy ranks (FSDP2, gloo), 2 engines, seeds 0 to 2. The gain of a run
is its solve rate on the 64 held-out mazes (sampled) after the last step minus that before the first. The unseen mazes
are those of the confirmation: 256 that nothing was chosen by. Runs that are already finished are only read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

SEEDS = {"local": range(5), "ray": range(3)}
RAY = ["runtime.kind=ray", "runtime.workers_per_node=2", "runtime.engines=2"]
SHORT = ["training.steps=40", 'evaluation.suites=["heldout"]', "evaluation.references=false", "evaluation.sight=false"]
TARGET = 0.8


def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains (or finds trained) and returns the summary."""
    overrides = [*SHORT, f"training.seed={seed}", *(RAY if kind == "ray" else [])]
    command = [sys.executable, "-m", "clew.cli", "train", "laptop", "--run", str(folder), *overrides]
    subprocess.run(command, check=True)
    return json.loads((folder / "summary.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ray-learning"))
    arguments = parser.parse_args()
    rows: list[str] = []
    gains: dict[str, list[float]] = {"local": [], "ray": []}
    for kind, seeds in SEEDS.items():
        for seed in seeds:
            summary = run(kind, seed, arguments.out / f"{kind}-{seed}")
            before, after, best = (summary[key] for key in ("baseline", "final", "best_confirmed"))
            gain = after["solved"] / after["total"] - before["solved"] / before["total"]
            gains[kind].append(gain)
            rows.append(
                f"| {kind} | {seed} | {before['solved']}/{before['total']} | {after['solved']}/{after['total']} | "
                f"{100 * gain:+.1f} | {best['unseen_solved']}/{best['unseen_total']} | {summary['wall_s'] / 60:.1f} |"
            )
    print("| runtime | seed | before | after 40 steps | gain, points | unseen (best step) | minutes |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")
    local, ray = (mean(gains[kind]) for kind in ("local", "ray"))
    same = mean(gains["local"][seed] for seed in SEEDS["ray"])
    print(f"mean gain: local {100 * local:.1f} points, Ray {100 * ray:.1f}: {ray / local:.2f} (at least {TARGET})")
    print(f"over the seeds that both ran: local {100 * same:.1f} points, Ray {100 * ray:.1f}: {ray / same:.2f}")
    return 0 if ray >= TARGET * local else 1


if __name__ == "__main__":
    sys.exit(main())
