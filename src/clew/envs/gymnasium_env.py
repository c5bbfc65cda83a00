"""Any Gymnasium environment that draws itself and has a list of actions, seen in frames and played by text."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.error import Error as GymnasiumError

from clew.envs.base import Observation, plain_text
from clew.envs.maze_env import answer_text, parse_action
from clew.errors import UserError

PREFIX = "gym:"
FEEDBACK = {
    "played": "Done.",
    "unparsable": "Not understood.",
    "reached": "You succeeded.",
    "ended": "It is over.",
}
# What a constructor says of arguments that it doesn't like. Whatever else it raises is no fault of the recipe.
_BAD_ARGUMENTS = (TypeError, ValueError, KeyError, AssertionError)


class GymnasiumEnv:
    """An environment made by ``gymnasium.make`` with ``render_mode="rgb_array"`` (see ``ImageEnv``).

    An answer that can't be read takes a turn in which the environment does not move. Two seeds with the same first
    frame are one task. Chance after a reset comes from the seed of the reset, as Gymnasium asks of environments.

    Environments may help: a method ``oracle_action() -> int`` gives demonstrations and the reference ``oracle``; a
    ``path_length`` (int) in the info of a reset sorts evaluations.

    Args:
        name: Gymnasium's id, or ``module:id`` where importing the module registers it.
        max_turns: turns after which the episode is truncated; the environment's own time limit counts too.
        kwargs: arguments of ``gymnasium.make``.
        actions: names of the actions in the order of their numbers; None: the numbers.
        prompt: instructions; None: a sentence with the environment's name and the actions.
        success: what wins. ``"reward"``: the environment ended the episode with a last reward of at least
            ``success_threshold``; ``"return"``: the sum of rewards is at least that when the episode is over;
            ``"info"``: the last step's ``info[success_key]`` is true.

    Raises:
        UserError: there is no such environment, a package is missing, it draws no RGB frames, its actions are no
            list, or a setting does not fit it.
    """

    def __init__(
        self,
        name: str,
        max_turns: int = 15,
        kwargs: dict[str, Any] | None = None,
        actions: tuple[str, ...] | None = None,
        prompt: str | None = None,
        success: Literal["reward", "return", "info"] = "reward",
        success_threshold: float = 1.0,
        success_key: str = "is_success",
    ) -> None:
        self.env_id = PREFIX + name
        self.max_turns, self.success = max_turns, success
        self.success_threshold, self.success_key = success_threshold, success_key
        self._env = _make(name, kwargs or {})
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise UserError(f"environment.id: {self.env_id} has no list of actions but {space}; give one with Discrete")
        self._first = int(space.start)
        self.action_names = _action_names(self.env_id, space, actions)
        self.answer_texts = tuple(answer_text(name) for name in self.action_names)
        choice = answer_text("|".join(self.action_names))
        self.prompt = plain_text(prompt or f"You play {_title(name)}. Answer each frame with one action: {choice}")
        self.reset(0)  # whether it can draw is known only when it has drawn
        self.over = True

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Starts the task of ``seed``."""
        _, info = self._env.reset(seed=seed)
        self.turn, self.over, self._return = 0, False, 0.0
        self._frame = self._draw()
        content = hashlib.sha256(str(self._frame.shape).encode() + self._frame.tobytes()).hexdigest()[:16]
        length = info.get("path_length")
        return Observation(self._frame, ""), {
            "content_hash": content,
            "path_length": length if isinstance(length, int) else None,
        }

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Plays one answer; the reward is the environment's own.

        Raises:
            RuntimeError: the episode has ended or was never started.
            UserError: ``success_key`` is no fact of this environment.
        """
        if self.over:
            raise RuntimeError("no episode is going on: call reset(seed) first")
        self.turn += 1
        name = parse_action(action, self.action_names)
        reward, terminated, truncated = 0.0, False, False
        facts: dict[str, Any] = {}
        if name is not None:
            number = self._first + self.action_names.index(name)
            _, gained, terminated, truncated, facts = self._env.step(number)
            reward, terminated, truncated = float(gained), bool(terminated), bool(truncated)
            self._return += reward
            self._frame = self._draw()
        truncated = not terminated and (truncated or self.turn >= self.max_turns)
        self.over = terminated or truncated
        success = self.over and self._won(reward, terminated, facts)
        word = "unparsable" if name is None else "reached" if success else "ended" if terminated else "played"
        info = {"success": success, "feedback": word, "action": name}
        return Observation(self._frame, FEEDBACK[word]), reward, terminated, truncated, info

    def oracle_action(self) -> str:
        """The text of the action that the environment's own ``oracle_action()`` gives."""
        oracle = getattr(self._env.unwrapped, "oracle_action", None)
        if not callable(oracle):
            raise NotImplementedError(f"{self.env_id} has no method oracle_action")
        number = int(oracle())
        if not 0 <= number - self._first < len(self.action_names):
            raise UserError(f"environment.id: oracle_action() of {self.env_id} gave {number}, which is no action of it")
        return self.answer_texts[number - self._first]

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _won(self, reward: float, terminated: bool, facts: dict[str, Any]) -> bool:
        """Whether an episode that is over was won, by the last step's reward and info."""
        if self.success == "reward":
            return terminated and reward >= self.success_threshold
        if self.success == "return":
            return self._return >= self.success_threshold
        # At the turn cap, which the environment knows nothing of, it need not say anything.
        if terminated and self.success_key not in facts:
            known = ", ".join(sorted(map(str, facts))) or "nothing"
            raise UserError(
                f"environment.gymnasium.success_key: the last info of {self.env_id} has no {self.success_key!r} "
                f"(it has {known})"
            )
        return bool(facts.get(self.success_key))

    def _draw(self) -> np.ndarray:
        """The current frame, a copy, uint8 RGB [height, width, 3]."""
        try:
            frame: Any = self._env.render()
        except DependencyNotInstalled as error:
            raise _missing(self.env_id, error) from error
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            is_array = isinstance(frame, np.ndarray)
            what = f"an array {frame.dtype} {list(frame.shape)}" if is_array else type(frame).__name__
            raise UserError(f"environment.id: {self.env_id} draws no RGB frame (uint8 [height, width, 3]) but {what}")
        return np.array(frame, order="C")


def _make(name: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    env_id = PREFIX + name
    if hasattr(gymnasium, "VLMEnvMixin"):
        raise UserError(
            "environment.id: the gymnasium of this Python is VisGym's fork, which plays visgym:... only: "
            "pip install --force-reinstall gymnasium, and name the fork's folder in CLEW_VISGYM instead"
        )
    # Nothing is shown on a screen, and pygame's greeting would stand in the middle of the output.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **kwargs)
    except DependencyNotInstalled as error:
        raise _missing(env_id, error) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"environment.id: {env_id} can't be imported ({_line(error.__cause__ or error)}); "
            "put the folder of its module in PYTHONPATH, or install what is missing"
        ) from error
    except GymnasiumError as error:
        raise UserError(
            f"environment.id: Gymnasium knows no {name!r} ({_line(error)}); "
            "an environment of your own is named by the module that registers it: gym:my_module:MyEnv-v0"
        ) from error
    except _BAD_ARGUMENTS as error:
        raise UserError(
            f"environment.gymnasium.kwargs: {env_id} can't be made with {kwargs} and render_mode='rgb_array' "
            f"({type(error).__name__}: {_line(error)})"
        ) from error
    modes = env.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        env.close()
        raise UserError(
            f"environment.id: {env_id} can't draw frames, it has no render mode rgb_array "
            f"(it has {', '.join(map(str, modes)) or 'none'})"
        )
    return env


def _action_names(env_id: str, space: gymnasium.spaces.Discrete, given: tuple[str, ...] | None) -> tuple[str, ...]:
    count, first = int(space.n), int(space.start)
    if given is None:
        return tuple(map(str, range(first, first + count)))
    key = "environment.gymnasium.actions"
    if len(given) != count:
        raise UserError(f"{key}: {env_id} has {count} actions, {len(given)} names are given")
    if bad := [name for name in given if name != name.strip() or "<" in name or "|" in name]:
        raise UserError(f"{key}: {bad[0]!r} can't stand between tags in a list: leave out <, | and outer blanks")
    return tuple(given)


def _missing(env_id: str, error: Exception) -> UserError:
    return UserError(f"environment.id: {env_id} needs a package that is missing ({_line(error)})")


def _title(name: str) -> str:
    """The name in words: ``my_module:CliffWalking-v1`` is Cliff Walking."""
    bare = re.sub(r"-v\d+$", "", re.split(r"[:/]", name)[-1])
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", bare)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
