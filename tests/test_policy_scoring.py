"""The scorer gives what Hugging Face's own forward of the whole conversation gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from clew.agent.ledger import Trajectory
from clew.policy.model import (
    VisionLanguageModel,
    collate,
    load_model,
    masked_log_softmax,
    rope_positions,
    score,
)

ANSWERS = [
    ["<action>up</action>"],
    ["up", "<action>left</action> down", "x"],
    ["", "right right right right"],
]
SIZES = [(64, 64), (64, 96), (96, 64)]


@pytest.fixture(params=[tiny.tiny_folder, tiny.qwen_folder], ids=["tiny", "qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param()


def score_all(vlm: VisionLanguageModel, trajectories: list[Trajectory], temperature: float = 1.0):
    merge = vlm.merge_size
    triples = [(t.token_ids, t.sampled, t.grids) for t in trajectories]
    batch = collate(triples, vlm.template.image_token_id, merge)
    frames = [turn.frame for t in trajectories for turn in t.turns]
    scores = score(vlm, batch, tiny.feature_cache(vlm).gather(frames), temperature)
    counts = [sum(t.sampled) for t in trajectories]
    return scores.logprobs_N.split(counts), scores.entropy_N.split(counts)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_score_equals_the_plain_forward(folder: Path, temperature: float) -> None:
    """Also: rows of different lengths and image sizes side by side do not touch each other."""
    vlm = load_model(folder)
    stock = AutoModelForImageTextToText.from_pretrained(folder).eval()
    trajectories = [
        tiny.conversation(vlm, answers, seed, size)
        for seed, (answers, size) in enumerate(zip(ANSWERS, SIZES, strict=True))
    ]
    logprobs, entropies = score_all(vlm, trajectories, temperature)
    for trajectory, ours, entropy in zip(trajectories, logprobs, entropies, strict=True):
        theirs, expected_entropy = tiny.plain_logprobs(vlm, stock, trajectory, temperature)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=5e-5)
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_carries_no_meaning() -> None:
    """What stands in the padding changes nothing: not the pad token, not even an image placeholder."""
    vlm = tiny.shared_tiny()
    short, long = tiny.conversation(vlm, ["up"], 1), tiny.conversation(vlm, ["up", "down", "left"], 2)
    (alone,), _ = score_all(vlm, [short])
    (beside, other), _ = score_all(vlm, [short, long])
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-5)
    triples = [(t.token_ids, t.sampled, t.grids) for t in (short, long)]
    batch = collate(triples, vlm.template.image_token_id, vlm.merge_size)
    features = tiny.feature_cache(vlm).gather([turn.frame for t in (short, long) for turn in t.turns])
    for filler in (vlm.tokenizer.eos_token_id, vlm.tokenizer.pad_token_id, vlm.template.image_token_id):
        batch.ids_BT[0, len(short.token_ids) :] = filler
        scores = score(vlm, batch, features, 1.0)
        torch.testing.assert_close(scores.logprobs_N, torch.cat([beside, other]), rtol=0, atol=1e-5)


@torch.no_grad()
def test_pad_may_be_eos() -> None:
    """Where the pad token is the end of turn (trl 4974), the sampled end of turn still carries loss."""
    vlm = tiny.tiny()
    expected, _ = score_all(vlm, [tiny.conversation(vlm, a, i) for i, a in enumerate(ANSWERS)])
    vlm.tokenizer.pad_token = vlm.tokenizer.eos_token
    vlm.model.config.text_config.pad_token_id = vlm.tokenizer.eos_token_id
    trajectories = [tiny.conversation(vlm, a, i) for i, a in enumerate(ANSWERS)]
    found, _ = score_all(vlm, trajectories)
    for ours, theirs, trajectory in zip(found, expected, trajectories, strict=True):
        assert torch.equal(ours, theirs)
        ends = [
            i for i, s in enumerate(trajectory.sampled) if s and trajectory.token_ids[i] == vlm.tokenizer.eos_token_id
        ]
        assert len(ends) == len(trajectory.turns)


def test_mask_and_temperature() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    forbidden = torch.tensor([0, 5])
    ours = masked_log_softmax(logits, forbidden, 0.5)
    allowed = [1, 2, 3, 4, 6]
    torch.testing.assert_close(ours[:, allowed], torch.log_softmax(logits[:, allowed] / 0.5, -1))
    assert torch.isneginf(ours[:, [0, 5]]).all()
    ours[:, 1].sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert (logits.grad[:, [0, 5]] == 0).all()
    half = masked_log_softmax(logits.detach().bfloat16(), forbidden[:0], 1.0)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.exp().sum(-1), torch.ones(3))


def test_forbidden_ids_are_vision_and_padding(folder: Path) -> None:
    vlm = load_model(folder)
    forbidden = set(vlm.forbidden_ids.tolist())
    vocab = vlm.model.config.text_config.vocab_size
    names = {vlm.tokenizer.convert_ids_to_tokens(i) for i in forbidden if i < len(vlm.tokenizer)}
    assert names == {"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}
    assert {i for i in forbidden if i >= len(vlm.tokenizer)} == set(range(len(vlm.tokenizer), vocab))
    assert vlm.template.end_of_turn_id not in forbidden


def test_placeholders_must_match_the_features() -> None:
    vlm = tiny.shared_tiny()
    trajectory = tiny.conversation(vlm, ["up", "down"])
    batch = collate([(trajectory.token_ids, trajectory.sampled, trajectory.grids)], vlm.template.image_token_id, 2)
    with pytest.raises(ValueError, match="placeholders"):
        score(vlm, batch, tiny.feature_cache(vlm).gather([trajectory.turns[0].frame]), 1.0)
    trajectory.check_images(vlm.template.image_token_id, 2)
    trajectory.append_prompt([vlm.template.image_token_id])
    with pytest.raises(ValueError, match="placeholders"):
        trajectory.check_images(vlm.template.image_token_id, 2)
    sampled = tiny.conversation(vlm, ["up"])
    sampled.sampled[sampled.token_ids.index(vlm.template.image_token_id)] = True
    with pytest.raises(ValueError, match="sampled"):
        sampled.check_images(vlm.template.image_token_id, 2)


# --- positions -------------------------------------------------------------------------------------------

TEXT, IMAGE = 7, 3
pieces = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),  # text tokens before, rows, columns
    max_size=4,
)


def layout(parts: list[tuple[int, int, int]], tail: int, merge: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    ids: list[int] = []
    for text, rows, cols in parts:
        ids += [TEXT] * text + [IMAGE] * (rows * cols)
    return ids + [TEXT] * tail, [(1, rows * merge, cols * merge) for _, rows, cols in parts]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(pieces, st.integers(1, 9)), min_size=1, max_size=3), st.sampled_from([1, 2]))
def test_rope_positions_equal_transformers(rows: list[tuple[list[tuple[int, int, int]], int]], merge: int) -> None:
    """Batches of different conversations: theirs in one padded call, ours row by row."""
    model = tiny.shared_tiny().model.model
    conversations = [layout(parts, tail, merge) for parts, tail in rows]
    width = max(len(ids) for ids, _ in conversations)
    ids_BT = torch.full((len(rows), width), TEXT)
    mask_BT = torch.zeros_like(ids_BT)
    for row, (ids, _) in enumerate(conversations):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
    grids = [grid for _, row_grids in conversations for grid in row_grids]
    config = model.config.vision_config
    before, config.spatial_merge_size = config.spatial_merge_size, merge
    try:
        theirs, _ = model.get_rope_index(
            ids_BT,
            mm_token_type_ids=(ids_BT == IMAGE).int(),
            image_grid_thw=torch.tensor(grids) if grids else None,
            attention_mask=mask_BT,
        )
    finally:
        config.spatial_merge_size = before
    for row, (ids, row_grids) in enumerate(conversations):
        assert np.array_equal(rope_positions(ids, row_grids, IMAGE, merge), theirs[:, row, : len(ids)].numpy())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids, grids: (ids, [*grids, (1, 2, 2)]),
        lambda ids, grids: (ids, grids[:-1]),
        lambda ids, grids: (ids[: ids.index(IMAGE)] + ids[ids.index(IMAGE) + 1 :], grids),
        lambda ids, grids: ([*ids, IMAGE], grids),
        lambda ids, grids: (ids[:-4], grids),
    ],
)
def test_mismatched_placeholders_are_refused(spoil: Callable) -> None:
    ids, grids = layout([(3, 2, 3), (2, 2, 2)], tail=2, merge=2)
    rope_positions(ids, grids, IMAGE, 2)
    with pytest.raises(ValueError, match="placeholders"):
        rope_positions(*spoil(ids, grids), IMAGE, 2)


@torch.no_grad()
def test_no_position_is_left_over_from_an_earlier_batch() -> None:
    """transformers keeps rope offsets of the last call on the model; the scorer must not see them (44873)."""
    vlm = tiny.tiny()
    trajectory = tiny.conversation(vlm, ["up", "down"])
    (expected,), _ = score_all(vlm, [trajectory])
    vlm.model.model.rope_deltas = torch.tensor([[12345]])
    (found,), _ = score_all(vlm, [trajectory])
    assert torch.equal(found, expected)
