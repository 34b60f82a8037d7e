"""Markdown of names and figures, whatever is in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.report import Row, number

#: Columns of the CPU of a message.
CPU = ("CPU of the worker, us", "CPU of the server, us")
#: The characters that have a meaning in Markdown, in its tables or in HTML.
SPECIAL = re.compile(r"[&<|*`\[\]\\_~]")


def plain(text: str) -> str:
    """Return text that is shown as it is, in one line.

    An underscore within a word is one everywhere.

    >>> plain("a|b [c](d) <e> django_mq _f_")
    'a&#124;b &#91;c&#93;(d) &#60;e> django_mq &#95;f&#95;'
    """
    line = " ".join(text.split())
    return SPECIAL.sub(
        lambda found: found[0] if _within_a_word(found) else f"&#{ord(found[0])};", line
    )


def _within_a_word(found: re.Match[str]) -> bool:
    around = found.string[max(0, found.start() - 1) : found.end() + 1]
    return found[0] == "_" and len(around) == 3 and around.replace("_", "a").isalnum()


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already; columns in which nothing is are left out.

    >>> print(table(("", "figure", "note"), [("drain", "5", ""), ("bulk", "7", "")]))
    |  | figure |
    | --- | --- |
    | drain | 5 |
    | bulk | 7 |
    """
    full = [column for column in zip(headings, *rows, strict=True) if any(column[1:])]
    headings, *rows = zip(*full, strict=True)
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows)
    )


def rows_table(rows: Sequence[Row], *, without: str = "") -> str:
    """Return a table with a line for each row; names lose the prefix `without`."""
    lines = [
        (
            plain(row.workload.removeprefix(without)),
            figure(row.figure, row.unit),
            number(row.against),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            number(row.worker_us),
            number(row.server_us),
            plain(row.target),
            _verdict(row),
            plain(row.note),
        )
        for row in rows
    ]
    headings = ("", "figure", "against", "ratio", *CPU, "target", "", "note")
    return table(headings, lines)


def _verdict(row: Row) -> str:
    if row.figure != row.figure:
        return "**failed**"
    return {True: "met", False: "**missed**", None: ""}[row.ok]


def figure(value: float | None, unit: str) -> str:
    """Return a figure with its unit.

    >>> figure(32230.4, "msg/s"), figure(float("nan"), "msg/s")
    ('32,230 msg/s', '')
    """
    text = number(value)
    return f"{text} {plain(unit)}".strip() if text else ""
