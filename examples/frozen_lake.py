"""Gymnasium's FrozenLake with a lake of its own for every seed: the worked example of docs/gymnasium.md.

``FrozenLake-v1`` shows one map for ever, so nothing could be held out. Here ``reset(seed=...)`` draws the map.
Importing this module registers ``Lakes-v0``; a recipe names it ``gym:frozen_lake:Lakes-v0``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from gymnasium.envs.registration import register
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map


class Lakes(FrozenLakeEnv):
    """A lake that is not slippery, with a solvable map drawn anew at each reset.

    Args:
        size: cells along a side.
        frozen: probability that a cell is ice and no hole.
        render_mode: as Gymnasium has it.
    """

    def __init__(self, size: int = 4, frozen: float = 0.65, render_mode: str | None = None) -> None:
        self.size, self.frozen = size, frozen
        super().__init__(render_mode, generate_random_map(size, frozen, seed=0), is_slippery=False)
        self.moves_left = self._moves_left()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Draws a map; ``info`` holds ``path_length``, the moves of a shortest way."""
        state, info = super().reset(seed=seed)
        board = generate_random_map(self.size, self.frozen, seed=int(self.np_random.integers(2**32)))
        drawn = FrozenLakeEnv(desc=board, is_slippery=False)
        self.desc, self.P = drawn.desc, drawn.P
        self.moves_left = self._moves_left()
        return state, {**info, "path_length": self.moves_left[state]}

    def oracle_action(self) -> int:
        """A move of a shortest way to the goal: what Clew's demonstrations and its oracle need."""
        onward = {action: moves[0][1] for action, moves in self.P[self.s].items()}
        return min(onward, key=lambda action: self.moves_left.get(onward[action], self.size**2))

    def _moves_left(self) -> dict[int, int]:
        """Moves to the goal from each cell that leads there, found by walking back from it."""
        goal = int(np.argmax(self.desc == b"G"))
        before: dict[int, list[int]] = {}
        for state, actions in self.P.items():
            for moves in actions.values():
                before.setdefault(moves[0][1], []).append(state)
        left, reached = {goal: 0}, deque([goal])
        while reached:
            state = reached.popleft()
            for earlier in before[state]:
                if earlier not in left:
                    left[earlier] = left[state] + 1
                    reached.append(earlier)
        return left


register("Lakes-v0", entry_point=Lakes)
