"""request(), ask(), gather() and their async versions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction
from django.utils.asyncio import async_unsafe

from django_mq.exceptions import CannotWait
from django_mq.messages import Message, MessageInstance, current_delivery, foreign_alias
from django_mq.outbox.blocks import in_transaction
from django_mq.outbox.options import options_of
from django_mq.outbox.send import queue_connection, send, send_durably
from django_mq.policy.backoff import RetryPolicy
from django_mq.requests.collecting import TIMEOUT, acollect, collect, seconds_of
from django_mq.requests.pending import PendingReply
from django_mq.values import When

ASK_IN_ATOMIC = """\
ask() inside an atomic() block on the database {alias!r}, or while autocommit is off, would wait \
for a reply to a message that is not committed yet. Call it before or after the block, in a view \
under ATOMIC_REQUESTS with @transaction.non_atomic_requests, and in a handler with \
@handler(atomic=False); or store a request with your data and wait later:

    with transaction.atomic(using={alias!r}):
        order.save()
        pending = request("shop.orders.check", {{"order_id": order.pk}})
    pending.result(timeout=10)"""


@async_unsafe("request() blocks, and a coroutine calls it: `await arequest(...)`")
def request(
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
    retry: RetryPolicy | None = None,
    using: str | None = None,
) -> PendingReply:
    """Store a message and keep its handler's return value; the options are those of `broadcast()`.

    Inside `atomic()` the message is part of that transaction, and you can wait for its reply after
    the commit; elsewhere it is committed when this returns. With autocommit off it needs
    `atomic()`, like `broadcast()`. Give `expires`, so that a request does not run after its caller
    has stopped waiting.

    Raises RoutingError when several handlers match, since only one can answer (no match in this
    process is fine: a worker may have the handler), and the errors of `broadcast()`.
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
        retry=retry,
    )
    connection = queue_connection(using)
    receipt = (send if in_transaction(connection) else send_durably)(
        message, using=using, wants_result=True
    )
    return PendingReply._of(receipt, message.type, connection)


@async_unsafe("ask() blocks, and a coroutine calls it: `await aask(...)`")
def ask(
    type: str | MessageInstance,
    payload: Any = None,
    *,
    timeout: float | timedelta | None = TIMEOUT,
    queue: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    schema_version: int = 1,
    expires: When | None = None,
    priority: int = 0,
    key: str | None = None,
    retry: RetryPolicy | None = None,
    using: str | None = None,
) -> Any:
    """Send a request and return its reply: `request()` and `PendingReply.result()` in one.

    Inside `atomic()`, and in a handler of the queue that the request goes to, it raises CannotWait
    and stores nothing. It also raises the errors of those two functions.
    """
    pending = _sent(
        timeout,
        type,
        payload,
        queue=queue,
        metadata=metadata,
        schema_version=schema_version,
        expires=expires,
        priority=priority,
        key=key,
        retry=retry,
        using=using,
    )
    return pending.result(timeout)


def gather(
    *pendings: PendingReply,
    timeout: float | timedelta | None = TIMEOUT,
    return_exceptions: bool = False,
) -> list[Any]:
    """Return all replies in order; `timeout` (seconds or timedelta) covers all of them together.

    The first error or timeout is raised, after which you can still wait for the other replies; with
    `return_exceptions`, each RemoteError and ReplyTimeout is returned in place of its reply.
    """
    return collect(_checked(pendings), timeout, return_exceptions=return_exceptions)


@options_of(request)
async def arequest(*args: Any, **options: Any) -> PendingReply:
    """Like `request()`, for async code."""
    return await sync_to_async(request, thread_sensitive=True)(*args, **options)


@options_of(ask)
async def aask(*args: Any, timeout: float | timedelta | None = TIMEOUT, **options: Any) -> Any:
    """Like `ask()`, for async code."""
    pending = await sync_to_async(_sent, thread_sensitive=True)(timeout, *args, **options)
    return await pending.aresult(timeout)


async def agather(
    *pendings: PendingReply,
    timeout: float | timedelta | None = TIMEOUT,
    return_exceptions: bool = False,
) -> list[Any]:
    """Like `gather()`, without blocking the event loop and without a thread per reply."""
    return await acollect(_checked(pendings), timeout, return_exceptions=return_exceptions)


def _checked(pendings: tuple[PendingReply, ...]) -> tuple[PendingReply, ...]:
    for each in pendings:
        if not isinstance(each, PendingReply):
            raise TypeError(
                "gather(p1, p2) takes the pending replies that request() returns, a list of them"
                f" as gather(*replies), not {type(each).__name__}"
            )
    return pendings


def _sent(
    timeout: float | timedelta | None, *args: Any, using: str | None = None, **options: Any
) -> PendingReply:
    """Store the request of `ask()`; store nothing if its reply cannot be waited for."""
    seconds_of(timeout)
    if "after" in options:
        raise TypeError("ask() waits for the reply, so it has no after=: call request()")
    connection = queue_connection(using)
    if in_transaction(connection):
        raise _in_transaction(connection.alias)
    with transaction.atomic(using=connection.alias):
        pending = request(*args, using=using, **options)
        pending._refuse_own_queue()
    return pending


def _in_transaction(alias: str) -> CannotWait:
    delivery = current_delivery.get()
    if delivery is not None and delivery._is_atomic and foreign_alias(alias) is None:
        # Logs and `mq_why` show its first 500 characters.
        return CannotWait(
            f"ask() in the handler {delivery.handler}, which is atomic, would wait for a reply to a"
            " message that is not committed yet: a handler that asks needs @handler(atomic=False)"
        )
    return CannotWait(ASK_IN_ATOMIC.format(alias=alias))
