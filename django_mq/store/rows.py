"""Rows to insert, stored compactly where they differ in little but their payloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, overload


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


class Rows(Sequence[NewRow]):
    """Rows stored as templates (rows without their payload) and payloads; joined on access.

    Many rows share few templates, so this keeps little more than one string per row. The garbage
    collector scans every long-lived object again and again, but not strings.

    >>> rows = Rows([NewRow("mail", "t", "1", 20), NewRow("stock", "t", "2", 20)])
    >>> [row.queue for row in rows], rows[1].payload, [row.payload for row in rows[:1]]
    (['mail', 'stock'], '2', ['1'])
    """

    __slots__ = ("payloads", "stored_at", "templates")

    def __init__(self, rows: Iterable[NewRow] = ()) -> None:
        self.templates: list[NewRow] = []
        self.payloads: list[str] = []
        #: When the last row was stored, unless by COPY: its `created_at`, in seconds since 1970.
        self.stored_at: float | None = None
        for row in rows:
            self.add(row._replace(payload=""), row.payload)

    def add(self, template: NewRow, payload: str) -> None:
        """Append the row made of `template` and `payload`."""
        self.templates.append(template)
        self.payloads.append(payload)

    def __len__(self) -> int:
        return len(self.templates)

    def __iter__(self) -> Iterator[NewRow]:
        for template, payload in zip(self.templates, self.payloads, strict=True):
            yield template._replace(payload=payload)

    @overload
    def __getitem__(self, index: int) -> NewRow: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> NewRow | Rows:
        if isinstance(index, int):
            return self.templates[index]._replace(payload=self.payloads[index])
        found = Rows()
        found.templates, found.payloads = self.templates[index], self.payloads[index]
        return found
