"""A model, not a measurement: one GRPO step of the published run on 6 and on 48 GPUs, by discrete events.

    python benchmarks/scale.py [--seeds 5] [--json FILE]      (a minute on one core)

Colocated (all GPUs roll out, then all train) against pools (some roll out, then the others train), and pools one step
off (both at once, the engines a step behind; Clew does not do it). Every assumption is a field below, with its unit
and source. ``FREE`` sets one cost to zero at a time: what shortens the step most is the bottleneck.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

# Qwen3-VL-8B (36 layers, hidden 4096, MLP 12288, 32 heads and 8 key/value heads of 128, vocabulary 151,936, untied).
LAYERS, HIDDEN = 36, 4096
READ_PARAMETERS = LAYERS * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 151_936 * 4096  # with the head
PARAMETERS = READ_PARAMETERS + 151_936 * 4096  # with the input embedding; the vision tower has 0.58e9 more
LORA_PARAMETERS = LAYERS * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))  # rank 32, all linear
VISION_PARAMETERS, PATCHES = 0.58e9, 256  # a 225 x 225 frame is enlarged to 256 x 256: 256 patches, 64 tokens
# RTX PRO 6000 Blackwell Server Edition (g7e), NVIDIA's data sheet: 96 GB, 1597 GB/s, 120 TFLOPS in fp32; dense bf16 is
# four times that, as in the whitepaper's table for the Workstation Edition (503.8, RTX PRO Blackwell v1.0, table 4).
PEAK_FLOPS, GPUS_A_NODE = 480e12, 2  # ml.g7e.12xlarge: two GPUs (https://aws.amazon.com/ec2/instance-types/g7e/)


class Workload(NamedTuple):
    """Episodes. VisGym easy: 12 moves and ``stop`` solve most mazes, only ``stop`` ends an episode early."""

    median_answer: float = 128.0  # tokens an answer; assumed, the published run only states the cap
    cap_answer: float = 1024.0  # tokens (published)
    turn_sigma: float = 0.6  # lognormal spread within an episode; assumed
    episode_sigma: float = 0.5  # lognormal spread between episodes (some are wordy throughout): the long tail; assumed
    solved: float = 0.6  # between the published 44 % and 97 %; takes 13 to 15 turns
    stopped: float = 0.2  # a wrong stop, after 1 to 14 turns; the rest plays all 15 turns
    opening: float = 566.0  # tokens: instructions and the first frame
    observation: float = 116.0  # tokens: 64 of the frame, feedback, template
    even: bool = False  # every episode the same, with the same total of tokens


class Engine(NamedTuple):
    """One vLLM engine on one GPU."""

    weight_bytes: float = 2.0 * READ_PARAMETERS  # bf16, read once a decode step
    kv_bytes: float = 2 * 2 * 8 * 128 * LAYERS  # a token of context, bf16
    bandwidth: float = 0.85 * 1597e9  # bytes/s; 0.85 assumed: a 27.9e9-parameter decoder gives 25.7 tokens/s in bf16 on
    # this GPU = 0.80 to 0.90 of the two editions' bandwidth (https://lmsys.org/blog/2026-08-10-meta-muse-glimmer/)
    overhead_s: float = 6e-3  # a decode step: LoRA kernels, sampling, scheduling. Qwen3-8B takes 23.5 ms a step with 50
    # sequences on a 1344 GB/s RTX PRO 5000, 16 ms of it reads (https://www.databasemart.com/blog/vllm-gpu-benchmark-pro5000)
    prefill_s: float = 2.0 * READ_PARAMETERS / (0.5 * PEAK_FLOPS)  # a token, at half the peak; the prefix is cached
    frame_s: float = 2.0 * VISION_PARAMETERS * PATCHES / (0.25 * PEAK_FLOPS)  # vision tower, a frame
    host_s: float = 3.1e-3  # a turn, one after another: image processor, PNG, template (measured: one core, Zen 4)
    env_s: float = 6.6e-3  # a turn, side by side: VisGym in a child process, 0.8 ms of it the step (measured)


class Trainer(NamedTuple):
    """FSDP2 over all ranks, LoRA over a frozen base, gradient checkpointing."""

    flops: float = 0.35 * PEAK_FLOPS  # assumed, recomputation counted; Unsloth reaches 0.42 with Qwen3-8B LoRA on one
    # H100 (9,100 tokens/s: https://github.com/invergent-ai/surogate, docs/docs/reference/benchmarks.md)
    minibatches: int = 2  # published; more than one: old log-probabilities take another forward pass
    microbatch: float = 16_384.0  # tokens a rank: 4 sequences, as published
    gather_bytes: float = 2.0 * PARAMETERS  # bf16, a full all-gather
    node_bandwidth: float = 40e9  # bytes/s: NCCL on PCIe 5 with this GPU reaches 38 to 41
    # (https://github.com/voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md)
    network_bandwidth: float = 0.7 * 50e9  # bytes/s: EFA, 400 Gbit/s a g7e.12xlarge; 0.7 assumed


class Transfer(NamedTuple):
    """Between the phases. FSx for Lustre: 1200 GiB, PERSISTENT_2, 250 MB/s a TiB, bursting (its mean use is low)."""

    adapter_bytes: float = 4.0 * LORA_PARAMETERS  # fp32
    write_bandwidth: float = (
        1.17 * 500e6
    )  # bytes/s: https://docs.aws.amazon.com/fsx/latest/LustreGuide/ssd-storage.html
    read_bandwidth: float = 1.17 * 1300e6  # bytes/s, from the servers' memory, shared by all nodes (a node reads once)
    load_s: float = 0.75  # an engine checks the adapter's hash and takes it in; assumed
    sleep_s: float = 3.0  # colocated engines, both ways; 0.1 to 6 s (https://blog.vllm.ai/2025/10/26/sleep-mode.html)
    trajectory_bandwidth: float = 1e9  # bytes/s through the driver, in and out; assumed
    frame_bytes: float = 225 * 225 * 3.0  # frames travel raw
    step_s: float = 1.0  # driver: advantages, Ray calls, logs; assumed
    checkpoint_bytes: float = 4 * 4.0 * LORA_PARAMETERS  # adapter, two moments of AdamW, and the export; every 20 steps
    evaluations: float = 0.1  # of 64 mazes a step


class World(NamedTuple):
    """All assumptions."""

    workload: Workload = Workload()
    engine: Engine = Engine()
    trainer: Trainer = Trainer()
    transfer: Transfer = Transfer()


@cache
def sample_episodes(work: Workload, n: int, seed: int) -> list[list[float]]:
    """Tokens of every answer of every episode."""
    random = np.random.default_rng(seed)
    kind = random.random(n)
    turns = np.where(kind < work.solved, random.integers(13, 16, n), 15)
    turns = np.where(kind > 1 - work.stopped, random.integers(1, 15, n), turns)
    medians = work.median_answer * random.lognormal(0.0, work.episode_sigma, n)
    drawn = (m * random.lognormal(0.0, work.turn_sigma, t) for m, t in zip(medians, turns, strict=True))
    answers = [np.clip(tokens, 1, work.cap_answer).round().tolist() for tokens in drawn]
    if work.even:
        each = round(turns.mean())
        return [[sum(map(sum, answers)) / (n * each)] * each] * n
    return answers


class Play(NamedTuple):
    """A rollout. Idle is an engine's time with nothing to decode or prefill."""

    wall_s: float
    busy_s: float  # engine-seconds, all engines together, as below
    waiting_s: float  # idle, but with living episodes (their environments are at work)
    tail_s: float  # idle after its last episode, until the slowest engine has played its own
    last_tenth: float  # share of the wall time in which the last tenth of the episodes ends


class _Engine:
    """Continuous batching: every running sequence gets one token a decode step; prefills stop the decoding."""

    def __init__(self, costs: Engine) -> None:
        self.costs = costs
        self.running: list[tuple[float, int, float]] = []  # (step at which it ends, episode, tokens of context)
        self.steps = self.prefill_s = self.context = self.busy_s = self.now = self.host_free = self.end = 0.0
        self.version = 0

    def step_s(self) -> float:
        reads = (self.costs.weight_bytes + self.costs.kv_bytes * self.context) / self.costs.bandwidth
        return max(reads, len(self.running) * self.costs.prefill_s, 1e-9) + self.costs.overhead_s

    def advance(self, now: float) -> None:
        passed, self.now = now - self.now, now
        if self.running:
            self.busy_s += passed
            prefilled = min(passed, self.prefill_s)
            self.prefill_s -= prefilled
            self.steps += (passed - prefilled) / self.step_s()


@cache
def rollout(work: Workload, costs: Engine, n: int, seed: int, engines: int, slots: int, stealing: bool = True) -> Play:
    """Plays ``n`` episodes, at most ``slots`` at a time an engine. With ``stealing`` an engine takes the next as one
    ends, else all are dealt out before. An episode stays with its engine: its prefix is cached there."""
    answers = sample_episodes(work, n, seed)
    queues = [deque(range(i, n, engines)) for i in range(engines)] if not stealing else [deque(range(n))] * engines
    fleet = [_Engine(costs) for _ in range(engines)]
    turn, context, ends = [0] * n, [0.0] * n, []
    events: list[tuple[float, int, int, int, int]] = []  # (time, tie-break, engine, episode or -1: a token, version)
    order = itertools.count()

    def observe(e: int, episode: int, now: float) -> None:
        fleet[e].host_free = max(fleet[e].host_free, now) + costs.host_s
        heapq.heappush(events, (fleet[e].host_free + costs.env_s, next(order), e, episode, 0))

    def begin(e: int, now: float) -> None:
        if queues[e]:
            observe(e, queues[e].popleft(), now)

    for _, e in itertools.product(range(slots), range(engines)):
        begin(e, 0.0)
    while events:
        now, _, e, episode, version = heapq.heappop(events)
        engine = fleet[e]
        if episode < 0 and version != engine.version:
            continue  # the batch changed after this end was foreseen
        engine.advance(now)
        if episode >= 0:
            new = work.observation if turn[episode] else work.opening
            answer = answers[episode][turn[episode]]
            engine.prefill_s += new * costs.prefill_s + costs.frame_s
            middle = context[episode] + new + answer / 2  # a sequence counts as in the middle of its answer
            heapq.heappush(engine.running, (engine.steps + answer, episode, middle))
            engine.context += middle
            context[episode] += new + answer
        else:
            engine.steps, episode, middle = heapq.heappop(engine.running)
            engine.context = engine.context - middle if engine.running else 0.0
            turn[episode] += 1
            if turn[episode] < len(answers[episode]):
                observe(e, episode, now)
            else:
                engine.end = now
                ends.append(now)
                begin(e, now)
        engine.version += 1
        if engine.running:
            end = now + engine.prefill_s + max(0.0, engine.running[0][0] - engine.steps) * engine.step_s()
            heapq.heappush(events, (end, next(order), e, -1, engine.version))
    wall, busy, alive = ends[-1], sum(f.busy_s for f in fleet), sum(f.end for f in fleet)
    return Play(wall, busy, alive - busy, engines * wall - alive, 1 - ends[ceil(0.9 * n) - 1] / wall)


def train(world: World, answers: list[list[float]], ranks: int) -> tuple[float, float, float, float]:
    """Seconds to train on episodes: wall time; of it the ranks' mean compute, the slowest rank's excess, all-gathers
    not hidden. FLOPs a weight and token: 2 forward, 2 backward (no gradient for frozen weights), 2 for checkpoints."""
    costs, work = world.trainer, world.workload
    bandwidth = costs.node_bandwidth if ranks <= GPUS_A_NODE else costs.network_bandwidth
    gather_s = (ranks - 1) / ranks * costs.gather_bytes / bandwidth
    wall = mean = slowest = 0.0
    for part in range(costs.minibatches):
        loads = [(0.0, 0.0, 0.0)] * ranks  # of each: FLOPs of the update, of a forward pass, tokens
        batch = answers[part :: costs.minibatches]
        sizes = [(work.opening + (len(a) - 1) * work.observation + sum(a), len(a)) for a in batch]
        for tokens, turns in sorted(sizes, reverse=True):  # the longest first, to the rank with the least to do
            linear, attention = 2.0 * READ_PARAMETERS * tokens, 2.0 * HIDDEN * LAYERS * tokens**2
            vision = turns * 2.0 * VISION_PARAMETERS * PATCHES  # once a step, then kept
            update = 3 * linear + 4 * attention + 6.0 * LORA_PARAMETERS * tokens + vision  # attention backward: 2 x
            least = loads[0]
            heapq.heapreplace(loads, (least[0] + update, least[1] + linear + attention, least[2] + tokens))
        microbatches = max(ceil(tokens / costs.microbatch) for _, _, tokens in loads)  # the same on every rank
        for which, gathers in [(0, 2)] + [(1, 1)] * (costs.minibatches > 1):  # (FLOPs, all-gathers a micro-batch)
            seconds = [load[which] / costs.flops for load in loads]
            mean, slowest = mean + sum(seconds) / ranks, slowest + max(seconds)
            wall += max(max(seconds), microbatches * gathers * gather_s) + gather_s / LAYERS  # the first can't hide
    return wall, mean, slowest - mean, wall - slowest


class Step(NamedTuple):
    """One training step: wall time, and where all GPU-seconds went."""

    wall_s: float
    rolled: Play
    gpu_s: dict[str, float]  # rollout, training; idle: tail, environment, sync, transfer, other pool


class Policy(NamedTuple):
    """Who does what: colocated, or ``rollout_gpus`` for the engines alone and the rest for training."""

    rollout_gpus: int = 0
    off_policy: bool = False  # both pools at once, the engines one step behind
    slots: int = 0  # episodes an engine plays at a time; 0: what fits
    stealing: bool = True


COLOCATED = Policy()
# Episodes of 4,200 tokens whose keys and values fit beside weights and 4 GB of workspace in 45 % and 90 % of 96 GB.
BESIDE = 2.0 * (PARAMETERS + VISION_PARAMETERS) + 4e9
SLOTS_COLOCATED, SLOTS_POOL = (int((share * 96e9 - BESIDE) / (4200 * Engine().kv_bytes)) for share in (0.45, 0.9))


def one_step(world: World, gpus: int, episodes: int, seed: int, policy: Policy = COLOCATED) -> Step:
    """A step of ``episodes`` trajectories."""
    transfer, pools = world.transfer, policy.rollout_gpus > 0
    x, y = policy.rollout_gpus or gpus, gpus - policy.rollout_gpus
    how = (x, policy.slots or (SLOTS_POOL if pools else SLOTS_COLOCATED), policy.stealing)
    rolled = rollout(world.workload, world.engine, episodes, seed, *how)
    evaluated = rollout(world.workload, world.engine, 64, seed + 1000, *how)
    answers = sample_episodes(world.workload, episodes, seed)
    train_s, compute_s, imbalance_s, gather_s = train(world, answers, y)
    publish_s = transfer.adapter_bytes / transfer.write_bandwidth
    fetch_s = ceil(x / GPUS_A_NODE) * transfer.adapter_bytes / transfer.read_bandwidth + transfer.load_s
    collect_s = 2 * sum(map(len, answers)) * transfer.frame_bytes / transfer.trajectory_bandwidth
    save_s = transfer.checkpoint_bytes / transfer.write_bandwidth / 20
    switch_s = transfer.step_s + (0.0 if pools else transfer.sleep_s)
    share = transfer.evaluations
    first = rolled.wall_s + share * evaluated.wall_s + fetch_s + switch_s  # what the engines' GPUs do
    second = train_s + collect_s + publish_s + save_s  # what the trainer's GPUs do
    wall = max(first, second) if policy.off_policy else first + second
    gpu_s = {
        "rollout": rolled.busy_s + share * evaluated.busy_s,
        "training": y * compute_s,
        "tail": rolled.tail_s + share * evaluated.tail_s,
        "environment": rolled.waiting_s + share * evaluated.waiting_s,
        "sync": x * switch_s + y * imbalance_s,
        "transfer": x * fetch_s + y * (collect_s + publish_s + save_s + gather_s),
        "other pool": x * (wall - first) + y * (wall - second) if pools else 0.0,
    }
    return Step(wall, rolled, gpu_s)


def policies(world: World, gpus: int, episodes: int) -> dict[str, Policy]:
    """Colocated, and the pools (whole nodes from 16 GPUs up) with the shortest step of seed 0."""
    best = {"colocated": COLOCATED}
    for name, off in {"pools": False, "pools, one step off": True}.items():
        tried = [Policy(x, off) for x in (range(1, gpus) if gpus < 16 else range(GPUS_A_NODE, gpus, GPUS_A_NODE))]
        best[name] = min(tried, key=lambda policy: one_step(world, gpus, episodes, 0, policy).wall_s)
    return best


def _with(part: str, **fields: Any) -> Callable[[World], World]:
    return lambda world: world._replace(**{part: getattr(world, part)._replace(**fields)})


FREE = {
    "decode: reading the weights": _with("engine", weight_bytes=0.0),
    "decode: reading keys and values": _with("engine", kv_bytes=0.0),
    "decode: overhead of a step": _with("engine", overhead_s=0.0),
    "prefill": _with("engine", prefill_s=0.0, frame_s=0.0),
    "environment and host": _with("engine", env_s=0.0, host_s=0.0),
    "long tail (all episodes equal)": _with("workload", even=True),
    "training: all FLOPs": _with("trainer", flops=float("inf")),
    "training: old log-probabilities": _with("trainer", minibatches=1),
    "all-gathers": _with("trainer", gather_bytes=0.0),
    "adapter sync": _with("transfer", adapter_bytes=0.0, load_s=0.0),
    "trajectories through the driver": _with("transfer", frame_bytes=0.0),
    "sleep and wake": _with("transfer", sleep_s=0.0),
    "evaluations and checkpoints": _with("transfer", evaluations=0.0, checkpoint_bytes=0.0),
}
UNCERTAIN = {
    "as assumed": lambda world: world,
    "answers half as long": _with("workload", median_answer=Workload().median_answer / 2),
    "answers twice as long": _with("workload", median_answer=Workload().median_answer * 2),
    "training at half the FLOP/s": _with("trainer", flops=Trainer().flops / 2),
    "training at twice the FLOP/s": _with("trainer", flops=Trainer().flops * 2),
    "100 Gbit/s, micro-batches of 8,192": _with("trainer", network_bandwidth=0.7 * 12.5e9, microbatch=8192.0),
    "episodes half as uneven": _with("workload", episode_sigma=Workload().episode_sigma / 2),
}
SCALES = {"6 GPUs, 24 x 8": (6, 192), "48 GPUs, 192 x 8": (48, 1536), "48 GPUs, 24 x 8": (48, 192)}
Rows = list[dict[str, Any]]


def seconds(world: World, scale: str, seeds: range, policy: Policy = COLOCATED) -> list[float]:
    """Step times."""
    return [one_step(world, *SCALES[scale], seed, policy).wall_s for seed in seeds]


def steps(seeds: range) -> Rows:
    """Step time (median and range over the seeds), and where the GPUs' time goes (all seeds together)."""
    rows: Rows = []
    for scale, (gpus, episodes) in SCALES.items():
        for name, policy in policies(World(), gpus, episodes).items():
            runs = [one_step(World(), gpus, episodes, seed, policy) for seed in seeds]
            rate = episodes / median(walls := [run.wall_s for run in runs])
            row: dict[str, Any] = {"scale": scale, "policy": name, "rollout GPUs": policy.rollout_gpus or gpus}
            row |= {"step s": median(walls), "from s": min(walls), "to s": max(walls), "trajectories/s": rate}
            row["per GPU, of 6 colocated"] = rate / gpus / (rows[0]["trajectories/s"] / 6 if rows else rate / gpus)
            shares = {k: 100 * sum(run.gpu_s[k] for run in runs) / (gpus * sum(walls)) for k in runs[0].gpu_s}
            row["idle %"] = 100 - shares.pop("rollout") - shares.pop("training")
            row |= {f"{cause} %": share for cause, share in shares.items()}
            alone = [rollout(World().workload, World().engine, episodes, seed, episodes, 1).wall_s for seed in seeds]
            longest = median(100 * a / run.rolled.wall_s for a, run in zip(alone, runs, strict=True))
            row |= {"last tenth, % of rollout": median(100 * run.rolled.last_tenth for run in runs)}
            rows.append(row | {"longest episode alone, % of rollout": longest})
    return rows


def bottlenecks(seeds: range) -> Rows:
    """By how many percent a step is shorter (median over the seeds) when one cost is zero, the split kept."""
    rows: Rows = [{"cost": cost} for cost in FREE]
    for scale in SCALES:
        for name, policy in policies(World(), *SCALES[scale]).items():
            base = seconds(World(), scale, seeds, policy)
            for row in rows:
                freed = seconds(FREE[row["cost"]](World()), scale, seeds, policy)
                row[f"{scale}: {name}"] = median(100 * (1 - f / b) for f, b in zip(freed, base, strict=True))
    return rows


def stealing(seeds: range) -> Rows:
    """Seconds a colocated step (median over the seeds) when an engine plays only so many episodes at a time."""
    rows: Rows = [{"episodes at a time": slots} for slots in (SLOTS_COLOCATED, 16, 8, 4)]
    for row, scale, steal in itertools.product(rows, list(SCALES)[:2], (False, True)):
        policy = Policy(slots=row["episodes at a time"], stealing=steal)
        row[f"{scale}: {'pulled' if steal else 'dealt out'}"] = median(seconds(World(), scale, seeds, policy))
    return rows


def sensitivity(seeds: range) -> Rows:
    """Seconds a step (median over the seeds), and what costs most when colocated; the splits are searched again."""
    rows: Rows = []
    for scale, (change, world) in itertools.product(SCALES, ((c, f(World())) for c, f in UNCERTAIN.items())):
        walls = {n: median(seconds(world, scale, seeds, p)) for n, p in policies(world, *SCALES[scale]).items()}
        freed = {cost: median(seconds(free(world), scale, seeds)) for cost, free in FREE.items()}
        bottleneck = {"first bottleneck, colocated": min(freed, key=freed.__getitem__)}
        rows.append({"scale": scale, "assumption": change} | walls | bottleneck)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="batches of episodes that the medians are over")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    tables = {study.__name__: study(range(arguments.seeds)) for study in (steps, bottlenecks, stealing, sensitivity)}
    for name, rows in tables.items():
        table = Table(*rows[0], title=name)
        for row in rows:
            table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
        Console(width=200).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
