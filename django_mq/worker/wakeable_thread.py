"""A background thread that the worker's loop wakes; it logs its errors and never raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import connections, transaction
from django.db.backends.utils import CursorWrapper
from psycopg import IsolationLevel

from django_mq.executor.connections import plain_connection_as
from django_mq.executor.watchdog import Link
from django_mq.store.limits import Limits, set_local
from django_mq.store.server_errors import is_lost

logger = logging.getLogger("django_mq")

#: The limits of its statements.
LIMITS = Limits(lock=1.0)
#: Seconds that a stopping worker waits for the current turn.
STOP_SECONDS = 1.0


class WakeableThread(threading.Thread):
    """Takes a turn whenever it is woken; a subclass defines the turn in `work()`.

    `what` names the work in the log. `on_turn()` is called after every turn, on this thread.
    """

    def __init__(
        self,
        what: str,
        alias: str,
        *,
        on_turn: Callable[[], None] = lambda: None,
        link: Link,
    ) -> None:
        super().__init__(name=f"mq-{what}", daemon=True)
        self._what = what
        self._alias = alias
        self._link = link
        self._on_turn = on_turn
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._working = False

    def busy(self) -> bool:
        """Whether a turn runs or is about to: it may make messages due."""
        return self._wake.is_set() or self._working

    def run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(self.next_turn_in())
            self._working = True
            self._wake.clear()
            if not self._ended.is_set():
                self.take_turn()
            self._working = False
            self._on_turn()

    def take_turn(self) -> None:
        """Work once; never raises."""
        try:
            self.work()
        except Exception as error:
            lost = is_lost(error)
            if lost:  # the loop reports the outage, and waits for the database
                logger.debug("%s put off: %s", self._what, error)
            else:
                self.log_error(error)
            self.on_failure(lost=lost)

    def end(self) -> None:
        """Begin nothing more, and wait a moment for the current turn."""
        self._ended.set()
        self._wake.set()
        if self.is_alive():
            self.join(STOP_SECONDS)

    def work(self) -> None:
        """Do the work that is due."""
        raise NotImplementedError

    def log_error(self, error: Exception) -> None:
        """Log an error that ended a turn, with an event of this thread."""
        raise NotImplementedError

    def next_turn_in(self) -> float | None:
        """Return the seconds until it takes a turn without being woken; None: never."""
        return None

    def on_failure(self, *, lost: bool) -> None:
        """Called after a turn that failed; `lost`: because the database was lost."""

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect this thread to the alias for the duration of the block.

        At READ COMMITTED, whatever the alias sets: a row that another worker has moved on is not
        due.
        """
        with plain_connection_as(self._alias, self._link) as plain:
            plain.connect()
            plain.connection.isolation_level = IsolationLevel.READ_COMMITTED
            yield

    @contextmanager
    def block(self) -> Iterator[CursorWrapper]:
        """Yield a cursor in a transaction under LIMITS, whatever limits the role has."""
        with transaction.atomic(using=self._alias), connections[self._alias].cursor() as cursor:
            cursor.execute(set_local(LIMITS))
            yield cursor

    def is_connected(self) -> bool:
        """Return whether the connection survived the last error."""
        driver = connections[self._alias].connection
        return driver is not None and not driver.closed
