"""The numbers are the reference numbers: Clew against the real functions of SkyRL 0.4.0 and TRL 1.16.

`make test-skyrl` installs both and runs this. Nothing of theirs is copied or recorded:

* SkyRL's are functions: advantages through its registry, losses through another, reductions beside them.
* TRL's are two long methods of its trainer. They run on an instance of the real class that was made without its
  constructor (`Trainer` below): generation, rewards and the model's log-probabilities are given to it, and the rest is
  its own, from ragged lists of tokens to padded tensors, advantages, importance weights, loss and gradient.

Both round inner results to float32, whatever they are given. So each comparison runs twice: with their code as
shipped, to float32's precision, and with that rounding lifted, nothing else changed, to a relative 1e-9.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clew.algorithms import (
    entropy_from_logits,
    group_advantages,
    kl_k3,
    loss_norm,
    policy_loss,
    reduce_tokens,
    truncated_importance_weights,
)

pytestmark = [
    pytest.mark.skyrl,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("skyrl", "trl")),
        reason="SkyRL and TRL are not installed here: run `make test-skyrl`",
    ),
]

SKYRL_NAMES = {"token_mean": "token_mean", "sequence_mean": "sequence_mean", "dr_grpo": "seq_mean_token_sum_norm"}
TRL_NAMES = {"token_mean": "dapo", "sequence_mean": "grpo", "dr_grpo": "dr_grpo"}
MAX_TOKENS = 13
EXAMPLES = settings(max_examples=40)

Compare = Callable[[Tensor, Tensor], None]


@pytest.fixture(scope="module")
def skyrl() -> SimpleNamespace:
    from skyrl.backends.skyrl_train.utils import off_policy_correction_utils, ppo_utils, torch_utils
    from skyrl.train.config import AlgorithmConfig

    return SimpleNamespace(
        ppo=ppo_utils, off_policy=off_policy_correction_utils, torch=torch_utils, config=AlgorithmConfig
    )


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    from trl.trainer import grpo_trainer

    return grpo_trainer


@pytest.fixture(scope="module", params=["as shipped", "in float64"])
def agree(request: pytest.FixtureRequest, skyrl: SimpleNamespace) -> Iterator[Compare]:
    """A comparison of tensors, with the references' float32 rounding left in or lifted."""
    rtol, atol = (1e-9, 1e-13) if request.param == "in float64" else (2e-5, 2e-6)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in float64":
            torch.set_default_dtype(torch.float64)  # int / int and torch.tensor(list) take the default
            source = inspect.getsource(skyrl.torch.safe_exp_delta)
            assert source.count("torch.float32") == 1
            names: dict[str, Any] = {"torch": torch}
            exec(source.replace("torch.float32", "torch.float64"), names)
            for module in (skyrl.ppo, skyrl.off_policy):
                patch.setattr(module, "safe_exp_delta", names["safe_exp_delta"])

        def compare(ours: Tensor, theirs: Tensor) -> None:
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours, theirs.double(), rtol=rtol, atol=atol)

        yield compare
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------- shared inputs


@dataclass(frozen=True)
class Batch:
    """Ragged sequences, padded to [B, T]: log-probabilities of the policy, before its update, of the engine."""

    lengths: list[int]
    sampled: list[list[int]]  # 1 where the model sampled the token, up to the sequence's length
    new: Tensor
    old: Tensor
    engine: Tensor
    advantages: Tensor  # [B, 1]

    @property
    def mask(self) -> Tensor:
        return torch.tensor([[*row, *[0] * (self.new.shape[1] - len(row))] for row in self.sampled]).bool()


@st.composite
def batches(draw: st.DrawFn, sequences: st.SearchStrategy[int] = st.integers(1, 6)) -> Batch:  # noqa: B008
    """Sequences of one to nine tokens; some have no sampled token at all, some nothing else."""
    count = draw(sequences)
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    sampled = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    spread = draw(st.sampled_from([0.0, 0.01, 0.3, 2.0]))  # nats between the three policies
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (len(lengths), max(lengths))
    old = -np.abs(rng.normal(size=shape))
    new, engine = (old + spread * rng.normal(size=shape) for _ in range(2))
    tensors = (torch.from_numpy(x) for x in (new, old, engine, rng.normal(size=(len(lengths), 1))))
    return Batch(lengths, sampled, *tensors)


clips = st.tuples(st.sampled_from([0.05, 0.2, 0.9]), st.sampled_from([0.05, 0.28, 4.0]))
caps = st.sampled_from([None, 0.7, 2.0, 1e3])


def clew_loss(
    logprobs: Tensor, batch: Batch, advantages: Tensor, reduction: str, clip: tuple[float, float], cap: float | None
) -> Tensor:
    mask = batch.mask
    norm = loss_norm(reduction, tokens=int(mask.sum()), sequences=len(mask), max_tokens=MAX_TOKENS)
    weights = None if cap is None else truncated_importance_weights(batch.old, batch.engine, cap)
    low, high = clip
    return policy_loss(
        logprobs, batch.old, advantages, mask, clip_low=low, clip_high=high,
        reduction=reduction, norm=norm, rollout_weights_BT=weights,
    ).loss  # fmt: skip


def value_and_gradient(logprobs: Tensor, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


# Multiples of 1/20: equal or well apart, so that neither side divides by what is left of a rounded difference.
reward = st.integers(0, 20).map(lambda n: n / 20)
rewards_of_a_group = st.lists(reward, min_size=1, max_size=9)


# -------------------------------------------------------------------------------------------------- SkyRL


@EXAMPLES
@given(groups=st.lists(rewards_of_a_group, min_size=1, max_size=6), order=st.randoms(use_true_random=False))
@pytest.mark.parametrize("estimator", ["grpo", "grpo_no_std"])
def test_advantages_are_skyrls(
    skyrl: SimpleNamespace, agree: Compare, estimator: str, groups: list[list[float]], order: Any
) -> None:
    """Groups of any size, also of one sample and of equal rewards, in random order."""
    rows = [(group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    order.shuffle(rows)
    ids = [group for group, _ in rows]
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    mask = torch.ones(len(rows), 3, dtype=torch.float64)
    token_rewards = torch.zeros_like(mask)
    token_rewards[:, -1] = rewards
    theirs, _ = skyrl.ppo.compute_advantages_and_returns(
        token_rewards, mask, np.array(ids), "grpo", skyrl.config(), grpo_norm_by_std=estimator == "grpo"
    )
    ours, used = group_advantages(rewards, torch.tensor(ids), estimator=estimator, epsilon=1e-6)
    alone = torch.tensor([len(groups[group]) == 1 for group in ids])
    equal = ~alone & torch.tensor([len(set(groups[group])) == 1 for group in ids])
    assert (ours[equal] == 0).all() and not used[equal].any()
    expected = ours.clone()
    if estimator == "grpo":  # alone, a trajectory gets R / (1 + epsilon) there, and R here
        expected[alone] /= 1 + 1e-6
    agree(expected[~equal], theirs[~equal, 0])
    # What equal rewards give there is the rounding of their mean, divided by epsilon.
    rounding = torch.finfo(torch.get_default_dtype()).eps
    assert (theirs[equal].abs() <= 10 * rounding / 1e-6).all()


@EXAMPLES
@given(batch=batches(), clip=clips, cap=caps)
@pytest.mark.parametrize("reduction", SKYRL_NAMES)
def test_loss_and_gradient_are_skyrls(
    skyrl: SimpleNamespace, agree: Compare, reduction: str, batch: Batch, clip: tuple[float, float], cap: float | None
) -> None:
    mask = batch.mask.double()
    config = skyrl.config(eps_clip_low=clip[0], eps_clip_high=clip[1])
    if cap is not None:
        config.off_policy_correction.tis_ratio_type = "token"
        config.off_policy_correction.token_tis_ratio_clip_high = cap
    scaled = skyrl.ppo.apply_loss_reduction_to_advantages_minibatch(
        batch.advantages.expand_as(batch.new), mask, SKYRL_NAMES[reduction], len(mask), MAX_TOKENS
    )
    loss_of = skyrl.ppo.PolicyLossRegistry.get("regular")
    theirs = value_and_gradient(
        batch.new, lambda lp: loss_of(lp, batch.old, scaled, config, mask, rollout_logprobs=batch.engine)[0]
    )
    ours = value_and_gradient(batch.new, lambda lp: clew_loss(lp, batch, batch.advantages, reduction, clip, cap))
    agree(ours[0], theirs[0])
    agree(ours[1], theirs[1])


@EXAMPLES
@given(batch=batches(), cap=st.sampled_from([0.7, 2.0, 1e3]))
def test_kl_and_importance_weights_are_skyrls(skyrl: SimpleNamespace, agree: Compare, batch: Batch, cap: float) -> None:
    mask = batch.mask.double()
    # SkyRL cuts the estimate itself at 10 nats a token, which Clew does not.
    agree(
        kl_k3(batch.new, batch.old, batch.mask).clamp(max=10),
        skyrl.ppo.compute_approx_kl(batch.new, batch.old, mask, "k3"),
    )
    config = skyrl.config().off_policy_correction
    config.token_tis_ratio_clip_high = cap
    theirs, _ = skyrl.off_policy.compute_tis_ratio(batch.old, batch.engine, mask, "token", config)
    agree(truncated_importance_weights(batch.old, batch.engine, cap), theirs)


def test_skyrls_cap_is_clews_for_vllm(skyrl: SimpleNamespace) -> None:
    assert skyrl.config().off_policy_correction.token_tis_ratio_clip_high == 2.0


def test_entropy_is_skyrls_and_trls(skyrl: SimpleNamespace, agree: Compare) -> None:
    from trl.trainer.utils import entropy_from_logits as trls

    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    agree(entropy_from_logits(logits, 0.7), skyrl.torch.chunked_entropy_from_logits(logits / 0.7))
    agree(entropy_from_logits(logits, 0.7), trls(logits / 0.7))


# ---------------------------------------------------------------------------------------------------- TRL


def trainer(
    trl: ModuleType, batch: Batch, rewards: list[float], group_size: int, logprobs: Tensor, **changes: Any
) -> Any:
    """A real GRPOTrainer without its constructor: what it would compute with a model is given to it.

    Args:
        logprobs: what the model says when the loss is computed; before that, it says ``batch.old``.
    """
    ids = [[7] * n for n in batch.lengths]
    engine = [row[:n].tolist() for row, n in zip(batch.engine, batch.lengths, strict=True)]
    generated = ([[1]] * len(ids), ids, batch.sampled, ["answer"] * len(ids), engine, {}, None, None)
    made = object.__new__(trl.GRPOTrainer)

    def model_says(*_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Tensor, Tensor, None]:
        return (logprobs, torch.zeros_like(logprobs), None) if compute_entropy else (batch.old, None, None)

    attributes = {
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *_: torch.tensor(rewards, dtype=torch.float64)[:, None],
        "_get_per_token_logps_and_entropies": model_says,
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, process_index=0,
            gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x,
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(
            per_device_train_batch_size=len(ids), steps_per_generation=1, gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None, delta=None, use_bias_correction_kl=False,
        ),
        "_tokenizer": SimpleNamespace(pad_token_id=0), "pad_to_multiple_of": None,
        "environment_factories": None, "environments": None, "tools": None,
        "mask_truncated_completions": False, "num_generations": group_size, "num_iterations": 2,
        "reward_weights": torch.ones(1, dtype=torch.float64), "reward_func_names": ["reward"],
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group",
        "use_vllm": False, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 2.0,
        "beta": 0.0, "ref_model": None, "importance_sampling_level": "token", "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0, "_entropy_bonus_enabled": False, "aux_loss_enabled": False,
        "max_completion_length": MAX_TOKENS, "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)}, "_logs": defaultdict(list, rewards=defaultdict(list)),
        "_pending_extra_logs": {}, "_pending_metrics": {}, "log_multimodal": False,
        **changes,
    }  # fmt: skip
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def scored(made: Any, rewards: list[float]) -> dict[str, Any]:
    """TRL's own way from what was generated to what its loss takes."""
    return made._generate_and_score_completions([{"prompt": "go"}] * len(rewards))


@st.composite
def groups_and_batches(draw: st.DrawFn) -> tuple[Batch, list[float], int]:
    """A batch of whole groups of one size (TRL has no other), with a reward a sequence."""
    size, groups = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    batch = draw(batches(st.just(size * groups)))
    rewards = draw(st.lists(reward, min_size=size * groups, max_size=size * groups))
    return batch, rewards, size


@EXAMPLES
@given(rewards=st.lists(rewards_of_a_group, min_size=1, max_size=4), size=st.integers(2, 9))
@pytest.mark.parametrize(("estimator", "scale"), [("grpo", "group"), ("grpo_no_std", "none")])
def test_advantages_are_trls(
    trl: ModuleType, agree: Compare, estimator: str, scale: str, rewards: list[list[float]], size: int
) -> None:
    cut = [(group * size)[:size] for group in rewards]
    flat = [reward for group in cut for reward in group]
    ones = torch.zeros(len(flat), 1, dtype=torch.float64)
    batch = Batch([1] * len(flat), [[1]] * len(flat), ones, ones, ones, ones)
    theirs = scored(trainer(trl, batch, flat, size, ones, scale_rewards=scale), flat)["advantages"]
    ids = torch.arange(len(cut)).repeat_interleave(size)
    ours, _ = group_advantages(torch.tensor(flat, dtype=torch.float64), ids, estimator=estimator, epsilon=1e-4)
    equal = torch.tensor([len(set(group)) == 1 for group in cut]).repeat_interleave(size)
    assert (ours[equal] == 0).all() and (theirs[equal].abs() < 1e-10).all()
    agree(ours[~equal], theirs[~equal])


@EXAMPLES
@given(case=groups_and_batches(), clip=clips, cap=caps, beta=st.sampled_from([0.0, 0.1]))
@pytest.mark.parametrize("reduction", TRL_NAMES)
def test_loss_and_gradient_are_trls(
    trl: ModuleType,
    agree: Compare,
    reduction: str,
    case: tuple[Batch, list[float], int],
    clip: tuple[float, float],
    cap: float | None,
    beta: float,
) -> None:
    """From rewards and ragged sequences to the gradient, all of it TRL's and all of it Clew's."""
    batch, rewards, size = case
    mask = batch.mask
    ids = torch.arange(len(rewards)) // size
    advantages, _ = group_advantages(torch.tensor(rewards, dtype=torch.float64), ids, estimator="grpo", epsilon=1e-4)
    norm = loss_norm(reduction, tokens=int(mask.sum()), sequences=len(mask), max_tokens=MAX_TOKENS)

    def theirs(logprobs: Tensor) -> Tensor:
        made = trainer(
            trl, batch, rewards, size, logprobs, loss_type=TRL_NAMES[reduction], epsilon_low=clip[0],
            epsilon_high=clip[1], use_vllm=cap is not None, vllm_importance_sampling_clip_max=cap,
            ref_model="the old policy", beta=beta,
        )  # fmt: skip
        inputs = scored(made, rewards)
        assert torch.equal((inputs["completion_mask"] * inputs["tool_mask"]).bool(), mask)
        return made._compute_loss(None, inputs)

    def ours(logprobs: Tensor) -> Tensor:
        kl = reduce_tokens(kl_k3(logprobs, batch.old, mask), mask, reduction=reduction, norm=norm)
        return clew_loss(logprobs, batch, advantages[:, None], reduction, clip, cap) + beta * kl

    for a, b in zip(value_and_gradient(batch.new, ours), value_and_gradient(batch.new, theirs), strict=True):
        agree(a, b)
