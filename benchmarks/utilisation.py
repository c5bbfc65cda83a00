"""The machine's matrix-product peak, and the share of it that Clew's computing parts reach.

    python benchmarks/utilisation.py [--model FOLDER] [--repeats 5] [--threads 2]

Peak: the best of square fp32 products of several sizes and of the model's tall ones, torch's own ``mm``, same
threads.

Shares (useful operations a second / peak), medians of repeats after one that is not counted:

- update: scoring, loss, backward and optimizer of one GRPO step (all groups), visual features at hand;
- prefill: the rollout's passes over prompts and observations, the vision tower included;
- rollout: a whole rollout (prefill, decoding, environments, bookkeeping);
- sft, model: forward and backward of an SFT step; sft, step: demonstrations and the Muon step too.

Operations are those of the model, counted by formula (see ``Operations``), of real tokens only: padding,
recomputation inside kernels, norms, softmax, rope, the optimizer and Muon's iterations count as nothing, and
causal attention counts the half that is below the diagonal. The formula is checked against torch's own
counter before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clew.agent.ledger import Trajectory
from clew.policy.adapter import attach_lora
from clew.policy.model import collate, hidden_states, load_model
from clew.policy.vision import FeatureCache, encode
from clew.rollout.episodes import play
from clew.rollout.transformers_engine import TransformersEngine
from clew.training.demonstrations import Demonstration, Demonstrator
from clew.training.samples import prepare
from clew.training.sft import accumulate_gradients, draw, split_parameters
from clew.training.update import Updater


@dataclass(frozen=True)
class Operations:
    """Floating-point operations (2 a multiply-add) of a Qwen3-VL model's matrix products.

    A product y = W x of an [out, in] matrix costs 2 * in * out a token forward, and as much for each of the
    two gradients, dx = W' dy and dW = dy x'. Attention costs 4 * heads * head_dim a (query, key) pair forward
    (q.k and p.v), twice that backward (dq, dk, dv, dp).
    """

    text: Any
    vision: Any
    rank: int = 0

    def _projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a decoder layer's matrices."""
        t = self.text
        queries, keys = t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim
        h, m = t.hidden_size, t.intermediate_size
        return {
            "q": (h, queries), "k": (h, keys), "v": (h, keys), "o": (queries, h),
            "gate": (h, m), "up": (h, m), "down": (m, h),
        }  # fmt: skip

    def _text_token(self, train: str) -> int:
        """A token's cost in all decoder layers, without attention.

        Args:
            train: "" - forward only; "lora" - forward and backward, frozen matrices need dx alone and LoRA's
                two need both gradients, and the first layer's q, k, v need no dx (nothing below them is
                trained); "all" - forward and backward of every matrix.
        """
        total = 0
        for layer in range(self.text.num_hidden_layers):
            for name, (n_in, n_out) in self._projections().items():
                dense, low = 2 * n_in * n_out, 2 * self.rank * (n_in + n_out)
                if train == "lora":
                    bottom = layer == 0 and name in "qkv"
                    total += dense * (1 if bottom else 2)
                    total += 3 * low - (2 * self.rank * n_in if bottom else 0)
                else:
                    total += dense * (3 if train else 1)
        return total

    def text_layers(self, new: Iterable[int], context: Iterable[int], train: str = "") -> int:
        """Sequences of ``new`` tokens each behind ``context`` cached ones."""
        pair = 4 * self.text.num_attention_heads * self.text.head_dim * self.text.num_hidden_layers
        total = 0
        for n, c in zip(new, context, strict=True):
            pairs = n * c + n * (n + 1) // 2
            total += n * self._text_token(train) + pairs * pair * (3 if train else 1)
        return total

    def head(self, tokens: int, train: str = "") -> int:
        """The vocabulary's product; when only LoRA is trained its weight gradient isn't computed."""
        return 2 * self.text.hidden_size * self.text.vocab_size * tokens * {"": 1, "lora": 2, "all": 3}[train]

    def images(self, grids: Iterable[tuple[int, int, int]], train: bool = False) -> int:
        """The vision tower: patches, blocks with full attention inside an image, mergers."""
        v = self.vision
        merged = v.spatial_merge_size**2
        patch = v.hidden_size * v.in_channels * v.temporal_patch_size * v.patch_size**2
        block = v.depth * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
        wide = v.hidden_size * merged
        merger = (1 + len(v.deepstack_visual_indexes)) * (wide**2 + wide * v.out_hidden_size)
        total = 0
        for t, h, w in grids:
            n = t * h * w
            attention = 4 * v.hidden_size * n * n * v.depth
            total += (2 * n * block + 2 * n // merged * merger + attention) * (3 if train else 1)
            total += 2 * n * patch * (2 if train else 1)  # pixels need no gradient
        return total


def peak(threads: int) -> float:
    """fp32 operations a second of the best matrix product, and how it was found."""
    best, shape = 0.0, (0, 0, 0)
    for m, k, n in [(s, s, s) for s in (512, 1024, 1536, 2048, 3072)] + [(8192, 96, 256), (8192, 256, 96)]:
        a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        torch.mm(a, b, out=out)
        watch = common.Stopwatch()
        for _ in range(max(5, int(4e10 / (2 * m * k * n)))):  # half a second or so
            with watch.time("mm"):
                torch.mm(a, b, out=out)
        rate = 2 * m * k * n / watch.median("mm")
        print(f"mm {m} x {k} x {n}: {rate / 1e9:6.1f} GFLOP/s")
        if rate > best:
            best, shape = rate, (m, k, n)
    print(f"peak with {threads} threads: {best / 1e9:.1f} GFLOP/s fp32 (at {' x '.join(map(str, shape))})")
    return best


def check_formula(bench: common.Bench, operations: Operations, trajectory: Trajectory) -> None:
    """The formula against torch's counter on one sequence, forward and backward of all parameters.

    Raises:
        AssertionError: they differ by more than 1 % (torch's counter takes causal attention as full).
    """
    vlm = load_model(bench.path)
    t = trajectory
    batch = collate([(t.token_ids, t.sampled, t.grids)], vlm.template.image_token_id, vlm.merge_size)
    # The counter does not know the CPU's fused attention; the plain one is made of products that it counts.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = hidden_states(
            vlm.model, batch, encode(vlm.model.model.visual, [vlm.patcher(x.frame) for x in t.turns])
        )
        vlm.model.lm_head(hidden).sum().backward()
    n = len(t.token_ids)
    text = bench.vlm.model.config.text_config
    upper = 3 * 4 * text.num_attention_heads * text.head_dim * text.num_hidden_layers * (n * (n - 1) // 2)
    ours = (
        operations.text_layers([n], [0], "all") + upper + operations.head(n, "all") + operations.images(t.grids, True)
    )
    theirs = counter.get_total_flops()
    print(f"formula {ours / 1e9:.4f} GFLOP, torch's counter {theirs / 1e9:.4f} for forward and backward of {n} tokens")
    assert abs(ours / theirs - 1) < 0.01, "the formula and torch's counter differ"


class TimedEngine(TransformersEngine):
    """The engine, with its prefills timed and counted."""

    def measure(self, operations: Operations) -> None:
        self.operations, self.watch = operations, common.Stopwatch()
        self.prefill_flops = self.decode_flops = 0

    def _prefill(self, trajectories: list[Trajectory]) -> torch.Tensor:
        known, context = len(self.features), self._cache.lengths.tolist()
        new = [len(t.token_ids) - c for t, c in zip(trajectories, context, strict=True)]
        with self.watch.time("prefill"):
            logits = super()._prefill(trajectories)
        grid = trajectories[0].grids[0]  # the mazes of a recipe have one size
        self.prefill_flops += self.operations.text_layers(new, context) + self.operations.head(len(new))
        self.prefill_flops += self.operations.images([grid] * (len(self.features) - known))
        return logits

    def _decode(self, ids_B: torch.Tensor, advance: Any) -> torch.Tensor:
        living = self._cache.lengths[torch.from_numpy(advance)].tolist()
        self.decode_flops += self.operations.text_layers([1] * len(living), living) + self.operations.head(len(living))
        return super()._decode(ids_B, advance)


def sft_operations(operations: Operations, demonstrations: list[Demonstration]) -> int:
    """Forward and backward of all parameters on demonstrations."""
    lengths = [len(d.token_ids) for d in demonstrations]
    return (
        operations.text_layers(lengths, [0] * len(lengths), "all")
        + operations.head(sum(sum(d.answered) for d in demonstrations), "all")
        + operations.images([grid for d in demonstrations for grid in d.grids], train=True)
    )


def main() -> None:
    options = common.parser(__doc__).parse_args()
    bench = common.prepare(options.model, options.threads)
    recipe, config = bench.recipe, bench.vlm.model.config
    lora = recipe.model.lora
    operations = Operations(config.text_config, config.vision_config, lora.rank)
    attempts = bench.attempts(options.mazes)
    best = peak(options.threads)
    watch = common.Stopwatch()
    flops: dict[str, list[int]] = {}

    # SFT on a model of its own: it trains all parameters.
    student = load_model(bench.path)
    student.model.train()
    demonstrator = Demonstrator(student, bench.make_env(), frozenset())
    matrices, others = split_parameters(student.model)
    optimizers = [
        torch.optim.Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0),
    ]
    for index in range(2 * (options.repeats + 1)):
        step = 1 if index % 2 else recipe.sft.steps  # windows and whole episodes in turn
        stage = "windows" if step == 1 else "episodes"
        with watch.time(f"sft step, {stage}" if index > 1 else "warm-up"):
            demonstrations = draw(demonstrator, recipe.sft, step)
            with watch.time(f"sft model, {stage}" if index > 1 else "warm-up"):
                accumulate_gradients(student, demonstrations, recipe.sft.frames_per_microbatch)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if index > 1:
            for part in ("step", "model"):
                flops.setdefault(f"sft {part}, {stage}", []).append(sft_operations(operations, demonstrations))
    del student, demonstrator, optimizers, matrices, others

    # One GRPO step's parts, as in clew.training.grpo.
    policy = attach_lora(bench.vlm, lora.rank, lora.alpha, lora.dropout, lora.target, lora.vision, 0)
    features = FeatureCache(bench.vlm.model.model.visual, bench.vlm.patcher)
    engine = TimedEngine(bench.vlm, features)
    training = recipe.training.model_copy(update={"learning_rate": 1e-9, "warmup_steps": 0})
    updater = Updater(
        bench.vlm,
        policy,
        features,
        recipe.algorithm,
        training,
        bench.sampling.temperature,
        bench.limits.max_tokens,
    )
    for index in range(options.repeats + 1):
        engine.release()
        engine.measure(operations)
        with watch.time("rollout" if index else "warm-up"):
            trajectories = play(
                engine,
                bench.player,
                bench.make_env,
                attempts,
                bench.sampling,
                bench.limits,
                ("utilisation", index),
            )
        if index == 0:
            check_formula(bench, operations, trajectories[0])
        samples, used = prepare(trajectories, recipe.algorithm)
        with watch.time("update" if index else "warm-up"):
            updater.update(samples, [True] * len(used), 1)
        if index:
            lengths = [len(t.token_ids) for t in trajectories]
            update = operations.text_layers(lengths, [0] * len(lengths), "lora")
            update += operations.head(sum(sum(t.sampled) for t in trajectories), "lora")
            watch.seconds.setdefault("prefill", []).append(sum(engine.watch.seconds["prefill"]))
            flops.setdefault("update", []).append(update)
            flops.setdefault("prefill", []).append(engine.prefill_flops)
            flops.setdefault("rollout", []).append(engine.prefill_flops + engine.decode_flops)

    print(f"\n{options.mazes} mazes x {recipe.algorithm.group_size}, {options.repeats} repeats, medians:")
    for name in ("update", "prefill", "rollout", *sorted(n for n in flops if n.startswith("sft"))):
        rates = sorted(f / s for f, s in zip(flops[name], watch.seconds[name], strict=True))
        rate = rates[len(rates) // 2]
        seconds = watch.median(name)
        print(f"{name:20} {seconds:7.3f} s  {rate / 1e9:6.1f} GFLOP/s  {rate / best:6.1%} of the peak")
    print("target: 35% (training: update and sft)")


if __name__ == "__main__":
    main()
