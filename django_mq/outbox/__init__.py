"""The producer's functions: broadcast(), broadcast_many(), abroadcast(), cancel()."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, overload

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.utils.asyncio import async_unsafe

from django_mq.conf import get_settings
from django_mq.messages import BulkReceipt, Cancelled, Message, MessageInstance, Receipt
from django_mq.outbox.notify import ring_for_next
from django_mq.outbox.options import check_integer, options_of
from django_mq.outbox.send import queue_connection, send, send_durably, send_many, send_stream
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.policy.names import check_key, check_name
from django_mq.policy.uniqueness import OnDuplicate
from django_mq.store import free_unique_ids, message_changes
from django_mq.store.cancel import cancel as cancel_waiting
from django_mq.store.put_aside import drop_aside
from django_mq.values import When


def broadcast(
    type: str | MessageInstance,
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
    """Store a copy of a message for each of its handlers, inside your `transaction.atomic()` block.

    The copies commit with your data, or roll back with it. `payload` is any JSON value; `None` is
    stored as `{}`. `broadcast(instance)` takes type, payload and version from an instance of a
    `@message` class.

    - `queue`: replaces the handlers' own queues; each handler must allow it.
    - `metadata`: a dict that travels beside the payload; the `where=` of handlers matches it.
    - `schema_version`: the version of the payload's format, from 1.
    - `after`, `expires`: no attempt starts before `after`, or at `expires` or later. Give seconds,
      a timedelta or an aware datetime. Seconds count from now, by the database's clock.
    - `priority`: -100..100, higher first, over all queues that a worker serves in turn.
    - `key`: the order key: 1 to 128 characters without control characters. Per queue and handler,
      messages with the same key run one at a time, in order.
    - `unique_id`: text, as for a key. While a message with this id waits or runs, no second one is
      stored for the same queue, handler and type. `on_duplicate` says what happens instead: "skip"
      (nothing; the default), "raise" (DuplicateMessage), "update" (the waiting message gets this
      content and these options), "debounce" (it gets this due time), "replace" (it gets both),
      "requeue" (this message runs after the one in flight), "rerun" (like "update" while it waits,
      like "requeue" while it runs: a run starts after your commit). The Receipt has the outcome of
      each copy.
    - `unique_for`: seconds or a timedelta for which the unique id stays taken after a success.
    - `retry`: a RetryPolicy without a callable; this message uses it instead of the handler's.
    - `using`: the database alias; by default the DATABASE setting, else the router's choice.

    Raises NotInTransaction outside an `atomic()` block (unless REQUIRE_ATOMIC is off), and another
    BroadcastError if the message cannot be stored: BroadcastBusy if the queue is full, if
    another transaction held the unique id for 3 to 4 s, or if your session's timeouts end the wait
    for a key in commit order. Raises TypeError for `unique_for`, or an `on_duplicate` other than
    "skip", without a `unique_id`. Your transaction stays usable.
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
def broadcast_many(  # type: ignore[overload-overlap]  # a list has another result
    messages: list[Message] | tuple[Message, ...], *, using: str | None = None
) -> list[Receipt]: ...
@overload
def broadcast_many(messages: Iterable[Message], *, using: str | None = None) -> BulkReceipt: ...
def broadcast_many(
    messages: Iterable[Message], *, using: str | None = None
) -> list[Receipt] | BulkReceipt:
    """Store many messages, all or none; otherwise like `broadcast()`.

    A list or tuple is checked as a whole before any SQL; returns one Receipt per message. Any other
    iterable is read and stored in chunks, in constant memory, behind a savepoint; returns a
    BulkReceipt with the number of rows stored or changed.
    """
    if isinstance(messages, Message):
        raise TypeError("broadcast_many() takes several messages: write broadcast_many([message])")
    if isinstance(messages, list | tuple):
        return send_many(messages, using=using)
    return send_stream(messages, using=using)


@options_of(broadcast)
async def abroadcast(*args: Any, using: str | None = None, **options: Any) -> Receipt:
    """Store a message in a transaction of its own; takes the options of `broadcast()`.

    Django has no async `atomic()`: the message is committed when this returns, regardless of your
    other writes. To commit both together, write a plain function and call it with
    `await sync_to_async(place_order)()`.

    Raises RuntimeError if the thread that writes has an `atomic()` block open or has autocommit
    off; also raises the errors of `broadcast()`.
    """
    message = Message(*args, **options)
    return await sync_to_async(send_durably, thread_sensitive=True)(message, using=using)


@async_unsafe("cancel() blocks, and a coroutine calls it: `await sync_to_async(cancel)(...)`")
def cancel(
    *,
    id: int | None = None,
    type: str | None = None,
    unique_id: str | None = None,
    using: str | None = None,
) -> Cancelled:
    """Remove the waiting copies that match all given arguments: an id, a type, a unique id.

    Copies that a worker holds are only counted (`in_flight`); dead letters stay. The unique ids of
    removed copies are free again, except in a quiet time, which goes on. Messages put aside by
    `on_duplicate="requeue"` or `"rerun"` have no id yet: a matching type or unique id also removes
    them, and counts them (`put_aside`). The removal is part of your transaction, if one is open.

    An id or a unique id is found by an index, fast enough for a web request. A type alone has no
    index: many short statements walk over all messages, 0.5 s per million.

    Raises TypeError without arguments, and InvalidName or InvalidOption for bad ones.
    """
    if id is None and type is None and unique_id is None:
        raise TypeError("cancel() needs at least one of id=, type=, unique_id=")
    id = None if id is None else check_integer(id, "id", 1, MAX_BIGINT)
    type = None if type is None else check_name(type, "type")
    unique_id = None if unique_id is None else check_key(unique_id, "unique id")
    settings = get_settings()
    alias = queue_connection(using).alias
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        put_aside = 0
        if id is None:  # first, since freeing an id promotes content put aside
            put_aside = drop_aside(cursor, type=type, unique_id=unique_id)
        removed, in_flight = cancel_waiting(cursor, id=id, type=type, unique_id=unique_id)
        message_changes.free_followers(cursor, removed)
        free_unique_ids.end_removed(cursor, removed)
        ring_for_next(connections[alias], settings, removed)
    return Cancelled(tuple(each.id for each in removed), in_flight, put_aside)
