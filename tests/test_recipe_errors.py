"""Bad recipes: one printable line each, naming the key or file, where it came from, and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.errors import UserError
from clew.recipe import load_recipe, parse_recipe

MINIMAL = """\
[model]
path = "folder"
[environment]
size = [4, 6]
[training]
steps = 10
prompts_per_step = 4
learning_rate = 1e-3
"""


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_recipe(text, source="my.toml", overrides=overrides)
    message = str(caught.value)
    assert message.isprintable(), "one line"
    return message


def test_minimal_recipe_is_enough() -> None:
    recipe = parse_recipe(MINIMAL, source="my.toml")
    assert recipe.environment.max_turns == 15
    assert recipe.algorithm.group_size == 8


# ---- unknown and missing keys


def test_unknown_key_in_the_file() -> None:
    message = error_of(MINIMAL + "warmup_step = 3\n")
    assert message == "unknown key training.warmup_step: the nearest known is training.warmup_steps (in my.toml)"


def test_unknown_table_in_the_file() -> None:
    message = error_of(MINIMAL + "[trainings]\nseed = 3\n")
    assert message == "unknown table trainings: the nearest known is training (in my.toml)"


def test_unknown_key_in_an_override() -> None:
    message = error_of(MINIMAL, "training.lr=1e-3")
    assert "unknown key training.lr" in message
    assert "nearest known is training.learning_rate" in message
    assert '(from the override "training.lr=1e-3")' in message


def test_a_misspelt_required_key_is_reported_as_misspelt() -> None:
    message = error_of(MINIMAL.replace("steps = 10", "step = 10", 1))
    assert message.startswith("unknown key training.step: the nearest known is training.steps")


@pytest.mark.parametrize("key", ["path", "steps", "prompts_per_step", "learning_rate"])
def test_missing_key(key: str) -> None:
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(f"{key} ")]
    message = error_of("\n".join(lines))
    assert f".{key} is missing: give " in message and message.endswith("(in my.toml)")


def test_missing_table_names_its_key() -> None:
    assert error_of("").startswith("model.path is missing: give a folder")


def test_value_in_place_of_a_table() -> None:
    assert error_of("model = 3") == "model must be a table, [model], got 3 (in my.toml)"
    assert error_of('model.path = "x"\nmodel.lora = [1]').startswith("model.lora must be a table, [model.lora]")
    assert error_of(MINIMAL.replace("[training]", "[[training]]")).startswith("training must be a table")


# ---- values


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("training.steps=0", "a whole number >= 1, got 0"),
        ("training.steps=-3", "a whole number >= 1, got -3"),
        ("training.steps=2.0", "a whole number >= 1, got 2.0"),
        ("training.steps=true", "a whole number >= 1, got true"),
        ('training.steps="3"', 'a whole number >= 1, got "3"'),
        ("training.steps=0x" + "f" * 17, "a whole number >= 1, got "),
        ("training.steps=0x" + "f" * 9999, "a whole number >= 1, got a value that cannot be printed"),
        ("training.warmup_steps=-1", "a whole number >= 0, got -1"),
        ("training.seed=-1", "a whole number >= 0, got -1"),
        ("algorithm.group_size=1", "a whole number >= 2, got 1"),
        ("training.learning_rate=nan", "a finite number > 0, got NaN"),
        ("training.learning_rate=inf", "a finite number > 0, got Infinity"),
        ("training.learning_rate=0", "a finite number > 0, got 0"),
        ("training.learning_rate=.5", 'a finite number > 0, got ".5"'),
        ("training.learning_rate=true", "a finite number > 0, got true"),
        ("algorithm.tis_cap=-0.1", "a finite number >= 0, got -0.1"),
        ("algorithm.kl_coef=-inf", "a finite number >= 0, got -Infinity"),
        ("algorithm.clip_low=1.5", "a finite number >= 0 and <= 1, got 1.5"),
        ("model.lora.dropout=1.0", "a finite number >= 0 and < 1, got 1.0"),
        ("environment.braid=1.01", "a finite number >= 0 and <= 1, got 1.01"),
        ("model.lora.vision=1", "true or false, got 1"),
        ("model.lora.vision=True", 'true or false, got "True"'),
        ("model.dtype=float16", '"float32" or "bfloat16", got "float16"'),
        ("algorithm.advantage=gae", '"grpo", "grpo_no_std" or "gigpo", got "gae"'),
        ("model.path=3", 'a folder, or "package:warm-start", got 3'),
        ("model.path=package:cold-start", 'a folder, or "package:warm-start", got "package:cold-start"'),
        ("model.path=''", 'a folder, or "package:warm-start", got ""'),
        ("cost.currency=2024-01-01", 'a string that is not empty, got "2024-01-01"'),
        (
            "model.lora.target=[]",
            '"all-linear" or a list of one or more different module name suffixes, got []',
        ),
        ('model.lora.target="q_proj"', '"all-linear" or a list'),
        ('evaluation.suites=["a", "a"]', 'a list of one or more different names, got ["a", "a"]'),
        ('evaluation.suites="heldout"', 'a list of one or more different names, got "heldout"'),
        ('evaluation.suites=["a", 3]', "a list of one or more different names"),
        ("evaluation.suites=[[1], [1]]", "a list of one or more different names"),
        ("environment.size=[4]", "[rows, cols] or one whole number, each side >= 2, got [4]"),
        ("environment.size=[4, 6", '[rows, cols] or one whole number, each side >= 2, got "[4, 6"'),
        ("environment.size=1", "[rows, cols] or one whole number, each side >= 2, got 1"),
        ("environment.size=true", "[rows, cols] or one whole number"),
        ("environment.size=[4, true]", "[rows, cols] or one whole number"),
        ("environment.size=[4.0, 6]", "[rows, cols] or one whole number"),
    ],
)
def test_bad_value_names_key_value_and_what_is_allowed(override: str, allowed: str) -> None:
    key = override.partition("=")[0]
    message = error_of(MINIMAL, override)
    assert f"{key} must be {allowed}" in message
    assert "(from the override " in message


def test_bad_value_in_the_file() -> None:
    message = error_of(MINIMAL + "seed = -1\n")
    assert message == "training.seed must be a whole number >= 0, got -1 (in my.toml)"


def test_an_override_mends_a_bad_value() -> None:
    assert parse_recipe(MINIMAL + "seed = -1\n", source="x", overrides=["training.seed=1"]).training.seed == 1


def test_whole_numbers_are_numbers() -> None:
    recipe = parse_recipe(MINIMAL, source="x", overrides=["rollout.temperature=2"])
    assert isinstance(recipe.rollout.temperature, float)


# ---- overrides


def test_overrides_take_toml_values_and_bare_strings() -> None:
    overrides = [
        "model.path=/data/a b=c#d",
        'cost.currency="EUR"',
        "environment.size = 5",
        "training.steps=1_000",
        "training.learning_rate=3e-5",
        "model.lora.target=['q_proj', \"v_proj\"]",
        "model.lora.vision=true",
        "training.seed=1",
        "training.seed=2",
    ]
    recipe = parse_recipe(MINIMAL, source="x", overrides=overrides)
    assert recipe.model.path == "/data/a b=c#d"
    assert recipe.cost.currency == "EUR"
    assert recipe.environment.size == (5, 5)
    assert (recipe.training.steps, recipe.training.learning_rate) == (1000, 3e-5)
    assert recipe.model.lora.target == ("q_proj", "v_proj")
    assert recipe.model.lora.vision is True
    assert recipe.training.seed == 2


@pytest.mark.parametrize("override", ["training.steps", "=3", "training.steps=", "  =  ", "--run"])
def test_malformed_override(override: str) -> None:
    message = error_of(MINIMAL, override)
    assert f'"{override}"' in message and "key.path=value" in message


def test_override_that_is_no_text() -> None:
    assert error_of(MINIMAL, 'evaluation.suites=["\udcff"]').endswith("is not UTF-8 text")


def test_override_of_a_table() -> None:
    message = error_of(MINIMAL, "model={lora={rank=3}}")
    assert message.startswith("model is a table: set one of its keys, e.g. model.path")


def test_override_cannot_smuggle_in_other_keys() -> None:
    assert "training.steps must be a whole number" in error_of(MINIMAL, "training.steps=3\nother=4")


# ---- files


def test_unknown_recipe_name_lists_the_shipped_ones() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("labtop", [])
    assert 'no recipe "labtop": the nearest shipped one is "laptop" (all: ' in str(caught.value)


def test_missing_file_names_it_and_the_shipped_recipe(tmp_path: Path) -> None:
    path = tmp_path / "laptop.toml"
    with pytest.raises(UserError) as caught:
        load_recipe(str(path), [])
    assert str(path) in str(caught.value) and '"laptop"' in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        load_recipe(str(Path(__file__) / "x.toml"), [])  # a file in place of a folder
    with pytest.raises(UserError, match="no recipe"):
        load_recipe("a\0b", [])


def test_folder_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder: name a TOML file, e\.g\. .*recipe\.toml"):
        load_recipe(str(tmp_path), [])
    path = tmp_path / "latin.toml"
    path.write_bytes('name = "é"'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.toml is not UTF-8 text"):
        load_recipe(str(path), [])
    path.chmod(0)
    if not os.access(path, os.R_OK):  # root reads everything
        with pytest.raises(UserError, match="cannot read the recipe"):
            load_recipe(str(path), [])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model]\npath =\n", "line 2"),
        ("[model]\npath = 'x'\npath = 'y'\n[training]", "line 3"),
        ("[model]\n\npath = [1,", "line 3, the end of the file"),
        ("x = 3 4", "line 1"),
    ],
)
def test_invalid_toml_names_the_line(text: str, line: str) -> None:
    message = error_of(text)
    assert message.startswith("my.toml is not valid TOML: ") and line in message


def test_hostile_toml() -> None:
    assert "nested too deeply" in error_of("a = " + "[" * 5000)
    assert "not valid TOML" in error_of("a = " + "9" * 5000)
    assert "unknown key model.a\\nb" in error_of(MINIMAL.replace("[env", '"a\\nb" = 1\n[env'))
    assert "cannot be printed" in error_of(MINIMAL.replace("steps = 10", f"steps{'.a' * 9000} = 1"))


# ---- values in conflict


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.minibatches=5"], "training.minibatches = 5 does not divide the 32 trajectories"),
        (["training.minibatches=33"], "choose 32 minibatches"),
        (["environment.min_path=9", "environment.max_path=8"], "environment.min_path = 9 is above"),
        (["environment.size=2", "environment.min_path=4"], "the longest path through its cells has 3 moves"),
        (["environment.max_turns=13"], "raise max_turns to at least 14"),
        (["environment.max_turns=14", "environment.goal=stop"], "raise max_turns to at least 15"),
        (["rollout.max_new_tokens=4096"], "rollout.max_new_tokens = 4096 leaves no room"),
        (["training.tokens_per_microbatch=4095"], "cannot hold a trajectory of rollout.max_tokens = 4096"),
        (["runtime.nodes=3"], 'runtime.nodes = 3 needs a cluster, but runtime.kind = "local"'),
        (["runtime.engines=2"], "runtime.engines = 2 needs a cluster"),
        (["runtime.kind=skyrl", "runtime.nodes=3"], "no multiple of the 3 SkyRL workers"),
        (["runtime.kind=skyrl", "training.minibatches=8"], "SkyRL needs whole prompts in a minibatch"),
    ],
)
def test_conflicts_name_the_keys_and_a_remedy(overrides: list[str], expected: str) -> None:
    message = error_of(MINIMAL, *overrides)
    assert expected in message
    assert all(f'"{override}"' in message for override in overrides)


def test_conflict_within_the_file_names_the_file() -> None:
    assert error_of(MINIMAL + "minibatches = 3\n").endswith("(in my.toml)")


@pytest.mark.parametrize(
    "overrides",
    [
        ["environment.max_turns=14"],
        ["environment.max_turns=15", "environment.goal=stop"],
        ["training.minibatches=32"],
        ["runtime.kind=ray", "runtime.nodes=3", "runtime.workers_per_node=2", "runtime.engines=6"],
        # the published layout: 24 prompts, 12 a minibatch, on 6 ranks
        [
            "runtime.kind=skyrl",
            "runtime.nodes=3",
            "runtime.workers_per_node=2",
            "runtime.engines=6",
            "training.prompts_per_step=24",
            "training.minibatches=2",
        ],
        # only native mazes are bound by their path lengths
        ["environment.id=visgym/maze_2d/easy", "environment.max_turns=10"],
    ],
)
def test_what_is_at_the_edge_is_allowed(overrides: list[str]) -> None:
    parse_recipe(MINIMAL, source="x", overrides=overrides)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=3), st.text(max_size=60))
def test_whatever_the_input_only_user_errors_come_out(overrides: list[str], tail: str) -> None:
    for text, settings_ in ((MINIMAL, overrides), (MINIMAL + tail, [])):
        try:
            parse_recipe(text, source="my.toml", overrides=settings_)
        except UserError as error:
            assert str(error).isprintable()
