"""Rows of the table, and the three ways to write it: for people, as Markdown, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

HEADINGS = (
    "workload", "figure", "unit", "against", "ratio", "us worker", "us server", "target", "", "note"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, what it stands against, and whether the target is met (None: no target).

    `ratio` is the median of the rounds' ratios, as the machine changes less within a round.
    `series` are named courses, for a plot: the rate of each fifth, or of each minute. `worker_us`
    and `server_us` are microseconds of CPU a message: of our process, and of its backends.
    """

    workload: str
    figure: float
    unit: str
    against: float | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool | None = None
    note: str = ""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    worker_us: float | None = None
    server_us: float | None = None


def compared(
    workload: str,
    ours: Sequence[float],
    bare: Sequence[float],
    *,
    unit: str = "msg/s",
    at_least: float | None = None,
    note: str = "",
    series: Mapping[str, Sequence[float]] | None = None,
) -> Row:
    """Return the row of two rates measured in turn; `at_least` is the target for their ratio."""
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    ratio = median(ratios)
    spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    return Row(
        workload=workload,
        figure=median(ours),
        unit=unit,
        against=median(bare),
        ratio=ratio,
        target="" if at_least is None else f"ratio >= {at_least:g}",
        ok=None if at_least is None else ratio >= at_least,
        note="; ".join(filter(None, (spread, note))),
        series=series or {},
    )


def limited(
    workload: str,
    figure: float,
    unit: str,
    *,
    at_most: float | None = None,
    against: float | None = None,
    note: str = "",
) -> Row:
    """Return the row of a figure that has an upper limit, beside the bare loop's, if any."""
    return Row(
        workload=workload,
        figure=figure,
        unit=unit,
        against=against,
        ratio=figure / against if against else None,
        target="" if at_most is None else f"<= {at_most:g} {unit}",
        ok=None if at_most is None else figure <= at_most,
        note=note,
    )


def failed(workload: str, reason: str) -> Row:
    """Return the row of a workload that failed: its figures do not count."""
    return Row(workload=workload, figure=float("nan"), unit="", ok=False, note=f"WRONG: {reason}")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by `share` of all.

    >>> percentile([4, 1, 3, 2], 0.5), percentile(range(1, 101), 0.99)
    (2, 99)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def as_table(rows: Sequence[Row], *, markdown: bool) -> str:
    """Return the rows as aligned text, or as a Markdown table."""
    cells = [HEADINGS, *map(_cells, rows)]
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        lines.insert(1, "|" + "---|" * len(HEADINGS))
        return "\n".join(lines)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = (False, True, False, True, True, True, True, False, False, False)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def write_json(path: Path, rows: Sequence[Row], **circumstances: object) -> None:
    """Write rows and circumstances to a file."""
    path.write_text(json.dumps({**circumstances, "rows": [asdict(row) for row in rows]}, indent=2))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.workload,
        number(row.figure),
        row.unit,
        number(row.against),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        number(row.worker_us),
        number(row.server_us),
        row.target,
        {True: "ok", False: "BELOW", None: ""}[row.ok],
        row.note,
    )


def number(value: float | None) -> str:
    """Return a figure as it is printed; nothing for none.

    >>> number(32230.4), number(0.0456), number(None)
    ('32,230', '0.0456', '')
    """
    if value is None or value != value:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
