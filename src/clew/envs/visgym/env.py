"""VisGym's tasks as image environments: prompt, frames and feedback are VisGym's, turns and endings are Clew's."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np

from clew.envs.base import Observation, plain_text
from clew.envs.visgym.answers import find_action
from clew.envs.visgym.fork import child_command
from clew.envs.visgym.grid import Cell, Grid
from clew.envs.visgym.pool import Child, ChildFault, ChildGone, ChildLost, Pool, pool
from clew.errors import UserError

log = logging.getLogger(__name__)

PREFIX = "visgym:"
_LONGEST_FEEDBACK = 400  # characters: VisGym repeats what it could not read
_LONGEST_ANSWER = 200  # characters of an answer without an action that VisGym is asked about
_MOVES = tuple(f"('move', {direction})" for direction in range(4))
_STOP = "('stop', 'stop')"
# What VisGym says, in a word (the beginnings of its sentences).
_WORDS = {
    "Action executed": "moved",
    "Cannot parse": "unparsable",
    "The action format": "unparsable",
    "Cannot move into a wall": "blocked",
}


class VisGymEnv:
    """A task of VisGym in a process of its own (see ``ImageEnv``).

    VisGym ends an episode only when the agent says ``stop`` and lets it go on afterwards; the turn cap and the end are
    kept here. Answers may be bare tuples or stand between tags (see ``find_action``).

    Args:
        task: VisGym's id without the prefix, e.g. ``maze_2d/easy``.
        max_turns: turns after which the episode is truncated.
        path: folder of the fork; None: as configured (see ``configure``), or what ``CLEW_VISGYM`` names.
        children: processes that all such environments of this process share; None: as configured.
        command: what starts a child, for one that speaks the same protocol in place of the fork.

    Raises:
        UserError: the fork, a package or the task is missing.
        ChildLost: no process could be started.
    """

    def __init__(
        self,
        task: str,
        max_turns: int = 15,
        path: str | None = None,
        children: int | None = None,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.env_id = PREFIX + task
        self.task, self.max_turns = task, max_turns
        self._pool: Pool = pool(command or child_command(path, task.partition("/")[0]), children)
        self._child: Child | None = None
        self._open()
        self.action_names: tuple[str, ...] = self.functions
        self.turn, self.over = 0, True
        self._plan: list[str] | None = None

    def _open(self) -> None:
        """Makes the environment in a living child."""
        self._child, self._number = self._pool.take(), next(self._pool.numbers)
        try:
            self.functions = tuple(self._ask("make", id=self.task)["functions"])
            self.prompt: str = plain_text(self._ask("reset", seed=0)["prompt"])
        except ChildFault as error:
            self.close()
            raise UserError(f"environment.id: VisGym can't make {self.task!r} ({error})") from error
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Starts the task of ``seed``, in another process if the environment's own has died."""
        if self._child is not None:  # not closed
            try:
                return self._begin(self._ask("reset", seed=seed))
            except (ChildLost, ChildGone):
                log.warning("%s: its process is replaced", self.env_id, exc_info=True)
                self.close()
                self._open()
        return self._begin(self._ask("reset", seed=seed))

    def _begin(self, reply: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        self.prompt = plain_text(reply["prompt"])
        self.turn, self.over = 0, False
        self._plan = None
        # What it says after a reset is left over from the last episode.
        return Observation(self._frame, ""), {"content_hash": reply["content"][:16], "path_length": None}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Plays one answer: VisGym's own reward, and success where it ended the episode with all of it (1.0).

        Raises:
            RuntimeError: the episode has ended or was never started.
            ChildLost: VisGym's process died.
        """
        if self.over:
            raise RuntimeError("no episode is going on: call reset(seed) first")
        self.turn += 1
        understood = find_action(action)
        # Where there is no action VisGym says so itself. It reads no text that begins with a question mark, so nothing
        # is played by accident; a long text, which it would repeat in full, is cut.
        try:
            reply = self._ask("step", action=understood or f"? {action[:_LONGEST_ANSWER]}")
        except ChildFault as error:
            # Numbers without end and the like: the agent wrote them, and its turn is used up.
            log.warning("%s raised at the answer %.200r: %s", self.env_id, action, error)
            reply = {"reward": 0.0, "terminated": False, "truncated": False, "feedback": f"Not possible: {error}"}
        self._plan = self._plan[1:] if self._plan and understood == self._plan[0] else None
        reward, terminated = reply["reward"], reply["terminated"]
        success = terminated and reward >= 1.0
        truncated = not terminated and (reply["truncated"] or self.turn >= self.max_turns)
        self.over = terminated or truncated
        text = plain_text(reply["feedback"])[:_LONGEST_FEEDBACK]
        if terminated:
            word = "reached" if success else "stopped"
        else:
            word = next((w for beginning, w in _WORDS.items() if text.startswith(beginning)), "refused")
        self._note(reply)
        info = {"success": success, "feedback": word, "action": understood}
        return Observation(self._frame, text), reward, terminated, truncated, info

    def _note(self, reply: dict[str, Any]) -> None:
        """Takes in what a subclass wants to know of a step."""

    def oracle_action(self) -> str:
        """The next action of VisGym's own solution from here."""
        if not self._plan:
            try:
                self._plan = self._ask("solve")["actions"]
            except ChildFault as error:
                raise NotImplementedError(f"VisGym has no solution of {self.task} from here ({error})") from error
        return self._plan[0]

    def close(self) -> None:
        """Gives the environment's place in the child back."""
        if self._child is None:
            return
        child, self._child = self._child, None
        try:
            child.ask({"do": "close", "env": self._number})
        except ChildGone:
            pass  # nothing is left to close
        finally:
            self._pool.leave(child)

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        if self._child is None:
            raise RuntimeError("the environment is closed")
        reply, frame = self._child.ask({"do": what, "env": self._number, **arguments})
        if frame is not None:
            self._frame: np.ndarray = frame
        return reply


class VisGymMaze(VisGymEnv):
    """VisGym's ``maze_2d``: what is known of its map gives path lengths, references and demonstrations.

    Directions are VisGym's: 0 right, 1 up, 2 left, 3 down.
    """

    grid: Grid  # of the task that was started last
    cell: Cell  # where the agent is, (row, column)

    def __init__(self, task: str, **settings: Any) -> None:
        super().__init__(task, **settings)
        self.action_names = (*_MOVES, _STOP)

    def _begin(self, reply: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        observation, info = super()._begin(reply)
        state = self._state = reply["state"]
        self.grid = Grid(state["maze_map"], tuple(state["target_location"]))
        self.cell = tuple(state["agent_location"])
        return observation, {**info, "path_length": self.grid.distance[self.cell]}

    def _note(self, reply: dict[str, Any]) -> None:
        self.cell = tuple(reply.get("agent", self.cell))

    # --- what navigators need (see ``Walk``) ---

    def exits(self) -> list[int]:
        """The open directions."""
        return self.grid.exits(self.cell)

    def best_moves(self) -> list[int]:
        """The directions that lead nearer to the target; none on it."""
        return self.grid.nearer(self.cell)

    def move_text(self, direction: int) -> str:
        """How a move is written."""
        return _MOVES[direction]

    @property
    def stop_text(self) -> str:
        """How stopping is written."""
        return _STOP

    # --- what demonstrations need ---

    def start_within(self, farthest: int, rng: random.Random) -> tuple[Observation, dict[str, Any]]:
        """Starts the current maze again from a random cell at most ``farthest`` moves from the target."""
        cells = [cell for cell, moves in sorted(self.grid.distance.items()) if 1 <= moves <= farthest]
        state = {**self._state, "agent_location": list(rng.choice(cells))}
        return self._begin(self._ask("reset", seed=0, state=state))
