"""Finds the rows of systems that did the same work, and ranks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.markdown import CPU, figure, plain, table
from benchmarks.plots import Bar, bars
from benchmarks.report import Row, number

#: Prefixes of the rows that compare systems; the names of these rows end with the system.
REAL, PEERS = "real: ", "peers: "
OURS = "django_mq"
#: The end of the name of a summary row, which belongs to no peer.
SUMMARY = " against the best peer"


@dataclass(frozen=True)
class Comparison:
    """The contenders' rows for `what`, the best first.

    `shares`: the figures are shares of what each does in other circumstances.
    """

    what: str
    rows: list[tuple[str, Row]]
    shares: bool

    @property
    def title(self) -> str:
        """`what`, with a capital letter at its beginning."""
        return titled(self.what)

    def chart(self) -> str:
        """Return the SVG."""
        unit = "of its own rate without" if self.shares else self.rows[0][1].unit
        better = "more" if self.shares or more_is_better(unit) else "less"
        shown = [Bar(who, self._value(row), is_ours(who)) for who, row in self.rows]
        return bars(self.title, f"{better} is better", unit, shown, linear=self.shares)

    def table(self) -> str:
        """Return the figure of each system, and its share of ours."""
        ours = next((row.figure for who, row in self.rows if is_ours(who)), None)
        lines = [
            (
                f"**{plain(who)}**" if is_ours(who) else plain(who),
                figure(row.figure, row.unit),
                f"{row.ratio:.2f}" if self.shares and row.ratio is not None else "",
                f"{row.figure / ours:.2f}" if ours and not self.shares else "",
                number(row.worker_us),
                number(row.server_us),
                plain(row.note),
            )
            for who, row in self.rows
        ]
        return table(("", "figure", "of its own without", "of ours", *CPU, "note"), lines)

    def _value(self, row: Row) -> float:
        return row.ratio if self.shares and row.ratio is not None else row.figure


def comparisons(rows: Iterable[Row], prefix: str = "") -> list[Comparison]:
    """Return everything that was compared, or what begins with `prefix`.

    The rows are named `peers: <what>, <who>`, or `real: ...`; who failed is left out. Against whom
    all others stand has no ratio; where each has one, it stands against itself.

    >>> rows = [Row(workload=f"peers: drain, {who}", figure=rate, unit="msg/s")
    ...         for who, rate in (("slow", 1), ("fast", 3), ("wrong", float("nan")))]
    >>> [(each.what, [who for who, _ in each.rows]) for each in comparisons(rows)]
    [('drain', ['fast', 'slow'])]
    """
    found: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        beginning, what, who = _parts(row)
        counts = beginning and (prefix or beginning) == beginning and not who.endswith(SUMMARY)
        if counts and what and row.figure == row.figure:
            found.setdefault(what, []).append((who, row))
    return [_comparison(what, each) for what, each in found.items()]


def _parts(row: Row) -> tuple[str, str, str]:
    """Return the prefix of a row's name, the work and the system."""
    beginning = next((each for each in (REAL, PEERS) if row.workload.startswith(each)), "")
    what, _, who = row.workload.removeprefix(beginning).rpartition(", ")
    return beginning, what, who


def _comparison(what: str, rows: list[tuple[str, Row]]) -> Comparison:
    shares = all(row.ratio is not None for _, row in rows)
    comparison = Comparison(what, rows, shares)
    more = shares or more_is_better(rows[0][1].unit)
    rows.sort(key=lambda one: comparison._value(one[1]), reverse=more)
    return comparison


def absent(rows: Iterable[Row]) -> dict[str, Row]:
    """Return, by name of the peer, the rows that say why it was not measured: `peers: <who>`."""
    parts = [(row, *_parts(row)) for row in rows]
    return {who: row for row, beginning, what, who in parts if beginning and not what}


def more_is_better(unit: str) -> bool:
    """Say whether a figure of this unit is a rate.

    >>> more_is_better("msg/s"), more_is_better("a second"), more_is_better("ms")
    (True, True, False)
    """
    return unit.endswith(("/s", "a second"))


def is_ours(who: str) -> bool:
    """Return whether this is django_mq, in any form."""
    return who.startswith(OURS)


def titled(what: str) -> str:
    """Return it with a capital at its beginning."""
    return what[:1].upper() + what[1:]
