"""Store an iterator of messages in chunks: all or none, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.conf import get_settings
from django_mq.messages import BulkReceipt, Message
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.dedupe_plan import Candidate, candidate_maker
from django_mq.outbox.receipts import deduped_receipts, notify_each
from django_mq.outbox.send import check_message, connection_in_transaction
from django_mq.outbox.write import RowWriter
from django_mq.store.rows import Rows

#: A chunk is full once it has this many rows, or this many characters of JSON. Each COPY has a
#: fixed cost: 7.3 us a row with chunks of 2,000 rows, 6.4 with 10,000.
CHUNK_ROWS = 10_000
CHUNK_SIZE = 4 * 1024 * 1024
#: The limit for a chunk with unique ids, each of which is looked up and locked.
CHUNK_UNIQUE = 2_000


class Chunk:
    """Rows that are stored together."""

    def __init__(self) -> None:
        self.rows = Rows()
        #: The number of rows of each message.
        self.counts: list[int] = []
        #: By index in `rows`: the rows that have a unique id.
        self.unique: dict[int, Candidate] = {}
        self._size = 0

    def add(self, builder: RowBuilder, message: Message) -> None:
        """Add the rows of `message`."""
        rows = self.rows
        added = builder.add(rows, message)
        self.counts.append(added)
        self._size += len(rows.payloads[-1]) + added * len(rows.kinds[-1].metadata)
        if message.unique_id is not None:
            make = candidate_maker(message)
            for index in range(len(rows) - added, len(rows)):
                self.unique[index] = make(rows[index])

    def is_full(self) -> bool:
        limit = CHUNK_UNIQUE if self.unique else CHUNK_ROWS
        return len(self.rows) >= limit or self._size >= CHUNK_SIZE


def send_stream(messages: Iterable[Message], *, using: str | None) -> BulkReceipt:
    """Store messages as they come, all or none, in constant memory."""
    settings = get_settings()
    connection = connection_in_transaction(settings, using)
    builder = RowBuilder(settings)
    writer = RowWriter(connection, settings, builder)
    count = 0
    with transaction.atomic(using=connection.alias):
        for chunk in _chunks(builder, messages):
            count += _store(connection, writer, chunk)
    return BulkReceipt(count)


def _chunks(builder: RowBuilder, messages: Iterable[Message]) -> Iterator[Chunk]:
    """Yield complete chunks: `messages` may query the database while no COPY is open."""
    chunk = Chunk()
    for message in messages:
        chunk.add(builder, check_message(message))
        if chunk.is_full():
            yield chunk
            chunk = Chunk()
    if chunk.rows:
        yield chunk


def _store(connection: BaseDatabaseWrapper, writer: RowWriter, chunk: Chunk) -> int:
    """Store the rows of a chunk; return how many were stored or changed."""
    rows, counts = chunk.rows, chunk.counts
    if not chunk.unique:
        writer.insert_chunk(rows)
        notify_each(connection, rows, counts)
        return len(rows)
    candidates = [chunk.unique.get(index) or Candidate(row) for index, row in enumerate(rows)]
    copies = writer.dedupe(candidates)
    deduped_receipts(connection, candidates, copies, counts)
    return sum(copy.outcome != "duplicate" for copy in copies)
