"""Charts drawn on the server: shapes for an SVG that scales to any width, labels for the HTML."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.formats import date_format

from django_mq.conf.local_time import local
from django_mq.policy.durations import precise_span
from django_mq.policy.figures import Counted
from django_mq.policy.histogram import Latency
from django_mq.queues import Figures

#: The size of the drawing in its own units; it stretches.
WIDTH, HEIGHT = 600.0, 120.0
#: The share of a step's width that its bar fills.
FILLED = 0.82

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind, one per step."""

    name: str
    label: Any
    values: Values


def charts(figures: Figures) -> list[dict[str, Any]]:
    """Return the charts of throughput, failures and latency."""
    steps = list(figures.steps.values())
    per = _PER.get(figures.step, figures.span)
    return [
        _bars(
            figures,
            "throughput",
            f"Messages {per}",
            bars=[Series("acked", "acked", [each.acked for each in steps])],
            line=Series("broadcast", "in", [each.broadcast for each in steps]),
        ),
        _bars(
            figures,
            "failures",
            f"Failures {per}",
            bars=[
                Series("dead", "dead letters", [each.dead for each in steps]),
                Series("retried", "retried", [each.retried for each in steps]),
            ],
        ),
        _latencies(figures, "waited", "Waited from due to claimed", lambda each: each.waited),
        _latencies(figures, "ran", "Ran in the handler", lambda each: each.ran),
    ]


_PER = {
    timedelta(minutes=1): "per minute",
    timedelta(hours=1): "per hour",
    timedelta(hours=3): "per 3 hours",
}


def _bars(
    figures: Figures, name: str, title: Any, *, bars: list[Series], line: Series | None = None
) -> dict[str, Any]:
    """Return a chart of stacked bars, the first series at the bottom, and of a line over them."""
    count = len(figures.steps)
    stacked = [sum(each.values[n] or 0 for each in bars) for n in range(count)]
    top = round_up(max([1.0, *stacked, *(v or 0 for v in (line.values if line else ()))]))
    below = [0.0] * count
    shapes = []
    for each in bars:
        shapes.append(_shape(each, _bar_path(each.values, below, top), is_bar=True))
        below = [start + (value or 0) for start, value in zip(below, each.values, strict=True)]
    all_series = list(bars)
    if line:
        all_series.insert(0, line)
        shapes.append(_shape(line, _line_path(line.values, lambda v: v / top)))
    totals = [f"{each.label} {sum(v or 0 for v in each.values):,.0f}" for each in all_series]
    return _chart(
        figures,
        name=name,
        title=title,
        summary=", ".join(totals),
        shapes=shapes,
        hits=_hits(figures, all_series, _whole),
        scale=[_whole(top), _whole(top / 2) if top > 1 else "", "0"],
    )


def _latencies(
    figures: Figures, name: str, title: Any, read: Callable[[Counted], Latency | None]
) -> dict[str, Any]:
    """Return a chart of percentiles on a logarithmic scale."""
    found = [read(each) for each in figures.steps.values()]
    series = [
        Series(share, share, [getattr(each, share) if each else None for each in found])
        for share in ("p50", "p95", "p99")
    ]
    values = [value for each in series for value in each.values if value]
    low, high = round_bounds(values)

    def position(value: float) -> float:
        return (math.log10(max(value, low)) - math.log10(low)) / math.log10(high / low)

    total = read(figures.total)
    summary = (
        ", ".join(f"{each.name} {precise_span(getattr(total, each.name))}" for each in series)
        if total
        else "no data"
    )
    return _chart(
        figures,
        name=name,
        title=title,
        summary=summary,
        shapes=[_shape(each, _line_path(each.values, position)) for each in series],
        hits=_hits(figures, series, precise_span),
        scale=[precise_span(high), precise_span(low)] if values else [],
    )


def _chart(figures: Figures, **parts: Any) -> dict[str, Any]:
    """Return a chart; the labels of its axes go from top to bottom and from left to right."""
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return {**parts, "times": times(figures), "box": box, "height": HEIGHT}


def _shape(series: Series, path: str, *, is_bar: bool = False) -> dict[str, Any]:
    return {"name": series.name, "label": series.label, "path": path, "is_bar": is_bar}


def round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten.

    >>> round_up(1), round_up(3), round_up(70), round_up(101)
    (1.0, 5.0, 100.0, 200.0)
    """
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= value)


def round_bounds(values: Iterable[float]) -> tuple[float, float]:
    """Return the round durations below and above all `values`.

    >>> round_bounds([0.002, 0.5]), round_bounds([45.0, 4000.0]), round_bounds([])
    ((0.001, 1.0), (10.0, 21600.0), (0.001, 1.0))
    """
    known = list(values) or [0.002, 0.5]
    low = bisect_right(_ROUND, min(known)) - 1
    high = max(bisect_left(_ROUND, max(known)), low + 1)
    return _ROUND[max(low, 0)], _ROUND[min(high, len(_ROUND) - 1)]


#: Seconds.
_ROUND = (
    *(1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0),
    *(60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 10 * 86400.0, 100 * 86400.0, 1e9),
)


def _bar_path(values: Values, below: Sequence[float], top: float) -> str:
    step = WIDTH / len(values)
    parts = []
    for n, value in enumerate(values):
        if value:
            # Even a single failure among many messages must stay visible.
            height = max(HEIGHT * value / top, 1.5)
            y = HEIGHT * (1 - below[n] / top)
            x, width = n * step + step * (1 - FILLED) / 2, step * FILLED
            parts.append(f"M{x:.1f} {y:.1f}h{width:.1f}v{-height:.1f}h{-width:.1f}z")
    return "".join(parts)


def _line_path(values: Values, position: Callable[[float], float]) -> str:
    """Return steps: each value as wide as its step, joined to the next unless that is missing."""
    step = WIDTH / len(values)
    parts = []
    before: float | None = None
    for n, value in enumerate(values):
        if value is not None:
            y = HEIGHT - 1 - (HEIGHT - 2) * min(1.0, max(0.0, position(value)))
            parts.append(f"M{n * step:.1f} {y:.1f}" if before is None else f"V{y:.1f}")
            parts.append(f"H{(n + 1) * step:.1f}")
        before = value
    return "".join(parts)


def _hits(
    figures: Figures, series: Sequence[Series], show: Callable[[float], str]
) -> list[dict[str, Any]]:
    """Return the steps as areas under the pointer, each with its text."""
    width = WIDTH / len(figures.steps)
    found = []
    for n, at in enumerate(figures.steps):
        words = [
            f"{each.label} {show(value)}"
            for each in series
            if (value := each.values[n]) is not None
        ]
        text = f"{step_time(at, figures)}: {', '.join(words) or 'no data'}"
        found.append({"x": round(n * width, 1), "width": round(width, 1), "text": text})
    return found


def times(figures: Figures) -> list[str]:
    """Return the labels of the time axis: its beginning, its middle, and now."""
    ats = list(figures.steps)
    return [step_time(ats[0], figures), step_time(ats[len(ats) // 2], figures), "now"]


def step_time(at: datetime, figures: Figures) -> str:
    """Return the start of a step, in the current time zone: the time, with the day in a week."""
    shown = local(at)
    day = f"{date_format(shown, 'D')} " if figures.span != "hour" else ""
    return f"{day}{shown:%H:%M}"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 or not value else f"{value:g}"
