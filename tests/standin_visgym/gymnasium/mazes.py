"""A maze played on recorded maps, drawn with tiles cut out of recorded frames."""

import ast
import json
from pathlib import Path

import numpy as np
from PIL import Image

_DATA = Path(__file__).parents[2] / "data" / "visgym"
_PIXELS = 25
_SHIFT = ((0, 1), (-1, 0), (0, -1), (1, 0))  # right, up, left, down


def _records(level):
    return json.loads((_DATA / "maze_2d.json").read_text())[level]


class _Functions:
    def get_function_names(self):
        return ["move", "stop"]


class RecordedMaze:
    action_space = _Functions()

    def __init__(self, level):
        self.records = {record["seed"]: record for record in _records(level)}
        self.env_feedback = None
        frame = np.asarray(Image.open(_DATA / "easy_seed0.png").convert("RGB"))
        first = _records("easy")[0]
        self.tiles = {name: self._cut(frame, first[name]) for name in ("agent", "target")}
        self.closed = False

    @staticmethod
    def _cut(frame, cell):
        row, column = (_PIXELS * index for index in cell)
        return frame[row : row + _PIXELS, column : column + _PIXELS]

    @property
    def unwrapped(self):
        return self

    def get_prompt(self):
        return (
            f"Walk through a maze of {len(self.walls)} rows. Write ('move', 0) to ('move', 3), then ('stop', 'stop')."
        )

    def get_init_state(self):
        return {
            "maze_map": self.walls.tolist(),
            "agent_location": list(self.agent),
            "target_location": list(self.target),
        }

    def reset(self, seed=None, init_state=None):
        if init_state is None:
            record = self.records[seed % len(self.records)]
            self.walls = np.array([[int(cell) for cell in row] for row in record["map"]])
            self.agent, self.target = tuple(record["agent"]), tuple(record["target"])
        else:
            self.walls = np.array(init_state["maze_map"])
            self.agent, self.target = tuple(init_state["agent_location"]), tuple(init_state["target_location"])
        # Picture and feedback of the last episode, as VisGym gives them.
        stale = getattr(self, "last", None)
        return self.render() if stale is None else stale, {"env_feedback": self.env_feedback}

    def step(self, action):
        reward, terminated = 0.0, False
        try:
            name, payload = ast.literal_eval(action)
        except (ValueError, SyntaxError, TypeError):
            self.env_feedback = f"Cannot parse action string {action!r}."
        else:
            self.env_feedback = "Action executed successfully."
            if name == "stop":
                terminated, reward = True, float(self.agent == self.target)
            elif payload not in range(4):
                self.env_feedback = f"The action {payload} is not in the valid action space."
            else:
                there = tuple(np.add(self.agent, _SHIFT[payload]).tolist())
                if self.walls[there]:
                    self.env_feedback = "Cannot move into a wall."
                else:
                    self.agent = there
        self.last = self.render()
        return self.last, reward, terminated, False, {"env_feedback": self.env_feedback, "agent": np.array(self.agent)}

    def render(self):
        frame = np.where(np.kron(self.walls, np.ones((_PIXELS, _PIXELS), int))[..., None], 169, 255)
        frame = np.repeat(frame, 3, axis=2).astype(np.uint8)
        for name, cell in (("target", self.target), ("agent", self.agent)):
            row, column = (_PIXELS * index for index in cell)
            frame[row : row + _PIXELS, column : column + _PIXELS] = self.tiles[name]
        return frame

    def solve(self):
        """Depth first: in a maze without loops the only way is the shortest."""
        way = self._way(self.agent, None)
        return [f"('move', {direction})" for direction in way] + ["('stop', 'stop')"] * 2

    def _way(self, cell, came_by):
        if cell == self.target:
            return []
        for direction, shift in enumerate(_SHIFT):
            there = tuple(np.add(cell, shift).tolist())
            if direction != came_by and not self.walls[there]:
                rest = self._way(there, direction ^ 2)
                if rest is not None:
                    return [direction, *rest]
        return None

    def close(self):
        self.closed = True
