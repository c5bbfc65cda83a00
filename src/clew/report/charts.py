"""Line charts and small rate plots as inline SVG; every text is escaped by Markup.format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from clew.report.reader import Score

Point = tuple[float, float]  # (step, value)
Scale = Literal["plain", "percent", "whole"]
Axis = Callable[[float], float]  # a step or a value to pixels
_MOST_POINTS = 400  # a series; longer ones are averaged over neighbouring steps
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 24  # margins in pixels


@dataclass(frozen=True)
class Series:
    """One line: its name, points by step, and class ``a``, ``b`` or ``c`` (colour and dash)."""

    name: str
    points: Sequence[Point]
    css: str = "a"
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart over training steps.

    Attributes:
        title, unit: what is drawn, and in what.
        band: (step, low, high), drawn behind the lines.
        references: (label, value) horizontal lines, labelled on the right.
        flag: (step, value, low, high): one point with whiskers (the confirmed result).
        scale: ``plain`` numbers; ``percent``: fractions shown as per cent; ``whole``: those too, on an axis
            from 0 to 100 % whatever the values.
        readouts: (step, text) shown when the pointer is near; made from the series if empty.
        note: a sentence under the chart.
    """

    title: str
    unit: str
    series: Sequence[Series]
    band: Sequence[tuple[float, float, float]] = ()
    references: Sequence[tuple[str, float]] = ()
    flag: tuple[float, float, float, float] | None = None
    scale: Scale = "plain"
    readouts: Sequence[tuple[float, str]] = ()
    note: str = ""

    @property
    def percent(self) -> bool:
        """Whether values are fractions."""
        return self.scale != "plain"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(s.points for s in self.series)


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most ``most`` points: neighbours are averaged, so that no spike is picked or lost by chance."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(len(points) / most)
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    return [(part[-1][0], sum(v for _, v in part) / len(part)) for part in parts]


def plain(value: float) -> str:
    """A number for reading: three significant digits, small ones as ``1.2e-5``."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1}f}"


def percent(value: float) -> str:
    """A fraction as per cent with one decimal, and a narrow space that does not break."""
    return f"{100 * value:.1f}\u202f%"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that span [low, high]."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def readouts(chart: Chart) -> list[tuple[float, str]]:
    """What hovering says at each step: given texts, or each series' value there."""
    if chart.readouts:
        return list(chart.readouts)
    by_step: dict[float, list[str]] = {}
    several = sum(bool(s.points) for s in chart.series) > 1
    for series in chart.series:
        for step, value in series.points:
            text = percent(value) if chart.percent else plain(value)
            by_step.setdefault(step, []).append(f"{series.name} {text}" if several else text)
    unit = "" if chart.percent or not chart.unit else f" {chart.unit}"
    return [(step, f"step {step:g}: {', '.join(texts)}{unit}") for step, texts in sorted(by_step.items())]


def points_json(chart: Chart) -> str:
    """The readouts for the page's script, as JSON (goes into an escaped attribute, never into a script)."""
    return json.dumps([[step, text] for step, text in readouts(chart)], ensure_ascii=False)


def describe(chart: Chart) -> str:
    """The chart in one sentence, for those who do not see it."""
    parts = []
    for series in chart.series:
        if series.points:
            values = [v for _, v in series.points]
            show = percent if chart.percent else plain
            ends = [f"{show(v)} at step {step:g}" for step, v in (series.points[0], series.points[-1])]
            span = f"lowest {show(min(values))}, highest {show(max(values))}"
            parts.append(f"{series.name} goes from {ends[0]} to {ends[1]} ({span})")
    parts += [f"reference line {label} at {percent(value)}" for label, value in chart.references]
    return f"{chart.title}: {'; '.join(parts)}."


def draw(chart: Chart, width: int, height: int, css: str = "") -> Markup:
    """The chart as an ``<svg>`` of this size in pixels."""
    right = _RIGHT + (118 if chart.references or chart.flag else 0)
    x0, x1, y0, y1 = _LEFT, width - right, height - _BOTTOM, _TOP
    values = [v for s in chart.series for _, v in s.points] + [v for b in chart.band for v in b[1:]]
    values += [v for _, v in chart.references]
    steps = [step for s in chart.series for step, _ in s.points]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    y_ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if chart.scale == "whole" else ticks(min(0.0, *values), max(values), 3)
    low, high = y_ticks[0], y_ticks[-1]

    def x(step: float) -> float:
        return x0 + (step - first) / (last - first) * (x1 - x0)

    def y(value: float) -> float:
        return y0 - (value - low) / (high - low) * (y0 - y1)

    out: list[Markup] = []
    for tick in y_ticks:
        label = f"{100 * tick:g}%" if chart.percent else f"{tick:,g}".replace("e-0", "e-")
        out.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(x0, x1, y(tick), y(tick))
        )
        out.append(
            Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                x0 - 8, y(tick) + 4, label
            )
        )
    for tick in ticks(first, last, 6 if width > 600 else 3):
        if first <= tick <= last and tick == int(tick):
            anchor = "middle" if x(tick) < x1 - 8 or right > _RIGHT else "end"
            out.append(
                Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="{}">{:g}</text>').format(
                    x(tick), y0 + 17, anchor, tick
                )
            )
    if len(chart.band) > 1:
        upper = [f"{x(s):.1f},{y(hi):.1f}" for s, _, hi in chart.band]
        lower = [f"{x(s):.1f},{y(lo):.1f}" for s, lo, _ in reversed(chart.band)]
        out.append(Markup('<polygon class="band" points="{}"/>').format(" ".join(upper + lower)))
    for _, value in chart.references:
        out.append(
            Markup('<line class="refline" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(x0, x1, y(value), y(value))
        )
    wanted = [(y(value), f"{label} {value:.0%}") for label, value in chart.references]
    for at, label in _spread(wanted, 15):
        out.append(Markup('<text class="label" x="{}" y="{:.1f}">{}</text>').format(x1 + 8, at + 4, label))
    for series in chart.series:
        out += _line(series, x, y)
    if chart.flag:
        out += _flag(chart.flag, x, y)
    out.append(Markup('<line class="cursor" x1="0" x2="0" y1="{}" y2="{}" visibility="hidden"/>').format(y1, y0))
    return Markup(
        '<svg class="chart {}" viewBox="0 0 {} {}" role="img" aria-label="{}" tabindex="0" '
        'data-x0="{}" data-x1="{}" data-first="{:g}" data-last="{:g}">{}</svg>'
    ).format(css, width, height, describe(chart), x0, x1, first, last, Markup("").join(out))


def _line(series: Series, x: Axis, y: Axis) -> Iterable[Markup]:
    if not series.points:
        return
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in series.points)
    if len(series.points) > 1:
        yield Markup('<polyline class="line {}" points="{}"/>').format(series.css, path)
    if series.dots or len(series.points) == 1:
        for step, value in series.points:
            yield Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(series.css, x(step), y(value))


def _flag(flag: tuple[float, float, float, float], x: Axis, y: Axis) -> Iterable[Markup]:
    step, value, low, high = flag
    at, up = x(step), y(value)
    yield Markup('<line class="flag" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(at, y(low), y(high))
    for end in (low, high):
        yield Markup('<line class="flag" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
            at - 4, at + 4, y(end), y(end)
        )
    yield Markup('<path class="flag diamond" d="M{:.1f},{:.1f} l6,6 l-6,6 l-6,-6 z"/>').format(at, up - 6)


def _spread(labels: Sequence[tuple[float, str]], gap: float) -> list[tuple[float, str]]:
    """Moves labels apart so that none lies within ``gap`` pixels of the next."""
    placed: list[tuple[float, str]] = []
    for at, label in sorted(labels):
        placed.append((max(at, placed[-1][0] + gap) if placed else at, label))
    return placed


def whisker(score: Score, css: str = "a") -> Markup:
    """A rate from 0 to 1 with its interval, on one short line (decorative: the numbers stand beside it)."""
    width = 140
    left, span = 5, width - 10
    parts = [Markup('<line class="grid" x1="{}" x2="{}" y1="8" y2="8"/>').format(left, left + span)]
    for edge in (0, 0.5, 1):
        parts.append(Markup('<line class="grid" x1="{0:g}" x2="{0:g}" y1="4" y2="12"/>').format(left + span * edge))
    if score.ci95:
        parts.append(
            Markup('<line class="whisker {}" x1="{:.1f}" x2="{:.1f}" y1="8" y2="8"/>').format(
                css, left + span * score.ci95[0], left + span * score.ci95[1]
            )
        )
    parts.append(Markup('<circle class="dot {}" cx="{:.1f}" cy="8" r="4"/>').format(css, left + span * score.rate))
    return Markup('<svg class="whiskers" viewBox="0 0 {} 16" aria-hidden="true">{}</svg>').format(
        width, Markup("").join(parts)
    )
