"""The thread in which async handlers make the blocking calls that share connections.

asgiref would use one thread for the whole process, and could not tell which handler's call occupies
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any
from weakref import WeakSet

from asgiref.sync import AsyncToSync
from django.db import close_old_connections, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.executor.thread_connections import blocking_call, reset
from django_mq.messages import Delivery, current_delivery


class SharedThread(ThreadPoolExecutor):
    """Runs the thread-sensitive calls made on `loop`, one after another, in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(max_workers=1, thread_name_prefix="mq-async-calls")
        self._loop = loop
        self._used = False
        # The deliveries of running handlers that have made a call.
        self._users: WeakSet[Delivery] = WeakSet()
        # The delivery whose call runs now, and a future that is done when that call ends.
        self._running: tuple[Delivery | None, Future[None]] | None = None
        AsyncToSync.loop_thread_executors[loop] = self  # type: ignore[assignment]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call for the handler in whose context this is called."""
        self._used = True
        if (delivery := current_delivery.get()) is not None:
            self._users.add(delivery)
        return super().submit(self._call, delivery, fn, *args, **kwargs)

    def end_handler(self, delivery: Delivery) -> None:
        """Note that the handler of `delivery` has ended; reset the sessions after its calls.

        Does not wait for the calls, since one may block the thread.
        """
        self._users.discard(delivery)
        if self._used:
            self._used = bool(self._users)
            super().submit(_reset_sessions, shared=bool(self._users))

    async def wait_for_calls(self, delivery: Delivery) -> None:
        """Wait while the thread runs a call of `delivery`."""
        running = self._running
        if running is not None and running[0] is delivery:
            await asyncio.wrap_future(running[1])

    async def close(self, seconds: float) -> None:
        """Close the connections of the thread; give up after `seconds` if a call blocks it."""
        closing = asyncio.wrap_future(super().submit(connections.close_all))
        await asyncio.wait({closing}, timeout=seconds)
        closing.cancel()
        AsyncToSync.loop_thread_executors.pop(self._loop, None)
        self.shutdown(wait=False)

    def _call(
        self, delivery: Delivery | None, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # a waiting coroutine cannot cancel it
        self._running = (delivery, ended)
        try:
            return blocking_call(fn, *args, **kwargs)
        finally:
            self._running = None
            ended.set_result(None)


def _reset_sessions(*, shared: bool) -> None:
    """Reset the sessions of this thread, and close connections that are old or broken.

    While a running handler has `shared` them, only broken or really old connections are closed:
    between two calls, a session may hold the handler's cursor, lock or setting.
    """
    if not shared:
        for wrapper in connections.all(initialized_only=True):
            _reset(wrapper)
        close_old_connections()
        return
    for wrapper in connections.all(initialized_only=True):
        if wrapper.settings_dict["CONN_MAX_AGE"] != 0:
            wrapper.close_if_unusable_or_obsolete()
        elif wrapper.errors_occurred and wrapper.connection is not None:
            wrapper.errors_occurred = False
            if not wrapper.is_usable():
                wrapper.close()


def _reset(wrapper: BaseDatabaseWrapper) -> None:
    """Reset the session, unless the connection is about to be closed."""
    is_pooled = bool(wrapper.settings_dict["OPTIONS"].get("pool"))
    if is_pooled or wrapper.close_at is None or monotonic() < wrapper.close_at:
        reset(wrapper)
