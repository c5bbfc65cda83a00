"""The scaling model (benchmarks/scale.py): closed forms, conservation, monotony."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

FILE = Path(__file__).parents[1] / "benchmarks" / "scale.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_scale", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scale = load()
WORLD = scale.World()
EVEN = scale.Workload(episode_sigma=0.0, turn_sigma=0.0, solved=0.0, stopped=0.0, median_answer=100.0)  # 15 x 100
AT_ONCE = scale.Engine(host_s=0.0, env_s=0.0)


def episode_s(work, costs, together: int) -> float:
    """Closed form: ``together`` equal episodes of 15 turns in lockstep on one engine that waits for nothing."""
    total, context = 0.0, 0.0
    for turn in range(15):
        new = work.observation if turn else work.opening
        middle = context + new + work.median_answer / 2
        reads = (costs.weight_bytes + together * middle * costs.kv_bytes) / costs.bandwidth
        total += together * (new * costs.prefill_s + costs.frame_s)
        total += work.median_answer * (reads + costs.overhead_s)
        context += new + work.median_answer
    return total


def test_model_sizes_are_those_of_the_architecture():
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
        },
        vision_config={"out_hidden_size": 4096},
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    linear = [m for m in model.model.language_model.modules() if isinstance(m, torch.nn.Linear)]
    head = model.lm_head.weight.numel()
    assert sum(m.weight.numel() for m in linear) + head == scale.READ_PARAMETERS
    assert scale.READ_PARAMETERS + model.get_input_embeddings().weight.numel() == scale.PARAMETERS
    assert sum(32 * (m.in_features + m.out_features) for m in linear) == scale.LORA_PARAMETERS
    assert sum(p.numel() for p in model.model.visual.parameters()) == pytest.approx(scale.VISION_PARAMETERS, rel=0.02)


def test_a_colocated_engine_holds_its_32_episodes_at_once_and_what_it_holds_fits():
    kept = scale.SLOTS_COLOCATED * 4200 * 2 * 2 * 8 * 128 * 36  # bytes: key and value, bf16, 8 heads of 128, 36 layers
    assert 32 <= scale.SLOTS_COLOCATED < scale.SLOTS_POOL
    assert 2 * (scale.PARAMETERS + scale.VISION_PARAMETERS) + kept + 4e9 <= 0.45 * 96e9


@pytest.mark.parametrize("together", [1, 2, 8])
def test_equal_episodes_on_one_engine_take_the_closed_form(together):
    play = scale.rollout(EVEN, AT_ONCE, together, 0, engines=1, slots=together)
    assert play.wall_s == pytest.approx(episode_s(EVEN, AT_ONCE, together), rel=1e-9)
    assert play.busy_s == pytest.approx(play.wall_s, rel=1e-9)
    assert play.waiting_s == pytest.approx(0.0, abs=1e-6)
    assert play.tail_s == 0.0 and play.last_tenth == pytest.approx(0.0, abs=1e-9)


def test_one_slot_plays_one_episode_after_another_and_waits_for_its_environment():
    costs = scale.Engine(host_s=0.5, env_s=2.0)
    play = scale.rollout(EVEN, costs, 3, 0, engines=1, slots=1)
    assert play.wall_s == pytest.approx(3 * (episode_s(EVEN, costs, 1) + 15 * 2.5), rel=1e-9)
    assert play.waiting_s == pytest.approx(3 * 15 * 2.5, rel=1e-9)


def test_the_host_of_an_engine_serves_one_turn_at_a_time():
    costs = scale.Engine(
        weight_bytes=0.0, kv_bytes=0.0, overhead_s=0.0, prefill_s=0.0, frame_s=0.0, host_s=1.0, env_s=0.0
    )
    play = scale.rollout(EVEN, costs, 8, 0, engines=1, slots=8)
    assert play.wall_s == pytest.approx(8 * 15, rel=1e-6)
    assert scale.rollout(EVEN, costs, 8, 0, engines=4, slots=2).wall_s == pytest.approx(2 * 15, rel=1e-6)


def token_by_token(work, costs, answers) -> float:
    """Wall time of one engine that decodes one token of every running sequence a step: no events, no mean contexts."""
    now = prefill = 0.0
    arrivals = [((i + 1) * costs.host_s + costs.env_s, i) for i in range(len(answers))]
    host_free, turn, context, running = len(answers) * costs.host_s, [0] * len(answers), [0.0] * len(answers), {}
    while running or arrivals:
        if not running:
            now = max(now, min(arrivals)[0])
        for at, i in [a for a in arrivals if a[0] <= now]:
            arrivals.remove((at, i))
            new = work.observation if turn[i] else work.opening
            prefill += new * costs.prefill_s + costs.frame_s
            context[i] += new
            running[i] = int(answers[i][turn[i]])
        reads = (costs.weight_bytes + costs.kv_bytes * sum(context[i] for i in running)) / costs.bandwidth
        now, prefill = now + prefill + reads + costs.overhead_s, 0.0
        for i in list(running):
            running[i] -= 1
            context[i] += 1
            if not running[i]:
                del running[i]
                turn[i] += 1
                if turn[i] < len(answers[i]):
                    host_free = max(host_free, now) + costs.host_s
                    arrivals.append((host_free + costs.env_s, i))
    return now


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_events_agree_with_decoding_token_by_token(seed):
    work, costs = WORLD.workload, WORLD.engine
    reference = token_by_token(work, costs, scale.sample_episodes(work, 16, seed))
    # A sequence that arrives during a step waits for its end there, half a step on average here.
    assert scale.rollout(work, costs, 16, seed, engines=1, slots=16).wall_s == pytest.approx(reference, rel=0.01)


def test_training_time_is_flops_over_speed_and_communication_appears_when_computing_is_free():
    one = [[100.0] * 10]
    tokens = EVEN.opening + 9 * EVEN.observation + 1000
    forward = 2 * scale.READ_PARAMETERS * tokens + 2 * scale.HIDDEN * scale.LAYERS * tokens**2
    lora = 6 * scale.LORA_PARAMETERS * tokens
    vision = 10 * 2 * scale.VISION_PARAMETERS * scale.PATCHES
    world = WORLD._replace(trainer=scale.Trainer(minibatches=1))
    wall, compute, excess, gathers = scale.train(world, one, 1)
    # forward + checkpoint's forward + backward (half of a full one for the weights, a full one for attention)
    flops = (
        2 * forward + 2 * scale.READ_PARAMETERS * tokens + 4 * scale.HIDDEN * scale.LAYERS * tokens**2 + lora + vision
    )
    assert wall == compute == pytest.approx(flops / world.trainer.flops)
    assert excess == gathers == 0.0
    # Six ranks, one sequence: five wait. Infinitely fast: two all-gathers a micro-batch remain, and the first layer's.
    wall, compute, excess, _ = scale.train(world, one, 6)
    assert compute + excess == pytest.approx(flops / world.trainer.flops) and excess == pytest.approx(5 * compute)
    free = world._replace(trainer=world.trainer._replace(flops=math.inf))
    gather = 5 / 6 * world.trainer.gather_bytes / world.trainer.network_bandwidth
    assert scale.train(free, one, 6) == pytest.approx((gather * (2 + 1 / 36), 0.0, 0.0, gather * (2 + 1 / 36)))


def test_colocated_without_a_tail_takes_the_sum_of_its_phases():
    transfer = scale.Transfer(evaluations=0.0)
    world = scale.World(EVEN, AT_ONCE, WORLD.trainer, transfer)
    step = scale.one_step(world, 6, 192, 0)
    trained = scale.train(world, [[100.0] * 15] * 192, 6)
    adapter = transfer.adapter_bytes / transfer.write_bandwidth + 3 * transfer.adapter_bytes / transfer.read_bandwidth
    frames = 2 * 192 * 15 * transfer.frame_bytes / transfer.trajectory_bandwidth
    saved = transfer.checkpoint_bytes / transfer.write_bandwidth / 20
    rest = adapter + transfer.load_s + frames + saved + transfer.sleep_s + transfer.step_s
    assert step.wall_s == pytest.approx(episode_s(EVEN, AT_ONCE, 32) + trained[0] + rest, rel=1e-6)
    assert step.gpu_s["tail"] == pytest.approx(0.0, abs=1e-9) and step.gpu_s["other pool"] == 0.0


@settings(max_examples=25, deadline=None)
@given(
    gpus=st.integers(2, 12),
    groups=st.integers(1, 12),
    seed=st.integers(0, 99),
    pool=st.floats(0, 0.99),
    off_policy=st.booleans(),
    slots=st.integers(1, 40),
    stealing=st.booleans(),
)
def test_every_gpu_second_is_accounted_for(gpus, groups, seed, pool, off_policy, slots, stealing):
    x = int(pool * gpus)
    policy = scale.Policy(x, off_policy and x > 0, slots, stealing)
    step = scale.one_step(WORLD, gpus, 8 * groups, seed, policy)
    assert sum(step.gpu_s.values()) == pytest.approx(gpus * step.wall_s, rel=1e-6)
    assert all(0.0 <= s / (gpus * step.wall_s) + 1e-9 <= 1.0 + 1e-6 for s in step.gpu_s.values())
    assert 0.0 <= step.rolled.last_tenth <= 1.0


def test_episodes_keep_their_limits_and_an_even_batch_has_the_same_tokens():
    work = WORLD.workload
    answers = scale.sample_episodes(work, 2000, 0)
    lengths = np.array([len(a) for a in answers])
    tokens = np.concatenate(answers)
    assert lengths.min() >= 1 and lengths.max() == 15
    assert (lengths < 13).mean() == pytest.approx(work.stopped * 12 / 14, abs=0.03)
    assert tokens.min() >= 1 and tokens.max() == work.cap_answer
    assert np.median(tokens) == pytest.approx(work.median_answer, rel=0.05)
    even = scale.sample_episodes(work._replace(even=True), 2000, 0)
    assert sum(map(sum, even)) == pytest.approx(tokens.sum())
    assert all(e == even[0] for e in even)


@pytest.mark.parametrize("seed", [0, 1])
def test_faster_parts_and_shorter_answers_never_make_a_step_longer(seed):
    def wall(world, gpus=6):
        return scale.one_step(world, gpus, 192, seed).wall_s

    base = wall(WORLD)
    for cost, free in scale.FREE.items():
        assert wall(free(WORLD)) <= base + 1e-6, cost
    assert (
        wall(scale.UNCERTAIN["answers half as long"](WORLD))
        < base
        < wall(scale.UNCERTAIN["answers twice as long"](WORLD))
    )
    assert wall(scale.UNCERTAIN["training at twice the FLOP/s"](WORLD)) < base
    assert wall(WORLD, 12) < base < wall(WORLD, 3)


def test_the_pools_of_a_pipelined_step_overlap():
    for x in (2, 4):
        after, beside = (scale.one_step(WORLD, 6, 96, 0, scale.Policy(x, off)) for off in (False, True))
        busy = max(beside.gpu_s["rollout"] / x, beside.gpu_s["training"] / (6 - x))
        assert max(busy, after.wall_s / 2) <= beside.wall_s < after.wall_s


def test_pulling_episodes_helps_when_some_are_many_times_longer():
    # One engine is dealt all the long ones (every second episode), unless the other takes its share.
    answers = [[1000.0 if i % 2 else 10.0] for i in range(16)]
    work = scale.Workload(median_answer=7.0)
    original = scale.sample_episodes
    scale.sample_episodes = lambda *_: answers
    try:
        dealt = scale.rollout(work, AT_ONCE, 16, 0, engines=2, slots=1, stealing=False)
        pulled = scale.rollout(work, AT_ONCE, 16, 0, engines=2, slots=1)
    finally:
        scale.sample_episodes = original
    assert pulled.wall_s < 0.6 * dealt.wall_s
    assert pulled.busy_s == pytest.approx(dealt.busy_s)  # the same work, better spread


def test_the_best_split_is_the_best():
    best = scale.policies(WORLD, 6, 64)
    for name, off in {"pools": False, "pools, one step off": True}.items():
        walls = {x: scale.one_step(WORLD, 6, 64, 0, scale.Policy(x, off)).wall_s for x in range(1, 6)}
        assert best[name] == scale.Policy(min(walls, key=walls.__getitem__), off)
