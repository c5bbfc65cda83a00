"""Losses against an independent scalar loop, and the properties they are chosen for."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.algorithms import (
    entropy_from_logits,
    kl_k3,
    loss_norm,
    policy_loss,
    reduce_tokens,
    truncated_importance_weights,
)

REDUCTIONS = ["token_mean", "sequence_mean", "dr_grpo"]
MAX_TOKENS = 11
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
repeatable = settings(deadline=None, derandomize=True, max_examples=30)


def batch(seed, sequences=5, tokens=7, spread=0.3):
    """New, old and engine log-probabilities, advantages, and a mask with holes and one empty sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(sequences, tokens).abs()
    new, engine = old + spread * normal(sequences, tokens), old + spread * normal(sequences, tokens)
    mask = torch.rand(sequences, tokens, generator=generator) < 0.7
    mask[seed % sequences] = False
    mask[(seed + 1) % sequences, 0] = True
    return new, old, engine, normal(sequences, tokens), mask


def norm_of(reduction, mask):
    counts = {"tokens": int(mask.sum()), "sequences": len(mask), "max_tokens": MAX_TOKENS}
    return loss_norm(reduction, **counts)


def scalar_loss(new, old, engine, advantages, mask, reduction, cap):
    """The whole objective in plain Python: (loss, clipped tokens, KL sum, largest ratio)."""
    total, clipped, kl, ratio_max, tokens = 0.0, 0, 0.0, 0.0, 0
    for b in range(len(mask)):
        in_sequence = []
        for t in range(len(mask[b])):
            if not mask[b][t]:
                continue
            ratio, advantage = math.exp(new[b][t] - old[b][t]), advantages[b][t]
            bounded = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
            weight = 1.0 if cap is None else min(math.exp(old[b][t] - engine[b][t]), cap)
            in_sequence.append(-weight * min(ratio * advantage, bounded * advantage))
            clipped += bounded * advantage < ratio * advantage
            kl += ratio - 1 - math.log(ratio)
            ratio_max = max(ratio_max, ratio)
        tokens += len(in_sequence)
        total += sum(in_sequence) / (max(len(in_sequence), 1) if reduction == "sequence_mean" else 1)
    norm = {"token_mean": tokens, "sequence_mean": len(mask), "dr_grpo": len(mask) * MAX_TOKENS}[reduction]
    return total / norm, clipped, kl, ratio_max


@pytest.mark.parametrize("reduction", REDUCTIONS)
@repeatable
@given(seed=st.integers(0, 10_000), cap=st.sampled_from([None, 1.1, 2.0]))
def test_policy_loss_equals_the_scalar_loop(reduction, seed, cap):
    new, old, engine, advantages, mask = batch(seed)
    weights = None if cap is None else truncated_importance_weights(old, engine, cap)
    result = policy_loss(
        new, old, advantages, mask, **CLIP,
        reduction=reduction, norm=norm_of(reduction, mask), rollout_weights_BT=weights,
    )  # fmt: skip
    inputs = (tensor.tolist() for tensor in (new, old, engine, advantages, mask))
    loss, clipped, kl, ratio_max = scalar_loss(*inputs, reduction, cap)
    assert result.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-14)
    assert result.kl.item() == pytest.approx(kl, rel=1e-9)
    assert result.ratio_max.item() == pytest.approx(ratio_max, rel=1e-12)
    assert (result.clipped.item(), result.tokens.item()) == (clipped, mask.sum().item())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@repeatable
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_add_up_to_the_batch(reduction, seed, cuts):
    new, old, _, advantages, mask = batch(seed)
    norm = norm_of(reduction, mask)

    def run(parts):
        leaf = new.clone().requires_grad_()
        results = []
        for rows in parts:
            result = policy_loss(
                leaf[rows], old[rows], advantages[rows], mask[rows], **CLIP, reduction=reduction, norm=norm
            )
            result.loss.backward()
            results.append(torch.stack([result.loss.detach(), result.clipped, result.kl, result.tokens]))
        return torch.stack(results).sum(0), leaf.grad

    edges = [0, *sorted(cuts), len(mask)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    whole, in_parts = run([slice(None)]), run(parts)
    torch.testing.assert_close(in_parts[0], whole[0], rtol=1e-12, atol=1e-15)
    assert torch.equal(in_parts[1], whole[1])  # a token's gradient does not depend on its neighbours


@pytest.mark.parametrize("reduction", REDUCTIONS)
@repeatable
@given(seed=st.integers(0, 10_000), random=st.randoms())
def test_order_and_padding_do_not_matter(reduction, seed, random):
    new, old, _, advantages, mask = batch(seed)
    order = list(range(len(mask)))
    random.shuffle(order)
    norm = norm_of(reduction, mask)
    plain = policy_loss(new, old, advantages, mask, **CLIP, reduction=reduction, norm=norm)
    moved = [torch.nn.functional.pad(x[order], (2, 3)) for x in (new, old, advantages, mask)]
    other = policy_loss(*moved, **CLIP, reduction=reduction, norm=norm)
    for value, expected in zip(other, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-15)


def test_gradient_at_ratio_one_is_reinforce():
    """With the log-probabilities as their own old ones, the gradient of the logits is that of -A log p."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 9, generator=generator, dtype=torch.float64)
    chosen = torch.randint(9, (4, 6, 1), generator=generator)
    _, _, _, advantages, mask = batch(3, 4, 6)
    norm = norm_of("token_mean", mask)

    def gradient(loss_of):
        leaf = logits.clone().requires_grad_()
        loss_of(leaf.log_softmax(-1).gather(-1, chosen).squeeze(-1)).backward()
        return leaf.grad

    ours = gradient(lambda lp: policy_loss(lp, lp, advantages, mask, **CLIP, reduction="token_mean", norm=norm).loss)
    reinforce = gradient(lambda lp: -(lp * advantages * mask).sum() / norm)
    torch.testing.assert_close(ours, reinforce, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.5, 1.0, -1.28, True),  # already likelier than allowed: no further push up
        (0.5, 1.0, -0.5, False),  # the good token lost probability: pull it back
        (0.5, -1.0, 0.8, True),  # already rarer than allowed: no further push down
        (1.5, -1.0, 1.5, False),  # the bad token gained probability: push it down
        (1.28 - 1e-9, 1.0, -1.28 + 1e-9, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clipping_follows_the_sign_of_the_advantage(ratio, advantage, expected, clipped):
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[advantage]], dtype=torch.float64)
    result = policy_loss(new, old, advantages, torch.ones(1, 1), **CLIP, reduction="token_mean", norm=1)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected, abs=1e-12)
    assert result.clipped.item() == clipped
    assert new.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage, abs=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_leaks(reduction, poison):
    new, old, engine, advantages, mask = batch(1)
    norm = norm_of(reduction, mask)

    def run(*tensors):
        new, old, engine, advantages = tensors
        leaf = new.clone().requires_grad_()
        result = policy_loss(
            leaf, old, advantages, mask, **CLIP,
            reduction=reduction, norm=norm, rollout_weights_BT=truncated_importance_weights(old, engine, 2.0),
        )  # fmt: skip
        kl = kl_k3(leaf, engine, mask)
        assert (kl[~mask] == 0).all()
        (result.loss + 0.1 * reduce_tokens(kl, mask, reduction=reduction, norm=norm)).backward()
        return [*(value.detach() for value in result), kl.detach(), leaf.grad]

    inputs = (new, old, engine, advantages)
    clean, poisoned = run(*inputs), run(*(torch.where(mask, x, poison) for x in inputs))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert (clean[-1][~mask] == 0).all() and torch.isfinite(clean[-1]).all()


def test_nan_inside_the_mask_is_seen():
    new, old, _, advantages, mask = batch(1)
    new[mask.nonzero()[0].tolist()[0], mask.nonzero()[0].tolist()[1]] = math.nan
    assert policy_loss(new, old, advantages, mask, **CLIP, reduction="token_mean", norm=1).loss.isnan()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(reduction):
    """The zero-weight dummies that fill up a rank's micro-batches."""
    new, old, _, advantages, mask = batch(2)
    leaf, nothing = new.clone().requires_grad_(), torch.zeros_like(mask)
    result = policy_loss(leaf, old, advantages, nothing, **CLIP, reduction=reduction, norm=norm_of(reduction, nothing))
    result.loss.backward()
    assert [value.item() for value in result] == [0, 0, 0, 0, 0]
    assert (leaf.grad == 0).all()


def test_only_the_new_logprobs_receive_gradients():
    new, old, engine, advantages, mask = (x.requires_grad_() if x.is_floating_point() else x for x in batch(4))
    result = policy_loss(
        new, old, advantages, mask, **CLIP, reduction="token_mean", norm=1, rollout_weights_BT=engine.exp()
    )
    assert [value.requires_grad for value in result] == [True, False, False, False, False]
    result.loss.backward()
    assert new.grad is not None
    assert [x.grad for x in (old, engine, advantages)] == [None, None, None]


def test_far_apart_policies_stay_finite():
    new = torch.tensor([[-0.1, -900.0]], requires_grad=True)
    result = policy_loss(
        new, torch.tensor([[-900.0, -0.1]]), torch.tensor([[-1.0]]), torch.ones(1, 2), **CLIP,
        reduction="token_mean", norm=2,
    )  # fmt: skip
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(new.grad).all() and torch.isfinite(result.kl)


def test_unknown_reductions_are_refused():
    with pytest.raises(ValueError, match="mean_of_means"):
        reduce_tokens(torch.ones(1, 1), torch.ones(1, 1), reduction="mean_of_means", norm=1)
    with pytest.raises(ValueError, match="mean_of_means"):
        loss_norm("mean_of_means", tokens=1, sequences=1, max_tokens=1)


def test_k3_is_unbiased_for_the_first_argument():
    """Its expectation under p, summed over a whole vocabulary, is KL(p || q)."""
    p, q = torch.randn(2, 50, generator=torch.Generator().manual_seed(5), dtype=torch.float64).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl_k3(p, q)).sum(), expected, rtol=1e-12, atol=0)
    assert (kl_k3(p, q) >= 0).all()


def test_k3_keeps_its_digits_when_the_policies_are_close():
    near = kl_k3(torch.tensor([-1.0]), torch.tensor([-1.001]))
    assert near.item() == pytest.approx(0.5e-6, rel=2e-3)


def test_importance_weights_are_capped_and_carry_no_gradient():
    trainer = torch.tensor([0.0, math.log(3.0), -1.0, 500.0], requires_grad=True)
    weights = truncated_importance_weights(trainer, torch.zeros(4), cap=2.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 2.0])


@repeatable
@given(seed=st.integers(0, 1000), temperature=st.floats(0.2, 3))
def test_entropy_equals_the_scalar_loop(seed, temperature):
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    entropy = entropy_from_logits(logits, temperature)
    for b, t in [(0, 0), (1, 2)]:
        weights = [math.exp(x / temperature) for x in logits[b, t].tolist()]
        probabilities = [w / sum(weights) for w in weights]
        assert entropy[b, t].item() == pytest.approx(-sum(p * math.log(p) for p in probabilities), rel=1e-9)


def test_forbidden_tokens_do_not_poison_the_entropy():
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], dtype=torch.bfloat16).requires_grad_()
    entropy = entropy_from_logits(logits, 0.7)
    entropy.sum().backward()
    assert entropy.dtype == torch.float32
    assert entropy.item() == pytest.approx(math.log(2), rel=1e-6)
    assert torch.isfinite(logits.grad).all()
