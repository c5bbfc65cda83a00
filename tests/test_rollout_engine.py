"""The engine samples what a naive one would, and its log-probabilities are the scorer's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForImageTextToText

from clew.agent.ledger import Trajectory
from clew.policy.adapter import attach_lora, current_adapter
from clew.policy.model import VisionLanguageModel, collate, load_model, score
from clew.rollout.engine import Completion, LockstepEngine, Sampling, derive_seed, uniforms
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import RowCache, TransformersEngine

SIZES = ((64, 64), (64, 96))


@pytest.fixture(params=[tiny.tiny_folder, tiny.qwen_folder], ids=["tiny", "qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param()


def word_env() -> tiny.WordEnv:
    return tiny.WordEnv(max_turns=4, sizes=SIZES)


def rollout(
    engine: Any,
    vlm: VisionLanguageModel,
    attempts: list[tuple[int, int]],
    temperature: float = 0.9,
    parts: Any = ("t", 1),
) -> list[Trajectory]:
    tasks = [(word_env().task(seed), sample) for seed, sample in attempts]
    player = Player(vlm.template, vlm.patcher)
    return play(engine, player, word_env, tasks, Sampling(temperature, 8), Limits(4000), parts)


ATTEMPTS = [(seed, sample) for seed in range(4) for sample in range(3)]


def make_engine(vlm: VisionLanguageModel) -> TransformersEngine:
    return TransformersEngine(vlm, tiny.feature_cache(vlm))


class NaiveEngine(LockstepEngine):
    """No cache, no batch, no code of the engine: each token by a Hugging Face forward of all before it."""

    version = "naive"

    def __init__(self, vlm: VisionLanguageModel, model: Any) -> None:
        super().__init__()
        self.vlm, self.model = vlm, model

    @torch.no_grad()
    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        return [self._answer(t, sampling, seed) for t, seed in zip(trajectories, seeds, strict=True)]

    def _answer(self, trajectory: Trajectory, sampling: Sampling, seed: int) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        frames = [turn.frame for turn in trajectory.turns]
        for index in range(sampling.max_new_tokens):
            self.model.model.rope_deltas = None
            inputs = tiny.plain_inputs(self.vlm, trajectory.token_ids + ids, frames)
            logits = self.model(**inputs, use_cache=False).logits[0, -1].double()
            logits[self.vlm.forbidden_ids] = -math.inf
            p = torch.softmax(logits / sampling.temperature, -1).numpy()
            u = uniforms(np.array([seed], np.uint64), index)[0]
            token = int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))
            ids.append(token)
            logprobs.append(math.log(p[token]))
            if token == self.vlm.template.end_of_turn_id:
                return Completion(ids, logprobs, True)
        return Completion(ids, logprobs, False)

    def release(self) -> None:
        pass


def test_equals_a_naive_engine(folder: Path) -> None:
    """Ragged answers, rows that end at different turns, two image sizes: same tokens and scores."""
    vlm = load_model(folder)
    stock = AutoModelForImageTextToText.from_pretrained(folder).eval()
    attempts = ATTEMPTS if "tiny" in folder.name else ATTEMPTS[:5]
    ours = rollout(make_engine(vlm), vlm, attempts)
    naive = rollout(NaiveEngine(vlm, stock), vlm, attempts)
    assert len({len(t.turns) for t in ours}) > 1, "the episodes should end at different turns"
    assert len({turn.end - turn.start for t in ours for turn in t.turns}) > 2, "the answers should differ in length"
    assert {s for t in ours for s in (t.stop_reason,)} >= {"turn_cap"} or len(ours) < 6
    for a, b in zip(ours, naive, strict=True):
        assert a.token_ids == b.token_ids
        assert a.sampled == b.sampled
        assert (a.stop_reason, a.success, a.reward) == (b.stop_reason, b.success, b.reward)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=3e-5)


@torch.no_grad()
def test_logprobs_equal_scoring_the_finished_trajectories(folder: Path) -> None:
    vlm = load_model(folder)
    for temperature in (0.7, 1.3):
        trajectories = rollout(make_engine(vlm), vlm, ATTEMPTS, temperature)
        triples = [(t.token_ids, t.sampled, t.grids) for t in trajectories]
        batch = collate(triples, vlm.template.image_token_id, vlm.merge_size)
        frames = [turn.frame for t in trajectories for turn in t.turns]
        scores = score(vlm, batch, tiny.feature_cache(vlm).gather(frames), temperature)
        engine = torch.tensor([lp for t in trajectories for lp, s in zip(t.logprobs, t.sampled, strict=True) if s])
        torch.testing.assert_close(scores.logprobs_N, engine, rtol=0, atol=3e-5)
        assert all(lp == 0.0 for t in trajectories for lp, s in zip(t.logprobs, t.sampled, strict=True) if not s)


def test_greedy_equals_generate(folder: Path) -> None:
    """Each turn of a greedy episode is what ``model.generate`` makes of the whole conversation so far."""
    vlm = load_model(folder)
    stock = AutoModelForImageTextToText.from_pretrained(folder).eval()
    trajectories = rollout(make_engine(vlm), vlm, [(seed, 0) for seed in range(5)], temperature=0.0)
    answers = set()
    for trajectory in trajectories:
        for n, turn in enumerate(trajectory.turns):
            inputs = tiny.plain_inputs(
                vlm, trajectory.token_ids[: turn.start], [t.frame for t in trajectory.turns[: n + 1]]
            )
            stock.model.rope_deltas = None
            out = stock.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=8,
                eos_token_id=vlm.template.end_of_turn_id,
                suppress_tokens=vlm.forbidden_ids.tolist(),
            )
            assert out[0, turn.start :].tolist() == trajectory.token_ids[turn.start : turn.end]
            answers.add(turn.answer)
    assert len(answers) > 1


def test_draws_do_not_depend_on_who_plays_beside() -> None:
    vlm = tiny.shared_tiny()
    engine = make_engine(vlm)
    together = {(t.task.seed, t.sample): t for t in rollout(engine, vlm, ATTEMPTS)}
    for attempts in (ATTEMPTS[::-1], ATTEMPTS[2:5], [ATTEMPTS[7]]):
        engine.release()
        for trajectory in rollout(engine, vlm, attempts):
            other = together[trajectory.task.seed, trajectory.sample]
            assert trajectory.token_ids == other.token_ids
            np.testing.assert_allclose(trajectory.logprobs, other.logprobs, rtol=0, atol=3e-5)
    same_maze = [together[0, sample].token_ids for sample in range(3)]
    assert same_maze[0] != same_maze[1] != same_maze[2] != same_maze[0]
    other_step = {(t.task.seed, t.sample): t for t in rollout(engine, vlm, ATTEMPTS, parts=("t", 2))}
    assert sum(other_step[k].token_ids == together[k].token_ids for k in together) <= 3


def test_same_seeds_same_bits() -> None:
    vlm = tiny.shared_tiny()
    runs = [rollout(make_engine(vlm), vlm, ATTEMPTS) for _ in range(2)]
    assert [t.logprobs for t in runs[0]] == [t.logprobs for t in runs[1]]


class Forgetful(TransformersEngine):
    """Loses all its state before each turn."""

    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        self.release()
        return super().sample(trajectories, sampling, seeds)


def test_what_the_engine_does_not_know_is_computed_from_the_beginning() -> None:
    """Unknown trajectories with several images behind them, alone or beside known ones."""
    vlm = tiny.shared_tiny()
    kept = rollout(make_engine(vlm), vlm, ATTEMPTS)
    forgotten = rollout(Forgetful(vlm, tiny.feature_cache(vlm)), vlm, ATTEMPTS)
    for a, b in zip(kept, forgotten, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=3e-5)
    known = tiny.conversation(vlm, ["up", "down up"], 1)
    new = tiny.conversation(vlm, ["left"], 2)
    tiny.show(vlm, known, tiny.noise(9), "Moved.")
    tiny.show(vlm, new, tiny.noise(8), "Moved.")
    sampling = Sampling(0.9, 8)
    engine = make_engine(vlm)
    (first,) = engine.sample([known], sampling, [4])
    known.append_sampled(first.ids, first.logprobs)
    tiny.show(vlm, known, tiny.noise(7), "Moved.", ended=first.ended)
    alone = [make_engine(vlm).sample([t], sampling, [s])[0] for t, s in ((new, 6), (known, 5))]
    beside = engine.sample([new, known], sampling, [6, 5])
    assert [c.ids for c in beside] == [c.ids for c in alone]


@torch.no_grad()
def test_forbidden_tokens_are_never_sampled(folder: Path) -> None:
    """Even a model that wants nothing else can't say an image placeholder, and the scorer agrees."""
    vlm = load_model(folder)
    plain = vlm.model.lm_head.weight
    vlm.model.lm_head = torch.nn.Linear(plain.shape[1], plain.shape[0])
    vlm.model.lm_head.weight.copy_(plain)
    vlm.model.lm_head.bias.zero_()[vlm.forbidden_ids] = 50.0
    trajectories = rollout(make_engine(vlm), vlm, ATTEMPTS[:6])
    forbidden = set(vlm.forbidden_ids.tolist())
    sampled = [i for t in trajectories for i, s in zip(t.token_ids, t.sampled, strict=True) if s]
    assert sampled and not forbidden & set(sampled)
    stock_inputs = tiny.plain_inputs(
        vlm, trajectories[0].token_ids[: trajectories[0].turns[0].start], [trajectories[0].turns[0].frame]
    )
    wanted = int(vlm.model(**stock_inputs).logits[0, -1].argmax())
    assert wanted in forbidden, "the bias should make a forbidden token the likeliest"
    for trajectory in trajectories:
        trajectory.check_images(vlm.template.image_token_id, vlm.merge_size)
        theirs, _ = tiny.plain_logprobs(vlm, vlm.model, trajectory, 0.9)
        ours = [lp for lp, s in zip(trajectory.logprobs, trajectory.sampled, strict=True) if s]
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-4)


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    expected = p * counts.sum()
    big = expected >= 10
    counts = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], max(expected[~big].sum(), 1e-9))
    keep = expected > 1
    return float(((counts - expected)[keep] ** 2 / expected[keep]).sum()), int(keep.sum()) - 1


def test_frequencies_are_the_softmaxs() -> None:
    """Chi-square at 1 in 10,000: the first token of many draws, full vocabulary, at two temperatures."""
    vlm = tiny.shared_tiny()
    engine = make_engine(vlm)
    trajectory = tiny.conversation(vlm, [])
    tiny.show(vlm, trajectory, tiny.noise(1), "Go!")
    with torch.inference_mode():
        engine._place([trajectory])
        logits_BV = engine._prefill([trajectory])
        for temperature in (0.6, 1.0):
            n = 20000
            seeds = np.array([derive_seed("chi", i) for i in range(n)], np.uint64)
            ids_B, logprobs_B = engine._draw(logits_BV.expand(n, -1), temperature, uniforms(seeds, 0))
            allowed = logits_BV[0].double()
            allowed[vlm.forbidden_ids] = -math.inf
            p = torch.softmax(allowed / temperature, -1).numpy()
            counts = np.bincount(ids_B.numpy(), minlength=len(p))
            assert counts[vlm.forbidden_ids.numpy()].sum() == 0
            statistic, freedom = chi_square(counts, p)
            assert freedom > 3
            # Wilson-Hilferty: the 99.99 % quantile of chi-square.
            bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
            assert statistic < bound
            np.testing.assert_allclose(np.exp(logprobs_B.numpy()), p[ids_B.numpy()], rtol=1e-4)


def test_the_edges_of_the_distribution_are_reached_and_not_passed() -> None:
    vlm = tiny.shared_tiny()
    engine = make_engine(vlm)
    vocab = vlm.model.config.text_config.vocab_size
    flat = torch.zeros(3, vocab)
    ids, logprobs = engine._draw(flat, 1.0, np.array([0.0, 0.5, 1.0 - 2.0**-53]))
    allowed = sorted(set(range(vocab)) - set(vlm.forbidden_ids.tolist()))
    assert ids.tolist() == [allowed[0], allowed[len(allowed) // 2], allowed[-1]]
    np.testing.assert_allclose(logprobs.numpy(), -math.log(len(allowed)), rtol=1e-5)
    peaked = torch.full((1, vocab), -1e4)
    peaked[0, allowed[7]] = 1e4
    assert engine._draw(peaked, 1.0, np.array([1.0 - 2.0**-53]))[0].item() == allowed[7]
    assert engine._draw(peaked, 0.0, np.array([0.1]))[0].item() == allowed[7]


def test_uniforms_are_uniform_and_independent() -> None:
    seeds = np.array([derive_seed("u", i) for i in range(4000)], np.uint64)
    table = np.stack([uniforms(seeds, index) for index in range(4)])
    assert table.min() >= 0 and table.max() < 1
    for row in table:
        statistic, freedom = chi_square(np.histogram(row, 20, (0, 1))[0], np.full(20, 0.05))
        assert freedom == 19 and statistic < 50
    correlations = np.corrcoef(table) - np.eye(4)
    assert np.abs(correlations).max() < 0.07
    small = uniforms(np.arange(4000, dtype=np.uint64), 0)  # neighbouring seeds too
    assert abs(np.corrcoef(small[:-1], small[1:])[0, 1]) < 0.07
    assert derive_seed("a", "bc") != derive_seed("ab", "c") != derive_seed("abc")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed("x", 1) == derive_seed("x", 1)


@torch.no_grad()
def test_a_merged_adapter_samples_what_the_trainer_scores() -> None:
    vlm = tiny.tiny()
    cache = tiny.feature_cache(vlm)
    engine = TransformersEngine(vlm, cache)
    policy = attach_lora(vlm, 8, 16, 0.0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    base = rollout(engine, vlm, ATTEMPTS)
    engine.load_adapter(current_adapter(policy, 3))
    trajectories = rollout(engine, vlm, ATTEMPTS)
    assert [t.token_ids for t in trajectories] != [t.token_ids for t in base]
    assert {t.policy_version for t in trajectories} == {current_adapter(policy, 3).name}
    assert {t.policy_version for t in base} == {"base"}
    batch = collate([(t.token_ids, t.sampled, t.grids) for t in trajectories], vlm.template.image_token_id, 2)
    scores = score(vlm, batch, cache.gather([turn.frame for t in trajectories for turn in t.turns]), 0.9)
    engine_N = torch.tensor([lp for t in trajectories for lp, s in zip(t.logprobs, t.sampled, strict=True) if s])
    assert (scores.logprobs_N - engine_N).abs().max() < 1e-4


def test_features_are_kept_for_a_step_and_no_longer() -> None:
    vlm = tiny.tiny()
    engine = make_engine(vlm)
    policy = attach_lora(vlm, 2, 4, 0.0)
    sizes = []
    for step in range(3):
        engine.load_adapter(current_adapter(policy, step))
        assert len(engine.features) == 0
        trajectories = rollout(engine, vlm, ATTEMPTS, parts=("t", step))
        distinct = {turn.frame.tobytes() for t in trajectories for turn in t.turns}
        assert len(engine.features) == len(distinct)
        sizes.append(len(distinct))
    assert len(engine._rows) <= len(ATTEMPTS)
    engine.release()
    assert len(engine.features) == 0 and engine._rows == [] and engine._cache.room == 0


def test_bfloat16_plays_and_agrees_with_its_scorer() -> None:
    vlm = load_model(tiny.tiny_folder(), torch.bfloat16)
    trajectories = rollout(make_engine(vlm), vlm, ATTEMPTS)
    batch = collate([(t.token_ids, t.sampled, t.grids) for t in trajectories], vlm.template.image_token_id, 2)
    with torch.no_grad():
        features = tiny.feature_cache(vlm).gather([turn.frame for t in trajectories for turn in t.turns])
        scores = score(vlm, batch, features, 0.9)
    engine = torch.tensor([lp for t in trajectories for lp, s in zip(t.logprobs, t.sampled, strict=True) if s])
    assert scores.logprobs_N.dtype == torch.float32
    assert (scores.logprobs_N - engine).abs().mean() < 0.2


def test_row_cache_keeps_rows_apart() -> None:
    """Rows grow at their own pace, are dropped and joined; each reads back what was written for it."""
    generator = np.random.default_rng(0)
    cache = RowCache(1, 2, 3, torch.float32, torch.device("cpu"))
    written: list[list[torch.Tensor]] = []
    serial = 0
    for _ in range(12):
        keep = sorted(generator.permutation(len(written))[: generator.integers(0, len(written) + 1)].tolist())
        joining = int(generator.integers(0 if keep else 1, 3))
        cache.select(keep, joining)
        written = [written[i] for i in keep] + [[] for _ in range(joining)]
        new = int(generator.integers(1, 4))
        real = [int(generator.integers(1, new + 1)) for _ in written]
        mask = cache.begin(new)
        values = torch.arange(serial, serial + len(written) * new * 6, dtype=torch.float32).view(
            len(written), 2, new, 3
        )
        serial += values.numel()
        keys, _ = cache.update(values, values, 0)
        for row, count in enumerate(real):
            before = len(written[row])
            for i in range(new):
                visible = mask[row, 0, i].nonzero().flatten().tolist()
                assert visible == list(range(before + i + 1))
            written[row] += [values[row, :, i] for i in range(count)]
            for i, value in enumerate(written[row]):
                assert torch.equal(keys[row, :, i], value)
        cache.lengths += torch.tensor(real)
