"""An event loop for clients that are asynchronous; it runs only while its link is used."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ClientLoop:
    """Runs coroutines of one client, each for `seconds` at most."""

    def __init__(self, seconds: float) -> None:
        self.loop = asyncio.new_event_loop()
        self._seconds = seconds

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. Raises TimeoutError."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, self._seconds))

    def close(self) -> None:
        """Cancel the tasks that still run, and close the loop."""
        self.loop.run_until_complete(_end_others())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
