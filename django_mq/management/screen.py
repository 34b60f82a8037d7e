"""Tables that are cut to the height of a terminal, so that it never scrolls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOBase
from typing import NamedTuple
from unicodedata import east_asian_width

#: Moves the cursor home.
HOME = "\x1b[H"
#: Clears the terminal. Many terminals keep what it removes, to scroll back.
CLEAR = f"{HOME}\x1b[2J"
#: Erases to the end of the line.
ERASE = "\x1b[K"


class Line(NamedTuple):
    """One line of the output; `is_row` if it is a row, which a small terminal hides."""

    text: str
    is_row: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table or a text with its title; `rows` may be hidden, the last ones first."""

    rows: Sequence[str]
    above: Sequence[str] = ()
    below: Sequence[str] = ()

    @classmethod
    def of_table(cls, table: str, *, title: str = "", note: str = "") -> Section:
        """Return a section of a table under its headers, between a title and a note."""
        headers, *rows = table.splitlines()
        return cls(rows, [title, headers] if title else [headers], [note] if note else [])

    def lines(self, most: int, columns: int) -> Iterator[Line]:
        """Yield the lines with as many rows as `most` lines of a terminal can show."""
        yield from map(Line, self.above)
        shown = _fitting(self.rows, most, columns)
        hidden = len(self.rows) - shown
        if hidden == 1 and _height(self.rows[-1], columns) == 1:
            shown, hidden = len(self.rows), 0  # the row takes no more room than a line about it
        for row in self.rows[:shown]:
            yield Line(row, is_row=True)
        if hidden:
            yield Line(f"... and {hidden:,} more")
        yield from map(Line, self.below)


def whole(sections: Iterable[Section]) -> str:
    """Return all lines of the sections, with an empty line between two sections."""
    texts = ("\n".join([*each.above, *each.rows, *each.below]) for each in sections)
    return "\n\n".join(texts)


def fitted(title: str, sections: Sequence[Section], size: os.terminal_size) -> str:
    """Return a title and the sections, each ended by a line break, in at most `size.lines` - 1.

    The last line stays free for the cursor. Long tables lose rows before short ones do; the title
    says how many rows are hidden.
    """
    rows = sum(len(each.rows) for each in sections)
    lines, hidden = _laid_out(title, sections, size, rows)
    if hidden:
        text = f"{title}, {{}} of {rows:,} rows hidden: the terminal has {size.lines} lines"
        # Its longest form is as long as this, so the lines below it fit under the real one.
        lines, hidden = _laid_out(text.format(f"{rows:,}"), sections, size, rows)
        lines[:1] = [text.format(f"{hidden:,}")] if lines else []
    return "".join(f"{line}\n" for line in lines)


def _laid_out(
    title: str, sections: Sequence[Section], size: os.terminal_size, rows: int
) -> tuple[list[str], int]:
    """Return the lines that fit, and how many of the `rows` they hide."""
    room = size.lines - 1
    for most in range(room, -1, -1):
        lines = [Line(title)]
        for section in sections:
            lines += [*([Line("")] if len(lines) > 1 else []), *section.lines(most, size.columns)]
        if height((line.text for line in lines), size.columns) <= room:
            break
    del lines[_fitting([line.text for line in lines], room, size.columns) :]
    return [line.text for line in lines], rows - sum(line.is_row for line in lines)


def erased(size: os.terminal_size) -> str:
    """Return what empties a terminal line by line, so that it keeps nothing to scroll back."""
    return HOME + "\n".join([ERASE] * size.lines) + HOME


def size_of(output: TextIOBase) -> os.terminal_size | None:
    """Return the size of the terminal that `output` is; None if it is none, or tells no size."""
    if not output.isatty():
        return None
    try:
        size = os.get_terminal_size(output.fileno())
    except OSError:
        return None
    return size if size.lines and size.columns else None


def height(texts: Iterable[str], columns: int) -> int:
    """Return how many lines `texts` take in a terminal of `columns` columns.

    >>> height(["", "short", "longer"], 5)
    4
    """
    return sum(_height(text, columns) for text in texts)


def _height(text: str, columns: int) -> int:
    if len(text) <= columns and text.isascii():
        return 1
    lines, at = 1, 0
    for each in text:
        width = 2 if east_asian_width(each) in "WF" else 1
        if at + width > columns:  # a wide character is not split
            lines, at = lines + 1, 0
        at += width
    return lines


def _fitting(texts: Sequence[str], room: int, columns: int) -> int:
    """Return how many of the first `texts` fit into `room` lines."""
    for count, text in enumerate(texts):
        room -= _height(text, columns)
        if room < 0:
            return count
    return len(texts)
