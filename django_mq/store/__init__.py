"""Every SQL statement and state change: one function each, its statement above it.

Functions take a cursor, Django's or psycopg's, and plain values; they open no transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from django_mq.messages import Fence


class Cursor(Protocol):
    """What a statement needs of a cursor."""

    @property
    def connection(self) -> Any: ...

    def execute(self, sql: Any, params: Sequence[Any] | Mapping[str, Any] | None = None) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def fetchone(self) -> Any: ...


def fence_columns(fences: Iterable[Fence]) -> dict[str, object]:
    """Return fences as the parameters `ids`, `attempts` and `claimers`: parallel arrays.

    As array literals, which cost a tenth of what the driver needs for lists of text: claimers
    are made of hexadecimal digits, a colon and a number, so nothing in them needs quotes.
    """
    columns = tuple(zip(*fences, strict=True)) or ((), (), ())
    return dict(zip(("ids", "attempts", "claimers"), map(_array, columns), strict=True))


def _array(values: Iterable[object]) -> str:
    return "{" + ",".join(map(str, values)) + "}"
