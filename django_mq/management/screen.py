"""Tables that are cut to the height of a terminal, so that it never scrolls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOBase
from typing import Any, NamedTuple
from unicodedata import combining, east_asian_width

#: Moves the cursor home.
HOME = "\x1b[H"
#: Clears the terminal. Many terminals keep what it removes, to scroll back.
CLEAR = f"{HOME}\x1b[2J"
#: Erases to the end of the line.
ERASE = "\x1b[K"


class ScreenLine(NamedTuple):
    """One line of the output; `is_row` if it is a row, which a small terminal hides."""

    text: str
    is_row: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table or a text with its title; a small terminal hides rows of it.

    `name` says what one row is. Sections of the lowest `rank` keep their rows the longest. `urgent`
    has the rows in the order in which a shortened table shows them, the most urgent first; without
    it they keep their order.
    """

    rows: Sequence[str]
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    name: str = "note"
    rank: int = 1
    urgent: Sequence[str] = ()

    @classmethod
    def of_table(
        cls,
        table: str,
        *,
        title: str = "",
        note: str = "",
        name: str = "row",
        rank: int = 1,
        urgency: Callable[[int], Any] | None = None,
    ) -> Section:
        """Return a section of a table under its headers, between a title and a note.

        `urgency` sorts the row numbers, the most urgent first.
        """
        headers, *rows = table.splitlines()
        urgent = [rows[n] for n in sorted(range(len(rows)), key=urgency)] if urgency else ()
        above = [title, headers] if title else [headers]
        return cls(rows, above, [note] if note else [], name, rank, urgent)

    def lines(self, shown: int) -> Iterator[ScreenLine]:
        """Yield the lines with `shown` of the rows; yield nothing if all rows are hidden."""
        hidden = len(self.rows) - shown
        if hidden and not shown:
            return
        yield from map(ScreenLine, self.above)
        for row in (self.urgent or self.rows)[:shown] if hidden else self.rows:
            yield ScreenLine(row, is_row=True)
        if hidden:
            yield ScreenLine(f"... and {hidden:,} more")
        yield from map(ScreenLine, self.below)


def all_lines(sections: Iterable[Section]) -> str:
    """Return all lines of the sections, with an empty line between two sections."""
    texts = ("\n".join([*each.above, *each.rows, *each.below]) for each in sections)
    return "\n\n".join(texts)


def fitted(title: str, sections: Sequence[Section], size: os.terminal_size) -> str:
    """Return a title and the sections, each ended by a line break, in at most `size.lines` - 1.

    The last line stays free for the cursor. Sections of rank 0 grow to half of the screen; then all
    sections share the rest, by rank. The title says how many rows are hidden, and a last line names
    the tables that are hidden as a whole.
    """
    rows = sum(len(each.rows) for each in sections)
    lines, hidden = _laid_out(title, sections, size, rows)
    if hidden:
        text = f"{title}, {{}} of {rows:,} rows hidden: the terminal has {size.lines} lines"
        # The longest form of the title is as long as this, so the lines below it fit under the real
        # one.
        lines, hidden = _laid_out(text.format(f"{rows:,}"), sections, size, rows)
        lines[:1] = [text.format(f"{hidden:,}")] if lines else []
    return "".join(f"{line}\n" for line in lines)


def _laid_out(
    title: str, sections: Sequence[Section], size: os.terminal_size, rows: int
) -> tuple[list[str], int]:
    """Return the lines that fit, and how many of the `rows` they hide."""
    room, columns = size.lines - 1, size.columns
    lines = _lines(title, sections, [len(each.rows) for each in sections])
    if height((line.text for line in lines), columns) > room:
        lines = _lines(title, sections, _shares(title, sections, room, columns))
    del lines[_fitting([line.text for line in lines], room, columns) :]
    return [line.text for line in lines], rows - sum(line.is_row for line in lines)


def _lines(title: str, sections: Sequence[Section], shown: Sequence[int]) -> list[ScreenLine]:
    """Return the title and the sections, each with its number of rows in `shown`."""
    lines, hidden = [ScreenLine(title)], []
    for section, count in zip(sections, shown, strict=True):
        if found := list(section.lines(count)):
            lines += [*([ScreenLine("")] if len(lines) > 1 else []), *found]
        else:
            n = len(section.rows)
            hidden.append(f"{n:,} {section.name}{'' if n == 1 else 's'}")
    return [*lines, ScreenLine(""), ScreenLine(f"... and {', '.join(hidden)}")] if hidden else lines


def _shares(title: str, sections: Sequence[Section], room: int, columns: int) -> list[int]:
    """Return how many rows of each section to show: sections of one rank grow in turns."""
    shown = [0] * len(sections)

    def fits(lines: int) -> bool:
        return height((line.text for line in _lines(title, sections, shown)), columns) <= lines

    for rank, lines in ((0, room // 2), (1, room), (2, room)):
        growing = [n for n, each in enumerate(sections) if each.rank <= rank]
        while growing:
            for n in tuple(growing):
                shown[n] += 1
                if shown[n] > len(sections[n].rows) or not fits(lines):
                    shown[n] -= 1
                    growing.remove(n)
    return shown


def erased(size: os.terminal_size) -> str:
    """Return text that empties a terminal line by line, so that it keeps nothing to scroll back."""
    return HOME + "\n".join([ERASE] * size.lines) + HOME


def size_of(output: TextIOBase) -> os.terminal_size | None:
    """Return the size of the terminal `output`; None if it is none, or does not report one."""
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


def width_of(text: str) -> int:
    """Return how many columns of a terminal `text` takes.

    >>> width_of("mail"), width_of("注文")
    (4, 4)
    """
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if combining(character):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def _height(text: str, columns: int) -> int:
    if len(text) <= columns and text.isascii():
        return 1
    lines, at = 1, 0
    for each in text:
        width = _width(each)
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
