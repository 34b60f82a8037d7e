"""From messages to rows in the caller's transaction: which database, which chunks, what receipt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq import bell, capturing
from django_mq.addressing import Addresser
from django_mq.conf import Settings, get_settings
from django_mq.exceptions import NotInTransaction
from django_mq.messages import BulkReceipt, Message, Receipt
from django_mq.store.insert import FEW, NewRow, insert

#: A chunk of a large broadcast ends at so many rows, or so many characters of JSON.
CHUNK_ROWS = 2_000
CHUNK_SIZE = 4 * 1024 * 1024

NOT_IN_TRANSACTION = """\
broadcast() needs an open atomic() block on the database {alias!r}, so that the message commits \
with your data:

    with transaction.atomic(using={alias!r}):
        order.save()
        broadcast("shop.orders.placed", {{"order_id": order.pk}})

A post_save receiver runs after its own save committed: put the block around the code that saves, \
or set ATOMIC_REQUESTS. The block that TestCase opens does not count. In async code put this into \
a function and await sync_to_async(function)(), or use abroadcast(), which commits by itself. \
DJANGO_MQ = {{"REQUIRE_ATOMIC": False}} turns this check off."""


def send(message: Message, *, using: str | None = None, wants_result: bool = False) -> Receipt:
    """Store one message in the caller's transaction: what `broadcast()` does with its options."""
    settings = get_settings()
    connection = queue_connection(settings, using)
    _check_transaction(connection, settings)
    rows = Addresser(settings, wants_result=wants_result).rows(message)
    return _receipt(connection, rows, _insert(connection, settings, rows))


def send_durably(
    message: Message, *, using: str | None = None, wants_result: bool = False
) -> Receipt:
    """Store one message in a transaction of its own; RuntimeError inside an `atomic()` block."""
    settings = get_settings()
    connection = queue_connection(settings, using)
    if _in_own_atomic(connection):
        raise RuntimeError(
            "this writes in a transaction of its own, and here an atomic() block is open:"
            " call broadcast() in it"
        )
    rows = Addresser(settings, wants_result=wants_result).rows(message)
    with transaction.atomic(using=connection.alias):
        return _receipt(connection, rows, _insert(connection, settings, rows))


def send_many(messages: Sequence[Message], *, using: str | None) -> list[Receipt]:
    """Store messages, all or none; all are checked before any SQL."""
    settings = get_settings()
    connection = queue_connection(settings, using)
    _check_transaction(connection, settings)
    addresser = Addresser(settings)
    addressed = [addresser.rows(_checked(message)) for message in messages]
    ids = iter(_insert(connection, settings, [row for rows in addressed for row in rows]))
    return [_receipt(connection, rows, islice(ids, len(rows))) for rows in addressed]


def send_stream(messages: Iterable[Message], *, using: str | None) -> BulkReceipt:
    """Store messages as they come, all or none, in constant memory."""
    settings = get_settings()
    connection = queue_connection(settings, using)
    _check_transaction(connection, settings)
    addresser = Addresser(settings)
    count = 0
    with transaction.atomic(using=connection.alias):
        for chunk in _chunks(_stream(connection, addresser, messages)):
            count += len(_insert_chunk(connection, settings, chunk))
    return BulkReceipt(count)


def _stream(
    connection: BaseDatabaseWrapper, addresser: Addresser, messages: Iterable[Message]
) -> Iterator[NewRow]:
    for message in messages:
        rows = addresser.rows(_checked(message))
        capturing.tell(connection, rows)
        yield from rows


def _insert(connection: BaseDatabaseWrapper, settings: Settings, rows: list[NewRow]) -> list[int]:
    if len(rows) <= FEW:
        # One statement is all or none by itself, and nothing is left that it could refuse.
        return _insert_chunk(connection, settings, rows)
    with transaction.atomic(using=connection.alias):
        return [id for chunk in _chunks(rows) for id in _insert_chunk(connection, settings, chunk)]


def _insert_chunk(
    connection: BaseDatabaseWrapper, settings: Settings, rows: list[NewRow]
) -> list[int]:
    if not rows:
        return []
    with connection.cursor() as cursor, connection.wrap_database_errors:
        ids = insert(cursor, rows)
    # A worker looks at least each poll interval, so it meets by itself what is due later. How far
    # away an absolute moment is only the database knows.
    if settings.wakeup != "poll" and any(
        row.due is not None or row.delay <= settings.poll_interval for row in rows
    ):
        bell.ring_after_commit(connection)
    return ids


def _chunks(rows: Iterable[NewRow]) -> Iterator[list[NewRow]]:
    """Cut rows into chunks, each complete before it is sent: what makes the rows may query."""
    chunk: list[NewRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.payload) + len(row.metadata)
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_SIZE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _receipt(connection: BaseDatabaseWrapper, rows: list[NewRow], ids: Iterable[int]) -> Receipt:
    capturing.tell(connection, rows)
    return Receipt.of_added(tuple((row.handler, row.queue) for row in rows), tuple(ids))


def _checked(message: object) -> Message:
    if not isinstance(message, Message):
        raise TypeError(
            f"broadcast_many() takes Message(...) objects, not {type(message).__name__}"
        )
    return message


def queue_connection(settings: Settings, using: str | None) -> BaseDatabaseWrapper:
    """Return the connection to the queue's database; ImproperlyConfigured if not PostgreSQL."""
    alias = using or settings.database or router.db_for_write(_queue_model())
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"django_mq keeps its messages in PostgreSQL, but the database {alias!r} is"
            f" {connection.display_name}: set DJANGO_MQ['DATABASE'], or route the app there"
        )
    return connection


@cache
def _queue_model() -> Any:
    from django_mq.models import QueuedMessage  # apps may not be ready when this is imported

    return QueuedMessage


def _in_own_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an atomic() block is open other than those that TestCase put around."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase  # type: ignore[attr-defined]


def _check_transaction(connection: BaseDatabaseWrapper, settings: Settings) -> None:
    if settings.require_atomic and not _in_own_atomic(connection):
        raise NotInTransaction(NOT_IN_TRANSACTION.format(alias=connection.alias))
