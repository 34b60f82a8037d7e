"""Messages that come one by one: read and stored in chunks, all or none, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq import capturing
from django_mq.addressing import Addresser
from django_mq.conf import get_settings
from django_mq.drafting import Wanted
from django_mq.messages import BulkReceipt, Message
from django_mq.sending import checked, checked_transaction, deduped, wanting
from django_mq.store.rows import Rows
from django_mq.storing import Storer

#: A chunk ends at so many rows, or so many characters of JSON.
CHUNK_ROWS = 2_000
CHUNK_SIZE = 4 * 1024 * 1024


class Chunk:
    """Rows that are stored together, and those of them that have a unique id, by their place."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.wanted: dict[int, Wanted] = {}
        self._size = 0

    def add(self, addresser: Addresser, message: Message) -> int:
        """Add the rows of `message`; return how many."""
        rows = self.rows
        added = addresser.add(rows, message)
        for place in range(len(rows) - added, len(rows)):
            self._size += len(rows.payloads[place]) + len(rows.kinds[place].metadata)
        if message.unique_id is not None:
            want = wanting(message)
            for place in range(len(rows) - added, len(rows)):
                self.wanted[place] = want(rows[place])
        return added

    def is_full(self) -> bool:
        return len(self.rows) >= CHUNK_ROWS or self._size >= CHUNK_SIZE


def send_stream(messages: Iterable[Message], *, using: str | None) -> BulkReceipt:
    """Store messages as they come, all or none, in constant memory."""
    settings = get_settings()
    connection = checked_transaction(settings, using)
    addresser = Addresser(settings)
    storer = Storer(connection, settings, addresser)
    count = 0
    with transaction.atomic(using=connection.alias):
        for chunk in _chunks(connection, addresser, messages):
            count += _store(connection, storer, chunk)
    return BulkReceipt(count)


def _chunks(
    connection: BaseDatabaseWrapper, addresser: Addresser, messages: Iterable[Message]
) -> Iterator[Chunk]:
    """Cut into chunks, each complete before it is sent: what makes the messages may query."""
    chunk = Chunk()
    for message in messages:
        added = chunk.add(addresser, checked(message))
        if capturing.observers and message.unique_id is None:
            capturing.tell(connection, chunk.rows[-added:])
        if chunk.is_full():
            yield chunk
            chunk = Chunk()
    if chunk.rows:
        yield chunk


def _store(connection: BaseDatabaseWrapper, storer: Storer, chunk: Chunk) -> int:
    """Store the rows of a chunk; return how many were stored or changed."""
    if not chunk.wanted:
        return len(storer.insert_chunk(chunk.rows))
    wanted = [chunk.wanted.get(place) or Wanted(row) for place, row in enumerate(chunk.rows)]
    copies = storer.dedupe(wanted)
    for place, each in chunk.wanted.items():
        deduped(connection, [each], [copies[place]])
    return sum(copy.outcome != "duplicate" for copy in copies)
