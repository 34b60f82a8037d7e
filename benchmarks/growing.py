"""Compares figures with the first of their kind, to show how something grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

from benchmarks.report import Row

TIMES = 20


def milliseconds(do: Callable[[], object], times: int = TIMES) -> float:
    """Return the median time of `times` calls, after as many calls for warm-up."""
    taken = []
    for _ in range(times if times == 1 else 2 * times):
        began = perf_counter()
        do()
        taken.append((perf_counter() - began) * 1000)
    return median(taken[-times:])


def grown(
    name: str, figures: Mapping[str, float], unit: str, notes: str | Mapping[str, str]
) -> list[Row]:
    """Return a row per figure; each is compared with the first."""
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
