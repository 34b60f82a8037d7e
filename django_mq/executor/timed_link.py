"""A link that ends its own waits, for a thread that no watchdog watches."""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any

import psycopg

from django_mq.executor.watchdog import Link


class TimedLink(Link):
    """A link whose waits end after `seconds`, or `max_wait`, without a watchdog.

    A watchdog would be one more thread in each process that makes requests or consumes an inbox.
    """

    def attach(self, driver: psycopg.Connection[Any]) -> None:
        driver_wait = driver.wait

        def wait(generator: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
            return driver_wait(self._timed(generator), *args, **kwargs)

        driver.wait = wait  # type: ignore[method-assign, assignment]
        super().attach(driver)

    def _timed(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Yield the events that `generator` waits for; shut the link once it has waited too long.

        The driver resumes a generator at least every 0.1 s. The value that it sends does not show
        whether an event came: before psycopg 3.2.11, its C code always claims that one did.
        """
        ends_at = monotonic() + min(self.seconds, self.max_wait)
        try:
            event = next(generator)
            while True:
                ready = yield event
                # First: an answer that came while the process was frozen is not late.
                event = generator.send(ready)
                if monotonic() >= ends_at:
                    self.shut()  # the socket is now readable, and reading its end raises an error
        except StopIteration as end:
            return end.value
