"""A fake but lifelike run directory for the tests of the report: true mazes, a policy that gets better."""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE, CELL, CAP = 5, 14, 15
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
HOSTILE = "</script><img src=x onerror=alert(1)>"

RECIPE = """name = "fake-maze"

[model]
path = "models/tiny-qwen3vl"

[model.lora]
rank = 16
alpha = 32

[environment]
id = "clew/maze-v0"
size = 5
max_turns = 15
goal = "reach"

[rollout]
engine = "transformers"
temperature = 0.7
max_new_tokens = 8

[algorithm]
advantage = "grpo"
group_size = 8
kl_coef = 0.0

[training]
steps = 150
prompts_per_step = 8
learning_rate = 3e-4
seed = 7

[evaluation]
suites = ["heldout", "larger"]
size = 64
interval = 10
"""


class Maze:
    """A perfect maze of SIZE x SIZE cells with a start and a goal."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.open: set[frozenset[tuple[int, int]]] = set()
        stack, seen = [(0, 0)], {(0, 0)}
        while stack:
            x, y = stack[-1]
            free = [c for d in MOVES.values() if (c := (x + d[0], y + d[1])) not in seen and self._inside(c)]
            if not free:
                stack.pop()
                continue
            cell = rng.choice(free)
            self.open.add(frozenset({(x, y), cell}))
            seen.add(cell)
            stack.append(cell)
        cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
        while True:
            self.start, self.goal = rng.sample(cells, 2)
            self.length = self.distances()[self.start]
            if 4 <= self.length <= 12:
                break

    @staticmethod
    def _inside(cell: tuple[int, int]) -> bool:
        return 0 <= cell[0] < SIZE and 0 <= cell[1] < SIZE

    def passes(self, cell: tuple[int, int], move: str) -> tuple[int, int] | None:
        """The cell behind this move, or None for a wall."""
        other = (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])
        return other if frozenset({cell, other}) in self.open else None

    def distances(self) -> dict[tuple[int, int], int]:
        found, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                other = self.passes(cell, move)
                if other and other not in found:
                    found[other] = found[cell] + 1
                    queue.append(other)
        return found

    def frame(self, at: tuple[int, int]) -> str:
        """The maze as a base64 PNG: walls dark, goal red square, agent blue disc."""
        pitch = CELL + 2
        picture = Image.new("RGB", (SIZE * pitch + 2, SIZE * pitch + 2), "#4a4e57")
        pen = ImageDraw.Draw(picture)
        for x in range(SIZE):
            for y in range(SIZE):
                left, top = 2 + x * pitch, 2 + y * pitch
                right = left + CELL - 1 + 2 * (self.passes((x, y), "right") is not None)
                down = top + CELL - 1 + 2 * (self.passes((x, y), "down") is not None)
                pen.rectangle((left, top, right, top + CELL - 1), fill="#f7f5f0")
                pen.rectangle((left, top, left + CELL - 1, down), fill="#f7f5f0")
        for cell, colour, shape in ((self.goal, "#d1495b", pen.rectangle), (at, "#2d6cdf", pen.ellipse)):
            left, top = 2 + cell[0] * pitch, 2 + cell[1] * pitch
            shape((left + 3, top + 3, left + CELL - 4, top + CELL - 4), fill=colour)
        out = io.BytesIO()
        picture.save(out, "PNG")
        return base64.b64encode(out.getvalue()).decode()


@cache
def maze_of(seed: int) -> Maze:
    """The maze of a seed, made once."""
    return Maze(seed)


@cache
def frame_of(seed: int, at: tuple[int, int]) -> str:
    """A frame of it, drawn once."""
    return maze_of(seed).frame(at)


def play(seed: int, skill: float, rng: random.Random, frames: bool, version: str) -> dict[str, Any]:
    """One episode as a replay line; the oracle's move is taken with probability ``skill``."""
    maze = maze_of(seed)
    at, far = maze.start, maze.distances()
    turns: list[dict[str, str]] = []
    tokens: list[dict[str, Any]] = [
        {"t": "<|im_start|>user\nGo to the red square. Answer with one word: up, down, left or right.\n"
              "<|vision_start|>", "m": 0, "lp": None},
        {"t": "<|image_pad|> x 9", "m": 0, "lp": None},
        {"t": "<|vision_end|><|im_end|>\n<|im_start|>assistant\n", "m": 0, "lp": None},
    ]  # fmt: skip
    success = False
    while not success and len(turns) < CAP:
        ways = [m for m in MOVES if maze.passes(at, m)]
        best = min(ways, key=lambda m: far[maze.passes(at, m)])  # type: ignore[index]
        move = best if rng.random() < skill else rng.choice(list(MOVES))
        other = maze.passes(at, move)
        feedback = "moved" if other else "blocked"
        frame = frame_of(seed, at) if frames else ""
        at = other or at
        success = at == maze.goal
        if success:
            feedback = "reached"
        turns.append({"frame": frame, "text": feedback, "answer": move, "feedback": feedback})
        p = min(0.999, max(0.004, rng.gauss(skill if move == best else (1 - skill) / 3, 0.06)))
        tokens += [
            {"t": move, "m": 1, "lp": math.log(p)},
            {"t": "<|im_end|>", "m": 1, "lp": math.log(0.97 + 0.029 * rng.random())},
        ]
        if not success:
            tokens += [
                {"t": f"\n<|im_start|>user\n{feedback}\n<|vision_start|>", "m": 0, "lp": None},
                {"t": "<|image_pad|> x 9", "m": 0, "lp": None},
                {"t": "<|vision_end|><|im_end|>\n<|im_start|>assistant\n", "m": 0, "lp": None},
            ]
    return {
        "seed": seed, "content_hash": f"{seed:08x}", "path_length": maze.length, "success": success,
        "reward": float(success), "stop_reason": "goal" if success else "turn_cap", "policy_version": version,
        "turns": turns, "final_frame": frame_of(seed, at) if frames else "", "tokens": tokens,
    }  # fmt: skip


def wilson95(solved: int, total: int) -> list[float]:
    """Wilson's interval (the textbook formula), for the fake files only."""
    z, p = 1.959964, solved / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def _evaluation(step: int | None, suite: str, mode: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    lengths: dict[str, dict[str, int]] = {}
    for line in lines:
        part = lengths.setdefault(str(line["path_length"]), {"solved": 0, "total": 0})
        part["total"] += 1
        part["solved"] += line["success"]
    solved = sum(line["success"] for line in lines)
    keys = ("seed", "content_hash", "path_length", "success", "reward", "stop_reason")
    episodes = [
        {k: e[k] for k in keys} | {"turns": len(e["turns"]), "actions": [t["answer"] for t in e["turns"]]}
        for e in lines
    ]
    return {
        "step": step, "suite": suite, "mode": mode, "solved": solved, "total": len(lines),
        "solve_rate": solved / len(lines), "ci95": wilson95(solved, len(lines)),
        "by_path_length": lengths, "episodes": episodes,
    }  # fmt: skip


def make_run(root: Path, episodes: int = 64, steps: int = 150) -> Path:
    """Writes a whole fake run of ``steps`` steps, evaluated every 10, into ``root`` and returns it."""
    rng = random.Random(0)
    made: dict[tuple[int | None, str, str], dict[str, Any]] = {}
    replays: dict[tuple[int, str], list[dict[str, Any]]] = {}

    def evaluate(step: int | None, suite: str, mode: str, skill: float, first: int, frames: bool = False) -> None:
        name = f"step-{step or 0:06d}"
        lines = [play(first + i, skill, rng, frames, name) for i in range(episodes)]
        made[step, suite, mode] = _evaluation(step, suite, mode, lines)
        if frames and step is not None:
            replays[step, suite] = lines

    def skill_at(step: int) -> float:
        return 0.1 + 0.5 * (1 - math.exp(-step / 55)) + (0.02 * math.sin(step) if step else 0)

    for step in range(0, steps + 1, 10):
        evaluate(step, "heldout", "sampled", skill_at(step), 1000, frames=True)
    best = max(range(0, steps + 1, 10), key=lambda s: made[s, "heldout", "sampled"]["solved"])
    for step in dict.fromkeys((0, best)):
        evaluate(step, "heldout", "greedy", skill_at(step) + 0.04, 1000)
        evaluate(step, "larger", "sampled", skill_at(step) - 0.2, 5000)
    evaluate(best, "heldout", "sampled-confirm", skill_at(best), 1000)
    evaluate(best, "unseen", "sampled-confirm", skill_at(best), 9000)
    evaluate(best, "heldout", "blank", 0.1, 1000)
    evaluate(best, "heldout", "swapped", 0.05, 1000)
    for policy, skill in (("random", 0.0), ("no-turn-back", 0.3), ("oracle", 1.0)):
        evaluate(None, "heldout", policy, skill, 1000)
        evaluate(None, "larger", policy, skill, 5000)
    for (step, suite, mode), value in made.items():
        folder = root / "eval" / ("references" if step is None else f"step-{step:06d}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{suite}.{mode}.json").write_text(json.dumps(value))
    for (step, suite), lines in replays.items():
        if step not in (0, best):
            continue  # a true run keeps them all; the report reads these two
        folder = root / "replays" / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{suite}.sampled.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    (root / "recipe.toml").write_text(RECIPE)
    _write_steps(root, steps, skill_at, made, rng)
    score = {k: made[k] for k in made}

    def counts(step: int, mode: str = "sampled", suite: str = "heldout") -> dict[str, int]:
        found = score[step, suite, mode]
        return {"solved": found["solved"], "total": found["total"]}

    unseen = counts(best, "sampled-confirm", "unseen")
    confirmed = counts(best, "sampled-confirm") | {f"unseen_{k}": v for k, v in unseen.items()}
    row_keys = ("suite", "mode", "step", "solved", "total", "ci95")
    summary = {
        "recipe": "fake-maze", "steps": steps, "trajectories": steps * 64, "tokens": 11_840_332,
        "device": "cpu, 2 threads", "wall_s": 3125.4,
        "baseline": {"step": 0, **counts(0)}, "best": {"step": best, **counts(best)},
        "best_confirmed": confirmed, "final": {"step": steps, **counts(steps)},
        "suites": [{k: v[k] for k in row_keys} for v in made.values()],
        "sight": {"normal": counts(best), "blank": counts(best, "blank"), "swapped": counts(best, "swapped")},
        "cost": {
            "device_hours": 0.868,
            "device_hours_formula": "3,125 s of wall clock x 1 device / 3600 = 0.868 h",
            "currency": "USD", "price": 0.0868,
            "price_formula": "0.868 device hours x 0.1 USD = 0.0868 USD (assumed)",
            "energy_kwh": 0.0564,
            "energy_formula": "0.868 h x 65 W / 1000 = 0.0564 kWh (assumed 65 W a device)",
        },
    }  # fmt: skip
    (root / "summary.json").write_text(json.dumps(summary))
    return root


def _write_steps(root: Path, steps: int, skill_at: Any, made: dict[Any, Any], rng: random.Random) -> None:
    rows, times = [{"step": 0, "eval/all/pass_at_1": made[0, "heldout", "sampled"]["solve_rate"]}], []
    for step in range(1, steps + 1):
        rate = min(1.0, max(0.0, rng.gauss(skill_at(step), 0.05)))
        solved = round(64 * rate)
        gap = abs(rng.gauss(2e-6, 5e-7))
        row = {
            "step": step, "train/solve_rate": solved / 64, "train/solved": solved, "train/episodes": 64,
            "train/reward_mean": solved / 64, "train/loss": rng.gauss(0, 0.01),
            "train/grad_norm": rng.gauss(0.6, 0.08),
            "train/learning_rate": 3e-4, "train/updates": int(step != 40),
            "train/groups_used": 8 - step // 40,
            "train/groups_equal": step // 40, "train/skipped_nonfinite": 0,
            "policy/entropy": 1.3 * math.exp(-step / 70) + abs(rng.gauss(0, 0.02)),
            "policy/kl": abs(rng.gauss(2e-3, 4e-4)), "policy/clip_fraction": abs(rng.gauss(0.02, 0.008)),
            "policy/ratio_max": 1.3, "policy/logprob_gap_mean": gap, "policy/logprob_gap_max": gap * 7,
            "rollout/turns_mean": 15 - 7 * rate, "rollout/tokens_sampled": 1480,
            "rollout/tokens_total": 78000,
            "rollout/answer_tokens_mean": 2 + abs(rng.gauss(0.05, 0.02)),
            "rollout/cut_ratio": abs(rng.gauss(0, 0.004)),
            "rollout/repetition": 0.02, "rollout/stop/goal": solved, "rollout/stop/turn_cap": 64 - solved,
            "advantages/mean": 0.0, "advantages/std": 0.9, "advantages/max": 2.4,
            "policy/version": f"step-{step:06d}-a1-3f9c2b1d",
        }  # fmt: skip
        if step % 10 == 0:
            row["eval/all/pass_at_1"] = made[step, "heldout", "sampled"]["solve_rate"]
        rows.append(row)
        roll, evaluate = rng.gauss(12, 0.6), 9.5 if step % 10 == 0 else 0.0
        times.append({
            "step": step, "rollout_s": roll, "train_s": 7.1, "eval_s": evaluate, "checkpoint_s": 0.2,
            "step_s": roll + 7.3 + evaluate, "tokens_per_s": 78000 / roll, "trajectories_per_s": 64 / roll,
            "rss_bytes": 1_900_000_000,
        })  # fmt: skip
    (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / "timing.jsonl").write_text("".join(json.dumps(t) + "\n" for t in times))


if __name__ == "__main__":
    import sys

    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    make_run(target)
