"""Recipes: the round trip, what may change on resume, and the promises of the package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from clew.recipe import (
    Recipe,
    differences,
    load_recipe,
    parse_recipe,
    recipe_reference_markdown,
    shipped_recipes,
)
from clew.recipe.keys import KEYS, nearest

LEAVES = [key for key, entry in KEYS.items() if entry.field is not None]

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
count = st.integers(1, 2**63 - 1)
number = st.floats(1e-37, 1e38, allow_nan=False)  # what single precision holds
fraction = st.floats(0, 1)
keywords = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
)
names = st.lists(text, min_size=1, unique=True, max_size=3).map(tuple)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A table with any subset of these keys."""
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any valid recipe; keys that depend on one another are drawn together."""
    lora = draw(some(rank=count, alpha=number, target=st.just("all-linear") | names, vision=st.booleans()))
    min_path, extra, spare = draw(st.tuples(st.integers(1, 24), st.integers(0, 9), st.integers(1, 9)))
    environment = {
        "size": draw(st.integers(5, 50) | st.tuples(st.integers(5, 50), st.integers(5, 50)).map(list)),
        "goal": draw(st.sampled_from(["reach", "stop"])),
        "min_path": min_path,
        "max_path": min_path + extra,
        "max_turns": min_path + extra + spare,
        **draw(some(braid=fraction, palette=text)),
        "gymnasium": draw(some(kwargs=st.dictionaries(text, keywords, max_size=3), prompt=text, actions=names)),
    }
    minibatches = draw(st.integers(1, 8))
    max_tokens = draw(st.integers(2, 2**40))
    return Recipe.model_validate(
        {
            "name": draw(text),
            "model": {"path": draw(text.filter(lambda t: not t.startswith("package:"))), "lora": lora},
            "environment": environment,
            "rollout": {
                "max_new_tokens": draw(st.integers(1, max_tokens - 1)),
                "max_tokens": max_tokens,
                **draw(some(temperature=number, deadline_s=number)),
            },
            "algorithm": draw(some(epsilon=number, clip_low=fraction, tis_cap=number, kl_coef=st.just(0))),
            "training": {
                "steps": draw(count),
                "prompts_per_step": minibatches * draw(st.integers(1, 9)),
                "minibatches": minibatches,
                "learning_rate": draw(number),
                "tokens_per_microbatch": max_tokens,
                **draw(some(seed=st.integers(0, 2**63 - 1), weight_decay=st.just(-0.0))),
            },
            "evaluation": draw(some(suites=names, before_training=st.booleans())),
            "runtime": draw(some(shared_dir=text, threads=st.integers(0, 64))),
            "cost": draw(some(currency=text, device_hour_price=st.integers(0, 9))),
        }
    )


@settings(max_examples=60, deadline=None)
@given(recipes())
def test_round_trip_is_exact(recipe: Recipe) -> None:
    again = parse_recipe(recipe.to_toml(), source="x.toml", name="not used: the text holds the name")
    assert again == recipe
    assert again.to_toml() == recipe.to_toml()
    assert differences(recipe, again) == []
    assert hash(again) == hash(recipe)


OPTIONAL = [
    "algorithm.tis_cap=2.0",
    "runtime.shared_dir=/mnt/x",
    "runtime.address=auto",
    "model.subfolder=a",
    "model.revision=main",
    "environment.gymnasium.actions=['a', 'b']",
    "environment.gymnasium.prompt=Play.",
    "runtime.visgym_path=/mnt/v",
    "cluster.name=maze",
    "cluster.image=host.example/clew:1",
    "cluster.serve_image=host.example/serve:1",
    "cluster.head_instance=ml.r5d.16xlarge",
    "cluster.worker_instance=ml.g7e.12xlarge",
    "cluster.file_system=fs-01234567",
    "cluster.mount_name=fsx",
    "cluster.subnet=subnet-01234567",
    "cluster.security_group=sg-01234567",
    "cluster.region=us-west-2",
    "cluster.queue=research",
    "cluster.adapters=s3://models/maze",
]


def test_resolved_recipe_holds_every_value_in_force(tmp_path: Path) -> None:
    recipe = load_recipe("laptop", OPTIONAL)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    tables = tomllib.loads((tmp_path / "recipe.toml").read_text())
    for key in LEAVES:
        value: Any = tables
        for part in key.split("."):
            value = value[part]
    again = load_recipe(str(tmp_path / "recipe.toml"), [])
    assert again == recipe
    assert again.name == "laptop"


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_are_named(name: str) -> None:
    assert load_recipe(name, []).name == name


def test_a_file_is_named_by_its_stem_and_may_name_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    body = load_recipe("laptop", []).to_toml().partition("\n")[2]
    path.write_text(body)
    assert load_recipe(str(path), []).name == "mine"
    path.write_text('name = "other"\n' + body)
    assert load_recipe(str(path), []).name == "other"
    path.write_bytes(b"\xef\xbb\xbf" + body.replace("\n", "\r\n").encode())  # as a Windows editor saves it
    assert load_recipe(str(path), []).name == "mine"


def test_recipes_are_frozen() -> None:
    recipe = load_recipe("laptop", [])
    with pytest.raises(ValidationError):
        recipe.training.steps = 3


@pytest.mark.parametrize(("size", "expected"), [("5", (5, 5)), ("[4, 6]", (4, 6)), ("[7,5]", (7, 5))])
def test_size_is_normalised(size: str, expected: tuple[int, int]) -> None:
    assert load_recipe("laptop", [f"environment.size={size}"]).environment.size == expected


def test_every_key_and_table_is_documented() -> None:
    for key, (table, field) in KEYS.items():
        documented = table.__doc__ if field is None else field.description
        assert documented and documented.rstrip().endswith("."), key


def test_reference_page_is_current() -> None:
    page = Path(__file__).parents[1] / "docs" / "recipe.md"
    assert page.read_text("utf-8") == recipe_reference_markdown()


def test_importing_recipe_loads_no_torch() -> None:
    code = "import sys, clew.recipe as r; r.load_recipe('laptop', []); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- resuming


@pytest.mark.parametrize(
    "overrides",
    [
        ["runtime.threads=3", 'runtime.kind="ray"', "runtime.nodes=3", "runtime.shared_dir=/mnt/x"],
        ["tracking.tensorboard=false"],
        ["cluster.image=host.example/clew:2", "cluster.queue=research"],
        ["checkpoint.keep=9"],
        ["training.steps=1000"],
        ["name=renamed"],
    ],
)
def test_what_may_change_on_resume(overrides: list[str]) -> None:
    assert differences(load_recipe("laptop", []), load_recipe("laptop", overrides)) == []


def test_what_may_not_change_on_resume_is_named() -> None:
    old = load_recipe("laptop", ["training.steps=100", "training.seed=0"])
    changed = ["training.steps=99", "training.seed=1", "model.lora.rank=8", "algorithm.tis_cap=2"]
    new = load_recipe("laptop", [*changed, "runtime.threads=1", "checkpoint.interval=21"])
    lines = differences(old, new)
    assert lines == [
        "model.lora.rank: 16 -> 8",
        "algorithm.tis_cap: left out -> 2.0",
        "training.steps: 100 -> 99 (it may grow, not shrink)",
        "training.seed: 0 -> 1",
        f"checkpoint.interval: {old.checkpoint.interval} -> 21",
    ]


# ---- the nearest key


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("training.learning_rat", "training.learning_rate"),
        ("training.lr", "training.learning_rate"),
        ("training.group_size", "algorithm.group_size"),
        ("group_size", "algorithm.group_size"),
        ("model.rank", "model.lora.rank"),
        ("model.lora.ranks", "model.lora.rank"),
        ("trainning", "training"),
        ("enviroment.max_turns", "environment.max_turns"),
        ("rollout.max_turn", "environment.max_turns"),
        ("runtime.workers", "runtime.workers_per_node"),
    ],
)
def test_nearest_key(unknown: str, meant: str) -> None:
    assert nearest(unknown) == meant


@given(st.sampled_from(LEAVES), st.integers(0, 40), st.sampled_from("abcxyz_"))
def test_one_wrong_letter_is_found(key: str, position: int, letter: str) -> None:
    table, dot, leaf = key.rpartition(".")
    if len(leaf) < 4:
        return
    at = position % len(leaf)
    typo = f"{table}{dot}{leaf[:at]}{letter}{leaf[at + 1 :]}"
    if typo not in KEYS:
        assert nearest(typo) == key
