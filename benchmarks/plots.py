"""Charts as SVG, written by hand: bars to compare, and courses over time.

They are shown as images, so each has its own styles, for light and for dark pages; nothing is
told by colour alone. Ours is in the one accent colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.report import number

WIDTH = 720
LABELS, VALUES = 190, 90
BAR, GAP = 20, 8
TOP, BOTTOM = 60, 34
PLOT_HEIGHT = 220
#: From this ratio of the largest to the smallest on, the scale is logarithmic.
LOG_FROM = 20.0

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.quiet { fill: #59636e; font-size: 12px }
.ours { font-weight: 600 }
rect { fill: #8c959f } rect.ours { fill: #0969da }
line { stroke: #d1d9e0 }
path { fill: none; stroke: #6e7781; stroke-width: 2 } path.ours { stroke: #0969da }
circle { fill: #6e7781 } circle.ours { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .quiet { fill: #9198a1 }
  rect { fill: #656c76 } rect.ours { fill: #4493f8 }
  line { stroke: #3d444d }
  path { stroke: #9198a1 } path.ours { stroke: #4493f8 }
  circle { fill: #9198a1 } circle.ours { fill: #4493f8 }
}
"""
#: Dashes distinguish the lines without colour; the first line is solid.
DASHES = ("", "6 4", "2 3", "10 3 2 3")


class Bar(NamedTuple):
    """One bar; `ours` has the accent colour."""

    label: str
    value: float
    ours: bool = False


class Scale(NamedTuple):
    """Maps figures to places between 0 and 1; `ticks` are the figures written at the axis."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of `value`: 0 at the low end, 1 at the high end."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


def scale(values: Sequence[float], *, linear: bool = False) -> Scale:
    """Return a scale for `values`, which are not negative: from 0, or logarithmic if they differ
    much, and need not be `linear`.

    >>> scale([300, 900]).ticks
    (0.0, 200.0, 400.0, 600.0, 800.0, 1000.0)
    >>> scale([485, 75200]).ticks
    (100.0, 1000.0, 10000.0, 100000.0)
    >>> round(scale([30, 9000]).at(100), 3), scale([0.0]).at(0.0)
    (0.333, 0.0)
    """
    smallest, largest = min(values), max(values)
    if not linear and smallest > 0 and largest / smallest >= LOG_FROM:
        low = math.floor(math.log10(smallest))
        if 10.0**low == smallest:
            low -= 1  # else its bar has no length
        high = math.ceil(math.log10(largest))
        return Scale(10.0**low, 10.0**high, tuple(10.0**n for n in range(low, high + 1)), log=True)
    step = _step(largest)
    count = max(1, math.ceil(largest / step - 1e-9))
    return Scale(0.0, step * count, tuple(step * n for n in range(count + 1)))


def _step(largest: float) -> float:
    """Return a round number of which four to eight reach `largest`."""
    if largest <= 0:
        return 1.0
    rough = largest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next((each * power for each in (1, 2, 5) if each * power >= rough), 10 * power)


def bars(title: str, note: str, unit: str, shown: Sequence[Bar], *, linear: bool = False) -> str:
    """Return a chart of horizontal bars, in the order given; `note` says what is better."""
    axis = scale([bar.value for bar in shown], linear=linear)
    room = WIDTH - LABELS - VALUES
    bottom = TOP + len(shown) * (BAR + GAP)
    parts = [
        f'<line x1="{_n(LABELS + room * axis.at(tick))}" y1="{TOP - 6}"'
        f' x2="{_n(LABELS + room * axis.at(tick))}" y2="{bottom}"/>'
        f'<text class="quiet" x="{_n(LABELS + room * axis.at(tick))}" y="{bottom + 16}"'
        f' text-anchor="middle">{number(tick)}</text>'
        for tick in axis.ticks
    ]
    for place, bar in enumerate(shown):
        y = TOP + place * (BAR + GAP)
        length = max(1.0, room * axis.at(bar.value))
        kind = ' class="ours"' if bar.ours else ""
        parts.append(
            f'<text{kind} x="{LABELS - 8}" y="{y + 15}" text-anchor="end">'
            f"{escape(bar.label)}</text>"
            f'<rect{kind} x="{LABELS}" y="{y}" width="{_n(length)}" height="{BAR}" rx="2"/>'
            f'<text{kind} x="{_n(LABELS + length + 6)}" y="{y + 15}">{number(bar.value)}</text>'
        )
    note = "; ".join(filter(None, (unit, note, "logarithmic scale" if axis.log else "")))
    told = ", ".join(f"{bar.label} {number(bar.value)}" for bar in shown)
    return _document(title, note, f"{told} {unit}", parts, bottom + BOTTOM)


def courses(
    title: str, note: str, unit: str, series: Mapping[str, Sequence[float]], steps: Sequence[str]
) -> str:
    """Return a chart of one line for each of `series`, over the `steps` that the axis names.

    The first is ours; the scale begins at 0.
    """
    largest = max(max(values) for values in series.values())
    axis = scale([0.0, largest])
    left, right = 70, WIDTH - LABELS
    bottom = TOP + PLOT_HEIGHT

    def y(value: float) -> float:
        return bottom - PLOT_HEIGHT * axis.at(value)

    def x(place: int) -> float:
        return left + (right - left) * place / max(1, len(steps) - 1)

    parts = [
        f'<line x1="{left}" y1="{_n(y(tick))}" x2="{right}" y2="{_n(y(tick))}"/>'
        f'<text class="quiet" x="{left - 8}" y="{_n(y(tick) + 4)}" text-anchor="end">'
        f"{number(tick)}</text>"
        for tick in axis.ticks
    ]
    parts += [
        f'<text class="quiet" x="{_n(x(place))}" y="{bottom + 18}" text-anchor="middle">'
        f"{escape(step)}</text>"
        for place, step in enumerate(steps)
    ]
    ends = _apart([y(values[-1]) for values in series.values()], 16.0)
    for order, ((name, values), end) in enumerate(zip(series.items(), ends, strict=True)):
        kind = ' class="ours"' if order == 0 else ""
        points = " L".join(f"{_n(x(place))} {_n(y(value))}" for place, value in enumerate(values))
        dashes = DASHES[order % len(DASHES)]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<path{kind}{dashed} d="M{points}"/>')
        parts += [
            f'<circle{kind} cx="{_n(x(place))}" cy="{_n(y(value))}" r="3"/>'
            for place, value in enumerate(values)
        ]
        parts.append(
            f'<text{kind} x="{_n(x(len(values) - 1) + 10)}" y="{_n(end + 4)}">{escape(name)}</text>'
        )
    told = "; ".join(
        f"{name}: {', '.join(number(value) for value in values)}" for name, values in series.items()
    )
    return _document(title, "; ".join(filter(None, (unit, note))), told, parts, bottom + BOTTOM)


def _apart(places: Sequence[float], least: float) -> list[float]:
    """Return the places moved down so far that labels there do not touch.

    >>> _apart([10.0, 50.0, 12.0], 16.0)
    [10.0, 50.0, 26.0]
    """
    moved = list(places)
    last = float("-inf")
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        moved[index] = last = max(places[index], last + least)
    return moved


def _document(title: str, note: str, told: str, parts: Sequence[str], height: int) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            ' aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(told)}</desc>',
            f"<style>{STYLE}</style>",
            f'<text class="title" x="8" y="22">{escape(title)}</text>',
            f'<text class="quiet" x="8" y="40">{escape(note)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _n(value: float) -> str:
    """Return a coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
