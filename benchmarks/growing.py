"""Figures that stand against the first of their kind: how something grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

from benchmarks.report import Row

TIMES = 20


def milliseconds(do: Callable[[], object], times: int = TIMES) -> float:
    """Return the median of so many times, after as many that do not count."""
    taken = []
    for _ in range(times if times == 1 else 2 * times):
        began = perf_counter()
        do()
        taken.append((perf_counter() - began) * 1000)
    return median(taken[-times:])


def grown(
    name: str, figures: Mapping[str, float], unit: str, notes: str | Mapping[str, str]
) -> list[Row]:
    """Return a row for each figure; each stands against the first."""
    first = next(iter(figures.values()))
    return [
        Row(
            workload=name.format(size),
            figure=figure,
            unit=unit,
            against=first,
            ratio=figure / first,
            note=notes if isinstance(notes, str) else notes[size],
        )
        for size, figure in figures.items()
    ]
