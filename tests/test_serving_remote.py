"""What is played through an API is what the trainer plays: the same tokens, the same draws, the same endings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi comes with clew[ray]")

import openai_server
from openai_server import ReferenceServer

from clew.evaluation.evaluate import Result
from clew.evaluation.evaluator import play_suite
from clew.evaluation.suites import RecipeSuites
from clew.policy.vision import FeatureCache
from clew.recipe import Recipe, load_recipe
from clew.rollout.rollouts import LocalRollouts
from clew.serving.client import ChatClient, Refused
from clew.serving.remote import RemoteRollouts


@pytest.fixture(scope="module")
def shared() -> Iterator[ReferenceServer]:
    with openai_server.warm_start_server() as server:
        yield server


@pytest.fixture
def server(shared: ReferenceServer) -> ReferenceServer:
    shared.asked, shared.ledgers, shared.hook = [], [], lambda number, body: None
    return shared


def recipe(*changes: str, size: int = 6) -> Recipe:
    return load_recipe("laptop", [f"evaluation.size={size}", *changes])


def remote(server: ReferenceServer, played: Recipe, model: str, mode: str = "greedy", **options: Any) -> Result:
    client = ChatClient(server.url, **options)
    try:
        return play_suite(played, RemoteRollouts(client, model, 4), RecipeSuites(played).suite("heldout"), mode, 3)
    finally:
        client.close()


def local(server: ReferenceServer, played: Recipe, model: str, mode: str) -> Result:
    vlm = server.vlm
    rollouts = LocalRollouts.of(vlm, FeatureCache(vlm.model.model.visual, vlm.patcher))
    rollouts.load(server.adapters[model.partition(":")[2]] if ":" in model else None)
    return play_suite(played, rollouts, RecipeSuites(played).suite("heldout"), mode, 3)


@pytest.mark.parametrize(
    ("model", "mode", "changes"),
    [
        ("warm-start", "greedy", []),
        ("warm-start:noise", "greedy", []),
        ("warm-start:noise", "sampled", []),
        ("warm-start", "sampled", ["rollout.max_tokens=300"]),
        ("warm-start", "sampled", ["rollout.max_new_tokens=2"]),
    ],
)
def test_the_same_episodes(server: ReferenceServer, model: str, mode: str, changes: list[str]) -> None:
    """Outcome and moves of each episode, and the server sees what the trainer's ledger holds, token for token."""
    played = recipe(*changes)
    here, there = remote(server, played, model, mode), local(server, played, model, mode)
    assert here.record() == there.record()
    ledgers = {tuple(t.token_ids[: turn.start]) for t in there.trajectories for turn in t.turns if turn.answered}
    assert ledgers <= {tuple(ids) for ids in server.ledgers}
    assert {body["model"] for body in server.asked} == {model}
    for ours, theirs in zip(here.trajectories, there.trajectories, strict=True):
        assert [t.answer for t in ours.turns] == [t.answer for t in theirs.turns]
        assert not ours.token_ids and not ours.sampled, "a token that isn't known is not made up"
        assert ours.policy_version == model
    reasons = {e["stop_reason"] for e in here.episodes}
    if changes:
        assert reasons & {"trajectory_tokens", "turn_tokens"}
    elif mode == "sampled":
        assert len(reasons) > 1


def test_adapters_differ(server: ReferenceServer) -> None:
    played = recipe(size=2)
    answers = [remote(server, played, model, "sampled").episodes for model in ("warm-start", "warm-start:noise")]
    assert answers[0] != answers[1]


def test_trouble_on_the_way_changes_nothing(server: ReferenceServer) -> None:
    calm = remote(server, recipe(size=2), "warm-start", "sampled")
    trouble = {3: 503, 4: 429, 9: 500, 10: 502}
    server.asked = []
    server.hook = lambda number, _: openai_server.error(trouble[number], "wait") if number in trouble else None
    assert remote(server, recipe(size=2), "warm-start", "sampled").record() == calm.record()
    assert len(server.asked) > 10


def test_a_lost_server_is_infrastructure(server: ReferenceServer) -> None:
    """What ended before stays; what did not is the engine's fault, not the agent's."""
    whole = local(server, recipe(), "warm-start", "greedy").episodes
    first = min(e["turns"] for e in whole if e["success"])
    # By the length of a conversation: which of them is asked about at which moment is up to the threads.
    server.hook = lambda _, body: openai_server.error(503, "gone") if len(body["messages"]) > 2 * first else None
    left = remote(server, recipe(), "warm-start", patience_s=0.3).episodes
    reasons = {e["stop_reason"] for e in left}
    assert reasons == {"success", "engine_lost"}
    for ours, theirs in zip(left, whole, strict=True):
        if theirs["turns"] <= first:
            assert ours == theirs
        else:
            assert (ours["stop_reason"], ours["success"]) == ("engine_lost", False) and ours["turns"] >= first


@pytest.mark.parametrize(("model", "says"), [("warm-start:absent", "no model warm-start:absent"), ("other", "other")])
def test_a_refusal_ends_it_all(server: ReferenceServer, model: str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        remote(server, recipe(), model)
    assert len(server.asked) <= 8


def test_a_context_that_is_too_short_is_a_token_stop(server: ReferenceServer) -> None:
    def hook(number: int, body: dict[str, Any]) -> Any:
        too_long = len(body["messages"]) > 5
        return openai_server.error(400, "too long", "context_length_exceeded") if too_long else None

    server.hook = hook
    result = remote(server, recipe(), "warm-start")
    assert {e["stop_reason"] for e in result.episodes} == {"trajectory_tokens"}
    assert {e["turns"] for e in result.episodes} == {3}
