"""The side-by-side animation, and how its maze and the shown episodes are picked."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from clew.report import episodes
from clew.report.gif import episode_gif, fit
from clew.report.reader import Score
from clew.report.story import Story


def frames(count: int, side: int = 20) -> list[np.ndarray]:
    return [np.full((side, side, 3), 40 * (i % 5), dtype=np.uint8) for i in range(count)]


@pytest.mark.parametrize(("left", "right"), [(1, 1), (3, 7), (16, 4), (5, 5)])
def test_as_many_frames_as_the_longer_episode(left: int, right: int) -> None:
    gif = Image.open(io.BytesIO(episode_gif(frames(left), frames(right), frame_ms=200, hold_ms=900)))
    assert gif.format == "GIF" and getattr(gif, "n_frames", 1) == max(left, right)
    gif.seek(max(left, right) - 1)
    assert gif.info["duration"] == 900


def test_equal_frames_are_not_merged() -> None:
    still = [np.zeros((8, 8, 3), np.uint8)] * 6
    assert Image.open(io.BytesIO(episode_gif(still, still))).n_frames == 6  # type: ignore[attr-defined]


def test_png_bytes_arrays_and_images_are_the_same() -> None:
    array = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    made = [episode_gif([f], [f]) for f in (array, Image.fromarray(array), out.getvalue())]
    assert made[0] == made[1] == made[2]


def test_enlarging_keeps_every_pixel() -> None:
    array = np.arange(75, dtype=np.uint8).reshape(5, 5, 3)
    large = np.asarray(fit(array, 17))
    assert large.shape == (15, 15, 3)
    assert (large[::3, ::3] == array).all()
    assert max(fit(np.zeros((900, 300, 3), np.uint8), 200).size) == 200


def test_no_frames_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        episode_gif([], frames(2))


def replay(seed: int, success: bool, length: int = 5, turns: int = 3) -> dict[str, object]:
    out = io.BytesIO()
    Image.new("RGB", (12, 12), (seed, 0, 0)).save(out, "PNG")
    png = base64.b64encode(out.getvalue()).decode()
    turn = {"frame": png, "text": "", "answer": "up", "feedback": "moved"}
    identity = {"seed": seed, "content_hash": f"h{seed}", "path_length": length}
    outcome = {"success": success, "reward": 1.0, "stop_reason": "goal"}
    return identity | outcome | {"turns": [turn] * turns, "final_frame": png, "tokens": []}


STORY = Story("mazes", (0, Score(1, 4)), (20, Score(3, 4)), None, None, None, 3, True, 20, 20)


def test_the_maze_is_one_that_was_failed_and_then_solved() -> None:
    before = [replay(1, True), replay(2, False, 6), replay(3, False, 9), replay(4, False, 12)]
    after = [replay(4, False, 12), replay(3, True, 9), replay(2, True, 6), replay(1, True)]
    made = episodes.side_by_side(before, after, STORY)
    assert made is not None
    assert "seed 3" in made.alt and "not solved, 3 turns" in made.alt and "solved in 3 turns" in made.alt
    assert "among the 2 that the base agent failed" in made.rule
    assert Image.open(io.BytesIO(made.gif)).n_frames == 4  # type: ignore[attr-defined]
    assert Image.open(io.BytesIO(made.still)).format == "PNG"


def test_no_such_maze_is_said() -> None:
    made = episodes.side_by_side([replay(1, True)], [replay(1, True)], STORY)
    assert made is not None and made.rule.startswith("No maze was failed before")
    assert episodes.side_by_side([replay(1, True)], [replay(2, True)], STORY) is None


def test_episodes_are_picked_by_their_rules() -> None:
    lines = [replay(1, True, 5), replay(2, False), replay(3, True, 8, turns=9), replay(4, True, 8, turns=8)]
    first, hardest, failed = episodes.chosen(lines, 20, "mazes")
    assert "seed 1" in first.facts and "seed 4" in hardest.facts and "seed 2" in failed.facts
    assert [len(e.frames) for e in (first, hardest, failed)] == [4, 9, 4]


def test_spans_follow_the_mask() -> None:
    rows = (("a", 0, None), ("b", 0, None), ("up", 1, -0.05), ("\n", 1, -3.0), ("c", 0, None), ("?", 1, None))
    tokens = [{"t": text, "m": mask, "lp": lp} for text, mask, lp in rows]
    pieces, facts = episodes.spans(tokens)
    assert [(p.text, p.shade) for p in pieces] == [("ab", None), ("up", 0), ("⏎\n", 3), ("c", None), ("?", 0)]
    assert pieces[1].hover == "p 0.951, log p -0.050"
    assert facts.startswith("6 tokens, 3 sampled, mean log-probability -1.525")


def test_large_frames_are_shrunk_and_junk_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    uri = episodes.data_uri(base64.b64encode(out.getvalue()).decode())
    assert len(base64.b64decode(uri.split(",")[1])) <= 16_000
    assert episodes.data_uri("not base64!") == episodes.data_uri("aGVsbG8=") == ""
