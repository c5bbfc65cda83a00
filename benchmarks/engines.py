"""Trajectories a second: the transformers engine against vLLM, on the laptop recipe's small model.

    .venvs/vllm/bin/python benchmarks/engines.py [--model FOLDER] [--mazes 16] [--repeats 3] [--threads 2]

(`scripts/setup_vllm.sh` makes that environment; on a machine with a GPU, one with the extra `vllm`.)

Compared, in one process, in turn, after one round that is not counted. Held equal: weights (no adapter), mazes,
environment and episode loop, token ids, turn and token caps, temperature, the full vocabulary without vision tokens,
log-probabilities of the sampled tokens, threads, float32. Each repeat plays the same mazes with other draws (the two
engines draw differently, so they play other episodes of one distribution: turns and tokens are printed).

Before timing it is checked that both give the same greedy episodes, and how far each one's log-probabilities are from
the trainer's.
"""

from __future__ import annotations

import os
import sys

import common
import torch

from clew.agent.ledger import Trajectory
from clew.policy.model import collate, load_processor, score
from clew.policy.vision import FeatureCache
from clew.rollout.engine import Sampling
from clew.rollout.episodes import play
from clew.rollout.transformers_engine import TransformersEngine
from clew.rollout.vllm_engine import VllmEngine
from clew.rollout.vllm_options import VllmSettings

Engine = TransformersEngine | VllmEngine


@torch.no_grad()
def gap(bench: common.Bench, trajectories: list[Trajectory]) -> torch.Tensor:
    """|engine - trainer| of the sampled tokens' log-probabilities, in nats."""
    vlm = bench.vlm
    triples = [(t.token_ids, t.sampled, t.grids) for t in trajectories]
    batch = collate(triples, vlm.template.image_token_id, vlm.merge_size)
    features = FeatureCache(vlm.model.model.visual, vlm.patcher)
    frames = [turn.frame for t in trajectories for turn in t.turns]
    theirs = score(vlm, batch, features.gather(frames), bench.sampling.temperature).logprobs_N
    ours = torch.tensor([lp for t in trajectories for lp, s in zip(t.logprobs, t.sampled, strict=True) if s])
    return (ours - theirs).abs()


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(options.threads):
        # vLLM's own kernels count threads by this alone, and read it when their library is loaded.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    bench = common.prepare(options.model, options.threads)
    recipe = bench.recipe
    attempts = bench.attempts(options.mazes)
    settings = VllmSettings(
        dtype=recipe.model.dtype,
        max_tokens=recipe.rollout.max_tokens,
        max_images=recipe.environment.max_turns,
        concurrent=bench.limits.concurrent,
        lora_rank=recipe.model.lora.rank,
        memory_utilization=recipe.rollout.memory_utilization,
    )
    engines: dict[str, Engine] = {
        "transformers": TransformersEngine(bench.vlm, FeatureCache(bench.vlm.model.model.visual, bench.vlm.patcher)),
        "vllm": VllmEngine(load_processor(bench.path), settings, bench.vlm.device.type),
    }

    def rollout(engine: Engine, sampling: Sampling, index: int, samples: int) -> list[Trajectory]:
        engine.release()
        todo = [(task, k) for task, k in attempts if k < samples]
        return play(engine, bench.player, bench.make_env, todo, sampling, bench.limits, ("engines", index))

    greedy = [rollout(e, Sampling(0.0, bench.sampling.max_new_tokens), 0, 1) for e in engines.values()]
    same = sum(a.token_ids == b.token_ids for a, b in zip(*greedy, strict=True))
    print(f"greedy episodes: {same} of {len(greedy[0])} the same token for token in both")

    group = recipe.algorithm.group_size
    watch, work = common.Stopwatch(), {name: common.Work() for name in engines}
    for index in range(options.repeats + 1):
        for name, engine in engines.items():
            with watch.time(name if index else "warm-up"):
                trajectories = rollout(engine, bench.sampling, index, group)
            if index:
                work[name].add(trajectories)
            else:
                gaps = gap(bench, trajectories)
                print(
                    f"{name}: log-probabilities are {gaps.mean():.1e} (at most {gaps.max():.1e}) nats off the trainer's"
                )

    print(f"\n{options.mazes} mazes x {group} trajectories, {options.repeats} repeats, medians:")
    rate = {name: len(attempts) / watch.median(name) for name in engines}
    for name in engines:
        print(f"{name:14} {rate[name]:8.2f} trajectories/s   ({watch.spread(name)} s for {len(attempts)})")
        print(f"{'':14} {work[name]}")
    slower, faster = sorted(rate, key=lambda name: rate[name])
    print(f"{faster} wins: {rate[faster] / rate[slower]:.2f} times {slower}")


if __name__ == "__main__":
    main()
