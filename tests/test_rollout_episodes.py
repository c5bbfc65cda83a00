"""Episodes end for typed reasons, and one that fails harms no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny

from clew.agent.ledger import StopReason, Trajectory
from clew.envs.base import Task
from clew.envs.maze_env import MazeEnv, answer_text
from clew.rollout import episodes
from clew.rollout.engine import Sampling
from clew.rollout.env_calls import EnvCalls
from clew.rollout.episodes import Limits, Player, play, play_feed
from clew.rollout.feed import Attempt, Feed

VLM = tiny.shared_tiny()
PLAYER = Player(VLM.template, VLM.patcher)
SAMPLING = Sampling(1.0, 8)
Say = Callable[[Trajectory], str | None]


def maze_env(**changes: Any) -> MazeEnv:
    return MazeEnv(**{"size": (4, 4), "min_path": 3, "max_path": 6, "max_turns": 6, **changes})


def run(
    say: Say, make_env: Any = maze_env, seeds: Any = range(4), limits: Limits | None = None, **options: Any
) -> list:
    env = make_env()
    engine = tiny.ScriptedEngine(VLM, say)
    tasks = [(env.task(seed), 0) for seed in seeds]
    return play(engine, PLAYER, make_env, tasks, SAMPLING, limits or Limits(4000), ("s", 1), **options)


def oracle(trajectory: Trajectory) -> str:
    """Walks a maze of its own along with the episode."""
    env = maze_env()
    env.reset(trajectory.task.seed)
    for turn in trajectory.turns[:-1]:
        env.step(turn.answer)
    return env.oracle_action()


def test_success() -> None:
    for trajectory in run(oracle):
        assert trajectory.stop_reason is StopReason.SUCCESS
        assert trajectory.success and trajectory.reward == 1.0
        assert len(trajectory.turns) == trajectory.path_length
        assert [t.feedback for t in trajectory.turns] == ["moved"] * (trajectory.path_length - 1) + ["reached"]
        assert [t.reward for t in trajectory.turns] == [0.0] * (trajectory.path_length - 1) + [1.0]
        assert trajectory.turns[0].text == "" and trajectory.turns[1].text == "Moved."
        assert trajectory.final_frame is not None and trajectory.policy_version == "scripted"
        # The frames are what the agent saw, the last one what its last answer led to.
        env = maze_env()
        observation, _ = env.reset(trajectory.task.seed)
        for turn in trajectory.turns:
            assert np.array_equal(turn.frame, observation.image)
            observation, *_ = env.step(turn.answer)
        assert np.array_equal(trajectory.final_frame, observation.image)


def test_turn_cap() -> None:
    for trajectory in run(lambda t: "hello"):
        assert trajectory.stop_reason is StopReason.TURN_CAP and not trajectory.success
        assert len(trajectory.turns) == 6 and {t.feedback for t in trajectory.turns} == {"unparsable"}


def test_wrong_end() -> None:
    for trajectory in run(lambda t: answer_text("stop"), lambda: maze_env(goal="stop", max_turns=7)):
        assert trajectory.stop_reason is StopReason.WRONG_END
        assert len(trajectory.turns) == 1 and trajectory.reward == 0.0


def test_turn_tokens() -> None:
    """A cut answer is not played: it is a token stop, no parse error, and its tokens stay in the record."""
    for trajectory in run(lambda t: None if len(t.turns) == 2 else "hello"):
        assert trajectory.stop_reason is StopReason.TURN_TOKENS
        first, second = trajectory.turns
        assert first.feedback == "unparsable" and second.feedback == ""
        assert second.end - second.start == SAMPLING.max_new_tokens
        assert trajectory.token_ids[-1] != VLM.template.end_of_turn_id


def test_trajectory_tokens() -> None:
    """The budget has room for a whole answer or the turn is not played; what was answered stays within it."""
    whole = run(lambda t: "hello")
    for budget in (400, 200, 130, 20):
        for trajectory, full in zip(run(lambda t: "hello", limits=Limits(budget)), whole, strict=True):
            answered = max(turn.end for turn in trajectory.turns)
            assert answered <= budget
            if full.turns[-1].start + SAMPLING.max_new_tokens <= budget:
                assert trajectory.stop_reason is StopReason.TURN_CAP
                continue
            assert trajectory.stop_reason is StopReason.TRAJECTORY_TOKENS
            assert full.token_ids[: len(trajectory.token_ids)] == trajectory.token_ids
            last = trajectory.turns[-1]
            assert last.start == last.end == 0, "the turn that did not fit was shown and not answered"
            assert sum(trajectory.sampled) == sum(t.end - t.start for t in trajectory.turns)
            assert len(trajectory.token_ids) + SAMPLING.max_new_tokens > budget
            trajectory.check_images(VLM.template.image_token_id, VLM.merge_size)
    turns = [len(t.turns) for budget in (400, 200, 20) for t in run(lambda t: "hello", limits=Limits(budget))]
    assert len(set(turns)) > 1


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done stays done; what is not is an infrastructure stop, and nothing waits for a straggler."""
    clock = [0.0]
    monkeypatch.setattr(episodes.time, "monotonic", lambda: clock[0])

    def say(trajectory: Trajectory) -> str:
        clock[0] += 1.0
        return oracle(trajectory) if trajectory.task.seed < 2 else "hello"

    ended = run(say, limits=Limits(4000, deadline_s=20.5))
    assert [t.stop_reason for t in ended[:2]] == [StopReason.SUCCESS] * 2
    assert [t.stop_reason for t in ended[2:]] == [StopReason.TURN_CAP] * 2
    clock[0] = 0.0
    late = run(say, limits=Limits(4000, deadline_s=3.5))
    assert {t.stop_reason for t in late} == {StopReason.DEADLINE}
    assert all(t.stop_reason.infrastructure and len(t.turns) == 2 for t in late)


# --- environments that fail ------------------------------------------------------------------------------


class Factory:
    """Makes word environments that raise where ``when(seed, turn, n-th environment of that seed)`` says."""

    def __init__(self, when: Callable[[int, int, int], bool]) -> None:
        self.when = when
        self.made: list[tiny.WordEnv] = []
        self.resets: dict[int, int] = {}

    def __call__(self) -> tiny.WordEnv:
        env = tiny.WordEnv(raises=self.raises)
        self.made.append(env)
        return env

    def raises(self, seed: int, turn: int) -> None:
        if turn == 0:
            self.resets[seed] = self.resets.get(seed, 0) + 1
        if self.when(seed, turn, self.resets[seed]):
            raise RuntimeError("the simulator died")


def words(trajectory: Trajectory) -> str:
    return f"a{len(trajectory.turns)}"


def wordplay(when: Callable[[int, int, int], bool]) -> tuple[list[Trajectory], Factory]:
    factory = Factory(when)
    tasks = [(tiny.WordEnv().task(seed), 0) for seed in range(8)]
    engine = tiny.ScriptedEngine(VLM, words)
    return play(engine, PLAYER, factory, tasks, SAMPLING, Limits(4000), ("s",)), factory


def facts(trajectory: Trajectory) -> tuple[Any, ...]:
    return (
        trajectory.token_ids,
        trajectory.sampled,
        trajectory.stop_reason,
        trajectory.reward,
        len(trajectory.turns),
    )


def longest(trajectories: list[Trajectory]) -> int:
    return max(range(len(trajectories)), key=lambda i: len(trajectories[i].turns))


def test_a_crash_is_played_again_with_a_fresh_environment() -> None:
    healthy, _ = wordplay(lambda *_: False)
    victim = longest(healthy)
    assert len(healthy[victim].turns) >= 3
    mended, factory = wordplay(lambda seed, turn, n: seed == victim and turn == 2 and n == 1)
    assert [facts(t) for t in mended] == [facts(t) for t in healthy], "the replay leaves no trace in the record"
    assert len(factory.made) == 9 and all(env.closed for env in factory.made)


def test_a_second_crash_is_typed_and_harms_no_other() -> None:
    healthy, _ = wordplay(lambda *_: False)
    victim = longest(healthy)
    broken, factory = wordplay(lambda seed, turn, n: seed == victim and turn == 2)
    assert broken[victim].stop_reason is StopReason.ENV_CRASHED and not broken[victim].success
    others = [i for i in range(8) if i != victim]
    assert [facts(broken[i]) for i in others] == [facts(healthy[i]) for i in others]
    assert factory.resets[victim] == 2 and all(env.closed for env in factory.made)


@pytest.mark.parametrize("times", [1, 2])
def test_a_crash_in_reset(times: int) -> None:
    healthy, _ = wordplay(lambda *_: False)
    trajectories, factory = wordplay(lambda seed, turn, n: seed == 3 and turn == 0 and n <= times)
    assert all(env.closed for env in factory.made)
    if times == 1:
        assert [facts(t) for t in trajectories] == [facts(t) for t in healthy]
    else:
        assert trajectories[3].stop_reason is StopReason.ENV_CRASHED
        assert trajectories[3].turns == [] and trajectories[3].token_ids == []


def test_an_environment_that_can_not_be_made_or_closed() -> None:
    made = []

    def make() -> tiny.WordEnv:
        made.append(1)
        if len(made) in (2, 4):  # the second episode's first try, and its second after all others' first
            raise OSError("no display")
        env = tiny.WordEnv()
        env.close = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        return env

    tasks = [(tiny.WordEnv().task(seed), 0) for seed in range(3)]
    played = play(tiny.ScriptedEngine(VLM, words), PLAYER, make, tasks, SAMPLING, Limits(4000), ("s",))
    healthy, _ = wordplay(lambda *_: False)
    assert played[1].stop_reason is StopReason.ENV_CRASHED
    assert [facts(played[i]) for i in (0, 2)] == [facts(healthy[i]) for i in (0, 2)]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_hangs_meets_the_deadline_alone(where: str) -> None:
    """It holds the others up for a moment, once, and is left behind when the time is up."""
    release = threading.Event()
    victim = 1

    def hang(seed: int, turn: int) -> None:
        if seed == victim and turn == (0 if where == "reset" else 1):
            release.wait(60)

    engine = tiny.ScriptedEngine(VLM, words)
    tasks = [(tiny.WordEnv().task(seed), 0) for seed in range(5)]
    began = time.monotonic()
    limits = Limits(4000, deadline_s=3.0)
    try:
        played = play(engine, PLAYER, lambda: tiny.WordEnv(raises=hang), tasks, SAMPLING, limits, ("s",))
    finally:
        release.set()
    assert 3.0 <= time.monotonic() - began < 10
    healthy, _ = wordplay(lambda *_: False)
    assert played[victim].stop_reason is StopReason.DEADLINE
    assert [facts(t) for i, t in enumerate(played) if i != victim] == [
        facts(t) for i, t in enumerate(healthy[:5]) if i != victim
    ]
    assert engine.calls[0] == (4 if where == "reset" else 5), "the others went on"


def test_a_feed_is_drawn_from_as_places_become_free() -> None:
    tasks = [(tiny.WordEnv().task(seed), 0) for seed in range(8)]
    engine = tiny.ScriptedEngine(VLM, words)
    narrow = play(engine, PLAYER, tiny.WordEnv, tasks, SAMPLING, Limits(4000, concurrent=3), ("s",))
    wide, _ = wordplay(lambda *_: False)
    assert [facts(t) for t in narrow] == [facts(t) for t in wide[:8]]
    assert max(engine.calls) == 3 and engine.calls[:2] == [3, 3]


def test_what_is_fed_while_nothing_but_a_hanging_environment_is_left_is_played_at_once() -> None:
    release = threading.Event()

    def hang(seed: int, turn: int) -> None:
        if seed == 0 and turn == 1:
            release.wait(60)

    attempts = [Attempt(seed, tiny.WordEnv().task(seed), 0) for seed in range(3)]
    feed = Feed(attempts[:2])
    engine = tiny.ScriptedEngine(VLM, words)
    limits = Limits(4000, deadline_s=60)
    rounds = play_feed(engine, PLAYER, lambda: tiny.WordEnv(raises=hang), feed, SAMPLING, limits, ("s",))
    began = time.monotonic()
    try:
        assert [place for place, _ in next(rounds)] == [1]
        later = threading.Timer(0.5, feed.add, [attempts[2:]])
        later.start()
        assert [place for place, _ in next(rounds)] == [2]
        assert time.monotonic() - began < 20
    finally:
        release.set()
        rounds.close()


def test_an_engine_in_a_hurry_gets_threads_for_slow_environments_too() -> None:
    calls: EnvCalls[int] = EnvCalls()
    for key in range(12):
        calls.start(key, lambda: time.sleep(0.3))
    began, found = time.monotonic(), 0
    while found < 12:
        found += len(calls.wait(0.005, until=began + 60, at_least_one=False))
        time.sleep(0.01)  # what the engine does meanwhile
    calls.close()
    assert time.monotonic() - began < 0.6 * 12 * 0.3, "one thread takes 12 x 0.3 s"


def test_tasks_of_other_settings_are_refused() -> None:
    task = Task(MazeEnv.env_id, 1, "0123456789abcdef")
    with pytest.raises(ValueError, match="settings differ"):
        play(tiny.ScriptedEngine(VLM, words), PLAYER, maze_env, [(task, 0)], SAMPLING, Limits(4000), ("s",))


# --- records ---------------------------------------------------------------------------------------------


def test_images_and_placeholders_agree_in_every_episode() -> None:
    make = lambda: tiny.WordEnv(max_turns=5, sizes=((64, 64), (96, 64), (50, 70)))  # noqa: E731
    for trajectory in run(words, make, range(12)):
        trajectory.check_images(VLM.template.image_token_id, VLM.merge_size)
        assert [VLM.patcher.grid(turn.frame) for turn in trajectory.turns] == trajectory.grids
        assert len(trajectory.token_ids) == len(trajectory.sampled) == len(trajectory.logprobs)


def test_success_is_not_reward() -> None:
    class Shaped(tiny.WordEnv):
        def step(self, action: str):  # type: ignore[no-untyped-def]
            observation, _, terminated, truncated, info = super().step(action)
            return observation, 0.5, terminated, truncated, {**info, "success": False}

    for trajectory in run(words, Shaped):
        assert not trajectory.success and trajectory.stop_reason is not StopReason.SUCCESS
        assert trajectory.reward == 0.5 * len(trajectory.turns)


def test_only_the_living_are_asked() -> None:
    engine = tiny.ScriptedEngine(VLM, words)
    tasks = [(tiny.WordEnv().task(seed), 0) for seed in range(12)]
    played = play(engine, PLAYER, tiny.WordEnv, tasks, SAMPLING, Limits(4000), ("s",))
    lengths = [len(t.turns) for t in played]
    assert engine.calls == [sum(n > turn for n in lengths) for turn in range(max(lengths))]
    assert len(set(engine.calls)) > 1
    assert [t.task.seed for t in played] == list(range(12))


def test_a_frame_filter_changes_what_is_seen_and_nothing_else() -> None:
    plain = run(oracle)
    seen = run(oracle, see=lambda frame, trajectory: np.zeros_like(frame))
    for a, b in zip(plain, seen, strict=True):
        assert a.token_ids == b.token_ids and a.success and b.success
        assert all(not turn.frame.any() for turn in b.turns)
        assert b.final_frame is not None and b.final_frame.any()
