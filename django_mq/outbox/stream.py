"""Store an iterator of messages in chunks: all or none, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db import transaction

from django_mq.conf import get_settings
from django_mq.messages import BulkReceipt, Message
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.chunk import Chunk
from django_mq.outbox.send import check_message, connection_in_transaction
from django_mq.outbox.write import RowWriter


def send_stream(messages: Iterable[Message], *, using: str | None) -> BulkReceipt:
    """Store messages as they come, all or none, in constant memory."""
    settings = get_settings()
    connection = connection_in_transaction(settings, using)
    builder = RowBuilder(settings)
    writer = RowWriter(connection, settings, builder, has_savepoint=True)
    count = 0
    with transaction.atomic(using=connection.alias):
        for chunk in _chunks(builder, messages):
            chunk.store(connection, writer, receipts=False)
            count += chunk.stored
    return BulkReceipt(count)


def _chunks(builder: RowBuilder, messages: Iterable[Message]) -> Iterator[Chunk]:
    """Yield complete chunks: `messages` may query the database while no COPY is open."""
    chunk = Chunk(builder)
    for message in messages:
        chunk.add(check_message(message))
        if chunk.is_full():
            yield chunk
            chunk = Chunk(builder)
    if chunk.rows:
        yield chunk
