"""Episodes with a model that is reached through an API: the loop is the trainer's, the tokens are the server's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from clew.agent.ledger import StopReason, Trajectory, Turn
from clew.agent.template import opening_text
from clew.envs.base import Task
from clew.evaluation.evaluate import png_base64
from clew.rollout.engine import Completion, Sampling
from clew.rollout.episodes import FrameFilter, Limits, MakeEnv, play
from clew.serving.client import Answer, ChatClient, Refused, Unreachable

log = logging.getLogger(__name__)


class RemoteNotation:
    """The notation of a conversation in words: the server's template makes tokens of it."""

    def show(self, trajectory: Trajectory, text: str, frame: np.ndarray) -> None:
        """See ``Notation.show``: there is no record of tokens."""

    def read(self, completion: Completion) -> str:
        """See ``Notation.read``."""
        return completion.text


class RemoteEngine:
    """An engine whose every answer is one request that holds the conversation so far (see ``Engine``).

    The messages are such that a server which renders them with the model's chat template gets the trainer's ledger:
    a user turn is a frame (PNG) and a text, an assistant turn is what was answered, there is no system turn. An answer
    goes back as words: a server's tokens for it are the sampled ones unless the model spelled it in an unusual way.

    Args:
        model: as the server knows it, e.g. ``base:adapter``.
        max_tokens: of a conversation with its next answer; past it the episode ends, as it does in training. The
            server counts; with one that does not say, nothing is checked.
        clients: requests on their way at a time.
    """

    patience_s = 0.005  # no request waits for another episode

    def __init__(self, client: ChatClient, model: str, max_tokens: int, clients: int) -> None:
        self.version = model
        self._client, self._max_tokens = client, max_tokens
        self._pool = ThreadPoolExecutor(clients, thread_name_prefix="chat")
        self._lost = False
        self._asked: dict[Future[Answer], tuple[Trajectory, Sampling]] = {}
        # By the identity of a trajectory, which is kept alive so that no other can take its place.
        self._conversations: dict[int, tuple[Trajectory, list[dict[str, Any]]]] = {}

    def submit(self, trajectory: Trajectory, sampling: Sampling, seed: int) -> None:
        """See ``Engine.submit``."""
        messages = self._conversation(trajectory)
        future = self._pool.submit(self._client.complete, self.version, messages, sampling, seed)
        self._asked[future] = (trajectory, sampling)

    def collect(self) -> list[tuple[Trajectory, Completion]]:
        """See ``Engine.collect``.

        Raises:
            Refused: the server will not answer: a key, a model or an adapter is wrong.
        """
        done, _ = wait(self._asked, return_when=FIRST_COMPLETED)
        return [self._completion(future, *self._asked.pop(future)) for future in done]

    def _completion(
        self, future: Future[Answer], trajectory: Trajectory, sampling: Sampling
    ) -> tuple[Trajectory, Completion]:
        stop = None
        try:
            answer = future.result()
            if (answer.prompt_tokens or 0) + sampling.max_new_tokens > self._max_tokens:
                stop = StopReason.TRAJECTORY_TOKENS
        except Unreachable as error:
            # Said once: where the server is gone, every other episode would say the same.
            log.log(logging.DEBUG if self._lost else logging.WARNING, "%s: %s", trajectory.task, error)
            self._lost = True
            stop = StopReason.ENGINE_LOST
        except Refused as error:
            if error.code != "context_length_exceeded":
                raise
            stop = StopReason.TRAJECTORY_TOKENS
        if stop is not None:
            return trajectory, Completion([], [], False, stop=stop)
        return trajectory, Completion([], [], answer.ended, answer.text)

    def _conversation(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        _, messages = self._conversations.setdefault(id(trajectory), (trajectory, []))
        turns = trajectory.turns
        for index in range((len(messages) + 1) // 2, len(turns)):
            if index:
                messages.append({"role": "assistant", "content": turns[index - 1].answer})
                messages.append(_user(turns[index], turns[index].text))
            else:
                messages.append(_user(turns[0], opening_text(trajectory.prompt, turns[0].text)))
        return list(messages)

    def abandon(self, trajectory: Trajectory) -> None:
        """See ``Engine.abandon``."""
        self._conversations.pop(id(trajectory), None)
        for future in [future for future, (asked, _) in self._asked.items() if asked is trajectory]:
            del self._asked[future]
            future.cancel()

    def release(self) -> None:
        """See ``Engine.release``: drops all requests, and takes none from now on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._asked.clear()
        self._conversations.clear()

    def sleep(self) -> None:
        """See ``Engine.sleep``: the server's memory is its own."""

    def wake(self) -> None:
        """See ``Engine.wake``."""


def _user(turn: Turn, text: str) -> dict[str, Any]:
    image = {"url": f"data:image/png;base64,{png_base64(turn.frame)}"}
    return {"role": "user", "content": [{"type": "image_url", "image_url": image}, {"type": "text", "text": text}]}


class RemoteRollouts:
    """Plays episodes with one model of a server (see ``Plays``).

    Args:
        clients: requests on their way at a time.
    """

    def __init__(self, client: ChatClient, model: str, clients: int = 8) -> None:
        self.client, self.model, self.clients = client, model, clients

    def play(
        self,
        make_env: MakeEnv,
        attempts: Sequence[tuple[Task, int]],
        sampling: Sampling,
        limits: Limits,
        seed_parts: tuple[int | str, ...],
        see: FrameFilter | None = None,
    ) -> list[Trajectory]:
        """See ``Plays.play``.

        Raises:
            Refused: the server will not answer.
        """
        engine = RemoteEngine(self.client, self.model, limits.max_tokens, self.clients)
        try:
            return play(engine, RemoteNotation(), make_env, attempts, sampling, limits, seed_parts, see)
        finally:
            engine.release()

    def release(self) -> None:
        """See ``Plays.release``: nothing is kept."""
