"""Notice stalls: of a link to the server, or of a thread that must keep moving.

If a server freezes, or a firewall drops packets, a connection stays open but never answers.
Keepalives and server timeouts do not end such a wait; shutting down the socket from another thread
does, at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from django_mq.store.limits import STATEMENT_SECONDS

#: Seconds between two looks at the links.
TICK = 0.5
#: Seconds beyond the server's own limit on a statement before its link counts as stalled.
STALL_MARGIN = 2.0


class ConnectionStalled(psycopg.OperationalError):
    """The server did not answer in time, so the watchdog has closed the connection."""


class Link:
    """One connection of the worker, and whether a statement of the worker waits for its answer.

    After `seconds`, or `max_wait` in a drain, the wait ends with ConnectionStalled. The watchdog
    counts its own ticks, so a process that is frozen meanwhile loses no time. While a
    handler has the link (`in_handler`), only the handler's timeout bounds its waits.
    """

    def __init__(self, seconds: float = STATEMENT_SECONDS + STALL_MARGIN) -> None:
        self.seconds = seconds
        self.max_wait = float("inf")
        self.in_handler = False
        #: How many waits began, and how many of them ended with an answer of the server.
        self.waits = self.answers = 0
        self._waiting = self._was_shut = False
        self._driver: psycopg.Connection[Any] | None = None
        self._seen = self._ticks = 0

    def attach(self, driver: psycopg.Connection[Any]) -> None:
        """Bound the waits of `driver`, which was just made: everything it sends passes `wait()`."""
        self._driver, self._was_shut = driver, False
        plain_wait = driver.wait

        def wait(*args: Any, **kwargs: Any) -> Any:
            if self.in_handler:
                return plain_wait(*args, **kwargs)
            self.waits += 1
            self._waiting = True
            try:
                answer = plain_wait(*args, **kwargs)
            except psycopg.OperationalError as error:
                if self._was_shut:
                    text = "connection stalled: the server did not answer"
                    raise ConnectionStalled(text) from error
                raise
            finally:
                self._waiting = False
            self.answers += 1
            return answer

        driver.wait = wait  # type: ignore[method-assign]

    def progress(self) -> tuple[int, int]:
        """Return a value that changes while statements run, or while one waits within its limit."""
        return self.waits, self._ticks if self._waiting else 0

    def tick(self) -> None:
        """Shut the link if one wait has lasted longer than it may."""
        if not self._waiting or self.waits != self._seen:
            self._seen, self._ticks = self.waits, 0
            return
        self._ticks += 1
        if self._ticks * TICK >= min(self.seconds, self.max_wait):
            self.shut()

    def shut(self) -> None:
        """End a wait now, from any thread."""
        driver = self._driver
        if driver is None:
            return
        with contextlib.suppress(OSError, psycopg.Error):
            number = driver.pgconn.socket
            with socket.socket(fileno=os.dup(number)) as link:
                if driver.pgconn.socket == number:  # else another connection may have this number
                    self._was_shut = True
                    link.shutdown(socket.SHUT_RDWR)


class Watchdog(threading.Thread):
    """Watches all links of the process, and the threads that must keep moving.

    It logs nothing: a log handler may block. The thread whose link was shut reports it.
    """

    def __init__(self) -> None:
        super().__init__(name="mq-watchdog", daemon=True)
        self._links: list[Link] = []
        self._draining: list[Link] = []
        self._moving: list[tuple[Callable[[], object], Callable[[], None]]] = []
        self._ending = threading.Event()

    def add(self, link: Link, *, drains: bool = True) -> Link:
        """Watch `link` from now on, and return it; `limit_waits()` affects links with `drains`."""
        self._links.append(link)
        if drains:
            self._draining.append(link)
        return link

    def follow(self, count: Callable[[], object], on_progress: Callable[[], None]) -> None:
        """Call `on_progress()` at each tick at which `count()` has changed, unless it is None."""
        self._moving.append((count, on_progress))

    def limit_waits(self, seconds: float) -> None:
        """From now on no wait on a link that drains lasts longer than `seconds`."""
        for link in self._draining:
            link.max_wait = min(link.max_wait, seconds)

    def end(self) -> None:
        self._ending.set()

    def run(self) -> None:
        before: list[object] = [None] * len(self._moving)
        while not self._ending.wait(TICK):
            for link in list(self._links):
                link.tick()
            for index, (count, on_progress) in enumerate(list(self._moving)):
                if (now := count()) != before[index]:
                    before[index] = now
                    on_progress()
