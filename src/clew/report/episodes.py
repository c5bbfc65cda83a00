"""Which episodes a report shows, and their frames, answers and tokens made ready for the page."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from clew.report.gif import episode_gif
from clew.report.reader import Run, number, task_key
from clew.report.story import Story

_MOST_FRAMES = 40  # an episode
_MOST_TOKENS = 4000  # an episode; the middle of longer ones is left out
_FRAME_BYTES = 16_000  # a frame of a page; larger ones are shrunk
_GIF_BYTES = 1_200_000
_TAGGED = re.compile(r"<(action|answer)>([^<]*)</\1>")


@dataclass(frozen=True)
class Frame:
    """A frame of the strip: a ``data:`` address (empty if unreadable) and its caption.

    ``tone`` is ``yes`` (solved), ``no`` (did not work) or empty.
    """

    source: str
    turn: str
    answer: str
    feedback: str
    tone: str
    alt: str


@dataclass(frozen=True)
class Span:
    """A piece of the token sequence: shade 0 (certain) to 4 (unlikely), or None where it was not sampled."""

    text: str
    shade: int | None
    hover: str


@dataclass(frozen=True)
class Episode:
    """An episode ready to be shown."""

    title: str
    rule: str
    facts: str
    success: bool
    frames: list[Frame]
    left_out_frames: int
    spans: list[Span]
    token_facts: str


@dataclass(frozen=True)
class SideBySide:
    """The two-episode animation, its still (for readers who want no motion), and what it shows."""

    gif: bytes
    still: bytes
    alt: str
    rule: str


def chosen(replays: Sequence[Mapping[str, Any]], step: int, noun: str) -> list[Episode]:
    """The episodes of one evaluation that the report shows, each picked by a rule a reader can check."""
    one = noun[:-1]
    picks: list[tuple[str, str, Mapping[str, Any]]] = []
    if replays:
        picks.append((f"First {one}", f"The first {one} of the held-out set, whatever came of it.", replays[0]))
    solved = [r for r in replays if r.get("success")]
    if solved:
        longest = max(solved, key=lambda r: (number(r.get("path_length")) or 0, -len(_turns(r))))
        picks.append(
            (
                f"Hardest {one} solved",
                "The longest shortest path among those solved; then the fewest turns.",
                longest,
            )
        )
    failed = next((r for r in replays if not r.get("success")), None)
    if failed:
        picks.append((f"First {one} failed", "The first of the held-out set that was not solved.", failed))
    return [_episode(title, f"{rule} Step {step}:", replay) for title, rule, replay in picks]


def side_by_side(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], story: Story
) -> SideBySide | None:
    """Base and trained agent on the same task: one the base failed and the trained agent solved, if any."""
    by_task = {task_key(r): r for r in before}
    pairs = [(by_task[task_key(r)], r) for r in after if task_key(r) in by_task]
    if not pairs or story.baseline is None or story.best is None:
        return None
    one = story.noun[:-1]
    won = [(a, b) for a, b in pairs if b.get("success") and not a.get("success")]
    if won:
        first, second = max(won, key=lambda p: number(p[1].get("path_length")) or 0)
        rule = (
            f"Chosen to show the difference, not a typical {one}: among the {len(won)} that the base agent "
            f"failed and the trained one solved, the one with the longest shortest path."
        )
    else:
        first, second = pairs[0]
        rule = f"No {one} was failed before and solved after; this is the first of the held-out set."
    labels = (
        "base" if story.baseline[0] == 0 else f"step {story.baseline[0]}",
        f"trained, step {story.best[0]}",
    )
    verdicts = (_verdict(first), _verdict(second))
    pictures = (_pictures(first), _pictures(second))
    if not pictures[0] or not pictures[1]:
        return None
    for side in (256, 192, 128):
        gif = episode_gif(
            *pictures,
            labels=labels,
            captions=(_captions(first), _captions(second)),
            verdicts=verdicts,
            solved=(bool(first.get("success")), bool(second.get("success"))),
            side=side,
        )
        if len(gif) <= _GIF_BYTES:
            break
    alt = f"Two agents on the same {one}, seed {second.get('seed')}. {labels[0]}: {verdicts[0]}. "
    return SideBySide(gif, _last_frame(gif), f"{alt}{labels[1]}: {verdicts[1]}.", rule)


def replays_for(run: Run, story: Story) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Held-out replays of the baseline step and of the best step."""
    before = run.replays(story.baseline[0] if story.baseline else None, run.heldout)
    if story.best and story.baseline and story.best[0] == story.baseline[0]:
        return [], before
    return before, run.replays(story.best[0] if story.best else None, run.heldout)


def data_uri(png: str, most_bytes: int = _FRAME_BYTES) -> str:
    """A base64 image as a ``data:`` address, decoded and encoded anew (nothing of the input is passed on).

    Images beyond ``most_bytes`` are shrunk by halves. Returns ``""`` if it can't be read as an image.
    """
    picture = _picture(png)
    if picture is None:
        return ""
    while True:
        out = io.BytesIO()
        picture.save(out, "PNG", optimize=True)
        if out.tell() <= most_bytes or min(picture.size) < 32:
            return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)


def spans(tokens: object) -> tuple[list[Span], str]:
    """The token sequence as spans (neighbours that were not sampled are joined) and a line of facts."""
    rows = [t for t in tokens if isinstance(t, Mapping)] if isinstance(tokens, list) else []
    sampled = [number(t.get("lp")) for t in rows if t.get("m")]
    known = [lp for lp in sampled if lp is not None]
    facts = f"{len(rows)} tokens, {len(sampled)} sampled"
    if known:
        mean, least = sum(known) / len(known), math.exp(min(0.0, *known))
        facts += f", mean log-probability {mean:.3f}, least likely {least:.2g}"
    out: list[Span] = []
    half = _MOST_TOKENS // 2
    for index, token in enumerate(rows):
        if len(rows) > _MOST_TOKENS and half <= index < len(rows) - half:
            if index == half:
                out.append(Span(f"\n[{len(rows) - 2 * half} tokens left out here]\n", None, ""))
            continue
        text = str(token.get("t", ""))
        if not token.get("m"):
            if out and out[-1].shade is None:
                out[-1] = Span(out[-1].text + text, None, "")
            else:
                out.append(Span(text, None, ""))
            continue
        out.append(_sampled(text, number(token.get("lp"))))
    return out, facts


def _sampled(text: str, lp: float | None) -> Span:
    shown = text.replace("\n", "\u23ce\n") or "\u2205"  # a new line and an empty token stay visible
    if lp is None:
        return Span(shown, 0, "sampled, no log-probability kept")
    p = math.exp(min(lp, 0.0))
    shade = sum(p < edge for edge in (0.9, 0.5, 0.1, 0.01))
    return Span(shown, shade, f"p {p:.3g}, log p {lp:.3f}")


def _episode(title: str, rule: str, replay: Mapping[str, Any]) -> Episode:
    turns = _turns(replay)
    kept = turns[:_MOST_FRAMES]
    success = bool(replay.get("success"))
    frames = []
    for number_, turn in enumerate(kept, 1):
        answer, feedback = str(turn.get("answer", "")), str(turn.get("feedback", ""))
        alt = f"Turn {number_}: what the agent saw before it answered {short(answer)}"
        ended = success and number_ == len(turns)
        tone = "yes" if ended else "" if feedback == "moved" else "no"
        source = data_uri(str(turn.get("frame", "")))
        frames.append(Frame(source, str(number_), action(answer), feedback, tone, alt))
    if replay.get("final_frame"):
        source, tone = data_uri(str(replay["final_frame"])), "yes" if success else "no"
        frames.append(Frame(source, "end", "", _verdict(replay), tone, "The last frame"))
    pieces, token_facts = spans(replay.get("tokens"))
    facts = [f"seed {replay.get('seed')}", f"shortest path {replay.get('path_length')} moves"]
    facts += [
        f"{len(turns)} turns",
        f"reward {replay.get('reward')}",
        f"stopped: {replay.get('stop_reason')}",
    ]
    if replay.get("policy_version"):
        facts.append(f"policy {replay['policy_version']}")
    return Episode(title, rule, ", ".join(facts), success, frames, len(turns) - len(kept), pieces, token_facts)


def short(text: str, most: int = 40) -> str:
    """The text on one line, cut with an ellipsis."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def action(answer: str) -> str:
    """A tagged answer without its tags; any other answer as it stands."""
    tagged = _TAGGED.fullmatch(answer.strip())
    return short(tagged[2] if tagged else answer)


def _turns(replay: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    turns = replay.get("turns")
    return [t for t in turns if isinstance(t, Mapping)] if isinstance(turns, list) else []


def _captions(replay: Mapping[str, Any]) -> list[str]:
    return [
        f"{short(action(str(t.get('answer', ''))), 24)}: {short(str(t.get('feedback', '')), 16)}".strip(": ")
        for t in _turns(replay)
    ]


def _verdict(replay: Mapping[str, Any]) -> str:
    count = len(_turns(replay))
    return f"solved in {count} turns" if replay.get("success") else f"not solved, {count} turns"


def _pictures(replay: Mapping[str, Any]) -> list[Image.Image]:
    coded = [str(t.get("frame", "")) for t in _turns(replay)[:_MOST_FRAMES]] + [str(replay.get("final_frame") or "")]
    return [picture for c in coded if (picture := _picture(c)) is not None]


def _picture(coded: str) -> Image.Image | None:
    try:
        return Image.open(io.BytesIO(base64.b64decode(coded, validate=True))).convert("RGB")
    except (binascii.Error, ValueError, OSError, Image.DecompressionBombError):
        return None  # shown as unreadable: a damaged frame must not cost the whole report


def _last_frame(gif: bytes) -> bytes:
    picture = Image.open(io.BytesIO(gif))
    picture.seek(getattr(picture, "n_frames", 1) - 1)
    out = io.BytesIO()
    picture.convert("RGB").save(out, "PNG", optimize=True)
    return out.getvalue()
