"""The rows of one or many messages, which are stored together, and the receipts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from django.db import ProgrammingError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.messages import Message, Receipt
from django_mq.messages.classes import class_of
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.dedupe_plan import Candidate
from django_mq.outbox.options import unique_seconds
from django_mq.outbox.write import RowWriter
from django_mq.policy.missing_right import name_roles
from django_mq.policy.names import check_key
from django_mq.store.rows import NewRow, Rows

T = TypeVar("T")

#: Called for each stored message with the connection, its rows and its unique id. Only the test
#: helpers register one.
observers: list[Callable[[BaseDatabaseWrapper, Sequence[NewRow], str | None], None]] = []

#: A chunk is full once it has this many rows, or this many characters of JSON. Each COPY has a
#: fixed cost: a row takes 7.3 us with chunks of 2,000 rows, 6.4 with 10,000.
CHUNK_ROWS = 10_000
CHUNK_SIZE = 4 * 1024 * 1024
#: The limit for a chunk with unique ids, since each id is looked up and locked.
CHUNK_UNIQUE = 2_000
#: The values of `on_duplicate` with which no waiting message is changed.
KEEPING = {"skip", "raise", "requeue"}


class Chunk:
    """Rows that are stored together."""

    def __init__(self, builder: RowBuilder) -> None:
        self.rows = Rows()
        #: How many rows were stored or changed.
        self.stored = 0
        self._builder = builder
        # The number of rows of each message.
        self._counts: list[int] = []
        # By index in `rows`: the rows that have a unique id.
        self._unique: dict[int, Candidate] = {}
        self._size = 0

    def add(self, message: object) -> None:
        """Check a message, without any SQL, and add its rows."""
        if not isinstance(message, Message):
            given = type(message).__name__
            if class_of(message) is not None:
                given += ": write Message(instance)"
            raise TypeError(f"broadcast_many() takes Message(...) objects, not {given}")
        rows = self.rows
        added = self._builder.add(rows, message)
        self._counts.append(added)
        self._size += len(rows.payloads[-1]) + added * len(rows.templates[-1].metadata)
        if message.unique_id is not None:
            unique_id = check_key(message.unique_id, "unique id")
            options = unique_id, unique_seconds(message), message.on_duplicate
            for index in range(len(rows) - added, len(rows)):
                self._unique[index] = Candidate(rows[index], *options)

    def is_full(self) -> bool:
        limit = CHUNK_UNIQUE if self._unique else CHUNK_ROWS
        return len(self.rows) >= limit or self._size >= CHUNK_SIZE

    def store(self, connection: BaseDatabaseWrapper, *, streamed: bool = False) -> list[Receipt]:
        """Store the rows, all or none; return the receipt of each message.

        A chunk that is `streamed` is one of many in the caller's savepoint, and needs no receipts.
        """
        writer = RowWriter(connection, self._builder.queues, has_savepoint=streamed)
        try:
            return self._store(writer, streamed=streamed)
        except ProgrammingError as error:
            name_roles(error, " and ".join(self._needed_roles()))
            raise

    def _store(self, writer: RowWriter, *, streamed: bool) -> list[Receipt]:
        if self._unique:
            return self._dedupe(writer)
        builder = ReceiptBuilder(self.rows.templates, () if streamed else self._counts)
        writer.insert(self.rows, on_ids=builder.add)
        self.stored = len(self.rows)
        if observers:
            for share in _split(self.rows, self._counts):
                _notify_observers(writer.connection, share)
        return builder.receipts

    def _needed_roles(self) -> list[str]:
        """Return the roles of docs/roles.md that together allow to store these rows."""
        ways = {each.on_duplicate for each in self._unique.values()}
        if not ways <= KEEPING:
            return ["mq_replacing_producer"]
        found = ["mq_unique_producer"] if ways else []
        if self._builder.queues.max_backlogs:
            found.append("mq_limited_producer")
        return found or ["mq_producer"]

    def _dedupe(self, writer: RowWriter) -> list[Receipt]:
        """Store rows with unique ids; observers are not called for duplicates."""
        candidates = [self._unique.get(n) or Candidate(row) for n, row in enumerate(self.rows)]
        result = writer.dedupe(candidates)
        self.rows.stored_at = result.stored_at
        receipts = []
        for share, found in zip(
            _split(candidates, self._counts), _split(result.copies, self._counts), strict=True
        ):
            both = zip(share, found, strict=True)
            stored = [each.row for each, copy in both if copy.outcome != "duplicate"]
            self.stored += len(stored)
            if stored:
                _notify_observers(writer.connection, stored, share[0].unique_id)
            receipts.append(Receipt(tuple(found)))
        return receipts


class ReceiptBuilder:
    """Build the receipts of many messages as the ids of their rows become known.

    Meanwhile the server reads the rows, which takes longer than building the receipts.
    """

    def __init__(self, templates: Sequence[NewRow], counts: Sequence[int]) -> None:
        self.receipts: list[Receipt] = []
        self._templates = templates
        self._counts = counts
        self._ids: list[int] = []
        self._start = 0

    def add(self, ids: Sequence[int]) -> None:
        """Take the next ids; the last of them may belong to a message whose other ids follow."""
        self._ids += ids
        while len(self.receipts) < len(self._counts):
            end = self._start + self._counts[len(self.receipts)]
            if end > len(self._ids):
                return
            share = slice(self._start, end)
            self.receipts.append(_receipt_of(self._templates[share], self._ids[share]))
            self._start = end


def _receipt_of(templates: Sequence[NewRow], ids: Iterable[int]) -> Receipt:
    if len(templates) == 1:
        return Receipt.of_added(_single_route(templates[0].handler, templates[0].queue), tuple(ids))
    return Receipt.of_added(tuple((each.handler, each.queue) for each in templates), tuple(ids))


@lru_cache(maxsize=1024)
def _single_route(handler: str, queue: str) -> tuple[tuple[str, str]]:
    """Return the routes of a message with one copy: one shared object for all such receipts."""
    return ((handler, queue),)


def _split(values: Sequence[T], counts: Iterable[int]) -> Iterator[Sequence[T]]:
    """Cut `values` into consecutive parts; `counts[i]` is the length of part i."""
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count


def _notify_observers(
    connection: BaseDatabaseWrapper, rows: Sequence[NewRow], unique_id: str | None = None
) -> None:
    for observer in observers:
        observer(connection, rows, unique_id)
