"""One policy update is what a slow, token-by-token reference makes of the same trajectories."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel

from clew.agent.ledger import Trajectory
from clew.policy.adapter import attach_lora, current_adapter
from clew.policy.model import VisionLanguageModel
from clew.recipe import AlgorithmTable, TrainingTable
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import TransformersEngine
from clew.training.update import Sample, Updater, deterministic_dropout, no_update_metrics

TEMPERATURE, MAX_TOKENS = 0.9, 500


def policy(dropout: float = 0.0) -> tuple[VisionLanguageModel, PeftModel]:
    """A model whose adapter already does something (a fresh one has no gradient in its A matrices)."""
    vlm = tiny.tiny()
    peft_model = attach_lora(vlm, 4, 8, dropout)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return vlm, peft_model


@functools.cache
def played() -> tuple[Trajectory, ...]:
    """Ten episodes of that policy, of different lengths and image sizes."""
    vlm, peft_model = policy()
    engine = TransformersEngine(vlm, tiny.feature_cache(vlm))
    engine.load_adapter(current_adapter(peft_model, 0))
    make = lambda: tiny.WordEnv(max_turns=3, sizes=((64, 64), (64, 96)))  # noqa: E731
    attempts = [(make().task(seed), k) for seed in range(2) for k in range(5)]
    player = Player(vlm.template, vlm.patcher)
    return tuple(play(engine, player, make, attempts, Sampling(TEMPERATURE, 8), Limits(MAX_TOKENS), ("u",)))


def samples(unused: tuple[int, ...] = (2, 7)) -> tuple[list[Sample], list[bool]]:
    """Advantages that differ by turn; some samples carry no signal but count."""
    generator = torch.Generator().manual_seed(2)
    found, used = [], []
    for i, trajectory in enumerate(played()):
        values = torch.randn(len(trajectory.turns), generator=generator).tolist()
        found.append(Sample(trajectory, [0.0] * len(values) if i in unused else values))
        used.append(i not in unused)
    return found, used


def updater(
    algorithm: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    dropout: float = 0.0,
    sgd: bool = True,
) -> Updater:
    vlm, peft_model = policy(dropout)
    table = {
        "steps": 9,
        "prompts_per_step": 2,
        "learning_rate": 0.5,
        "max_grad_norm": 1e9,
        **(training or {}),
    }
    made = Updater(
        vlm,
        peft_model,
        tiny.feature_cache(vlm),
        AlgorithmTable(**(algorithm or {})),
        TrainingTable(**table),
        TEMPERATURE,
        MAX_TOKENS,
        (algorithm or {}).get("tis_cap"),
    )
    if sgd:  # plain steps: Adam would hide a wrong scale and blow up rounding
        made.optimizer = torch.optim.SGD(made.parameters, lr=1.0)  # type: ignore[assignment]
    return made


def gradients(made: Updater) -> list[torch.Tensor]:
    return [p.grad.clone() for p in made.parameters]


def weights(made: Updater) -> list[torch.Tensor]:
    return [p.detach().clone() for p in made.parameters]


# --- the reference ---------------------------------------------------------------------------------------


def token_logprobs(made: Updater, trajectory: Trajectory) -> torch.Tensor:
    """[sampled tokens] in order, by Hugging Face's forward with the adapter in place; with gradients."""
    made.vlm.model.model.rope_deltas = None
    inputs = tiny.plain_inputs(made.vlm, trajectory.token_ids, [turn.frame for turn in trajectory.turns])
    logits = made.vlm.model(**inputs, use_cache=False).logits[0] / TEMPERATURE
    allowed = torch.ones(logits.shape[-1], dtype=torch.bool)
    allowed[made.vlm.forbidden_ids] = False
    logprobs = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), -1)
    return torch.stack([logprobs[i - 1, trajectory.token_ids[i]] for i, s in enumerate(trajectory.sampled) if s])


def reference_update(made: Updater, all_samples: list[Sample], used: list[bool], lr: float) -> dict[str, Any]:
    """Loops over epochs, minibatches, samples and tokens; plain gradient descent."""
    a, t = made.algorithm, made.training
    size = math.ceil(len(all_samples) / t.minibatches)
    parts = [range(i, min(i + size, len(all_samples))) for i in range(0, len(all_samples), size)]
    with torch.no_grad():
        old = [token_logprobs(made, s.trajectory) for s in all_samples]
    losses, clipped = [], 0
    for _ in range(t.epochs):
        for part in parts:
            made.optimizer.zero_grad()
            n_tokens = sum(sum(all_samples[i].trajectory.sampled) for i in part)
            total = torch.zeros(())
            for i in part:
                if not used[i]:
                    continue
                sample = all_samples[i]
                trajectory = sample.trajectory
                new = token_logprobs(made, trajectory)
                with torch.no_grad(), made.peft_model.disable_adapter():
                    base = token_logprobs(made, trajectory)
                engine = [lp for lp, s in zip(trajectory.logprobs, trajectory.sampled, strict=True) if s]
                n, token_losses = 0, []
                for turn, advantage in zip(trajectory.turns, sample.advantages, strict=True):
                    for _ in range(turn.end - turn.start):
                        ratio = torch.exp(new[n] - old[i][n])
                        value = float(ratio.detach())
                        bounded = min(max(value, 1 - a.clip_low), 1 + a.clip_high)
                        if bounded * advantage < value * advantage:
                            loss = torch.tensor(-bounded * advantage)
                            clipped += 1
                        else:
                            loss = -ratio * advantage
                        if a.tis_cap is not None:
                            loss = loss * min(math.exp(float(old[i][n]) - engine[n]), a.tis_cap)
                        delta = base[n] - new[n]
                        token_losses.append(loss + a.kl_coef * (torch.exp(delta) - 1 - delta))
                        n += 1
                assert n == len(new)
                for loss in token_losses:
                    total = (
                        total
                        + {
                            "token_mean": loss / n_tokens,
                            "sequence_mean": loss / n / len(part),
                            "dr_grpo": loss / (len(part) * MAX_TOKENS),
                        }[a.loss_reduction]
                    )
            total.backward()
            losses.append(float(total.detach()))
            with torch.no_grad():
                for parameter in made.parameters:
                    parameter -= lr * parameter.grad
    return {"loss": sum(losses) / len(losses), "clipped": clipped}


# --- tests -----------------------------------------------------------------------------------------------


def test_the_setting_is_worth_testing() -> None:
    lengths = [len(t.token_ids) for t in played()]
    assert len(set(lengths)) > 4 and {len(t.turns) for t in played()} >= {1, 3}
    assert len({grid for t in played() for grid in t.grids}) == 2


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_a_single_update_equals_the_reference(reduction: str, kl_coef: float) -> None:
    algorithm = {"loss_reduction": reduction, "kl_coef": kl_coef, "tis_cap": 1.0 if kl_coef else None}
    ours, theirs = updater(algorithm), updater(algorithm)
    metrics = ours.update(*samples(), step=1)
    expected = reference_update(theirs, *samples(), lr=0.5)
    assert metrics["train/loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for ours_grad, theirs_grad in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-3, atol=1e-5)
    norm = torch.stack([g.norm() for g in gradients(theirs)]).norm()
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # With one update the old policy is the new one.
    assert metrics["policy/ratio_max"] == 1.0 and metrics["policy/kl"] == 0.0 and metrics["policy/clip_fraction"] == 0.0
    assert (metrics["policy/kl_base"] > 0) == (kl_coef > 0)
    assert metrics["policy/logprob_gap_max"] < 1e-4
    assert metrics["train/updates"] == 1 and metrics["train/learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("minibatches", "epochs", "clip"),
    [(2, 1, 0.2), (1, 3, 0.02), (5, 2, 0.05)],
    ids=["halves", "epochs", "both"],
)
def test_several_updates_equal_the_reference(minibatches: int, epochs: int, clip: float) -> None:
    """Ratios are taken against the policy before the step; clipped tokens have no gradient."""
    algorithm = {"clip_low": clip, "clip_high": 1.5 * clip}
    training = {"minibatches": minibatches, "epochs": epochs, "learning_rate": 0.05}
    ours, theirs = updater(algorithm, training), updater(algorithm, training)
    metrics = ours.update(*samples(), step=1)
    expected = reference_update(theirs, *samples(), lr=0.05)
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
    computed = epochs * sum(sum(s.trajectory.sampled) for s, u in zip(*samples(), strict=True) if u)
    assert metrics["policy/clip_fraction"] == pytest.approx(expected["clipped"] / computed, abs=1.5 / computed)
    assert metrics["train/updates"] == minibatches * epochs
    assert metrics["policy/ratio_max"] > 1 and metrics["policy/kl"] > 0
    if epochs > 1:
        assert expected["clipped"] > 0, "the setting should reach the clip"


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "dr_grpo"])
def test_micro_batches_change_nothing_but_rounding(reduction: str) -> None:
    found, norms = [], []
    for budget in (1, 120, 10**9):  # one row at a time, a few, all at once
        made = updater({"loss_reduction": reduction, "kl_coef": 0.1}, {"tokens_per_microbatch": budget})
        metrics = made.update(*samples(), step=1)
        found.append((gradients(made), metrics))
        norms.append(metrics["train/grad_norm"])
    for other, metrics in found[1:]:
        for a, b in zip(found[0][0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        for key, value in metrics.items():
            assert value == pytest.approx(found[0][1][key], rel=1e-3, abs=1e-5), key
    assert norms[0] > 0


def test_microbatches_stay_within_the_budget() -> None:
    made = updater(training={"tokens_per_microbatch": 120})
    parts = list(made._microbatches(samples()[0]))
    assert len({id(s) for part in parts for s in part}) == sum(len(part) for part in parts) == 10
    assert len(parts) > 2
    for part in parts:
        longest = max(len(s.trajectory.token_ids) for s in part)
        assert len(part) == 1 or len(part) * longest <= 120


def test_the_metrics_are_means_over_the_tokens_used() -> None:
    made = updater()
    with torch.no_grad():
        entropies = [
            tiny.plain_logprobs(made.vlm, made.vlm.model, s.trajectory, TEMPERATURE)[1]
            for s, u in zip(*samples(), strict=True)
            if u
        ]
    metrics = made.update(*samples(), step=1)
    assert metrics["policy/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-3)


def test_no_signal_is_no_update() -> None:
    made = updater(sgd=False)
    before = weights(made)
    found, used = samples(unused=tuple(range(10)))
    metrics = made.update(found, used, step=1)
    assert metrics["train/updates"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(made), strict=True))
    assert not made.optimizer.state
    counted = no_update_metrics(0.25)
    assert counted.keys() == metrics.keys()
    assert counted["train/updates"] == 0 and counted["train/learning_rate"] == 0.25


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_nonfinite_update_is_skipped_whole(poison: float) -> None:
    """Weights and optimizer stay as they were, and the next, healthy update is as if nothing had happened."""
    made, fresh = updater(sgd=False), updater(sgd=False)
    for each in (made, fresh):
        each.update(*samples(), step=1)  # so that Adam has a state
    before = weights(made)
    state = [v.clone() for p in made.parameters for v in made.optimizer.state[p].values()]
    found, used = samples()
    found[4] = Sample(found[4].trajectory, [poison] * len(found[4].advantages))
    metrics = made.update(found, used, step=2)
    assert (metrics["train/updates"], metrics["train/skipped_nonfinite"]) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(made), strict=True))
    after = [v for p in made.parameters for v in made.optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True)) and state
    for each in (made, fresh):
        each.update(*samples(), step=3)
    assert all(torch.equal(a, b) for a, b in zip(weights(made), weights(fresh), strict=True))


def test_gradients_are_clipped_to_the_norm() -> None:
    made = updater(training={"max_grad_norm": 1e-3})
    before = weights(made)
    metrics = made.update(*samples(), step=1)
    assert metrics["train/grad_norm"] > 1e-3
    moved = torch.stack([(a - b).norm() for a, b in zip(before, weights(made), strict=True)]).norm()
    assert float(moved) == pytest.approx(0.5 * 1e-3, rel=1e-2)


def test_only_the_adapter_moves() -> None:
    made = updater(sgd=False)
    base = {n: p.detach().clone() for n, p in made.vlm.model.named_parameters() if not p.requires_grad}
    made.update(*samples(), step=1)
    assert all(torch.equal(p, base[n]) for n, p in made.vlm.model.named_parameters() if n in base)
    assert len(base) > 100


def test_an_update_follows_its_advantages() -> None:
    """After a small step the answers with positive advantage are likelier and the others less likely."""
    made = updater(training={"learning_rate": 0.02})
    found, used = samples(unused=())
    found = [Sample(s.trajectory, [1.0 if i % 2 else -1.0] * len(s.advantages)) for i, s in enumerate(found)]
    with torch.no_grad():
        before = [float(token_logprobs(made, s.trajectory).sum()) for s in found]
    made.update(found, used, step=1)
    with torch.no_grad():
        change = [float(token_logprobs(made, s.trajectory).sum()) - b for s, b in zip(found, before, strict=True)]
    assert sum(change[1::2]) > 0 > sum(change[::2])


def test_dropout_is_for_the_gradient_alone_and_repeats() -> None:
    made = [updater(dropout=0.5) for _ in range(3)]
    for i, each in enumerate(made):
        torch.manual_seed(i)
        with deterministic_dropout(7 if i < 2 else 8):
            each.update(*samples(), step=1)
        assert not any(m.training for m in each.peft_model.modules())
    assert all(torch.equal(a, b) for a, b in zip(weights(made[0]), weights(made[1]), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights(made[0]), weights(made[2]), strict=True))
    several = updater({}, {"epochs": 2}, dropout=0.5)
    chunk = samples()[0][:2]
    once, twice = several._score_all([chunk]), several._score_all([chunk])
    assert all(torch.equal(once[k], twice[k]) for k in once), "the old policy is scored without dropout"


def test_images_are_checked_before_the_forward() -> None:
    made = updater()
    found, used = samples()
    spoilt = copy.copy(found[0].trajectory)
    spoilt.grids = [*spoilt.grids, (1, 4, 4)]
    found[0] = Sample(spoilt, found[0].advantages)
    with pytest.raises(ValueError, match="placeholders"):
        made.update(found, used, step=1)


def test_learning_rate_schedules() -> None:
    def rates(**training: Any) -> list[float]:
        made = Updater.__new__(Updater)
        made.training = TrainingTable(steps=10, prompts_per_step=1, learning_rate=2.0, **training)
        return [made.learning_rate(step) for step in range(1, 11)]

    assert rates() == [2.0] * 10
    assert rates(warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    linear = rates(schedule="linear", warmup_steps=2)
    assert linear[:3] == [1.0, 2.0, 2.0] and linear[3:] == pytest.approx([2.0 * (1 - i / 8) for i in range(1, 8)])
    cosine = rates(schedule="cosine")
    assert cosine[0] == 2.0 and cosine == sorted(cosine, reverse=True) and 0 < cosine[-1] < 0.06
    assert cosine[5] == pytest.approx(1.0)
