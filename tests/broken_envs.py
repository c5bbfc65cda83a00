"""Environments for the tests of the checker: a sound one, and one broken in one place for each fault."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from clew.envs import MazeEnv, Observation
from clew.envs.maze_env import parse_action

SMALL = {"size": (2, 3), "min_path": 2, "max_path": 3, "max_turns": 5}
Step = tuple[Observation, float, bool, bool, dict[str, Any]]
Start = tuple[Observation, dict[str, Any]]


class Sound(MazeEnv):
    """A maze in a world so small that seeds collide."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**SMALL, **settings})


# Each class is broken in one place; the pattern is what the checker must say, and it must say nothing else.
SLOW_S = 0.1  # the limit of the checker in these tests
BROKEN: list[tuple[type, str]] = []


def broken(sentence: str) -> Callable[[type], type]:
    def keep(cls: type) -> type:
        BROKEN.append((cls, sentence))
        return cls

    return keep


class Changed(Sound):
    """Sound, with a place to change what is returned."""

    def reset(self, seed: int) -> Start:
        observation, info = super().reset(seed)
        return self.change(observation), self.change_start(info)

    def step(self, action: str) -> Step:
        observation, *rest = super().step(action)
        return self.change_step((self.change(observation), *rest))  # type: ignore[arg-type]

    def change(self, observation: Observation) -> Observation:
        return observation

    def change_start(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def change_step(self, outcome: Step) -> Step:
        return outcome


@broken(r"reset\(0\) gave another frame the second time: a seed must always give one task")
class NoisyFrames(Changed):
    noise = np.random.default_rng(0)

    def change(self, observation: Observation) -> Observation:
        return replace(observation, image=observation.image ^ self.noise.integers(2, size=(32, 48, 3), dtype=np.uint8))


@broken(r"reset\(\d+\) gave another frame .* always give one task")
class ForgetsNothing(Sound):
    resets = 0

    def start(self, maze: Any) -> Start:
        self.resets += 1
        return super().start(maze if self.resets == 1 else replace(maze, start=(maze.start + 1) % 6))

    def oracle_action(self) -> str:
        raise NotImplementedError


@broken(r"the same answers after reset\(\d+\) gave another \w+ at turn \d")
class SlipperyFloor(Sound):
    chance = random.Random(0)

    def step(self, action: str) -> Step:
        return super().step(action if self.chance.random() < 0.5 else "")

    def oracle_action(self) -> str:
        raise NotImplementedError


@broken(r"`random` was changed: use a random.Random\(seed\)")
class SeedsTheGlobalGenerator(Sound):
    def reset(self, seed: int) -> Start:
        random.seed(seed)
        return super().reset(seed)


@broken(r"`numpy.random` was changed: use numpy.random.default_rng")
class DrawsFromGlobalNumpy(Sound):
    def reset(self, seed: int) -> Start:
        np.random.rand()
        return super().reset(seed)


@broken(r"image of dtype float32: it must be uint8")
class FloatFrames(Changed):
    def change(self, observation: Observation) -> Observation:
        return replace(observation, image=observation.image.astype(np.float32) / 255)


@broken(r"an image of shape \(32, 48\): it must be an array \[height, width, 3\]")
class GreyFrames(Changed):
    def change(self, observation: Observation) -> Observation:
        return replace(observation, image=observation.image[..., 0])


@broken(r"not contiguous: use numpy.ascontiguousarray")
class MirroredFrames(Changed):
    def change(self, observation: Observation) -> Observation:
        return replace(observation, image=observation.image[:, ::-1])


@broken(r"frames of one episode have different shapes \[\(32, 48, 3\), \(33, 48, 3\)\]")
class GrowingFrames(Changed):
    def change(self, observation: Observation) -> Observation:
        taller = np.pad(observation.image, ((0, self.turn % 2), (0, 0), (0, 0)))
        return replace(observation, image=taller)


@broken(r"a frame changed after it was returned: return a new array")
class OneBuffer(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros((32, 48, 3), np.uint8)

    def change(self, observation: Observation) -> Observation:
        self.buffer[:] = observation.image
        return replace(observation, image=self.buffer)


@broken(r"content_hash of seed 0 changed between two resets")
class HashOfTheObject(Changed):
    def change_start(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "content_hash": str(id(self))}


@broken(r"show different problems with the same content_hash: hash everything")
class HashOfTheWallsOnly(Changed):
    def change_start(self, info: dict[str, Any]) -> dict[str, Any]:
        assert self.maze is not None
        return {**info, "content_hash": bytes(self.maze.open_sides).hex()}


@broken(r"look and play the same but differ in content_hash: hash the problem, not the seed")
class HashOfTheSeed(Sound):
    def reset(self, seed: int) -> Start:
        observation, info = super().reset(seed)
        return observation, {**info, "content_hash": f"maze-{seed}"}


@broken(r"content_hash of seed 0 is different in another process: use hashlib")
class SaltedHash(Changed):
    def change_start(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "content_hash": str(hash(info["content_hash"]))}


@broken(r"content_hash None: it must be a str")
class NoHash(Changed):
    def change_start(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"path_length": info["path_length"]}


@broken(r"text of a value of type NoneType: it must be a str")
class NoText(Changed):
    def change(self, observation: Observation) -> Observation:
        return replace(observation, text=None)


@broken(r"step raised IndexError.* on an empty answer .*: whatever an agent writes must be played as a turn")
class TrustsTheAgent(Sound):
    def step(self, action: str) -> Step:
        action[0]
        return super().step(action)


@broken(r"step raised UnicodeEncodeError.* on accents and emoji")
class AsciiOnly(Sound):
    def step(self, action: str) -> Step:
        if "🧶" in action:
            action.encode("ascii")
        return super().step(action)


@broken(r"step took [\d.]+ s of CPU time on 100,000 letters: parse answers in linear time")
class SlowParser(Sound):
    def step(self, action: str) -> Step:
        began = time.process_time()
        while len(action) == 100_000 and time.process_time() < began + 3 * SLOW_S:
            pass
        return super().step(action)


@broken(r"5 answers that can't be parsed did not end the episode: each must count as a turn")
class GarbageIsFree(Sound):
    def step(self, action: str) -> Step:
        if parse_action(action) is None and not self.over:
            self.turn -= 1
        return super().step(action)


@broken(r"answers that can't be parsed reached success")
class GarbageWins(Sound):
    def step(self, action: str) -> Step:
        return super().step(self.oracle_action() if parse_action(action) is None and not self.over else action)


@broken(r"the turn cap is not honoured: after max_turns = 5 answers step returned neither")
class NoCap(Changed):
    def step(self, action: str) -> Step:
        self.turn = min(self.turn, 3)
        return super().step(action)


@broken(r"step truncated an episode at turn 3, but max_turns is 5: make them agree")
class EarlyCap(Changed):
    def change_step(self, outcome: Step) -> Step:
        observation, reward, terminated, _, info = outcome
        truncated = self.turn == 3 and not terminated
        self.over = terminated or truncated
        return observation, reward, terminated, truncated, info

    def oracle_action(self) -> str:
        raise NotImplementedError


@broken(r"info of step has success 'missing': give a Python bool at every turn")
class SuccessOnlyByReward(Changed):
    def change_step(self, outcome: Step) -> Step:
        del outcome[4]["success"]
        return outcome

    def oracle_action(self) -> str:
        raise NotImplementedError


@broken(r"terminated as a value of type bool_?: return a Python bool")
class NumpyFlags(Changed):
    def change_step(self, outcome: Step) -> Step:
        return (*outcome[:2], np.bool_(outcome[2]), *outcome[3:])  # type: ignore[return-value]


@broken(r"feedback 'you moved': give one short word")
class LongFeedback(Changed):
    def change_step(self, outcome: Step) -> Step:
        return (*outcome[:4], {**outcome[4], "feedback": "you moved"})  # type: ignore[return-value]


@broken(r"step returned reward nan: return a finite Python float")
class NoReward(Changed):
    def change_step(self, outcome: Step) -> Step:
        return (outcome[0], float("nan"), *outcome[2:])  # type: ignore[return-value]


@broken(r"step returned a tuple of 4: return \(Observation, reward, terminated, truncated, info\)")
class OldGymStep(Changed):
    def change_step(self, outcome: Step) -> Step:
        return (*outcome[:2], outcome[2] or outcome[3], outcome[4])  # type: ignore[return-value]


@broken(r"step after the end of an episode went through: raise RuntimeError")
class NeverOver(Sound):
    def step(self, action: str) -> Step:
        self.over = False
        return super().step(action)


@broken(r"the oracle does not solve seed \d+ within max_turns = 5")
class LostOracle(Sound):
    def oracle_action(self) -> str:
        return "<action>stop</action>"


@broken(r"path_length of seed \d+ is \d+, but the oracle needs only \d turns")
class OverstatedPath(Changed):
    def change_start(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "path_length": info["path_length"] + 10}


@broken(r"two environments played in turn disturb each other: keep all state in the instance")
class SharedState(Sound):
    places: ClassVar[dict[str, int]] = {}

    @property
    def room(self) -> int:
        return self.places["room"]

    @room.setter
    def room(self, room: int) -> None:
        self.places["room"] = room


@broken(r"prompt is ' ': it must be a str with something in it")
class NoPrompt(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = " "


@broken(r"action_names is \('up', 'up'\): it must be a tuple of different words")
class TwinActions(Sound):
    action_names = ("up", "up")


@broken(r"max_turns is None: it must be a whole number")
class NoMaxTurns(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.max_turns = None  # type: ignore[assignment]


@broken(r"close\(\) raised OSError: still busy")
class WontClose(Sound):
    def close(self) -> None:
        raise OSError("still busy")


@broken(r"making the environment raised FileNotFoundError: no textures")
class WontStart(Sound):
    def __init__(self) -> None:
        raise FileNotFoundError("no textures")
