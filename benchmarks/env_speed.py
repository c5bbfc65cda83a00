"""How many times a second one core makes a maze, draws it and plays a move (the target is 5,000).

    OMP_NUM_THREADS=1 python benchmarks/env_speed.py [--seconds 3]

A unit is ``reset(seed)`` of a new seed (Wilson's maze, breadth-first path, first frame) and one ``step``
(parsing, the move, second frame). Each setting is timed in five equal parts and the median is shown:
by the wall clock, and by the CPU time of the process, which other work on the machine disturbs far less.
"""

from __future__ import annotations

import argparse
import statistics
import time

from clew.envs.maze_env import MazeEnv, answer_text

TARGET = 5_000
PARTS = 5
SETTINGS = {
    "6x6, paths 6-12": {},
    "4x6, paths 4-12": {"size": (4, 6), "min_path": 4},
    "8x8, paths 6-16": {"size": (8, 8), "max_path": 16, "max_turns": 20},
    "6x6 braided": {"braid": 0.5},
    "6x6, paths 13-18": {"min_path": 13, "max_path": 18, "max_turns": 24},
}


def part(env: MazeEnv, first_seed: int, seconds: float) -> tuple[float, float]:
    """Units a second, by the wall clock and by CPU time, over ``seconds`` of CPU time."""
    answer, units = answer_text("up"), 0
    wall, cpu = time.perf_counter(), time.process_time()
    while time.process_time() - cpu < seconds:
        for seed in range(first_seed + units, first_seed + units + 100):
            env.reset(seed)
            env.step(answer)
        units += 100
    return units / (time.perf_counter() - wall), units / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds a setting")
    seconds = parser.parse_args().seconds / PARTS
    print(f"{'reset + render + step':24s} {'per second':>12s} {'per CPU second':>16s}")
    for name, settings in SETTINGS.items():
        env = MazeEnv(**settings)  # type: ignore[arg-type]
        part(env, 0, seconds / 10)  # warm-up
        parts = [part(env, 10_000_000 * (i + 1), seconds) for i in range(PARTS)]
        wall, cpu = (statistics.median(column) for column in zip(*parts, strict=True))
        verdict = "reached" if cpu >= TARGET else "MISSED"
        print(f"{name:24s} {wall:12,.0f} {cpu:16,.0f}   {verdict} (target {TARGET:,})")


if __name__ == "__main__":
    main()
