"""Wait for one reply or many, within one time: in a thread, or on a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from threading import TIMEOUT_MAX
from time import monotonic
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.utils.asyncio import async_unsafe

from django_mq.backoff import as_seconds

if TYPE_CHECKING:
    from django_mq.requests.pending import PendingReply
    from django_mq.store.results import Found

#: Seconds that is waited for a reply where nothing else is said.
TIMEOUT = 10.0


@async_unsafe("this would block the loop: await aresult(), aask() or agather() instead")
def collect(
    pendings: Sequence[PendingReply],
    timeout: float | timedelta | None,
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """Return the replies of all, in their order, and errors among them or the first one raised."""
    time = _Time(timeout)

    def is_here(pending: PendingReply) -> bool:
        return time.is_zero or pending._is_within_test()

    replies = []
    with _futures(pendings, is_here) as futures:
        for pending, future in zip(pendings, futures, strict=True):
            found = pending._look_here() if future is None else _result(future, time.left())
            reply = _reply(pending, found, time, here=future is None)
            if isinstance(reply, Exception) and not return_exceptions:
                raise reply
            replies.append(reply)
    return replies


async def acollect(
    pendings: Sequence[PendingReply],
    timeout: float | timedelta | None,
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """As `collect()`."""
    time = _Time(timeout)

    def is_here(pending: PendingReply) -> bool:
        return time.is_zero or pending._was_born_in_test()

    replies = []
    with _futures(pendings, is_here) as futures:
        for pending, future in zip(pendings, futures, strict=True):
            if future is None:
                found: Found | None = await sync_to_async(pending._look_here)()
            else:
                found = await _aresult(future, time.left())
            reply = _reply(pending, found, time, here=future is None)
            if isinstance(reply, Exception) and not return_exceptions:
                raise reply
            replies.append(reply)
    return replies


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """Return `timeout` in seconds; ValueError for what is neither seconds, a timedelta nor None."""
    seconds = None if timeout is None else as_seconds(timeout)
    if seconds is None and timeout is not None:
        raise ValueError(f"timeout is seconds or a timedelta, not {timeout!r}")
    return seconds


class _Time:
    """How long it may take in all."""

    def __init__(self, timeout: float | timedelta | None) -> None:
        self.seconds = seconds_of(timeout)
        self.is_zero = self.seconds == 0
        self._end = None if self.seconds is None else monotonic() + self.seconds

    def left(self) -> float | None:
        return None if self._end is None else min(max(0.0, self._end - monotonic()), TIMEOUT_MAX)


@contextmanager
def _futures(
    pendings: Sequence[PendingReply], is_here: Callable[[PendingReply], bool]
) -> Iterator[list[Future[Found] | None]]:
    """Yield what becomes of each, as the waiter tells; None for one to look for here.

    All are waited for from now on, and none after the block. Raises CannotWait.
    """
    from django_mq.requests.waiter import waiter_of  # the driver is not needed before

    for pending in pendings:
        pending._refuse()
    with ExitStack() as stack:
        yield [
            None
            if is_here(pending)
            else stack.enter_context(waiter_of(pending._alias).waiting_for(pending.id))
            for pending in pendings
        ]


def _result(future: Future[Found], seconds: float | None) -> Found | None:
    try:
        return future.result(seconds)
    except TimeoutError:
        return None


async def _aresult(future: Future[Found], seconds: float | None) -> Found | None:
    if future.done():
        return future.result()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError:
        return None


def _reply(pending: PendingReply, found: Found | None, time: _Time, *, here: bool) -> Any:
    """Return the reply, or the error that stands for it."""
    if found is not None and (found.answered or not found.stored):
        return pending._read(found)
    return pending._late(None if here and not time.is_zero else time.seconds)
