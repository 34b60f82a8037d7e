"""The threads of blocking calls that async handlers make with `asyncio.to_thread()` and its kin."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asgiref.sync import async_to_sync

from django_mq.executor.scoreboard_entries import CallEntries
from django_mq.executor.thread_connections import blocking_call, close_all
from django_mq.messages import Delivery, current_delivery


def as_function(handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Any]:
    """Return a plain function that runs an async handler apart from others, on another loop.

    It is a loop of its own, or that of an async test, which keeps these threads.
    """

    async def run(argument: Any) -> Any:
        OtherThreads(asyncio.get_running_loop())
        return await handler(argument)

    return async_to_sync(run)


class _Call:
    """A call for `delivery`; `thread` is the identifier of its thread once it has begun, else 0."""

    def __init__(self, delivery: Delivery | None) -> None:
        self.delivery = delivery
        self.thread = 0

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.thread = threading.get_ident()
        try:
            return blocking_call(fn, *args, **kwargs)
        finally:
            close_all()


class OtherThreads(ThreadPoolExecutor):
    """Runs the calls made on `loop` that are not thread-sensitive, each on connections of its own.

    A thread keeps no connection between two calls: it would hold one for as long as the process
    lives, and a pool would soon have none for anyone else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(thread_name_prefix="mq-async-others")
        self._calls: dict[Future[Any], _Call] = {}
        loop.set_default_executor(self)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call for the handler in whose context this is called."""
        call = _Call(current_delivery.get())
        future = super().submit(call.run, fn, *args, **kwargs)
        # The loop looks names up here, too. If name servers are down, each handler with a client
        # waits for one, and the resolver ends that: no reason to end the process.
        if fn is not socket.getaddrinfo and fn is not socket.getnameinfo:
            self._calls[future] = call
            future.add_done_callback(self._calls.pop)
        return future

    async def wait_for_calls(self, delivery: Delivery, entries: CallEntries) -> None:
        """Wait for the calls of `delivery` that run now; meanwhile its `entries` name their thread.

        Those that a background task of the handler makes later do not count: each may be short.
        """
        try:
            for future, call in self._calls.copy().items():
                if call.delivery is delivery and future.running():
                    entries.bind_thread(call.thread)
                    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
        finally:
            entries.bind_thread(threading.get_ident())
