"""Splitting work over ranks: a partition that every rank finds alike and that is nearly as even as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.training.ranks import ALONE, Ranks, balanced

WEIGHTS = st.lists(st.integers(0, 10_000), max_size=40)


def heaviest(weights: list[int], split: list[list[int]]) -> int:
    return max(sum(weights[i] for i in part) for part in split)


@given(WEIGHTS, st.integers(1, 9))
def test_a_split_is_a_partition_in_order(weights: list[int], parts: int) -> None:
    split = balanced(weights, parts)
    assert len(split) == parts
    assert sorted(itertools.chain(*split)) == list(range(len(weights)))
    assert all(part == sorted(part) for part in split)


@given(WEIGHTS, st.integers(1, 9))
def test_every_rank_finds_the_same_split(weights: list[int], parts: int) -> None:
    """From the weights alone: neither the call before nor the type of the sequence matters."""
    first = balanced(weights, parts)
    balanced([w + 1 for w in weights], parts)
    assert balanced(tuple(weights), parts) == first


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_no_part_is_heavier_than_grahams_bound(weights: list[int], parts: int) -> None:
    """Longest processing time first: at most 4/3 - 1/(3 m) of the best, found here by trying all splits."""
    best = min(
        max(sum(w for w, p in zip(weights, places, strict=True) if p == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(weights))
    )
    assert best <= heaviest(weights, balanced(weights, parts)) <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


@given(WEIGHTS, st.integers(1, 9))
def test_the_heaviest_part_is_at_most_one_item_over_the_lightest(weights: list[int], parts: int) -> None:
    split = balanced(weights, parts)
    lightest = min(sum(weights[i] for i in part) for part in split)
    assert heaviest(weights, split) - lightest <= max(weights, default=0)


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 9))
def test_a_rank_goes_without_only_where_there_are_fewer_items_than_ranks(weights: list[int], parts: int) -> None:
    empty = sum(not part for part in balanced(weights, parts))
    assert empty == max(0, parts - len(weights))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_equal_weights_are_dealt_out(parts: int) -> None:
    sizes = [len(part) for part in balanced([7] * 11, parts)]
    assert max(sizes) - min(sizes) <= 1


def test_alone_nothing_is_exchanged() -> None:
    value = object()
    assert Ranks() == ALONE and (ALONE.rank, ALONE.size) == (0, 1)
    assert ALONE.from_first(value) is value
    assert ALONE.sums([0.1, 2]) == ALONE.highest([0.1, 2]) == [0.1, 2]
