"""The headline result: `clew train RECIPE` for several seeds, each from the warm start to its summary.

    python benchmarks/results.py laptop --seeds 0 1 2 --out runs/results

Every seed is a whole run as a user starts it (baseline, training, confirmation, all suites). The table has the
baseline, the best evaluation on the held-out set and its step, the same adapter with fresh sampling seeds, unseen
mazes, greedy decoding at the end, wall-clock time and peak memory. Runs that are already finished are only read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGET, TARGET_STEPS, TARGET_WALL_S, TARGET_BYTES = 62, 160, 15 * 60, 3 * 2**30


def row(run_dir: Path) -> dict[str, Any]:
    """The figures of one finished run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    timing = [json.loads(line) for line in (run_dir / "timing.jsonl").read_text().splitlines()]
    confirmed = summary["best_confirmed"]
    greedy = [s for s in summary["suites"] if s["mode"] == "greedy" and s["step"] == summary["steps"]]
    return {
        "baseline": f"{summary['baseline']['solved']}/{summary['baseline']['total']}",
        "best": f"{summary['best']['solved']}/{summary['best']['total']} at step {summary['best']['step']}",
        "confirmed": f"{confirmed['solved']}/{confirmed['total']}",
        "unseen": f"{confirmed['unseen_solved']}/{confirmed['unseen_total']}",
        "greedy": ", ".join(f"{s['solved']}/{s['total']}" for s in greedy),
        "other suites": ", ".join(
            f"{s['suite']} {s['solved']}/{s['total']}"
            for s in summary["suites"]
            if s["suite"] != "heldout" and s["step"] == summary["steps"]
        ),
        "minutes": f"{summary['wall_s'] / 60:.1f}",
        "peak GB": f"{max(t['rss_bytes'] for t in timing) / 1e9:.2f}",
        "reached": summary["best"]["solved"] >= TARGET
        and summary["best"]["step"] <= TARGET_STEPS
        and summary["wall_s"] <= TARGET_WALL_S
        and max(t["rss_bytes"] for t in timing) < TARGET_BYTES,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="laptop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    arguments, overrides = parser.parse_known_args()
    rows = {}
    for seed in arguments.seeds:
        run_dir = arguments.out / f"seed-{seed}"
        command = [
            "clew.cli",
            "train",
            arguments.recipe,
            "--run",
            str(run_dir),
            f"training.seed={seed}",
            *overrides,
        ]
        subprocess.run([sys.executable, "-m", *command], check=True)
        rows[seed] = row(run_dir)
    columns = list(next(iter(rows.values())))
    print("| seed | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for seed, figures in rows.items():
        print(f"| {seed} | " + " | ".join(str(figures[c]) for c in columns) + " |")
    return 0 if all(figures["reached"] for figures in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
