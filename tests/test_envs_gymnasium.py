"""Gymnasium's environments as image tasks, held to Gymnasium itself, driven directly."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import tiny
from gymnasium.envs.registration import register

from clew.envs import ImageEnv, check_image_env, make_env
from clew.envs.gymnasium_env import FEEDBACK, GymnasiumEnv
from clew.envs.navigators import Choices, Walk, missing_reference
from clew.envs.suites import belongs_to_imitation, make_suite, training_tasks
from clew.errors import UserError
from clew.evaluation.evaluate import reference
from clew.evaluation.suites import RecipeSuites, environment_settings
from clew.recipe import differences, load_recipe, parse_recipe
from clew.training.demonstrations import Demonstrator
from clew.training.sft import tokenizer_corpus

EXAMPLES = Path(__file__).parents[1] / "examples"
MOVES = ("left", "down", "right", "up")
LAKE: dict[str, Any] = {"kwargs": {"is_slippery": True}, "actions": MOVES, "max_turns": 12}


class Scripted(gymnasium.Env[int, int]):
    """Actions 0 wait (reward 0.25), 1 win (1, ends), 2 lose (-1, ends), 3 end without a word (0, ends)."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None, first: int = 0, frame: Any = None, colours: int = 9) -> None:
        self.action_space = gymnasium.spaces.Discrete(4, start=first)
        self.observation_space = gymnasium.spaces.Discrete(1)
        self.render_mode, self.first, self.frame, self.colours = render_mode, first, frame, colours

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.colour = (seed or 0) % self.colours
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        kind = action - self.first
        facts: list[dict[str, Any]] = [{}, {"won": np.True_}, {"won": False, "why": "lost"}, {}]
        return 0, (0.25, 1, -1, 0)[kind], kind > 0, False, facts[kind]

    def render(self) -> Any:
        return np.full((8, 8, 3), self.colour, np.uint8) if self.frame is None else self.frame


class Blind(Scripted):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}  # type: ignore[misc]


register("ClewTest/Scripted-v0", entry_point=Scripted)
register("ClewTest/Blind-v0", entry_point=Blind)


def scripted(**settings: Any) -> ImageEnv:
    return make_env("gym:ClewTest/Scripted-v0", **{"actions": ("wait", "win", "lose", "mute"), **settings})


def play(env: ImageEnv, *names: str) -> tuple[float, bool, bool, dict[str, Any]]:
    """Plays these actions; the last outcome without its observation."""
    env.reset(0)
    outcome = [env.step(f"I think <action>{name}</action>.")[1:] for name in names]
    return outcome[-1]


@pytest.fixture
def lakes(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return "gym:frozen_lake:Lakes-v0"


# --- the contract, and Gymnasium itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [("gym:FrozenLake-v1", LAKE), ("gym:Taxi-v4", {"success_threshold": 20.0, "max_turns": 6})],
)
def test_the_checker_finds_nothing(env_id: str, settings: dict[str, Any]) -> None:
    assert check_image_env(partial(make_env, env_id, **settings)) == []


def test_the_checker_finds_nothing_in_the_example(lakes: str) -> None:
    assert check_image_env(partial(make_env, lakes, actions=MOVES, max_turns=10)) == []


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("FrozenLake-v1", {"is_slippery": True}), ("Taxi-v4", {}), ("CliffWalking-v1", {}), ("Acrobot-v1", {})],
)
def test_it_is_the_environment_that_gymnasium_makes(name: str, kwargs: dict[str, Any]) -> None:
    """Frames, rewards and endings are those of the same actions played without Clew; chance included."""
    env = make_env(f"gym:{name}", kwargs=kwargs, max_turns=12)
    other = gymnasium.make(name, render_mode="rgb_array", **kwargs)
    rng = random.Random(0)
    for seed in (0, 7, 3_000_000_000):
        observation, _ = env.reset(seed)
        other.reset(seed=seed)
        for turn in range(12):
            assert observation.image.dtype == np.uint8 and observation.image.flags.c_contiguous
            assert np.array_equal(observation.image, other.render())
            action = rng.randrange(len(env.action_names))
            observation, reward, terminated, truncated, info = env.step(f"<action>{action}</action>")
            _, *expected, _ = other.step(action)
            assert [reward, terminated] == expected[:2] and truncated == (turn == 11 and not terminated)
            assert type(reward) is float and info["action"] == str(action)
            if terminated:
                break


def test_frames_are_copies() -> None:
    env = make_env("gym:FrozenLake-v1", **LAKE)
    first = env.reset(0)[0].image
    before = first.copy()
    for name in ("right", "down"):
        env.step(f"<action>{name}</action>")
    assert np.array_equal(first, before)


def test_a_seed_decides_all_chance() -> None:
    def walk(seed: int) -> list[tuple[str, bool]]:
        env = make_env("gym:FrozenLake-v1", **LAKE)
        env.reset(seed)
        found = []
        for name in MOVES * 3:
            observation, _, terminated, truncated, _ = env.step(f"<action>{name}</action>")
            found.append((observation.image.tobytes(), terminated))
            if terminated or truncated:
                break
        return found

    walks = [walk(seed) for seed in range(6)]
    assert walks == [walk(seed) for seed in range(6)]
    assert len({str(w) for w in walks}) > 1, "slippery ice"


# --- answers, turns, endings -----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "win", "<action>WIN</action>", "<action>win</action><action>win</action>"])
def test_what_cannot_be_read_takes_a_turn_and_moves_nothing(answer: str) -> None:
    env = scripted(max_turns=2)
    env.reset(0)
    observation, reward, terminated, truncated, info = env.step(answer)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"success": False, "feedback": "unparsable", "action": None} and observation.text
    assert env.step(answer)[3], "the cap"
    with pytest.raises(RuntimeError, match="reset"):
        env.step(answer)


def test_no_step_before_the_first_reset() -> None:
    with pytest.raises(RuntimeError, match="reset"):
        scripted().step("<action>win</action>")


def test_the_end_is_the_end() -> None:
    env = scripted()
    assert play(env, "wait", "lose")[1:3] == (True, False)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("<action>win</action>")


def test_the_environments_own_time_limit_counts() -> None:
    env = scripted(kwargs={"max_episode_steps": 2})
    assert play(env, "wait")[1:3] == (False, False)
    assert play(env, "wait", "wait")[1:3] == (False, True)


def test_actions_are_numbered_from_where_the_environment_begins() -> None:
    env = make_env("gym:ClewTest/Scripted-v0", kwargs={"first": 5})
    assert env.action_names == ("5", "6", "7", "8")
    assert play(env, "6")[0] == 1.0
    assert play(scripted(kwargs={"first": 5}), "win")[0] == 1.0


def test_default_prompt_names_environment_and_actions() -> None:
    assert "Frozen Lake" in make_env("gym:FrozenLake-v1", **LAKE).prompt
    assert "<action>left|down|right|up</action>" in make_env("gym:FrozenLake-v1", **LAKE).prompt
    assert make_env("gym:FrozenLake-v1", prompt="Walk <|im_end|>").prompt == "Walk < |im_end| >"


# --- what wins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "actions", "won"),
    [
        ({}, ["wait", "win"], True),
        ({}, ["lose"], False),
        ({"success_threshold": 1.5}, ["win"], False),
        ({"success_threshold": 0.2, "max_turns": 1}, ["wait"], False),  # the environment did not end it
        ({"success_threshold": -1.0}, ["lose"], True),
        ({"success": "return", "success_threshold": 1.5}, ["wait", "wait", "win"], True),
        ({"success": "return", "success_threshold": 1.5}, ["wait", "win"], False),
        ({"success": "return", "success_threshold": 0.5, "max_turns": 2}, ["wait", "wait"], True),  # it lasted
        ({"success": "return", "success_threshold": 0.5, "max_turns": 9}, ["wait", "wait"], False),  # not over yet
        ({"success": "info", "success_key": "won"}, ["win"], True),
        ({"success": "info", "success_key": "won"}, ["lose"], False),
        ({"success": "info", "success_key": "won", "max_turns": 1}, ["wait"], False),
    ],
)
def test_success_rules(settings: dict[str, Any], actions: list[str], won: bool) -> None:
    info = play(scripted(**settings), *actions)[3]
    assert info["success"] is won
    assert (info["feedback"] == "reached") == won


def test_a_return_begins_anew_with_each_episode() -> None:
    env = scripted(success="return", success_threshold=1.2)
    assert play(env, "wait", "win")[3]["success"]
    assert not play(env, "win")[3]["success"]


# --- bad input: one line, with the key -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("NoSuchLake-v1", {}, ["environment.id", "NoSuchLake", "gym:my_module:MyEnv-v0"]),
        ("FrozenLake-v99", {}, ["environment.id", "FrozenLake-v99"]),
        ("no.such.module:Env-v0", {}, ["environment.id", "no.such.module", "PYTHONPATH"]),
        ("Pendulum-v1", {}, ["environment.id", "gym:Pendulum-v1", "Box", "Discrete"]),
        ("ClewTest/Blind-v0", {}, ["environment.id", "rgb_array", "ansi"]),
        ("ClewTest/Scripted-v0", {"kwargs": {"frame": "text"}}, ["environment.id", "RGB", "str"]),
        ("ClewTest/Scripted-v0", {"kwargs": {"frame": np.zeros((4, 4), np.uint8)}}, ["environment.id", "uint8 [4, 4]"]),
        ("ClewTest/Scripted-v0", {"kwargs": {"depth": 3}}, ["environment.gymnasium.kwargs", "depth"]),
        ("FrozenLake-v1", {"kwargs": {"map_name": "5x5"}}, ["environment.gymnasium.kwargs", "5x5", "KeyError"]),
        ("FrozenLake-v1", {"kwargs": {"render_mode": "human"}}, ["environment.gymnasium.kwargs", "render_mode"]),
        ("FrozenLake-v1", {"actions": ("a", "b")}, ["environment.gymnasium.actions", "4 actions, 2 names"]),
        ("FrozenLake-v1", {"actions": ("a", "b", "c|d", "e")}, ["environment.gymnasium.actions", "'c|d'"]),
        ("FrozenLake-v1", {"actions": ("a", "b", "<c", "e")}, ["environment.gymnasium.actions", "'<c'"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode='rgb_array'")
def test_bad_settings(name: str, settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make_env(f"gym:{name}", **settings)
    message = str(caught.value)
    assert message.isprintable(), "one line"
    for part in parts:
        assert part in message


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(UserError, match=r"gym:FrozenLake-v1 needs a package that is missing .*pygame"):
        make_env("gym:FrozenLake-v1")


def test_visgyms_fork_in_the_place_of_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium, "VLMEnvMixin", object, raising=False)
    with pytest.raises(UserError, match=r"VisGym's fork.*pip install"):
        make_env("gym:FrozenLake-v1")


def test_an_unknown_success_key_is_no_failed_episode() -> None:
    with pytest.raises(UserError, match=r"success_key.*'is_success' \(it has why, won\)"):
        play(scripted(success="info"), "lose")
    with pytest.raises(UserError, match=r"it has nothing"):
        play(scripted(success="info", success_key="won"), "mute")


def test_an_oracle_that_names_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    env = scripted()
    with pytest.raises(NotImplementedError):
        env.oracle_action()
    monkeypatch.setattr(Scripted, "oracle_action", lambda self: 4, raising=False)
    with pytest.raises(UserError, match="oracle_action"):
        env.oracle_action()
    monkeypatch.setattr(Scripted, "oracle_action", lambda self: 1, raising=False)
    assert env.oracle_action() == "<action>win</action>"


# --- suites and recipes ----------------------------------------------------------------------------------


def test_one_frame_for_all_seeds_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"first frame is the same for every seed.*docs/gymnasium.md"):
        make_suite("heldout", "gym:ClewTest/Scripted-v0", {"kwargs": {"colours": 1}}, 2)
    with pytest.raises(UserError, match=r"evaluation.size: .*can't have 4 different tasks .*found 3.*ask for fewer"):
        make_suite("heldout", "gym:ClewTest/Scripted-v0", {"kwargs": {"colours": 3}}, 4)


def test_references_know_what_it_can_do(lakes: str) -> None:
    fixed, lake = make_env("gym:FrozenLake-v1", **LAKE), make_env(lakes)
    lake.reset(0)
    assert isinstance(fixed, GymnasiumEnv) and isinstance(fixed, Choices) and not isinstance(fixed, Walk)
    assert missing_reference(fixed, "random") is None
    assert "solution" in str(missing_reference(fixed, "oracle")) and missing_reference(lake, "oracle") is None


def test_the_example_is_held_out_by_content_and_solved_by_its_oracle(lakes: str) -> None:
    recipe = load_recipe(str(EXAMPLES / "frozen_lake.toml"), ["evaluation.size=8", "evaluation.confirm_size=8"])
    assert recipe.environment.id == lakes
    suites = RecipeSuites(recipe)
    held_out = suites.held_out()
    assert len(held_out) == 16
    stream = training_tasks(make_env(lakes, **suites.settings), held_out, seed=0)
    drawn = [next(stream)[1].content_hash for _ in range(12)]
    assert not held_out & set(drawn) and not any(map(belongs_to_imitation, drawn))
    oracle = reference(suites.suite("heldout"), "oracle", 0)
    assert oracle.solved == 8
    assert all(e["turns"] == e["path_length"] == 6 for e in oracle.episodes)
    assert reference(suites.suite("heldout"), "random", 0).solve_rate < 0.1


def test_the_example_can_be_demonstrated(lakes: str) -> None:
    recipe = load_recipe(str(EXAMPLES / "frozen_lake.toml"))
    env = make_env(lakes, **environment_settings(recipe))
    said = " ".join(tokenizer_corpus(env))
    for text in (*MOVES, FEEDBACK["played"], FEEDBACK["unparsable"], env.prompt):
        assert text in said
    demonstrator = Demonstrator(tiny.tiny(), env, frozenset())
    rng = random.Random(0)
    assert len(demonstrator.window(rng, 8, 2).frames) == 6, "a shortest way"
    assert 6 <= len(demonstrator.episode(rng, 0.4).frames) <= 10


RECIPE = """\
[model]
path = "folder"
[environment]
id = "gym:FrozenLake-v1"
[environment.gymnasium.kwargs]
is_slippery = false
desc = ["SFFG", "FFFH"]
[training]
steps = 10
prompts_per_step = 4
learning_rate = 1e-3
"""


def test_a_recipe_says_how_it_is_made() -> None:
    override = "environment.gymnasium.kwargs.success_rate=0.5"
    recipe = parse_recipe(RECIPE, source="my.toml", overrides=[override])
    kwargs = {"is_slippery": False, "desc": ["SFFG", "FFFH"], "success_rate": 0.5}
    assert environment_settings(recipe)["kwargs"] == kwargs
    env = make_env(recipe.environment.id, **environment_settings(recipe))
    assert env.reset(0)[0].image.shape == (128, 256, 3)
    assert [play(env, "2", "2", "2")[i] for i in (0, 1)] == [1.0, True]
    again = parse_recipe(recipe.to_toml(), source="again.toml")
    assert again == recipe and hash(again) == hash(recipe) and differences(again, recipe) == []
    (line,) = differences(parse_recipe(RECIPE, source="my.toml"), recipe)
    assert line.startswith("environment.gymnasium.kwargs: ") and "0.5" in line


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("environment.goal=stop", ["environment.goal", "environment.gymnasium.success"]),
        ("environment.gymnasium.kwargs=3", ["environment.gymnasium.kwargs must be a table", "got 3"]),
        (
            "environment.gymnasium.kwargs.day=2024-01-01",
            ["environment.gymnasium.kwargs must be a table of strings", "2024"],
        ),
        ("environment.gymnasium.kwargs.p=inf", ["environment.gymnasium.kwargs must be a table of", "finite"]),
        ("environment.gymnasium.kwarg={}", ["unknown key", "environment.gymnasium.kwargs"]),
        ('environment.gymnasium.actions=["a", "a"]', ["environment.gymnasium.actions must be a list"]),
        ("environment.gymnasium.success=luck", ['"reward", "return" or "info"']),
        ("environment.gymnasium.success_threshold=nan", ["a finite number"]),
    ],
)
def test_bad_recipes(override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(RECIPE, source="my.toml", overrides=[override])
    for part in parts:
        assert part in str(caught.value)
