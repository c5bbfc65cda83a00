"""The numbers are the reference numbers: Clew against the real functions of TRL and SkyRL.

Both round inner results to float32, whatever they are given. So each comparison runs twice: with their code
as shipped, to float32's precision, and with that rounding lifted to float64, nothing else changed, to 1e-9.

Neither is a dependency: these tests skip where the library is not installed. To run them, install `trl`
beside the CPU torch in one environment, and `skyrl==0.4.0 skyrl-gym==0.4.0` in another (on Python 3.11 with
--no-deps --ignore-requires-python, and then what the import asks for), and run this file with each.
"""

import ast
import importlib.util
import inspect
import random
import sys
import textwrap
import typing
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clew.algorithms import (
    entropy_from_logits,
    group_advantages,
    kl_k3,
    loss_norm,
    policy_loss,
    reduce_tokens,
    truncated_importance_weights,
)

if not any(importlib.util.find_spec(name) for name in ("trl", "skyrl")):
    pytest.skip("neither TRL nor SkyRL is installed", allow_module_level=True)

MAX_TOKENS = 13
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
TRL_NAMES = {"token_mean": "dapo", "sequence_mean": "grpo", "dr_grpo": "dr_grpo"}
SKYRL_NAMES = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}


@pytest.fixture(scope="module")
def trl():
    """TRL's GRPO module."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl.trainer import grpo_trainer

    return grpo_trainer


@pytest.fixture(scope="module")
def skyrl():
    """SkyRL's functions and its real default algorithm settings."""
    pytest.importorskip("skyrl", reason="SkyRL is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if sys.version_info < (3, 12):  # pydantic refuses typing.TypedDict there; SkyRL targets 3.12
            patch.setattr(typing, "TypedDict", pytest.importorskip("typing_extensions").TypedDict)
        from skyrl.backends.skyrl_train.utils import off_policy_correction_utils, ppo_utils, torch_utils
        from skyrl.train.config import AlgorithmConfig
    return SimpleNamespace(
        ppo=ppo_utils, off_policy=off_policy_correction_utils, torch=torch_utils, config=AlgorithmConfig
    )


@pytest.fixture(params=["as shipped", "in float64"])
def agree(request, monkeypatch):
    """A comparison of tensors, with the references' float32 rounding left in or lifted."""
    if request.param == "in float64":
        torch.set_default_dtype(torch.float64)  # int / int and torch.tensor(list) take the default dtype
        if "skyrl" in request.fixturenames:
            skyrl = request.getfixturevalue("skyrl")
            source = inspect.getsource(skyrl.torch.safe_exp_delta)
            assert source.count("torch.float32") == 1
            names = {"torch": torch}
            exec(source.replace("torch.float32", "torch.float64"), names)
            for module in (skyrl.ppo, skyrl.off_policy):
                monkeypatch.setattr(module, "safe_exp_delta", names["safe_exp_delta"])
    rtol, atol = (1e-9, 1e-14) if request.param == "in float64" else (1e-5, 1e-6)

    def compare(ours, theirs):
        assert ours.dtype == theirs.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)

    yield compare
    torch.set_default_dtype(torch.float32)


def batch(seed, sequences=6, tokens=10, spread=0.4):
    """New, old and engine log-probabilities, (B, 1) advantages, and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(sequences, tokens).abs()
    new, engine = old + spread * normal(sequences, tokens), old + spread * normal(sequences, tokens)
    mask = torch.rand(sequences, tokens, generator=generator) < 0.7
    mask[:, 0] = True
    return new, old, engine, normal(sequences, 1), mask


def clew_loss(new, old, advantages, mask, reduction, weights=None):
    norm = loss_norm(reduction, tokens=int(mask.sum()), sequences=len(mask), max_tokens=MAX_TOKENS)
    return policy_loss(new, old, advantages, mask, **CLIP, reduction=reduction, norm=norm, rollout_weights_BT=weights)


def value_and_gradient(new, loss_of):
    leaf = new.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


# ------------------------------------------------------------------------------------------------ TRL


def trl_advantages(trl, rewards, group_size, scale_rewards):
    """Runs TRL's own statements, cut out of the long method that holds them."""
    source = textwrap.dedent(inspect.getsource(trl.GRPOTrainer._generate_and_score_completions))
    branches = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("== 'sum_then_normalize'")
    ]
    assert len(branches) == 1
    names = {
        "self": SimpleNamespace(reward_weights=torch.ones(1).double(), scale_rewards=scale_rewards),
        "rewards_per_func": rewards[:, None], "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
        "num_generations": group_size, "device": "cpu", "torch": torch, "nanstd": trl.nanstd,
    }  # fmt: skip
    exec(compile(ast.Module(branches[0].body, []), "grpo_trainer.py", "exec"), names)
    return names["advantages"]


@pytest.mark.parametrize(("estimator", "scale_rewards"), [("grpo", "group"), ("grpo_no_std", "none")])
@pytest.mark.parametrize("seed", range(20))
def test_advantages_are_trls(trl, agree, estimator, scale_rewards, seed):
    groups, size = 4, 8
    rewards = torch.rand(groups * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if seed % 2:
        rewards = (rewards > 0.6).double()
    rewards[:size] = 1.0
    ids = torch.arange(groups).repeat_interleave(size)
    ours, _ = group_advantages(rewards, ids, estimator=estimator, epsilon=1e-4)
    agree(ours, trl_advantages(trl, rewards, size, scale_rewards))


@pytest.mark.parametrize("reduction", TRL_NAMES)
@pytest.mark.parametrize(("beta", "weighted"), [(0.0, False), (0.0, True), (0.1, False)])
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_trls(trl, agree, reduction, beta, weighted, seed):
    """Calls the real `GRPOTrainer._compute_loss`; only the model is replaced, by given log-probabilities."""
    new, old, engine, advantages, mask = batch(seed)
    weights = truncated_importance_weights(old, engine, 2.0) if weighted else None
    metrics = {"train": defaultdict(list)}
    same = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, gather_for_metrics=lambda x: x
    )

    def theirs(logprobs):
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            loss_type=TRL_NAMES[reduction], epsilon_low=CLIP["clip_low"], epsilon_high=CLIP["clip_high"],
            beta=beta, importance_sampling_level="token", top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False, _entropy_bonus_enabled=False, use_vllm=weighted,
            vllm_importance_sampling_correction=weighted, max_completion_length=MAX_TOKENS,
            current_gradient_accumulation_steps=1, accelerator=same, _metrics=metrics,
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        )  # fmt: skip
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        return trl.GRPOTrainer._compute_loss(
            trainer,
            None,
            {
                "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
                "completion_mask": torch.ones_like(ids), "tool_mask": mask.long(),
                "advantages": advantages.squeeze(1), "old_per_token_logps": old,
                "ref_per_token_logps": engine,
                "importance_sampling_ratio": weights, "num_items_in_batch": mask.sum(),
            },
        )  # fmt: skip

    def ours(logprobs):
        result = clew_loss(logprobs, old, advantages, mask, reduction, weights)
        norm = loss_norm(reduction, tokens=int(mask.sum()), sequences=len(mask), max_tokens=MAX_TOKENS)
        kl = kl_k3(logprobs, engine, mask)
        return result.loss + beta * reduce_tokens(kl, mask, reduction=reduction, norm=norm)

    for a, b in zip(value_and_gradient(new, ours), value_and_gradient(new, theirs), strict=True):
        agree(a, b)
    result = clew_loss(new, old, advantages, mask, reduction)
    reported = metrics["train"]["clip_ratio/region_mean"][0]
    assert (result.clipped / result.tokens).item() == pytest.approx(reported, rel=1e-6)


def test_entropy_is_trls(trl, agree):
    from trl.trainer.utils import entropy_from_logits as theirs

    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    agree(entropy_from_logits(logits, 0.7), theirs(logits / 0.7))


# ---------------------------------------------------------------------------------------------- SkyRL


@pytest.mark.parametrize("estimator", ["grpo", "grpo_no_std"])
@pytest.mark.parametrize("seed", range(20))
def test_advantages_are_skyrls(skyrl, agree, estimator, seed):
    """Groups of unequal size in random order, one of them of size one, one with equal rewards."""
    rng = random.Random(seed)
    ids = [9, 7, 7, 7] + [rng.randrange(4) for _ in range(20)]
    rewards = [0.7, 0.25, 0.25, 0.25] + [rng.choice([0.0, 1.0, rng.random()]) for _ in range(20)]
    order = rng.sample(range(24), 24)
    ids, rewards = [ids[i] for i in order], torch.tensor([rewards[i] for i in order], dtype=torch.float64)
    mask = torch.ones(24, 3, dtype=torch.float64)
    token_rewards = torch.zeros_like(mask)
    token_rewards[:, -1] = rewards
    theirs, _ = skyrl.ppo.compute_grpo_outcome_advantage(
        token_rewards, mask, np.array(ids), epsilon=1e-6, grpo_norm_by_std=estimator == "grpo"
    )
    ours, _ = group_advantages(rewards, torch.tensor(ids), estimator=estimator, epsilon=1e-6)
    if estimator == "grpo":  # alone, a trajectory gets R / (std + epsilon) with std = 1 there, and R here
        ours[torch.tensor([ids.count(group) == 1 for group in ids])] /= 1 + 1e-6
    agree(ours, theirs[:, 0])


@pytest.mark.parametrize("reduction", SKYRL_NAMES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_skyrls(skyrl, agree, reduction, weighted, seed):
    new, old, engine, advantages, mask = batch(seed)
    config = skyrl.config(eps_clip_low=CLIP["clip_low"], eps_clip_high=CLIP["clip_high"])
    config.off_policy_correction.tis_ratio_type = "token" if weighted else None
    assert config.off_policy_correction.token_tis_ratio_clip_high == 2.0
    scaled = skyrl.ppo.apply_loss_reduction_to_advantages_minibatch(
        advantages.expand_as(new), mask.double(), SKYRL_NAMES[reduction], len(mask), MAX_TOKENS
    )
    metrics = {}

    def theirs(logprobs):
        loss, reported = skyrl.ppo.ppo_policy_loss(logprobs, old, scaled, config, mask.double(), engine)
        metrics.update(reported)
        return loss

    weights = truncated_importance_weights(old, engine, 2.0) if weighted else None
    ours = value_and_gradient(new, lambda lp: clew_loss(lp, old, advantages, mask, reduction, weights).loss)
    for a, b in zip(ours, value_and_gradient(new, theirs), strict=True):
        agree(a, b)
    result = clew_loss(new, old, advantages, mask, reduction)
    assert (result.clipped / result.tokens).item() == pytest.approx(metrics["clip_ratio"], rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_kl_and_importance_weights_are_skyrls(skyrl, agree, seed):
    new, old, engine, _, mask = batch(seed)
    agree(kl_k3(new, old, mask), skyrl.ppo.compute_approx_kl(new, old, mask.double(), "k3"))
    theirs, _ = skyrl.off_policy.compute_tis_ratio(
        old, engine, mask.double(), "token", skyrl.config().off_policy_correction
    )
    agree(truncated_importance_weights(old, engine, 2.0), theirs)


def test_entropy_is_skyrls(skyrl, agree):
    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    agree(entropy_from_logits(logits, 0.7), skyrl.torch.chunked_entropy_from_logits(logits / 0.7))
