"""Messages that come one by one: read and stored in chunks, all or none, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.addressing import Addresser
from django_mq.conf import get_settings
from django_mq.drafting import Wanted
from django_mq.messages import BulkReceipt, Message
from django_mq.sending import checked, checked_transaction, deduped_each, tell_each, wanting
from django_mq.store.rows import Rows
from django_mq.storing import Storer

#: A chunk ends with the message that makes it so many rows, or so many characters of JSON. Each
#: COPY has a price: 7.3 us a row with 2,000 of them, 6.4 with 10,000.
CHUNK_ROWS = 10_000
CHUNK_SIZE = 4 * 1024 * 1024
#: Rows of a chunk in which one has a unique id: those are looked up and locked.
CHUNK_UNIQUE = 2_000


class Chunk:
    """Rows that are stored together, and those of them that have a unique id, by their place."""

    def __init__(self) -> None:
        self.rows = Rows()
        #: How many rows are of each message.
        self.counts: list[int] = []
        self.wanted: dict[int, Wanted] = {}
        self._size = 0

    def add(self, addresser: Addresser, message: Message) -> None:
        """Add the rows of `message`."""
        rows = self.rows
        added = addresser.add(rows, message)
        self.counts.append(added)
        self._size += len(rows.payloads[-1]) + added * len(rows.kinds[-1].metadata)
        if message.unique_id is not None:
            want = wanting(message)
            for place in range(len(rows) - added, len(rows)):
                self.wanted[place] = want(rows[place])

    def is_full(self) -> bool:
        most = CHUNK_UNIQUE if self.wanted else CHUNK_ROWS
        return len(self.rows) >= most or self._size >= CHUNK_SIZE


def send_stream(messages: Iterable[Message], *, using: str | None) -> BulkReceipt:
    """Store messages as they come, all or none, in constant memory."""
    settings = get_settings()
    connection = checked_transaction(settings, using)
    addresser = Addresser(settings)
    storer = Storer(connection, settings, addresser)
    count = 0
    with transaction.atomic(using=connection.alias):
        for chunk in _chunks(addresser, messages):
            count += _store(connection, storer, chunk)
    return BulkReceipt(count)


def _chunks(addresser: Addresser, messages: Iterable[Message]) -> Iterator[Chunk]:
    """Cut into chunks, each complete before it is sent: what makes the messages may query."""
    chunk = Chunk()
    for message in messages:
        chunk.add(addresser, checked(message))
        if chunk.is_full():
            yield chunk
            chunk = Chunk()
    if chunk.rows:
        yield chunk


def _store(connection: BaseDatabaseWrapper, storer: Storer, chunk: Chunk) -> int:
    """Store the rows of a chunk; return how many were stored or changed."""
    rows, counts = chunk.rows, chunk.counts
    if not chunk.wanted:
        storer.insert_chunk(rows)
        tell_each(connection, rows, counts)
        return len(rows)
    wanted = [chunk.wanted.get(place) or Wanted(row) for place, row in enumerate(rows)]
    copies = storer.dedupe(wanted)
    deduped_each(connection, wanted, copies, counts)
    return sum(copy.outcome != "duplicate" for copy in copies)
