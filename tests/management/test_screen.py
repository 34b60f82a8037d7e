"""Tables cut to the height of a terminal."""

from __future__ import annotations

import os
from io import StringIO
from typing import Any

import pytest

from django_mq.management.screen import Section, all_lines, fitted, height, size_of


def section(of: str, rows: int, *, width: int = 5, **options: Any) -> Section:
    table = "\n".join([of.upper(), *(f"{of}-{n}".ljust(width, ".") for n in range(rows))])
    return Section.of_table(table, **options)


def screen(sections: list[Section], lines: int, columns: int = 80) -> list[str]:
    text = fitted("now", sections, os.terminal_size((columns, lines)))
    assert text.endswith("\n") or not text
    found = text.splitlines()
    assert height(found, columns) < lines
    return found


def test_nothing_is_hidden_while_all_fits() -> None:
    sections = [section("a", 3), section("b", 2, note="see b")]
    found = screen(sections, 11)
    assert found == ["now", *all_lines(sections).splitlines()]
    assert len(found) == 10
    assert "hidden" in screen(sections, 10)[0]


def test_long_tables_lose_their_rows_first() -> None:
    found = screen([section("a", 40), section("b", 2), section("c", 12)], 20)
    assert found == [
        "now, 43 of 54 rows hidden: the terminal has 20 lines",
        *("A", "a-0..", "a-1..", "a-2..", "a-3..", "a-4..", "... and 35 more", ""),
        *("B", "b-0..", "b-1..", ""),
        *("C", "c-0..", "c-1..", "c-2..", "c-3..", "... and 8 more"),
    ]


def test_sections_of_rank_2_are_hidden_first() -> None:
    sections = [section("a", 9, name="ant"), section("q", 20, rank=0), section("z", 1, rank=2)]
    found = screen([*sections, section("b", 1, name="bee", rank=2)], 13)
    assert found == [
        "now, 27 of 31 rows hidden: the terminal has 13 lines",
        *("A", "a-0..", "a-1..", "... and 7 more", ""),
        *("Q", "q-0..", "q-1..", "... and 18 more", ""),
        "... and 1 row, 1 bee",
    ]


def test_a_table_that_hides_rows_begins_with_the_most_urgent_ones() -> None:
    table = section("q", 9, urgency=lambda n: -n)
    assert screen([table], 12)[2] == "q-0.."
    assert screen([table], 6) == [
        "now, 7 of 9 rows hidden: the terminal has 6 lines",
        *("Q", "q-8..", "q-7..", "... and 7 more"),
    ]


@pytest.mark.parametrize("lines", range(1, 30))
@pytest.mark.parametrize("columns", [10, 33, 80])
def test_screen_fits_any_terminal_and_counts_hidden_rows(lines: int, columns: int) -> None:
    sections = [section("a", 9, width=30), section("b", 4, note="x" * 90), section("c", 1)]
    found = screen(sections, lines, columns)
    shown = [line for line in found if line.startswith(("a-", "b-", "c-"))]
    if len(shown) < 14 and found:
        assert f"{14 - len(shown)} of 14 rows hidden" in found[0]


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("", 5, 1),
        ("12345", 5, 1),
        ("123456", 5, 2),
        ("漢字漢", 6, 1),
        ("漢字漢", 5, 2),
        ("é≈", 2, 1),
    ],
)
def test_a_long_line_takes_several(text: str, columns: int, lines: int) -> None:
    """Wide characters take two columns."""
    assert height([text], columns) == lines


def test_output_without_a_terminal_has_no_size() -> None:
    assert size_of(StringIO()) is None
