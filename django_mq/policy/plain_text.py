"""Text that can be stored, logged and printed: without control characters, and not too long."""

from __future__ import annotations

import re

# PostgreSQL refuses NUL, and UTF-8 refuses surrogates. Other control characters, and characters
# that change the direction of text, could forge the output of a terminal or a log.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile(r"\s+")
# libpq puts this question on a line of its own, after a sentence without a full stop.
_QUESTION = "\n\tIs the server "


def one_line(text: str, limit: int = 500) -> str:
    """Return `text` as one line without control characters, of at most `limit` bytes of UTF-8.

    >>> one_line("first\\nsecond\\x1b[2J"), one_line("seventeen letters", 9)
    ('first second\ufffd[2J', 'sevent…')
    >>> one_line("Connection refused\\n\\tIs the server running on that host")
    'Connection refused. Is the server running on that host'
    """
    text = str.__str__(text).lstrip()[: 4 * limit].replace(_QUESTION, ". Is the server ")
    line = _BREAKS.sub(" ", text).rstrip()
    return cut(clean(line), limit)


def clean(text: str) -> str:
    """Replace the characters that cannot be stored, or could forge output."""
    return _UNSAFE.sub("\ufffd", text)


def cut(text: str, limit: int) -> str:
    """Cut clean text to `limit` bytes of UTF-8, between characters."""
    data = text.encode()
    if len(data) <= limit:
        return text
    return data[: max(limit - 3, 0)].decode(errors="ignore") + "…"


def cut_middle(text: str, limit: int) -> str:
    """Cut like `cut()`, but keep both ends: the first cause, and the error itself."""
    data = text.encode()
    if len(data) <= limit:
        return text
    mark = "\n... cut here ...\n"
    half = (limit - len(mark)) // 2
    return data[:half].decode(errors="ignore") + mark + data[-half:].decode(errors="ignore")
