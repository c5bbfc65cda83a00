"""The computing thread outlives whatever is asked of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tiny

from clew.rollout.continuous import Answer, ContinuousEngine
from clew.rollout.engine import Sampling
from clew.serving.computing import Computing

PROMPT = "<|im_start|>user\nup<|im_end|>\n<|im_start|>assistant\n"  # with the seed below, its answer is long


class Asked:
    """An answer to a few tokens of text, and its end as an event."""

    def __init__(self, engine: ContinuousEngine, computing: Computing, max_new_tokens: int = 4) -> None:
        self.over = threading.Event()
        ids = engine.vlm.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
        self.answer = Answer(ids, [], [], Sampling(1.0, max_new_tokens), 1, self._on_token)
        computing.ask(engine, self.answer)

    def _on_token(self, answer: Answer) -> None:
        if not answer.living:
            self.over.set()


@pytest.fixture(scope="module")
def computing() -> Computing:
    return Computing()


@pytest.fixture
def engine() -> ContinuousEngine:
    vlm = tiny.shared_tiny()
    return ContinuousEngine(vlm, tiny.feature_cache(vlm))


def test_more_answers_than_rows(computing: Computing, engine: ContinuousEngine) -> None:
    engine.rows = 2
    asked = [Asked(engine, computing, 3 + i % 3) for i in range(12)]
    assert all(one.over.wait(60) for one in asked)
    assert all(one.answer.ids == asked[i % 3].answer.ids for i, one in enumerate(asked))


def test_an_engine_that_fails_loses_its_answers_and_no_others(
    computing: Computing, engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = tiny.shared_tiny()
    failing = ContinuousEngine(vlm, tiny.feature_cache(vlm))

    def fail(ids: object, advance: np.ndarray) -> None:
        raise MemoryError

    monkeypatch.setattr(failing, "_decode", fail)
    lost = [Asked(failing, computing, 50) for _ in range(3)]
    served = Asked(engine, computing)
    assert all(one.over.wait(60) for one in [*lost, served])
    assert {one.answer.failed for one in lost} == {"MemoryError"} and not served.answer.failed
    monkeypatch.undo()
    again = Asked(failing, computing)
    assert again.over.wait(60) and again.answer.ids == served.answer.ids


def test_work_goes_on_between_rounds(computing: Computing, engine: ContinuousEngine) -> None:
    """A piece at a time beside answers, alone, given up, and failing."""
    seen: list[int] = []

    def pieces(n: int, fails: bool = False) -> Iterator[None]:
        for i in range(n):
            seen.append(i)
            yield
        if fails:
            raise ValueError("no")

    asked = Asked(engine, computing, 30)
    assert computing.work(pieces(5)).result(60) is None
    with pytest.raises(ValueError, match="no"):
        computing.work(pieces(2, fails=True)).result(60)
    assert seen == [0, 1, 2, 3, 4, 0, 1]
    held, go = threading.Event(), threading.Event()

    def waits() -> Iterator[None]:
        held.set()
        go.wait(60)
        yield

    running = computing.work(waits())
    held.wait(60)
    given_up, after = computing.work(pieces(3)), computing.work(pieces(1))
    assert not running.cancel() and given_up.cancel(), "what has begun is finished"
    go.set()
    running.result(60), after.result(60)
    assert seen == [0, 1, 2, 3, 4, 0, 1, 0]
    assert asked.over.wait(60) and computing.alive
