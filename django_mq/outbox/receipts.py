"""Turn what was stored into receipts, and tell the observers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.messages import CopyReceipt, Receipt
from django_mq.outbox.dedupe_plan import Candidate
from django_mq.outbox.observers import notify, observers
from django_mq.store.rows import Kind, NewRow, Rows

T = TypeVar("T")


class ReceiptBuilder:
    """Build the receipts of many messages as the ids of their rows become known.

    The server takes longer to read the rows than this process takes for the receipts.
    """

    def __init__(self, kinds: Sequence[Kind], counts: Sequence[int]) -> None:
        self.receipts: list[Receipt] = []
        self._kinds = kinds
        self._counts = counts
        self._ids: list[int] = []
        self._start = 0

    def add(self, ids: Sequence[int]) -> None:
        """Take the next ids; the last ones may belong to a message whose other ids follow."""
        self._ids += ids
        while len(self.receipts) < len(self._counts):
            end = self._start + self._counts[len(self.receipts)]
            if end > len(self._ids):
                return
            share = slice(self._start, end)
            self.receipts.append(receipt_of(self._kinds[share], self._ids[share]))
            self._start = end


def split(values: Sequence[T], counts: Iterable[int]) -> Iterator[Sequence[T]]:
    """Cut `values` into consecutive parts; `counts[i]` is the length of part i."""
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count


def receipt_of(rows: Sequence[NewRow | Kind], ids: Iterable[int]) -> Receipt:
    """Return the receipt of one message whose rows were all added."""
    if len(rows) == 1:
        return Receipt.of_added(_single_route(rows[0].handler, rows[0].queue), tuple(ids))
    return Receipt.of_added(tuple((row.handler, row.queue) for row in rows), tuple(ids))


@lru_cache(maxsize=1024)
def _single_route(handler: str, queue: str) -> tuple[tuple[str, str]]:
    """Return the routes of a message with one copy: one object for all such receipts."""
    return ((handler, queue),)


def notify_each(connection: BaseDatabaseWrapper, rows: Rows, counts: Iterable[int]) -> None:
    """Tell the observers of each message; `counts[i]` is the number of rows of message i."""
    if observers:
        for share in split(rows, counts):
            notify(connection, share)


def deduped_receipts(
    connection: BaseDatabaseWrapper,
    candidates: Sequence[Candidate],
    copies: Sequence[CopyReceipt],
    counts: Sequence[int],
) -> list[Receipt]:
    """Return the receipt of each message; `counts[i]` is the number of rows of message i."""
    shares = zip(split(candidates, counts), split(copies, counts), strict=True)
    return [deduped_receipt(connection, share, found) for share, found in shares]


def deduped_receipt(
    connection: BaseDatabaseWrapper, candidates: Sequence[Candidate], copies: Iterable[CopyReceipt]
) -> Receipt:
    """Return the receipt of one message with a unique id; observers hear of no duplicates."""
    found = tuple(copies)
    stored = [
        each.row
        for each, copy in zip(candidates, found, strict=True)
        if copy.outcome != "duplicate"
    ]
    if stored:
        notify(connection, stored, candidates[0].unique_id)
    return Receipt(found)
