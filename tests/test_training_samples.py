"""From trajectories to advantages: groups are tasks, infrastructure is left out, equality is no signal."""

from __future__ import annotations

import math
from statistics import stdev

import pytest
import tiny

from clew.agent.ledger import StopReason, Trajectory
from clew.envs.base import Task
from clew.recipe import AlgorithmTable
from clew.training.samples import episode_metrics, group_metrics, prepare, repetition, warnings_for

VLM = tiny.shared_tiny()


def episode(
    task: str,
    reward: float,
    reason: StopReason | None = None,
    *,
    seed: int = 0,
    answers: tuple[str, ...] = ("up", "down"),
) -> Trajectory:
    trajectory = tiny.conversation(VLM, list(answers), seed, task=task)
    trajectory.reward, trajectory.success = reward, reward > 0
    trajectory.turns[-1].reward = reward
    trajectory.stop_reason = reason or (StopReason.SUCCESS if reward else StopReason.TURN_CAP)
    return trajectory


def advantages(trajectories: list[Trajectory], **algorithm: object) -> tuple[list[list[float]], list[bool]]:
    samples, used = prepare(trajectories, AlgorithmTable(**algorithm))
    return [s.advantages for s in samples], used


def test_groups_are_tasks_in_any_order() -> None:
    """Interleaved trajectories of two mazes with different seeds of one content: the content decides."""
    rewards = {"a": [1.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0]}
    mixed = [
        episode("a", 1.0, seed=1),
        episode("b", 1.0, seed=2),
        episode("a", 0.0, seed=3),  # another seed that made the same maze
        episode("b", 1.0, seed=2),
        episode("b", 0.0, seed=2),
        episode("a", 0.0, seed=1),
    ]
    found, used = advantages(mixed)
    assert all(used)
    for trajectory, values in zip(mixed, found, strict=True):
        group = rewards[trajectory.task.content_hash]
        expected = (trajectory.reward - sum(group) / 3) / (stdev(group) + 1e-4)
        assert values == pytest.approx([expected] * 2)
    plain, _ = advantages(mixed, advantage="grpo_no_std")
    assert plain[0] == pytest.approx([2 / 3] * 2) and plain[1] == pytest.approx([1 / 3] * 2)


def test_equal_text_is_no_group() -> None:
    """Two mazes under one prompt and one seed number are two groups (rllm 605)."""
    found, used = advantages([episode("a", 1.0), episode("a", 1.0), episode("b", 0.0), episode("b", 0.0)])
    assert found == [[0.0, 0.0]] * 4 and not any(used)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 1e-9])
def test_equal_rewards_are_exactly_no_signal(reward: float) -> None:
    found, used = advantages([episode("a", reward) for _ in range(8)], epsilon=1e-6)
    assert found == [[0.0, 0.0]] * 8 and not any(used)
    samples, used = prepare([episode("a", reward) for _ in range(8)], AlgorithmTable())
    metrics = group_metrics(samples, used)
    assert (metrics["train/groups_used"], metrics["train/groups_equal"]) == (0, 1)
    assert metrics["advantages/max"] == 0.0


@pytest.mark.parametrize("reason", [r for r in StopReason if r.infrastructure])
def test_infrastructure_is_left_out_of_the_group(reason: StopReason) -> None:
    """Its reward of 0 would pull the others' baseline down: the group is as if it had never been played."""
    healthy = [episode("a", 1.0), episode("a", 0.0), episode("a", 0.0)]
    broken = [episode("a", 0.0, reason), *healthy, episode("b", 0.0, reason)]
    assert advantages(broken) == advantages(healthy)
    metrics = episode_metrics(broken)
    assert (metrics["train/episodes"], metrics["train/solved"]) == (3, 1)
    assert metrics["train/solve_rate"] == pytest.approx(1 / 3)
    assert metrics[f"rollout/stop/{reason}"] == 2
    crashed_at_reset = Trajectory(Task("t", 0, "a"), 0, stop_reason=StopReason.ENV_CRASHED)
    assert advantages([*healthy, crashed_at_reset]) == advantages(healthy)
    assert prepare([crashed_at_reset], AlgorithmTable()) == ([], [])


@pytest.mark.parametrize(
    "reason",
    [StopReason.TURN_CAP, StopReason.TURN_TOKENS, StopReason.TRAJECTORY_TOKENS, StopReason.WRONG_END],
)
def test_the_agents_own_failures_count_as_zero(reason: StopReason) -> None:
    found, used = advantages([episode("a", 1.0), episode("a", 0.0, reason)])
    assert all(used) and found[0][0] == pytest.approx(-found[1][0]) and found[0][0] > 0


def test_gigpo_compares_turns_that_saw_the_same_frame() -> None:
    """Both start in the same frame; one solves it in one turn, the other in two, from a frame of its own."""
    quick = episode("a", 1.0, answers=("up",))
    slow = episode("a", 1.0, answers=("down", "up"))
    slow.turns[0].frame = quick.turns[0].frame
    slow.turns[1].frame = tiny.noise(77)
    found, used = advantages([quick, slow], advantage="gigpo")
    assert all(used), "equal rewards, but one way is shorter"
    spread = stdev([1.0, 0.95]) + 1e-4
    assert found[0] == pytest.approx([0.025 / spread])
    assert found[1] == pytest.approx([-0.025 / spread, 0.0], abs=1e-9)
    other, used = advantages([quick, slow], advantage="gigpo", step_advantage_weight=0.0)
    assert not any(used) and other == [[0.0], [0.0, 0.0]]


def test_episode_metrics_count_what_they_say() -> None:
    episodes = [
        episode("a", 1.0),
        episode("a", 0.0, StopReason.TURN_TOKENS),
        episode("b", 0.0, StopReason.TRAJECTORY_TOKENS),
        episode("b", 0.0),
    ]
    episodes[2].turns.append(type(episodes[2].turns[0])("shown, not answered", tiny.noise(5)))
    metrics = episode_metrics(episodes)
    assert metrics["rollout/cut_ratio"] == 0.5
    assert metrics["rollout/tokens_total"] == sum(len(t.token_ids) for t in episodes)
    assert metrics["rollout/tokens_sampled"] == sum(sum(t.sampled) for t in episodes)
    lengths = [turn.end - turn.start for t in episodes for turn in t.turns if turn.end]
    assert metrics["rollout/answer_tokens_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert sum(metrics[f"rollout/stop/{reason}"] for reason in StopReason) == 4
    assert metrics["train/reward_mean"] == 0.25
    assert all(math.isfinite(v) for v in episode_metrics([]).values())


def test_success_is_counted_apart_from_reward() -> None:
    shaped = [episode("a", 0.4), episode("a", 0.2)]
    for trajectory in shaped:
        trajectory.success, trajectory.stop_reason = False, StopReason.TURN_CAP
    metrics = episode_metrics(shaped)
    assert metrics["train/solved"] == 0 and metrics["train/reward_mean"] == pytest.approx(0.3)


def test_repetition() -> None:
    assert repetition([[5, 5, 5, 5]]) == 1.0
    assert repetition([[1, 2, 3], [4]]) == 0.0
    assert repetition([[1, 1, 2], [3, 3]]) == pytest.approx(2 / 3)
    assert repetition([]) == 0.0


def test_warnings() -> None:
    healthy = {
        "rollout/cut_ratio": 0.2,
        "rollout/repetition": 0.1,
        "policy/entropy": 0.4,
        "train/solve_rate": 0.3,
        "train/updates": 1,
    }
    assert warnings_for(healthy) == []
    for change, word in [
        ({"rollout/cut_ratio": 0.95}, "max_new_tokens"),
        ({"policy/entropy": 1e-5}, "entropy"),
        ({"rollout/repetition": 0.8}, "repeat"),
    ]:
        (warning,) = warnings_for({**healthy, **change})
        assert word in warning
    # Sure because it is right is no collapse; a step without update has no entropy to judge.
    assert warnings_for({**healthy, "policy/entropy": 1e-5, "train/solve_rate": 0.98}) == []
    assert warnings_for({**healthy, "policy/entropy": 0.0, "train/updates": 0}) == []
    assert (
        len(warnings_for({**healthy, "rollout/cut_ratio": 1.0, "policy/entropy": 0.0, "rollout/repetition": 1.0})) == 3
    )
