"""Send messages: choose the database and the transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.conf import alias_of, get_settings
from django_mq.exceptions import InvalidOption
from django_mq.handlers import Handler
from django_mq.messages import BulkReceipt, Message, Receipt
from django_mq.outbox.blocks import in_own_atomic, in_transaction
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.chunk import Chunk
from django_mq.outbox.outside_block import not_in_transaction


def send(
    message: Message,
    *,
    using: str | None = None,
    wants_result: bool = False,
    reserved: str = "{}",
) -> Receipt:
    """Store one message in the caller's transaction, with the options of `broadcast()`.

    `reserved` is `mq.` metadata that the package itself adds, as JSON text.
    """
    connection = connection_in_transaction(using)
    builder = RowBuilder(connection.alias, wants_result=wants_result, reserved=reserved)
    return _checked([message], builder).store(connection)[0]


def send_durably(
    message: Message, *, using: str | None = None, wants_result: bool = False
) -> Receipt:
    """Store one message in its own transaction; raise RuntimeError if the caller has one open."""
    connection = queue_connection(using)
    if in_transaction(connection):
        raise RuntimeError(
            "this call writes in a transaction of its own, but an atomic() block is open, or"
            " autocommit is off: call broadcast() in that block, or in one"
        )
    chunk = _checked([message], RowBuilder(connection.alias, wants_result=wants_result))
    with transaction.atomic(using=connection.alias):
        return chunk.store(connection)[0]


def send_to(
    handler: Handler, message: Message, *, using: str | None = None, reserved: str = "{}"
) -> tuple[Receipt, float | None]:
    """Store one message for one handler and keep its result; no pattern is matched.

    Writes in the open transaction, if there is one, else in a transaction of its own. `reserved` is
    as in `send()`. Also returns when the message was stored, in seconds since 1970 by the
    database's clock; None if it was not, since its unique id was taken.
    """
    connection = queue_connection(using)
    builder = RowBuilder(connection.alias, wants_result=True, handler=handler, reserved=reserved)
    chunk = _checked([message], builder)
    block = nullcontext() if in_transaction(connection) else transaction.atomic(connection.alias)
    with block:
        receipt = chunk.store(connection)[0]
    return receipt, chunk.rows.stored_at


def send_many(messages: Sequence[Message], *, using: str | None) -> list[Receipt]:
    """Store messages, all or none; check all of them before any SQL."""
    connection = connection_in_transaction(using)
    return _checked(messages, RowBuilder(connection.alias)).store(connection)


def send_stream(messages: Iterable[Message], *, using: str | None) -> BulkReceipt:
    """Store messages as they come, all or none, in constant memory."""
    connection = connection_in_transaction(using)
    builder = RowBuilder(connection.alias)
    count = 0
    with transaction.atomic(using=connection.alias):
        for chunk in _chunks(builder, messages):
            chunk.store(connection, streamed=True)
            count += chunk.stored
    return BulkReceipt(count)


def _chunks(builder: RowBuilder, messages: Iterable[Message]) -> Iterator[Chunk]:
    """Yield complete chunks, since `messages` may query the database only while no COPY is open."""
    chunk = Chunk(builder)
    for message in messages:
        chunk.add(message)
        if chunk.is_full():
            yield chunk
            chunk = Chunk(builder)
    if chunk.rows:
        yield chunk


def _checked(messages: Sequence[Message], builder: RowBuilder) -> Chunk:
    """Check the messages, without any SQL; return their rows as a chunk that can store them."""
    chunk = Chunk(builder)
    for message in messages:
        chunk.add(message)
    return chunk


def queue_connection(using: str | None) -> BaseDatabaseWrapper:
    """Return the connection to the queue's database.

    Raises InvalidOption if there is no alias `using`, and ImproperlyConfigured if the database is
    not PostgreSQL.
    """
    alias = alias_of(using)
    if using is not None and alias not in connections:
        raise InvalidOption(f"using={alias!r} is not an alias in DATABASES")
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"django_mq stores its messages in PostgreSQL, but the database {alias!r} is"
            f" {connection.display_name}: set DJANGO_MQ['DATABASE'], or route the app there"
        )
    return connection


def connection_in_transaction(using: str | None) -> BaseDatabaseWrapper:
    """Return the connection to the queue's database; raise NotInTransaction outside a block."""
    connection = queue_connection(using)
    if get_settings().require_atomic and not in_own_atomic(connection):
        raise not_in_transaction(connection.alias)
    return connection
