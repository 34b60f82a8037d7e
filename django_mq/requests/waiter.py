"""One thread and connection per database that wait for all pending replies of this process.

One statement queries for all of them: when a wait begins, on a notification, and otherwise at
growing intervals. The thread starts with the first wait and ends some time after the last; a
forked process starts its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic

from django.core import mail

from django_mq.executor.outage import log_wait
from django_mq.requests.connection import ServerLink, SleepBreaker
from django_mq.store.results import ReplyState
from django_mq.store.server_errors import LOST, was_refused

#: Seconds between two queries for one reply: first and maximum. With LISTEN, always the maximum.
QUERY_INTERVAL, MAX_QUERY_INTERVAL = 0.02, 0.25
GROWTH = 1.5
#: The minimum number of seconds between two queries, since any login may send notifications.
MIN_QUERY_INTERVAL = 0.005
#: Seconds that an idle thread keeps its connection.
IDLE_SECONDS = 30.0
#: Seconds between two attempts to reach a lost database: first and maximum.
RECONNECT_WAIT, MAX_RECONNECT_WAIT = 0.02, 5.0


class _PendingQuery:
    """A message with a pending reply, the futures that wait for it, and when to query next."""

    __slots__ = ("asked", "due", "futures", "wait")

    def __init__(self) -> None:
        self.futures: list[Future[ReplyState]] = []
        #: Those that waited before the last query began.
        self.asked: list[Future[ReplyState]] = []
        self.wait = QUERY_INTERVAL
        self.due = monotonic()


class Waiter:
    """Waits for replies in the database of `alias`."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._lock = threading.Lock()
        self._pending: dict[int, _PendingQuery] = {}
        self._running = False
        self._poke = SleepBreaker()

    @contextmanager
    def waiting_for(self, id: int) -> Iterator[Future[ReplyState]]:
        """Yield a future for the reply to message `id`, or for the state that none can come.

        The wait lasts until the block ends. The future fails if the database refuses the query.
        """
        future: Future[ReplyState] = Future()
        with self._lock:
            if not self._running:
                # Starting a thread may fail. The thread blocks on the lock until the future is
                # registered.
                threading.Thread(target=self._run, name="mq-replies", daemon=True).start()
                self._running = True
            self._pending.setdefault(id, _PendingQuery()).futures.append(future)
        self._poke()
        try:
            yield future
        finally:
            self._remove(id, future)

    def _remove(self, id: int, future: Future[ReplyState]) -> None:
        with self._lock:
            pending = self._pending.get(id)
            if pending is not None and future in pending.futures:
                pending.futures.remove(future)
                if not pending.futures:
                    del self._pending[id]

    # ---- in the thread

    def _run(self) -> None:
        link = ServerLink(self._alias, self._poke)
        wait = RECONNECT_WAIT
        looked_at = idle_since = float("-inf")
        try:
            while not self._ends(idle_since):
                try:
                    rang = link.sleep(self._until_due())
                    time.sleep(max(0.0, looked_at + MIN_QUERY_INTERVAL - monotonic()))
                    if ids := self._take_due(all=rang, listening=link.is_listening()):
                        looked_at = idle_since = monotonic()
                        self._deliver(link.query(ids))
                        wait = RECONNECT_WAIT
                except LOST as error:
                    if not was_refused(error):
                        link.close()
                    log_wait(error, wait, what="waiting for replies: ")
                    time.sleep(wait)
                    wait = min(wait * 2, MAX_RECONNECT_WAIT)
        except BaseException as error:
            self._fail(error)
        finally:
            link.close()

    def _ends(self, idle_since: float) -> bool:
        """Return whether the thread has been idle for long; the next wait then starts a new one."""
        # In tests, an open connection would keep the test database from being dropped. `outbox` is
        # the mark that Django's test runners, and pytest-django, leave in every process.
        keep = 0.0 if hasattr(mail, "outbox") else IDLE_SECONDS
        with self._lock:
            if self._pending or monotonic() - idle_since < keep:
                return False
            self._running = False
            return True

    def _until_due(self) -> float:
        with self._lock:
            if not self._pending:
                return IDLE_SECONDS
            return min(pending.due for pending in self._pending.values()) - monotonic()

    def _take_due(self, *, all: bool, listening: bool) -> list[int]:
        """Return the ids to query now, and schedule their next query."""
        now = monotonic()
        ids = []
        with self._lock:
            for id, pending in self._pending.items():
                if all or pending.due <= now:
                    ids.append(id)
                    pending.asked = list(pending.futures)
                    pending.due = now + (MAX_QUERY_INTERVAL if listening else pending.wait)
                    pending.wait = min(pending.wait * GROWTH, MAX_QUERY_INTERVAL)
        return ids

    def _deliver(self, found: list[ReplyState]) -> None:
        for each in found:
            if each.answered or not each.stored:
                for future in self._take_ended(each):
                    if future.set_running_or_notify_cancel():
                        future.set_result(each)

    def _take_ended(self, found: ReplyState) -> list[Future[ReplyState]]:
        """Remove and return the futures that `found` ends.

        A message that was missing may have been committed since the query: those that began to
        wait after it wait for the next one.
        """
        with self._lock:
            pending = self._pending.pop(found.id, None)
            if pending is None:
                return []
            ended = pending.futures
            if not found.answered:
                ended = [each for each in ended if each in pending.asked]
            if later := [each for each in pending.futures if each not in ended]:
                pending.futures, pending.due = later, monotonic()
                self._pending[found.id] = pending
            return ended

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._running = False
            failed = [future for pending in self._pending.values() for future in pending.futures]
            self._pending.clear()
        for future in failed:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


_waiters: dict[str, Waiter] = {}
_lock = threading.Lock()


def waiter_of(alias: str) -> Waiter:
    """Return this process's waiter for the database of `alias`."""
    with _lock:
        waiter = _waiters.get(alias)
        if waiter is None:  # only now, since a waiter has a pair of sockets
            waiter = _waiters[alias] = Waiter(alias)
        return waiter


def _begin_anew() -> None:
    """Reset a forked child: it has no waiter threads, and the connections belong to the parent."""
    global _lock
    _lock = threading.Lock()
    _waiters.clear()


os.register_at_fork(after_in_child=_begin_anew)
