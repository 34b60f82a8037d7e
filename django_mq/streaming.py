"""Messages that come one by one: read and stored in chunks, all or none, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
CHUNK_ROWS = 10_000
CHUNK_SIZE = 4 * 1024 * 1024


class Chunk(NamedTuple):
    """Rows that are stored together, and those of them that have a unique id, by their place."""

    rows: Rows
    wanted: dict[int, Wanted]


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
    chunk = Chunk(Rows(), {})
    for message in messages:
        rows = chunk.rows
        added = addresser.add(rows, checked(message))
        if message.unique_id is not None:
            want = wanting(message)
            for place in range(len(rows) - added, len(rows)):
                chunk.wanted[place] = want(rows[place])
        elif capturing.observers:
            capturing.tell(connection, rows[-added:])
        if rows.size >= CHUNK_SIZE or len(rows) >= CHUNK_ROWS:
            yield chunk
            chunk = Chunk(Rows(), {})
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
