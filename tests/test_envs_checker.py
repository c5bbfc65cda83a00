"""The checker finds nothing in sound environments, and names each fault of deliberately broken ones."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from broken_envs import BROKEN, SLOW_S, Sound, Start, Step

from clew.envs import ImageEnv, MazeEnv, Observation, check_image_env, probe


class Lamp:
    """Another kind of environment: switch the lamps on; its own way of writing, and no oracle."""

    env_id = "test/Lamp-v0"
    prompt = "Switch all lamps on. Write: press 0, press 1, press 2 or press 3"
    action_names = ("0", "1", "2", "3")
    max_turns = 6

    def reset(self, seed: int) -> Start:
        self.lamps = np.random.default_rng(seed).integers(2, size=4).astype(bool)
        self.lamps[seed % 4] = False
        self.turn, self.over = 0, False
        return self._see(""), {"content_hash": self.lamps.tobytes().hex(), "path_length": None}

    def step(self, action: str) -> Step:
        if self.over:
            raise RuntimeError("over")
        self.turn += 1
        pressed = re.fullmatch(r"(?:<action>)?(?:press )?([0-3])(?:</action>)?", action)
        if pressed:
            self.lamps[int(pressed[1])] ^= True
        success = bool(self.lamps.all())
        truncated = not success and self.turn == self.max_turns
        self.over = success or truncated
        info = {"success": success, "feedback": "pressed" if pressed else "unparsable"}
        return self._see(info["feedback"]), 1.0 if success else -0.1, success, truncated, info

    def _see(self, text: str) -> Observation:
        return Observation(
            np.repeat(np.kron(self.lamps, np.ones((8, 8)))[..., None] * 200, 3, 2).astype(np.uint8), text
        )

    def oracle_action(self) -> str:
        raise NotImplementedError

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "make_env",
    [
        functools.partial(MazeEnv),
        functools.partial(MazeEnv, size=(3, 3), min_path=2, max_path=4, goal="stop", max_turns=5, braid=1.0),
        Sound,
        Lamp,
        lambda: Sound(palette="night"),
    ],
)
def test_sound_environments_pass(make_env: Callable[[], ImageEnv]) -> None:
    state = random.getstate(), np.random.get_state()[1].copy()
    assert check_image_env(make_env) == []
    assert random.getstate() == state[0] and np.array_equal(np.random.get_state()[1], state[1])


@pytest.mark.parametrize(("cls", "sentence"), BROKEN, ids=[cls.__name__ for cls, _ in BROKEN])
def test_a_broken_environment_is_named(cls: type, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SLOW_S", SLOW_S)
    # Only the salted hash needs the second process, which is slow to start; a lambda can't be sent there.
    problems = check_image_env(cls if cls.__name__ == "SaltedHash" else lambda: cls())
    assert len(problems) == 1, problems
    assert re.search(sentence, problems[0])


def test_one_object_for_all_is_named() -> None:
    only = Sound()
    problems = check_image_env(lambda: only)
    assert any("make_env returned the same object twice" in problem for problem in problems)


def test_missing_methods_are_named() -> None:
    class Nothing:
        env_id = prompt = "x"
        action_names = ("a",)
        max_turns = 3

    (problem,) = check_image_env(Nothing)  # type: ignore[arg-type]
    assert "no method reset, step, oracle_action, close" in problem


def test_settings_that_cannot_travel_are_named() -> None:
    class Picky(Sound):
        def __init__(self, draw_with: Callable[[], None]) -> None:
            super().__init__()

    (problem,) = check_image_env(functools.partial(Picky, draw_with=lambda: None))
    assert problem.startswith("the setting 'draw_with' can't be pickled")
