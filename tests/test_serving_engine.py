"""The deployment that computes, without Ray around it: how many adapters it holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch

pytest.importorskip("fastapi", reason="fastapi comes with clew[ray]")

from serving_server import write

from clew.policy.adapter import attach_lora, current_adapter
from clew.policy.model import load_model
from clew.rollout.engine import Sampling
from clew.serving.engine import EngineSettings, Generation, TransformersReplica
from clew.serving.prompt import Prompt

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def replica(tmp_path: Path) -> TransformersReplica:
    """One that may keep two adapters of four."""
    policy = attach_lora(load_model(tiny.tiny_folder()), 2, 4, 0.0)
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in policy.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        write(tmp_path / "adapters" / name, current_adapter(policy, seed))
    threads = torch.get_num_threads()
    return TransformersReplica(
        EngineSettings(str(tiny.tiny_folder()), str(tmp_path / "adapters"), str(tmp_path), 2, threads, "cpu")
    )


def test_answers_under_way_hold_no_more_adapters_than_allowed(replica: TransformersReplica) -> None:
    """All are asked for at once: those without a place wait for one, and in the end nothing is held."""
    ids = replica._vlm.tokenizer("<|im_start|>user\nup<|im_end|>\n<|im_start|>assistant\n")["input_ids"]

    async def answer(name: str) -> int:
        asked = Generation(name, Prompt(ids, [], []), Sampling(2.0, 60), 1, stream=True)
        most, tokens = 0, 0
        async for progress in replica.generate(asked):
            assert progress.error is None
            most, tokens = max(most, len(replica._living)), progress.tokens
        assert tokens
        return most

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*map(answer, NAMES * 2))

    assert max(asyncio.run(all_at_once())) == 3, "two, and the one that is to take a place"

    async def nothing_is_held() -> None:
        async with asyncio.timeout(60):
            while replica._living:
                await asyncio.sleep(0.01)

    asyncio.run(nothing_is_held())


def test_steady_requests_for_others_keep_nobody_out(replica: TransformersReplica) -> None:
    """Three adapters that never rest, where two may stay: a fourth has its turn, and so has each of them."""
    ids = replica._vlm.tokenizer("<|im_start|>user\nup<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answered: Counter[str] = Counter()

    async def answer(name: str, seed: int) -> None:
        asked = Generation(name, Prompt(ids, [], []), Sampling(2.0, 20 + seed % 30), seed, stream=False)
        async for progress in replica.generate(asked):
            assert progress.error is None
        answered[name] += 1

    async def steady(name: str, seed: int) -> None:
        while not answered["d"] and answered.total() < 300:
            await answer(name, seed := seed + 7)

    async def all_of_them() -> None:
        loops = [asyncio.create_task(steady(name, seed)) for name in "abc" for seed in range(4)]
        while min(answered[name] for name in "abc") < 2:
            await asyncio.sleep(0.01)
        await answer("d", 1)
        await asyncio.gather(*loops)

    asyncio.run(all_of_them())
    assert answered.total() < 300, "the fourth came when the others had ended"
