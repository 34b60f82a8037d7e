"""Wait for one or several replies within one timeout, in a thread or on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.utils.asyncio import async_unsafe

from django_mq.executor.deadline import Deadline
from django_mq.requests.reply_query import ReplyQuery
from django_mq.values import as_seconds, short_repr

if TYPE_CHECKING:
    from django_mq.store.results import ReplyState

#: The default number of seconds to wait for a reply.
TIMEOUT = 10.0


@async_unsafe("this would block the event loop: await aresult(), aask() or agather() instead")
def collect(
    pendings: Sequence[ReplyQuery],
    timeout: float | timedelta | None,
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """Return the replies in order; raise the first error, or return errors in their places."""
    deadline = Deadline(seconds_of(timeout))
    replies = []
    with _futures(
        pendings, lambda each: deadline.seconds == 0 or each._is_answered_here()
    ) as futures:
        for pending, future in zip(pendings, futures, strict=True):
            found = (
                pending._query_here() if future is None else _result(future, deadline.remaining())
            )
            is_here, raises = future is None, not return_exceptions
            replies.append(_reply(pending, found, deadline, is_here=is_here, raises=raises))
    return replies


async def acollect(
    pendings: Sequence[ReplyQuery],
    timeout: float | timedelta | None,
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """Like `collect()`, on an event loop."""
    deadline = Deadline(seconds_of(timeout))
    replies = []
    with _futures(
        pendings, lambda each: deadline.seconds == 0 or each._was_stored_in_test()
    ) as futures:
        for pending, future in zip(pendings, futures, strict=True):
            if future is None:
                found: ReplyState | None = await sync_to_async(pending._query_here)()
            else:
                found = await _aresult(future, deadline.remaining())
            is_here, raises = future is None, not return_exceptions
            replies.append(_reply(pending, found, deadline, is_here=is_here, raises=raises))
    return replies


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """Return `timeout` in seconds, or None; raises ValueError unless it is a duration."""
    seconds = None if timeout is None else as_seconds(timeout)
    if seconds is None and timeout is not None:
        raise ValueError(f"timeout must be seconds, a timedelta or None, not {short_repr(timeout)}")
    return seconds


@contextmanager
def _futures(
    pendings: Sequence[ReplyQuery], is_here: Callable[[ReplyQuery], bool]
) -> Iterator[list[Future[ReplyState] | None]]:
    """Yield a future for each reply, or None for a reply that this thread queries itself.

    The waiter queries for all futures until the block ends. Raises CannotWait.
    """
    from django_mq.requests.waiter import waiter_of  # imports the driver, not needed earlier

    for pending in pendings:
        pending._refuse()
    with ExitStack() as stack:
        yield [
            None
            if is_here(pending)
            else stack.enter_context(waiter_of(pending._alias).waiting_for(pending.id))
            for pending in pendings
        ]


def _result(future: Future[ReplyState], seconds: float | None) -> ReplyState | None:
    try:
        return future.result(seconds)
    except TimeoutError:
        return None


async def _aresult(future: Future[ReplyState], seconds: float | None) -> ReplyState | None:
    if future.done():
        return future.result()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError:
        return None


def _reply(
    pending: ReplyQuery,
    found: ReplyState | None,
    deadline: Deadline,
    *,
    is_here: bool,
    raises: bool,
) -> Any:
    """Return the reply; an error is raised or, without `raises`, returned in its place."""
    if found is not None and (found.answered or not found.stored):
        reply = pending._read(found)
    else:
        reply = pending._late(None if is_here and deadline.seconds != 0 else deadline.seconds)
    if raises and isinstance(reply, Exception):
        raise reply
    return reply
