"""Clew's environments as an environment of SkyRL (needs ``skyrl_gym``; tested with 0.4.0)."""

from __future__ import annotations

import base64
import io
import json
import logging
from typing import Any

import numpy as np
import skyrl_gym
from PIL import Image
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from clew.envs.base import ImageEnv
from clew.envs.registry import make_env
from clew.envs.suites import file_stem
from clew.errors import UserError
from clew.runtime.skyrl.tasks import ENV_CLASS

__all__ = ["ENV_CLASS", "ClewSkyRLEnv", "register_env"]

Message = dict[str, Any]
log = logging.getLogger(__name__)


def register_env() -> None:
    """Makes ``ENV_CLASS`` known to SkyRL; needed once in every process that plays (the Ray entrypoint task)."""
    if ENV_CLASS not in skyrl_gym.registry:
        skyrl_gym.register(id=ENV_CLASS, entry_point=f"{__name__}:{ClewSkyRLEnv.__name__}")


class ClewSkyRLEnv(BaseTextEnv):
    """One episode of a Clew environment, as SkyRL plays it: images in messages, one answer a turn.

    The turn cap is the row's own (``settings``), whatever the suite. An exception of the environment ends this episode
    alone, with reward 0 and ``env_crashed``: SkyRL lets any exception end the whole batch. Bad input (``UserError``)
    would meet every episode, so that one does end it.

    Args:
        env_config: SkyRL's configuration of the environment; not used, everything is in the row.
        extras: a row of ``clew.runtime.skyrl.tasks`` without its first two columns, and ``max_turns`` from SkyRL.

    Raises:
        UserError: ``generator.max_turns`` is below the row's cap.
    """

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.extras = extras
        self.settings: dict[str, Any] = json.loads(extras["settings"])
        self.max_turns = self.settings["max_turns"]
        if extras["max_turns"] < self.max_turns:
            raise UserError(
                f"generator.max_turns: {extras['max_turns']} is below the {self.max_turns} turns that tasks of "
                f"{extras['suite']!r} may take; set it to {self.max_turns} or more"
            )
        self.success = self.crashed = False
        self._env: ImageEnv | None = None

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Starts the task of the row: the first message holds the frame, the instructions and the first text.

        Raises:
            UserError: the environment can't be made as the row says, or the row's seed gives another task.
        """
        try:
            self._env = make_env(self.extras["env_id"], **self.settings)
            observation, info = self._env.reset(self.extras["seed"])
        except UserError:
            raise
        except Exception:
            self._crash("reset")
            # A batch in which one trajectory has no image is more than SkyRL's trainer can take.
            return [_message(np.zeros((64, 64, 3), np.uint8), prompt[0]["content"])], {}
        if info["content_hash"] != self.extras["content_hash"]:
            raise UserError(
                f"data.train_data, data.val_data: seed {self.extras['seed']} of {self.extras['env_id']} gives another "
                "task now than when the rows were written; write them again"
            )
        text = f"{self._env.prompt}\n{observation.text}" if observation.text else self._env.prompt
        return [_message(observation.image, text)], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Plays one answer (its full text)."""
        self.turns += 1
        if self._env is None:
            return _output([], 0.0, True)
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
        except UserError:
            raise
        except Exception:
            self._crash("step")
            return _output([], 0.0, True)
        done = terminated or truncated
        self.success = done and bool(info["success"])
        return _output([] if done else [_message(observation.image, observation.text)], reward, done)

    def close(self) -> None:
        """Closes the environment; one that fails at that harms no other episode."""
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                log.warning("%s seed %d raised in close", self.extras["env_id"], self.extras["seed"], exc_info=True)

    def get_metrics(self) -> dict[str, Any]:
        """What ``aggregate_metrics`` needs of this episode."""
        return {"suite": file_stem(self.extras["suite"]), "success": self.success, "env_crashed": self.crashed}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
        """Success, apart from any reward, over all episodes and for each suite (``SUITE/solved``, ...).

        solved, episodes:  the episodes that reached the goal within the cap, and all that no crash has ended
        solve_rate_mean:   their quotient (left out when there were none)
        env_crashed:       episodes that a crash of their environment has ended

        SkyRL puts the batches of an evaluation together by name: the mean of what has ``mean`` or ``avg`` in it, the
        least and the greatest of what has ``min`` or ``max``, and the sum of all else. So a plain ``solve_rate`` of two
        batches could exceed 1, and the counts are exact, however the batches are cut: each suite has its own in every
        batch it is in. Only those of a suite with such a word in its name need an evaluation in one batch.
        """
        found = _counts(metrics)
        for suite in sorted({episode["suite"] for episode in metrics}):
            counts = _counts([episode for episode in metrics if episode["suite"] == suite])
            found |= {f"{suite}/{name}": value for name, value in counts.items()}
        return found

    def _crash(self, during: str) -> None:
        log.warning("%s seed %d raised in %s", self.extras["env_id"], self.extras["seed"], during, exc_info=True)
        self.crashed = True
        self.close()


def _counts(episodes: list[dict[str, Any]]) -> dict[str, float]:
    crashed = sum(episode["env_crashed"] for episode in episodes)
    solved, played = sum(episode["success"] for episode in episodes), len(episodes) - crashed
    rate = {"solve_rate_mean": solved / played} if played else {}
    return {"solved": solved, "episodes": played, "env_crashed": crashed, **rate}


def _output(observations: list[Message], reward: float, done: bool) -> BaseTextEnvStepOutput:
    return BaseTextEnvStepOutput(
        observations=observations, reward=reward, done=done, metadata={}, postprocessed_action=None
    )


def _message(frame: np.ndarray, text: str) -> Message:
    """A user's message with a frame, uint8 RGB [height, width, 3], and a text."""
    png = io.BytesIO()
    Image.fromarray(frame).save(png, "PNG", compress_level=1)  # more would take longer than the environment's step
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }
