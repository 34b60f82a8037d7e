"""From messages to receipts: which database, in whose transaction, what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq import capturing
from django_mq.addressing import Addresser, unique_seconds
from django_mq.conf import Settings, get_settings
from django_mq.drafting import Wanted
from django_mq.exceptions import NotInTransaction
from django_mq.messages import CopyReceipt, Message, Receipt
from django_mq.routing import check_name
from django_mq.store.rows import Kind, NewRow, Rows
from django_mq.storing import Storer

T = TypeVar("T")

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
    connection = checked_transaction(settings, using)
    addresser = Addresser(settings, wants_result=wants_result)
    rows = addresser.rows(message)
    return _store(connection, Storer(connection, settings, addresser), message, rows)


def send_durably(
    message: Message, *, using: str | None = None, wants_result: bool = False
) -> Receipt:
    """Store one message in a transaction of its own; RuntimeError inside an `atomic()` block."""
    settings = get_settings()
    connection = queue_connection(settings, using)
    if in_own_atomic(connection):
        raise RuntimeError(
            "this writes in a transaction of its own, and here an atomic() block is open:"
            " call broadcast() in it"
        )
    addresser = Addresser(settings, wants_result=wants_result)
    rows = addresser.rows(message)
    with transaction.atomic(using=connection.alias):
        return _store(connection, Storer(connection, settings, addresser), message, rows)


def _store(
    connection: BaseDatabaseWrapper, storer: Storer, message: Message, rows: list[NewRow]
) -> Receipt:
    if message.unique_id is None:
        receipt = _receipt(rows, storer.insert(rows))
        capturing.tell(connection, rows)
        return receipt
    wanted = list(map(wanting(message), rows))
    return _deduped(connection, wanted, storer.dedupe(wanted))


def send_many(messages: Sequence[Message], *, using: str | None) -> list[Receipt]:
    """Store messages, all or none; all are checked before any SQL."""
    settings = get_settings()
    connection = checked_transaction(settings, using)
    addresser = Addresser(settings)
    rows = Rows()
    counts = [addresser.add(rows, checked(message)) for message in messages]
    storer = Storer(connection, settings, addresser)
    if all(message.unique_id is None for message in messages):
        answers = Answers(rows.kinds, counts)
        storer.insert(rows, sent=answers.add)
        tell_each(connection, rows, counts)
        return answers.receipts
    addressed = zip(messages, _shares(rows, counts), strict=True)
    wanted = [row for message, share in addressed for row in map(wanting(message), share)]
    return deduped_each(connection, wanted, storer.dedupe(wanted), counts)


class Answers:
    """Makes the receipts of many messages as the ids of their rows become known.

    That is while the server reads the rows, which takes longer than all that is done for it here.
    """

    def __init__(self, kinds: Sequence[Kind], counts: Sequence[int]) -> None:
        self.receipts: list[Receipt] = []
        self._kinds = kinds
        self._counts = counts
        self._ids: list[int] = []
        self._start = 0

    def add(self, ids: Sequence[int]) -> None:
        """Take the next ids; some may be of a message that others are to come of."""
        self._ids += ids
        while len(self.receipts) < len(self._counts):
            end = self._start + self._counts[len(self.receipts)]
            if end > len(self._ids):
                return
            share = slice(self._start, end)
            self.receipts.append(_receipt(self._kinds[share], self._ids[share]))
            self._start = end


def _shares(values: Sequence[T], counts: Iterable[int]) -> Iterator[Sequence[T]]:
    """Cut `values` into parts of so many each."""
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count


def wanting(message: Message) -> Callable[[NewRow], Wanted]:
    """Return what puts to a row of `message` what that says of its unique id."""
    if message.unique_id is None:
        return Wanted
    unique_id = check_name(message.unique_id, "unique id")
    unique_for = unique_seconds(message)
    return lambda row: Wanted(row, unique_id, unique_for, message.on_duplicate)


def _receipt(rows: Sequence[NewRow | Kind], ids: Iterable[int]) -> Receipt:
    if len(rows) == 1:
        return Receipt.of_added(_only(rows[0].handler, rows[0].queue), tuple(ids))
    return Receipt.of_added(tuple((row.handler, row.queue) for row in rows), tuple(ids))


@lru_cache(maxsize=1024)
def _only(handler: str, queue: str) -> tuple[tuple[str, str]]:
    """Return the route of one copy: the same object for all receipts that have it."""
    return ((handler, queue),)


def tell_each(connection: BaseDatabaseWrapper, rows: Rows, counts: Iterable[int]) -> None:
    """Tell the observers, if there are any, of messages that have so many rows each."""
    if capturing.observers:
        for share in _shares(rows, counts):
            capturing.tell(connection, share)


def deduped_each(
    connection: BaseDatabaseWrapper,
    wanted: Sequence[Wanted],
    copies: Sequence[CopyReceipt],
    counts: Sequence[int],
) -> list[Receipt]:
    """Return the receipts of messages that have so many of these rows each."""
    answered = zip(_shares(wanted, counts), _shares(copies, counts), strict=True)
    return [_deduped(connection, share, found) for share, found in answered]


def _deduped(
    connection: BaseDatabaseWrapper, wanted: Sequence[Wanted], copies: Iterable[CopyReceipt]
) -> Receipt:
    """Return the receipt of one message with a unique id; a duplicate was not broadcast."""
    found = tuple(copies)
    stored = [
        each.row for each, copy in zip(wanted, found, strict=True) if copy.outcome != "duplicate"
    ]
    if stored:
        capturing.tell(connection, stored, wanted[0].unique_id)
    return Receipt(found)


def checked(message: object) -> Message:
    """Return it; TypeError if it is none: broadcast_many() takes no dicts."""
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


def in_own_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an atomic() block is open other than those that TestCase put around."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase  # type: ignore[attr-defined]


def checked_transaction(settings: Settings, using: str | None) -> BaseDatabaseWrapper:
    """Return that connection; NotInTransaction where the caller has no transaction open."""
    connection = queue_connection(settings, using)
    if settings.require_atomic and not in_own_atomic(connection):
        raise NotInTransaction(NOT_IN_TRANSACTION.format(alias=connection.alias))
    return connection
