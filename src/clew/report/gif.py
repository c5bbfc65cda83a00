"""Episodes as one animated GIF: one alone, or several on the same maze side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Frame = bytes | np.ndarray | Image.Image

# Okabe-Ito colours tell solved from failed for every kind of colour vision; the verdict says it in words too.
_PAPER, _INK, _MUTED, _SOLVED, _FAILED = "#ffffff", "#1d1f23", "#666c75", "#00684d", "#a8430a"
_PAD, _TITLE, _CAPTION, _LEAST_WIDTH = 12, 30, 46, 180  # pixels; the width holds a caption


@dataclass(frozen=True)
class Side:
    """One episode of an animation.

    Attributes:
        frames: observations, the final one included: PNG bytes, uint8 RGB arrays [height, width, 3] or Pillow images.
            Small ones are enlarged by whole factors, without smoothing.
        label: what played.
        captions: a line a frame, e.g. the action that was taken on seeing it; missing ones are left blank.
        verdict: shown on the last frame, e.g. ``"solved in 8 turns"``.
        solved: colours the verdict.
    """

    frames: Sequence[Frame]
    label: str
    captions: Sequence[str] = ()
    verdict: str = ""
    solved: bool = False


def episode_gif(
    left_frames: Sequence[Frame],
    right_frames: Sequence[Frame],
    *,
    labels: tuple[str, str] = ("base", "trained"),
    captions: tuple[Sequence[str], Sequence[str]] = ((), ()),
    verdicts: tuple[str, str] = ("", ""),
    solved: tuple[bool, bool] = (False, True),
    side: int = 256,
    frame_ms: int = 500,
    hold_ms: int = 3000,
) -> bytes:
    """Two episodes as one animation (see ``Side`` and ``walk_gif``)."""
    both = [
        Side(frames, labels[i], captions[i], verdicts[i], solved[i])
        for i, frames in enumerate((left_frames, right_frames))
    ]
    return walk_gif(both, side=side, frame_ms=frame_ms, hold_ms=hold_ms)


def walk_gif(sides: Sequence[Side], *, side: int = 256, frame_ms: int = 500, hold_ms: int = 3000) -> bytes:
    """Plays episodes at the same pace; one that ends before the others shows its verdict and waits.

    Args:
        side: width and height of each picture in pixels, at most.
        frame_ms: milliseconds a frame. hold_ms: milliseconds on the last frame.

    Returns:
        The GIF's bytes: as many frames as the longest episode has, looping for ever.

    Raises:
        ValueError: a side without frames.
    """
    if not all(one.frames for one in sides):
        raise ValueError("each side needs at least one frame")
    shown = [[fit(f, side) for f in one.frames] for one in sides]
    height = max(picture.height for pictures in shown for picture in pictures)
    width = max(_LEAST_WIDTH, *(picture.width for pictures in shown for picture in pictures))
    count = max(len(pictures) for pictures in shown)
    size = (len(sides) * (width + _PAD) + _PAD, _TITLE + height + _CAPTION + _PAD)
    canvases: list[Image.Image] = []
    for index in range(count):
        canvas = Image.new("RGB", size, _PAPER)
        pen = ImageDraw.Draw(canvas)
        for which, (one, pictures) in enumerate(zip(sides, shown, strict=True)):
            x = _PAD + which * (width + _PAD)
            last = index >= len(pictures) - 1
            picture = pictures[min(index, len(pictures) - 1)]
            _write(pen, (x, 8), one.label, _INK, 15, width)
            canvas.paste(picture, (x + (width - picture.width) // 2, _TITLE + (height - picture.height) // 2))
            y = _TITLE + height + 6
            if last:
                _write(pen, (x, y), one.verdict, _SOLVED if one.solved else _FAILED, 15, width)
            else:
                lines = one.captions
                _write(pen, (x, y), lines[index] if index < len(lines) else "", _INK, 15, width)
            turns = len(pictures) - 1
            _write(pen, (x, y + 20), f"turn {min(index, turns)} of {turns}", _MUTED, 12, width)
        # A thin thread of time: it also keeps frames distinct, which Pillow would merge if they were equal.
        done = round(canvas.width * (index + 1) / count)
        pen.rectangle((0, canvas.height - 3, done, canvas.height), fill=_MUTED)
        canvases.append(canvas)
    # One palette for all frames (from the last, which holds both verdicts): no flicker, smaller file.
    palette = _palette(canvases)
    frames = [c.quantize(palette=palette, dither=Image.Dither.NONE) for c in canvases]
    out = io.BytesIO()
    durations = [frame_ms] * (count - 1) + [hold_ms]
    frames[0].save(
        out,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        disposal=1,
        optimize=False,
    )
    return out.getvalue()


def fit(frame: Frame, side: int) -> Image.Image:
    """The frame as an RGB image within ``side`` x ``side`` pixels, enlarged by a whole factor or shrunk."""
    if isinstance(frame, bytes):
        picture = Image.open(io.BytesIO(frame)).convert("RGB")
    elif isinstance(frame, np.ndarray):
        picture = Image.fromarray(frame).convert("RGB")
    else:
        picture = frame.convert("RGB")
    longest = max(picture.size)
    if longest > side:
        size = (max(1, picture.width * side // longest), max(1, picture.height * side // longest))
        return picture.resize(size, Image.Resampling.BOX)
    factor = side // longest
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _palette(canvases: Sequence[Image.Image]) -> Image.Image:
    first, last = canvases[0], canvases[-1]
    both = Image.new("RGB", (first.width, first.height * 2))
    both.paste(first, (0, 0))
    both.paste(last, (0, first.height))
    return both.quantize(colors=128, method=Image.Quantize.MEDIANCUT)


def _write(pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, colour: str, size: int, width: int) -> None:
    font = ImageFont.load_default(size=size)
    text = " ".join(text.split())
    while text and pen.textlength(text, font=font) > width:
        text = text[:-2].rstrip(".") + "." if len(text) > 2 else ""
    pen.text(at, text, fill=colour, font=font)
