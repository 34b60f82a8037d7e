"""The figures of all rounds, and the rows of the table that they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.database import Wrong
from benchmarks.footprints import Cost, with_cpu
from benchmarks.report import Row, compared, failed


class Board:
    """Figures by what was measured and of whom; rows compare with `against`."""

    def __init__(self, against: str = "", prefix: str = "peers") -> None:
        self._against = against
        self._prefix = prefix
        self._figures: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
        self._notes: dict[tuple[str, str], str] = {}
        self._wrongs: dict[tuple[str, str], str] = {}

    def measure(
        self,
        whats: Sequence[str],
        title: str,
        act: Callable[..., Mapping[str, Sequence[float | Cost]]],
        *arguments: Any,
    ) -> None:
        """Keep what `act` returns: by title, one figure for each of `whats` (more are dropped).

        The figure is a number, or a Cost: a rate with its CPU.

        Who was wrong once is not asked again.
        """
        if any((what, title) in self._wrongs for what in whats):
            return
        try:
            found = act(*arguments)
        except Exception as error:  # the error of one peer does not affect the rows of others
            reason = str(error) if isinstance(error, Wrong) else repr(error)
            self._wrongs.update({(what, title): reason for what in whats})
            return
        for name, figures in found.items():
            for what, figure in zip(whats, figures, strict=False):
                cost = figure if isinstance(figure, Cost) else Cost(figure)
                self._figures[what, name].append(cost.rate)
                self._costs[what, name].append(cost)

    def note(self, what: str, title: str, text: str) -> None:
        """Add the text to the note of the row."""
        self._notes[what, title] = text

    def rates(
        self, what: str, ours: str, others: Sequence[str], *, at_least: float | None = None
    ) -> list[Row]:
        """Return a row of each rate, and one of ours against the best of the others."""
        return self._rows(what, ours, others, unit="a second", best=max, limit=at_least)

    def times(
        self,
        what: str,
        ours: str,
        others: Sequence[str],
        *,
        at_most: float | None = None,
        unit: str = "ms",
        rivals: Sequence[str] = (),
    ) -> list[Row]:
        """Return a row of each time, and one of ours against the best of `rivals`: all others."""
        return self._rows(what, ours, others, unit=unit, best=min, limit=at_most, rivals=rivals)

    def shares(self, what: str, base: str, title: str) -> Row:
        """Return the row of a rate against the same one's rate in other circumstances."""
        name = f"{self._prefix}: {what}, {title}"
        wrong = self._wrongs.get((what, title)) or self._wrongs.get((base, title))
        figures, bases = self._figures[what, title], self._figures[base, title]
        if wrong or not figures:
            return failed(name, wrong or "nothing was measured")
        note = f"figures {self._said(what, title)}"
        return compared(name, figures, bases, unit="a second", note=note)

    def _rows(
        self,
        what: str,
        ours: str,
        others: Sequence[str],
        *,
        unit: str,
        best: Callable[[Sequence[float]], float],
        limit: float | None,
        rivals: Sequence[str] = (),
    ) -> list[Row]:
        titles = (ours, self._against, *others)
        rows = [self._row(what, title, unit) for title in titles if title]
        right = {title: self._good(what, title) for title in rivals or others}
        found = {title: figures for title, figures in right.items() if figures}
        mine = self._good(what, ours)
        if not found or not mine:
            return rows
        bests = [best(each) for each in zip(*found.values(), strict=True)]
        ratios = [one / other for one, other in zip(mine, bests, strict=True)]
        ratio = median(ratios)
        sign, ok = (">=", ratio >= (limit or 0)) if best is max else ("<=", ratio <= (limit or 0))
        leader = best(found, key=lambda title: median(found[title]))  # type: ignore[call-arg]
        row = Row(
            workload=f"{self._prefix}: {what}, {ours} against the best peer",
            figure=median(mine),
            unit=unit,
            against=median(bests),
            ratio=ratio,
            target="" if limit is None else f"ratio {sign} {limit:g}",
            ok=None if limit is None else ok,
            note=f"{leader}; rounds {min(ratios):.2f} to {max(ratios):.2f}",
        )
        return [*rows, row]

    def _row(self, what: str, title: str, unit: str) -> Row:
        name = f"{self._prefix}: {what}, {title}"
        figures, against = self._good(what, title), self._good(what, self._against)
        if not figures:
            return failed(name, self._wrongs.get((what, title), "nothing was measured"))
        note = f"rounds {self._said(what, title)}"
        row = Row(workload=name, figure=median(figures), unit=unit, note=note)
        if title != self._against and len(against) == len(figures):
            ratio = median(one / other for one, other in zip(figures, against, strict=True))
            row = replace(row, against=median(against), ratio=ratio)
        return with_cpu(row, self._costs[what, title])

    def _said(self, what: str, title: str) -> str:
        figures = self._figures[what, title]
        low, high = min(figures), max(figures)
        digits = 0 if high >= 100 else 2
        spread = f"{low:,.{digits}f} to {high:,.{digits}f}"
        return "; ".join(filter(None, (spread, self._notes.get((what, title)))))

    def _good(self, what: str, title: str) -> list[float]:
        return [] if (what, title) in self._wrongs else self._figures[what, title]
