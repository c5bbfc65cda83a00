"""Advantages against an independent scalar loop, and the properties they are chosen for."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.algorithms import discounted_returns, group_advantages, step_advantages
from clew.errors import UserError

REWARD = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 1.0]), st.floats(-3, 3, width=32))
GROUPED = st.lists(st.tuples(REWARD, st.integers(-2, 3)), min_size=1, max_size=24)
ESTIMATOR = st.sampled_from(["grpo", "grpo_no_std"])
EPSILON = 1e-4
repeatable = settings(deadline=None, derandomize=True)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def relative(value, peers, estimator):
    """The scalar reference: one value against its peers (itself included)."""
    if len(set(peers)) == 1:
        return 0.0
    centred = value - statistics.fmean(peers)
    return centred / (statistics.stdev(peers) + EPSILON) if estimator == "grpo" else centred


def episode_reference(rewards, groups, estimator):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        out.append(reward if len(peers) == 1 else relative(reward, peers, estimator))
    return out


@repeatable
@given(GROUPED, ESTIMATOR)
def test_group_advantages_equal_the_scalar_loop(grouped, estimator):
    rewards, groups = zip(*grouped, strict=True)
    advantages, used = group_advantages(f64(rewards), torch.tensor(groups), estimator=estimator, epsilon=EPSILON)
    torch.testing.assert_close(advantages, f64(episode_reference(rewards, groups, estimator)), rtol=1e-9, atol=1e-12)
    for index, group in enumerate(groups):
        peers = [r for r, g in grouped if g == group]
        alone_with_reward = len(peers) == 1 and peers[0] != 0
        assert used[index].item() == (len(set(peers)) > 1 or alone_with_reward)


@repeatable
@given(st.floats(-3, 3), st.integers(2, 9), ESTIMATOR, st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_give_exactly_zero(reward, size, estimator, dtype):
    rewards = torch.full((size,), reward, dtype=dtype)
    advantages, used = group_advantages(rewards, torch.zeros(size, dtype=torch.int64), estimator=estimator)
    assert advantages.dtype == dtype
    assert (advantages == 0).all() and not used.any()


def test_a_group_of_one_gets_its_reward():
    advantages, used = group_advantages(f64([0.7, 0.0, 0.0, 1.0]), torch.tensor([5, 6, 7, 7]), estimator="grpo")
    assert advantages[:2].tolist() == [0.7, 0.0]
    assert used.tolist() == [True, False, True, True]


def test_one_success_in_eight():
    advantages, _ = group_advantages(f64([1] + [0] * 7), torch.zeros(8, dtype=torch.int64), estimator="grpo", epsilon=0)
    assert advantages[0].item() == pytest.approx(7 / math.sqrt(8), rel=1e-12)
    assert advantages[1].item() == pytest.approx(-1 / math.sqrt(8), rel=1e-12)


@repeatable
@given(GROUPED, ESTIMATOR, st.randoms())
def test_order_does_not_matter(grouped, estimator, random):
    order = list(range(len(grouped)))
    random.shuffle(order)
    rewards, groups = f64([r for r, _ in grouped]), torch.tensor([g for _, g in grouped])
    plain, used = group_advantages(rewards, groups, estimator=estimator)
    shuffled, used_shuffled = group_advantages(rewards[order], groups[order], estimator=estimator)
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-9, atol=1e-12)
    assert used_shuffled.tolist() == used[order].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_named(bad):
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UserError, match="reward number 1 is"):
        group_advantages(f64([0.0, bad]), ids, estimator="grpo")
    with pytest.raises(UserError, match="return number 0 is"):
        step_advantages(f64([0.0, 1.0]), ids, f64([bad]), torch.tensor([0]), torch.tensor([0]))


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="gae"):
        group_advantages(f64([0.0, 1.0]), torch.tensor([0, 0]), estimator="gae")


def test_nothing_in_nothing_out():
    none, ids = f64([]), torch.zeros(0, dtype=torch.int64)
    assert [t.shape for t in group_advantages(none, ids, estimator="grpo")] == [(0,), (0,)]
    assert [t.shape for t in step_advantages(none, ids, none, ids, ids)] == [(0,), (0,)]


EPISODES = st.lists(  # (group, reward, [anchor of each turn])
    st.tuples(st.integers(0, 2), REWARD, st.lists(st.sampled_from([-(2**62), 0, 1, 2**62 + 1]), max_size=6)),
    min_size=1,
    max_size=10,
)


@repeatable
@given(EPISODES, ESTIMATOR, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.95, 1.0]))
def test_step_advantages_equal_the_scalar_loop(episodes, estimator, weight, discount):
    rewards, groups = [r for _, r, _ in episodes], [g for g, _, _ in episodes]
    turns = [(n, anchor) for n, (_, _, anchors) in enumerate(episodes) for anchor in anchors]
    trajectory, anchors = (torch.tensor([t[i] for t in turns], dtype=torch.int64) for i in (0, 1))
    returns = []  # only the last turn is rewarded: return = reward x discount ^ (turns that follow)
    for _, reward, visited in episodes:
        returns += [reward * discount**after for after in reversed(range(len(visited)))]

    last = [i + 1 == len(turns) or turns[i + 1][0] != n for i, (n, _) in enumerate(turns)]
    turn_rewards = f64([rewards[n] if is_last else 0.0 for (n, _), is_last in zip(turns, last, strict=True)])
    returns_M = discounted_returns(turn_rewards, trajectory, discount)
    torch.testing.assert_close(returns_M, f64(returns), rtol=1e-12, atol=0)

    advantages, used = step_advantages(
        f64(rewards), torch.tensor(groups), f64(returns), trajectory, anchors,
        weight=weight, estimator=estimator, epsilon=EPSILON,
    )  # fmt: skip
    episode = episode_reference(rewards, groups, estimator)
    expected, signal = [], {n for n, a in enumerate(episode) if a != 0}
    for (n, anchor), value in zip(turns, returns, strict=True):
        peers = [v for (m, a), v in zip(turns, returns, strict=True) if a == anchor and groups[m] == groups[n]]
        expected.append(episode[n] + weight * relative(value, peers, estimator))
        if weight and len(set(peers)) > 1:
            signal.add(n)
    torch.testing.assert_close(advantages, f64(expected), rtol=1e-9, atol=1e-12)
    with_signal = {groups[n] for n in signal}
    assert used.tolist() == [group in with_signal for group in groups]


def test_step_advantages_prefer_the_shorter_of_two_solutions():
    """Both trajectories solve the maze, so GRPO learns nothing; one took two needless moves."""
    rewards, groups = f64([1.0, 1.0]), torch.tensor([0, 0])
    trajectory, anchors = torch.tensor([0, 0, 1, 1, 1, 1]), torch.tensor([10, 11, 10, 12, 10, 11])
    returns = discounted_returns(f64([0, 1, 0, 0, 0, 1]), trajectory, 0.9)
    assert not group_advantages(rewards, groups, estimator="grpo")[1].any()
    advantages, used = step_advantages(rewards, groups, returns, trajectory, anchors)
    assert used.all()
    assert advantages[0] == advantages[4] > 0 > advantages[2]  # three visits of state 10
    assert advantages[[1, 3, 5]].tolist() == [0, 0, 0]  # equal returns; a state met once; equal returns


def test_discounted_returns_of_interleaved_trajectories():
    returns = discounted_returns(f64([1, 0, 2, 4]), torch.tensor([3, 8, 3, 8]), 0.5)
    assert returns.tolist() == [2, 2, 2, 4]
