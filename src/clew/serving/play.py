"""A suite played against an endpoint, and held against what an evaluation found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.envs.base import Suite
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.serving.client import ChatClient, Refused, Unreachable

_SHOWN_NAMES = 8


def check_model(client: ChatClient, model: str) -> None:
    """Asks the server for its models before anything is played.

    A server that loads adapters on request need not list them, so a known base is enough for ``base:adapter``.

    Raises:
        UserError: the server is not there, wants another key, or does not have the model.
    """
    try:
        names = client.models()
    except Unreachable as error:
        raise UserError(f"--url: {error}: start a server there (clew serve), or name another") from error
    except Refused as error:
        if error.status == 404:
            raise UserError(f"--url {client.url}: no OpenAI-compatible API is there ({error})") from error
        raise
    if model not in names and model.partition(":")[0] not in names:
        raise UserError(f"--model {model}: {client.url} has no such model; it has {_some(names)}")


def unknown_model(client: ChatClient, model: str) -> UserError:
    """Of an adapter that the server did not find when it was asked to play: what the server lists instead."""
    names = [name for name in client.models() if name.startswith(model.partition(":")[0] + ":")]
    return UserError(f"--model {model}: {client.url} has no such adapter; it lists {_some(names)}")


def _some(names: list[str]) -> str:
    """The last ones, which are those of the latest steps."""
    return ("..., " if len(names) > _SHOWN_NAMES else "") + ", ".join(names[-_SHOWN_NAMES:]) or "none"


@dataclass(frozen=True)
class Difference:
    """An episode that came out differently: its outcomes in words."""

    seed: int
    here: str
    there: str


@dataclass(frozen=True)
class Comparison:
    """Two results on the same tasks, episode by episode.

    Attributes:
        total: episodes played here.
        recorded: episodes of the record; more than ``total`` when fewer were played.
        differences: those of ``total`` whose success, stop reason or actions are not the same.
    """

    total: int
    recorded: int
    differences: list[Difference]

    @property
    def same(self) -> int:
        return self.total - len(self.differences)


def read_record(path: Path, suite: Suite, mode: str) -> dict[str, dict[str, Any]]:
    """The episodes of an evaluation by content hash, from SUITE.MODE.json of a run or from what ``--json`` wrote.

    Raises:
        UserError: the file is none of these, or is about another suite or mode, or about other tasks.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = content.get("results", [content])
        about = [(record["suite"], record["mode"]) for record in records]
        found = next((record for record, what in zip(records, about, strict=True) if what == (suite.name, mode)), None)
        episodes = {e["content_hash"]: e for e in found["episodes"]} if found is not None else {}
        for episode in episodes.values():
            outcome(episode)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--compare {path} can't be read ({error}): name a run's eval/step-*/SUITE.MODE.json"
        ) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"--compare {path} is no evaluation: name a run's eval/step-*/SUITE.MODE.json") from error
    if found is None:
        there = ", ".join(" ".join(what) for what in about) or "nothing"
        raise UserError(f"--compare {path} is about {there}; this plays {suite.name} {mode}: name the file of that")
    if (task := next((task for task in suite.tasks if task.content_hash not in episodes), None)) is not None:
        raise UserError(
            f"--compare {path}: the task of seed {task.seed} is not in it, it was made under other [environment] "
            "settings: name the recipe of its run"
        )
    return episodes


def compare(result: Result, recorded: dict[str, dict[str, Any]]) -> Comparison:
    """Holds what was played here against a record of the same suite (see ``read_record``)."""
    differences = []
    for episode in result.episodes:
        here, there = outcome(episode), outcome(recorded[episode["content_hash"]])
        if here != there:
            differences.append(Difference(episode["seed"], here, there))
    return Comparison(len(result.episodes), len(recorded), differences)


def outcome(episode: dict[str, Any]) -> str:
    """What came of an episode and by which moves, in words that are equal when these are."""
    return f"{episode['stop_reason']} after {' '.join(episode['actions']) or 'no move'}"


def stop_reasons(episodes: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How often each reason ended an episode, the most frequent first."""
    return dict(Counter(episode["stop_reason"] for episode in episodes).most_common())
