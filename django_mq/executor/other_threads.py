"""The threads of blocking calls that async handlers make with `asyncio.to_thread()` and its kin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from django_mq.executor.thread_connections import blocking_call, close_all


class OtherThreads(ThreadPoolExecutor):
    """Runs the calls made on `loop` that are not thread-sensitive, each on connections of its own.

    A thread keeps no connection between two calls: it would hold one for as long as the process
    lives, and a pool would soon have none for anyone else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(thread_name_prefix="mq-async-others")
        loop.set_default_executor(self)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call for the handler in whose context this is called."""
        return super().submit(_call, fn, *args, **kwargs)


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return blocking_call(fn, *args, **kwargs)
    finally:
        close_all()
