"""Rows to insert, stored compactly where they differ in little but their payloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple, overload


class NewRow(NamedTuple):
    """One row to insert; the order of the fields is that of the statements' parameters.

    `payload`, `metadata` and `retry` are JSON text. The message is due at `due`, else `delay`
    seconds from now. It expires at `expires`, else `lifetime` seconds from now, else never.
    """

    queue: str
    type: str
    payload: str
    max_attempts: int
    handler: str = ""
    schema_version: int = 1
    metadata: str = "{}"
    priority: int = 0
    key: str | None = None
    retry: str | None = None
    wants_result: bool = False
    ordered: bool = False
    due: datetime | None = None
    delay: float = 0.0
    expires: datetime | None = None
    lifetime: float | None = None

    @property
    def kind(self) -> Kind:
        return Kind(self[:2], self[3:])


class Kind(NamedTuple):
    """A row without its payload: the fields before it, and those after it.

    >>> row = NewRow("mail", "shop.placed", "{}", 20, "send_mail")
    >>> row.kind.row("[]") == row._replace(payload="[]")
    True
    >>> row.kind.queue, row.kind.handler, row.kind.metadata
    ('mail', 'send_mail', '{}')
    """

    before: tuple[str, str]
    after: tuple[Any, ...]

    def row(self, payload: str) -> NewRow:
        return NewRow._make((*self.before, payload, *self.after))

    @property
    def queue(self) -> str:
        return self.before[0]

    @property
    def handler(self) -> str:
        handler: str = self.after[1]
        return handler

    @property
    def metadata(self) -> str:
        metadata: str = self.after[3]
        return metadata


class Rows(Sequence[NewRow]):
    """Rows stored as kinds and payloads; a `NewRow` is made on access.

    Many rows share few kinds, so this keeps little more than one string per row. The garbage
    collector scans every long-lived object again and again, but no strings.

    >>> rows = Rows([NewRow("mail", "t", "1", 20), NewRow("stock", "t", "2", 20)])
    >>> [row.queue for row in rows], rows[1].payload, [row.payload for row in rows[:1]]
    (['mail', 'stock'], '2', ['1'])
    """

    __slots__ = ("kinds", "payloads")

    def __init__(self, rows: Iterable[NewRow] = ()) -> None:
        self.kinds: list[Kind] = []
        self.payloads: list[str] = []
        self.extend(rows)

    def extend(self, rows: Iterable[NewRow]) -> None:
        for row in rows:
            self.add(row.kind, row.payload)

    def add(self, kind: Kind, payload: str) -> None:
        """Append a row."""
        self.kinds.append(kind)
        self.payloads.append(payload)

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[NewRow]:
        for kind, payload in zip(self.kinds, self.payloads, strict=True):
            yield kind.row(payload)

    @overload
    def __getitem__(self, index: int) -> NewRow: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> NewRow | Rows:
        if isinstance(index, int):
            return self.kinds[index].row(self.payloads[index])
        found = Rows()
        found.kinds, found.payloads = self.kinds[index], self.payloads[index]
        return found
