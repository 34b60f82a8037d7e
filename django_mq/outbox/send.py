"""Send messages to the database: which one, in whose transaction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.conf import Settings, get_settings
from django_mq.exceptions import NotInTransaction
from django_mq.messages import Message, Receipt
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.dedupe_plan import candidate_maker
from django_mq.outbox.observers import notify
from django_mq.outbox.receipts import (
    ReceiptBuilder,
    deduped_receipt,
    deduped_receipts,
    notify_each,
    receipt_of,
    split,
)
from django_mq.outbox.write import RowWriter
from django_mq.store.rows import NewRow, Rows

NOT_IN_TRANSACTION = """\
broadcast() needs an open atomic() block on the database {alias!r}, so that the message commits \
with your data:

    with transaction.atomic(using={alias!r}):
        order.save()
        broadcast("shop.orders.placed", {{"order_id": order.pk}})

A post_save receiver runs after its own save has committed: open the block around the code that \
saves, or set ATOMIC_REQUESTS. The block that TestCase opens does not count. In async code, put \
this into a function and await sync_to_async(function)(), or use abroadcast(), which commits by \
itself. \
DJANGO_MQ = {{"REQUIRE_ATOMIC": False}} turns this check off."""


def send(message: Message, *, using: str | None = None, wants_result: bool = False) -> Receipt:
    """Store one message in the caller's transaction: what `broadcast()` does with its options."""
    settings = get_settings()
    connection = connection_in_transaction(settings, using)
    builder = RowBuilder(settings, wants_result=wants_result)
    rows = builder.rows(message)
    return _store(connection, RowWriter(connection, settings, builder), message, rows)


def send_durably(
    message: Message, *, using: str | None = None, wants_result: bool = False
) -> Receipt:
    """Store one message in its own transaction; raise RuntimeError inside an `atomic()` block."""
    settings = get_settings()
    connection = queue_connection(settings, using)
    if in_own_atomic(connection):
        raise RuntimeError(
            "this call writes in a transaction of its own, but an atomic() block is open:"
            " call broadcast() in that block"
        )
    builder = RowBuilder(settings, wants_result=wants_result)
    rows = builder.rows(message)
    with transaction.atomic(using=connection.alias):
        return _store(connection, RowWriter(connection, settings, builder), message, rows)


def _store(
    connection: BaseDatabaseWrapper, writer: RowWriter, message: Message, rows: list[NewRow]
) -> Receipt:
    if message.unique_id is None:
        receipt = receipt_of(rows, writer.insert(rows))
        notify(connection, rows)
        return receipt
    candidates = list(map(candidate_maker(message), rows))
    return deduped_receipt(connection, candidates, writer.dedupe(candidates))


def send_many(messages: Sequence[Message], *, using: str | None) -> list[Receipt]:
    """Store messages, all or none; check all of them before any SQL."""
    settings = get_settings()
    connection = connection_in_transaction(settings, using)
    builder = RowBuilder(settings)
    rows = Rows()
    counts = [builder.add(rows, check_message(message)) for message in messages]
    writer = RowWriter(connection, settings, builder)
    if all(message.unique_id is None for message in messages):
        receipts = ReceiptBuilder(rows.kinds, counts)
        writer.insert(rows, sent=receipts.add)
        notify_each(connection, rows, counts)
        return receipts.receipts
    shares = zip(messages, split(rows, counts), strict=True)
    candidates = [
        each for message, share in shares for each in map(candidate_maker(message), share)
    ]
    return deduped_receipts(connection, candidates, writer.dedupe(candidates), counts)


def check_message(message: object) -> Message:
    """Return `message`; raise TypeError if it is not a Message (a dict, say)."""
    if not isinstance(message, Message):
        raise TypeError(
            f"broadcast_many() takes Message(...) objects, not {type(message).__name__}"
        )
    return message


def queue_connection(settings: Settings, using: str | None) -> BaseDatabaseWrapper:
    """Return the connection to the queue's database.

    Raises ImproperlyConfigured if it is not PostgreSQL.
    """
    alias = using or settings.database or router.db_for_write(_queue_model())
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"django_mq stores its messages in PostgreSQL, but the database {alias!r} is"
            f" {connection.display_name}: set DJANGO_MQ['DATABASE'], or route the app there"
        )
    return connection


@cache
def _queue_model() -> Any:
    from django_mq.models import QueuedMessage  # apps may not be ready when this is imported

    return QueuedMessage


def in_own_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an `atomic()` block other than those of a TestCase is open."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase  # type: ignore[attr-defined]


def connection_in_transaction(settings: Settings, using: str | None) -> BaseDatabaseWrapper:
    """Return the connection to the queue's database; raise NotInTransaction outside a block."""
    connection = queue_connection(settings, using)
    if settings.require_atomic and not in_own_atomic(connection):
        raise NotInTransaction(NOT_IN_TRANSACTION.format(alias=connection.alias))
    return connection
