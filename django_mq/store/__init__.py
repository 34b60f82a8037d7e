"""Every SQL statement and state change: one function each, its statement above it.

Functions take a cursor, Django's or psycopg's, and plain values; they open no transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from django_mq.messages import PlainFence


class Cursor(Protocol):
    """What a statement needs of a cursor."""

    @property
    def connection(self) -> Any: ...

    @property
    def rowcount(self) -> int: ...

    def execute(self, sql: Any, params: Sequence[Any] | Mapping[str, Any] | None = None) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def fetchone(self) -> Any: ...


def fence_columns(fences: Iterable[PlainFence]) -> dict[str, object]:
    """Return fences as the parameters `ids`, `attempts` and `claimers`: parallel arrays.

    As array literals, which cost a tenth of what the driver needs for lists of text: claimers
    are made of hexadecimal digits, a colon and a number, so nothing in them needs quotes.
    """
    ids, attempts, claimers = tuple(zip(*fences, strict=True)) or ((), (), ())
    return {"ids": array(ids), "attempts": array(attempts), "claimers": array(claimers)}


def array(values: Iterable[object]) -> str:
    """Return values, in whose texts nothing needs quotes, as an array literal.

    >>> array([7, 12]), array(())
    ('{7,12}', '{}')
    """
    return "{" + ",".join(map(str, values)) + "}"
