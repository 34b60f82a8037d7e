"""The worker: one process that claims, runs and settles messages until it is told to stop.

`Worker` is what users and commands hold; `process.py` has the parts of one run and the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from django.db import connections, router

from django_mq.conf import get_settings
from django_mq.routing import check_pattern
from django_mq.timing import HandlerTimings
from django_mq.worker import timings
from django_mq.worker.board import Board
from django_mq.worker.leases import DeadWorker
from django_mq.worker.process import Process
from django_mq.worker.timings import Timings

__all__ = ["DeadWorker", "Worker", "places_needed"]


def places_needed(*, threads: int, async_slots: int, batch_size: int) -> int:
    """Return how many places on the board a worker with these options needs."""
    return threads * batch_size + async_slots


class Worker:
    """Runs messages in this process, in threads of its own, until it is told to stop.

    `queues` are names or patterns (`mail.*`, `#` for all, the default), in strict preference.
    Other options default to the settings. Only `manage.py mq_worker` has a supervisor, so only
    there a handler that runs past its timeout, and is no coroutine, is ended.

        worker = Worker(queues=["mail"])
        worker.run(until_empty=True)
    """

    def __init__(
        self,
        queues: Sequence[str] | str = (),
        *,
        threads: int | None = None,
        batch_size: int | None = None,
        async_slots: int | None = None,
        max_messages: int | None = None,
        max_seconds: float | None = None,
        drain_seconds: float | None = None,
        using: str | None = None,
        id: str | None = None,
        board: Board | None = None,
    ) -> None:
        """Raise InvalidName for a queue that is no name and no pattern, ValueError for a number
        below one; nothing is connected yet."""
        settings = get_settings()
        self.settings = settings
        if isinstance(queues, str):
            queues = (queues,)
        self.queues = tuple(check_pattern(name, "queue") for name in queues) or ("#",)
        self.threads = _number("threads", threads, settings.threads, 1000)
        self.batch_size = (
            None if batch_size is None else _number("batch_size", batch_size, 1, 10_000)
        )
        self.async_slots = _number("async_slots", async_slots, settings.async_slots, 100_000)
        self.max_messages = max_messages
        self.max_seconds = max_seconds
        self.drain_seconds = settings.drain_seconds if drain_seconds is None else drain_seconds
        self.alias = using or settings.database or _routed_alias()
        self._given_board = board
        self._given_id = id
        self._to_recover: list[tuple[DeadWorker, Callable[[], None]]] = []
        self._parts: Process | None = None
        self._timings = Timings()
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    @property
    def id(self) -> str:
        """The random id of this run, as in `claimed_by` and the heartbeat; empty when idle."""
        return self._parts.id if self._parts else ""

    @property
    def running(self) -> bool:
        """Whether it runs now; from any thread."""
        return self._parts is not None

    @property
    def sleeps(self) -> int:
        """How often this run found nothing to do and slept; 0 when idle."""
        return self._parts.wakeup.sleeps if self._parts else 0

    def timings(self) -> dict[str, HandlerTimings]:
        """Return what each handler did in this run, or in the last one; from any thread.

        At most 100 handlers, those that ended most messages first. `django_mq.queues.timings()`
        adds up the whole fleet.
        """
        return {name: tally.timings(name) for name, tally in self._timings.read().items()}

    def run(self, until_empty: bool = False) -> bool:
        """Work until told to stop, or until nothing is due any more; blocks.

        Returns True when everything that was begun was ended, False when `drain_seconds` ran
        out first. Raises RuntimeError when it runs already or inside a transaction, and what
        the database raises when it cannot be reached at the start.
        """
        with self._starting:
            if self._parts is not None:
                raise RuntimeError("this worker runs already")
            if connections[self.alias].in_atomic_block:
                raise RuntimeError(
                    "a worker has connections of its own and would see nothing of this"
                    " transaction: in a TestCase use django_mq.testing.drain()"
                )
            self._parts = Process(self)
            self._timings = timings.begin(self._parts.id)
            self._ended.clear()
        try:
            return self._parts.run(until_empty)
        finally:
            timings.end(self._parts.id)
            with self._starting:
                self._parts = None
                self._stopping.clear()  # not at the start: it may have been asked to stop before
            self._ended.set()

    def stop(self, timeout: float | None = None) -> bool:
        """Drain: start nothing more, end what runs. From any thread.

        Waits up to `timeout` seconds (None: as long as it takes) and returns whether the run
        ended; False as well when nothing was running.
        """
        with self._starting:
            if self._parts is None:
                return False
            self.ask_to_stop()
        return self._ended.wait(timeout)

    def ask_to_stop(self) -> None:
        """Drain, without waiting: from any thread. Before a run, it ends that at once."""
        self._stopping.set()
        if self._parts is not None:
            self._parts.wakeup.poke()

    def recover(self, dead: DeadWorker, done: Callable[[], None]) -> None:
        """Settle what a dead worker process held, then call `done`: its supervisor asks for it."""
        self._to_recover.append((dead, done))
        if self._parts is not None:
            self._parts.take_recoveries()

    def board(self) -> Board:
        """Return where this worker shows what it runs."""
        return self._given_board or Board(
            places_needed(
                threads=self.threads,
                async_slots=self.async_slots,
                batch_size=self.batch_size or self.settings.batch_size,
            )
        )


def _routed_alias() -> str:
    from django_mq.models import QueuedMessage

    alias: str = router.db_for_write(QueuedMessage)
    return alias


def _number(what: str, value: int | None, default: int, most: int) -> int:
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} is {value!r}; it must be a whole number from 1 to {most:,}")
    return value
