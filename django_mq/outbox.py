"""broadcast() and its kin: the options as people write them, in words that say what is promised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, overload

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_mq.addressing import check_whole
from django_mq.backoff import RetryPolicy
from django_mq.conf import get_settings
from django_mq.exceptions import When
from django_mq.messages import BulkReceipt, Cancelled, Message, OnDuplicate, Receipt
from django_mq.routing import check_name
from django_mq.sending import queue_connection, send, send_durably, send_many
from django_mq.store import freeing, operate
from django_mq.store.cancel import cancel as cancel_waiting
from django_mq.streaming import send_stream


def broadcast(
    type: str,
    payload: Any = None,
    *,
    queue: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    schema_version: int = 1,
    after: When | None = None,
    expires: When | None = None,
    priority: int = 0,
    key: str | None = None,
    unique_id: str | None = None,
    on_duplicate: OnDuplicate = "skip",
    unique_for: float | timedelta | None = None,
    retry: RetryPolicy | None = None,
    using: str | None = None,
) -> Receipt:
    """Store a message for each of its handlers, inside the caller's `transaction.atomic()`.

    It commits with your data, or vanishes with it. `payload` is any JSON value; `None` is `{}`.

    - `queue`: instead of the handlers' own; each handler must allow it.
    - `metadata`: a dict beside the payload, which `where=` of handlers may ask for.
    - `after`: not before, `expires`: not after; seconds, timedelta or aware datetime. Seconds
      count from now, by the database's clock.
    - `priority`: -100..100, higher first.
    - `retry`: a RetryPolicy of numbers alone, for this message instead of the handler's.
    - `using`: the database alias; default the DATABASE setting, else what the router says.
    - `key`: the order key. For each queue and handler, messages of a key run one at a time, in
      order.
    - `unique_id`: while a message with it waits or runs, there is no second one for the same
      queue, handler and type. `on_duplicate` says what this one does then: "skip" (nothing),
      "raise" (DuplicateMessage), "update" (give the waiting one this content and these options),
      "debounce" (this due time, too), "requeue" (run after the one in flight). The Receipt says
      what became of each copy.
    - `unique_for`: seconds or timedelta that the unique id stays taken after a success.

    Raises NotInTransaction without an open `atomic()` block (unless REQUIRE_ATOMIC is off), and
    another BroadcastError when the message cannot be stored: BroadcastBusy when the queue is full
    or another transaction has had the unique id for 3 s. The transaction stays usable.
    """
    message = Message(
        type,
        payload,
        queue=queue,
        metadata=metadata,
        schema_version=schema_version,
        after=after,
        expires=expires,
        priority=priority,
        key=key,
        unique_id=unique_id,
        on_duplicate=on_duplicate,
        unique_for=unique_for,
        retry=retry,
    )
    return send(message, using=using)


@overload
def broadcast_many(  # type: ignore[overload-overlap]  # a list is answered differently
    messages: list[Message] | tuple[Message, ...], *, using: str | None = None
) -> list[Receipt]: ...
@overload
def broadcast_many(messages: Iterable[Message], *, using: str | None = None) -> BulkReceipt: ...
def broadcast_many(
    messages: Iterable[Message], *, using: str | None = None
) -> list[Receipt] | BulkReceipt:
    """Store many messages, all or none; otherwise as `broadcast()`.

    A list or tuple is checked as a whole before any SQL, and answered by a Receipt for each
    message. Any other iterable is read and stored in chunks, with constant memory, behind a
    savepoint, and answered by the number of rows stored.
    """
    if isinstance(messages, list | tuple):
        return send_many(messages, using=using)
    return send_stream(messages, using=using)


async def abroadcast(
    type: str,
    payload: Any = None,
    *,
    queue: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    schema_version: int = 1,
    after: When | None = None,
    expires: When | None = None,
    priority: int = 0,
    key: str | None = None,
    unique_id: str | None = None,
    on_duplicate: OnDuplicate = "skip",
    unique_for: float | timedelta | None = None,
    retry: RetryPolicy | None = None,
    using: str | None = None,
) -> Receipt:
    """Store a message in a transaction of its own, durably; the options are `broadcast()`'s.

    Django has no async `atomic()`: the message is committed when this returns, whatever becomes
    of your other writes. To commit both together write a plain function and call it with
    `await sync_to_async(place_order)()`.

    Raises RuntimeError when the thread it writes in has an `atomic()` block open, and the errors
    of `broadcast()`.
    """
    message = Message(
        type,
        payload,
        queue=queue,
        metadata=metadata,
        schema_version=schema_version,
        after=after,
        expires=expires,
        priority=priority,
        key=key,
        unique_id=unique_id,
        on_duplicate=on_duplicate,
        unique_for=unique_for,
        retry=retry,
    )
    return await sync_to_async(send_durably, thread_sensitive=True)(message, using=using)


def cancel(
    *,
    id: int | None = None,
    type: str | None = None,
    unique_id: str | None = None,
    using: str | None = None,
) -> Cancelled:
    """Remove the waiting copies that meet all that is given: one id, a type, a unique id.

    What a worker holds is never touched, only counted (`in_flight`); dead letters stay. Unique
    ids are free again; what was put aside for one (`on_duplicate="requeue"`) goes too if its type
    or unique id is what is given, and is counted (`put_aside`): it has no id yet. It takes part in
    the caller's transaction if there is one. Raises TypeError when nothing is given, and
    InvalidName or InvalidOption.
    """
    if id is None and type is None and unique_id is None:
        raise TypeError("cancel() needs at least one of id=, type=, unique_id=")
    id = None if id is None else check_whole(id, "id", 1, 2**63 - 1)
    type = None if type is None else check_name(type, "type")
    unique_id = None if unique_id is None else check_name(unique_id, "unique id")
    alias = queue_connection(get_settings(), using).alias
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        dropped = 0
        if id is None:  # before the ids are free: else it would come forward
            dropped = freeing.drop_aside(cursor, type=type, unique_id=unique_id)
        gone, in_flight = cancel_waiting(cursor, id=id, type=type, unique_id=unique_id)
        operate.free_followers(cursor, gone)
        freeing.end_removed(cursor, gone)
    return Cancelled(tuple(each.id for each in gone), in_flight, dropped)
