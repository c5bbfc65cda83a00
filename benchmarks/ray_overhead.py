"""What Ray costs: the same training step in one process, and on Ray with one policy worker and one transformers engine.

    python benchmarks/ray_overhead.py --out runs/ray-overhead

Runs of `laptop` with a batch large enough for a step of several seconds, alternately local and on Ray, without evaluation
in between; the first step of each run (warm-up) is left out. Reports medians, their ratio, where the time goes, and
how long an adapter takes from the policy to the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

RUNTIMES = {"local": ["runtime.kind=local"], "ray": ["runtime.kind=ray"]}
BATCH = ["training.prompts_per_step=48", "rollout.concurrent_episodes=384", "training.steps=5"]
QUIET = [
    'evaluation.suites=["heldout"]',
    "evaluation.size=8",
    "evaluation.confirm_size=8",
    "evaluation.interval=100",
    "evaluation.before_training=false",
    "evaluation.references=false",
    "evaluation.sight=false",
    "checkpoint.interval=100",
    "checkpoint.export_interval=100",
]
TARGET, TARGET_SYNC_S, TARGET_STEP_S = 1.3, 0.5, 5.0


def steps(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Timing of the steps of a run, the first left out; eval and export after the last one are not part of a step."""
    overrides = [*BATCH, *QUIET, *RUNTIMES[kind]]
    command = [sys.executable, "-m", "clew.cli", "train", "laptop", "--fresh", "--run", str(folder), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()][1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ray-overhead"))
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RUNTIMES}
    for _ in range(arguments.repeats):
        for kind in RUNTIMES:
            found[kind] += steps(kind, arguments.out / kind)
    parts = ("rollout_s", "train_s", "sync_s")
    print(
        "| runtime | step, s | rollout, s | update, s | adapter to the engine, s |", "|---|---|---|---|---|", sep="\n"
    )
    whole = {}
    for kind, lines in found.items():
        whole[kind] = median(sum(line[part] for part in parts) for line in lines)
        figures = " | ".join(f"{median(line[part] for line in lines):.2f}" for part in parts)
        print(f"| {kind} | {whole[kind]:.2f} | {figures} |")
    ratio, sync = whole["ray"] / whole["local"], max(line["sync_s"] for line in found["ray"])
    print(f"Ray / local: {ratio:.2f} (at most {TARGET}); slowest sync {sync:.3f} s (under {TARGET_SYNC_S})")
    return 0 if ratio <= TARGET and sync < TARGET_SYNC_S and whole["local"] > TARGET_STEP_S else 1


if __name__ == "__main__":
    sys.exit(main())
