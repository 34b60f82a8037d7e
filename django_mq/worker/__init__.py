"""The worker: one process that claims, runs and settles messages until it is told to stop.

Users and commands hold a `Worker`; `run` has the loop, `parts` builds what it works with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from django.db import connections

from django_mq.conf import alias_of, get_settings
from django_mq.executor import handler_counts
from django_mq.executor.handler_counts import Timings
from django_mq.executor.scoreboard import Scoreboard
from django_mq.policy.handler_stats import HandlerTimings
from django_mq.policy.routing import check_pattern
from django_mq.worker.commands import EndProcess
from django_mq.worker.orders import LEAVE, Orders
from django_mq.worker.recovery import DeadWorker
from django_mq.worker.run import Run

__all__ = ["DeadWorker", "Worker", "entries_needed"]


def entries_needed(*, threads: int, async_slots: int, batch_size: int) -> int:
    """Return how many scoreboard entries a worker with these options needs."""
    return threads * batch_size + async_slots


class Worker:
    """Runs messages in threads of this process, until it is told to stop.

    `queues` are names or patterns (`mail.*`, `#` for all, the default), in strict preference.
    Other options default to the settings. A worker started here cannot end a sync handler that runs
    past its timeout: only the supervisor of `manage.py mq_worker` can.

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
        scoreboard: Scoreboard | None = None,
    ) -> None:
        """Raise InvalidName for a queue that is neither a name nor a pattern, and ValueError for a
        number out of range; nothing connects yet."""
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
        self.alias = alias_of(using)
        self._given_scoreboard = scoreboard
        self._given_id = id
        self._to_recover: list[tuple[DeadWorker, Callable[[], None]]] = []
        self._end_process: EndProcess | None = None
        self._orders = Orders()
        self._run: Run | None = None
        self._timings = Timings()
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    @property
    def id(self) -> str:
        """The random id of this run, as in `claimed_by` and the heartbeat; empty when idle."""
        return self._run.id if self._run else ""

    @property
    def running(self) -> bool:
        """Whether it runs now; from any thread."""
        return self._run is not None

    @property
    def running_messages(self) -> list[int]:
        """The ids of the messages whose handlers run now; from any thread."""
        return self._run.parts.scoreboard.running() if self._run else []

    @property
    def sleeps(self) -> int:
        """How often this run has slept for lack of work; 0 when idle."""
        return self._run.parts.wakeup.sleeps if self._run else 0

    def timings(self) -> dict[str, HandlerTimings]:
        """Return the timings of each handler in this run, or in the last; from any thread.

        At most 100 handlers, starting with those that ended most messages.
        `django_mq.queues.timings()` sums the whole fleet.
        """
        return {name: tally.timings(name) for name, tally in self._timings.read().items()}

    def run(self, until_empty: bool = False) -> bool:
        """Work until told to stop or, with `until_empty`, until nothing is due; blocks.

        Returns True if every message that started was finished, False if `drain_seconds` ran out
        first. Raises RuntimeError if the worker is running already or in a transaction, and the
        database's own error if it cannot be reached at the start.
        """
        with self._starting:
            if self._run is not None:
                raise RuntimeError("this worker is already running")
            if connections[self.alias].in_atomic_block:
                raise RuntimeError(
                    "a worker uses its own connections, which cannot see the changes of this"
                    " transaction: in a TestCase use django_mq.testing.drain()"
                )
            self._run = Run(self)
            self._timings = handler_counts.begin(self._run.id)
            self._ended.clear()
        try:
            return self._run.run(until_empty)
        finally:
            handler_counts.end(self._run.id)
            with self._starting:
                self._run = None
                self._stopping.clear()  # here, since a stop may come before the run
                self._orders = Orders()
            self._ended.set()

    def stop(self, timeout: float | None = None) -> bool:
        """Drain: start nothing more, and finish what runs. From any thread.

        Waits up to `timeout` seconds (None: as long as it takes) and returns whether the run
        ended; also False if nothing was running.
        """
        with self._starting:
            if self._run is None:
                return False
            self.ask_to_stop()
        return self._ended.wait(timeout)

    def ask_to_stop(self) -> None:
        """Begin to drain, from any thread. Before a run, it makes that end at once."""
        self._stopping.set()
        if self._run is not None:
            self._run.hurry()

    def obey(self, order: str, by: str = "") -> None:
        """Be quiet, resume or leave, by order of an operator; from any thread, and never blocks."""
        self._orders.give(order, by)
        if order == LEAVE:
            self.ask_to_stop()
        if (run := self._run) is not None:
            run.parts.wakeup.poke()
            run.parts.lease_keeper.hurry()  # the heartbeat shows that it was obeyed

    def recover(self, dead: DeadWorker, done: Callable[[], None]) -> None:
        """Settle what a dead sibling held, then call `done`; for the supervisor."""
        self._to_recover.append((dead, done))
        if self._run is not None:
            self._run.take_recoveries()

    def supervised(self, end_process: EndProcess, pass_on: Callable[[str], None]) -> None:
        """Set what ends this process for a message that is stopped; for the supervisor.

        `pass_on` is called with each order of an operator that was carried out.
        """
        self._end_process = end_process
        self._orders.supervised(pass_on)

    def scoreboard(self) -> Scoreboard:
        """Return the scoreboard on which this worker shows what it runs."""
        return self._given_scoreboard or Scoreboard(
            entries_needed(
                threads=self.threads,
                async_slots=self.async_slots,
                batch_size=self.batch_size or self.settings.batch_size,
            )
        )


def _number(what: str, value: int | None, default: int, most: int) -> int:
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} is {value!r}; it must be a whole number from 1 to {most:,}")
    return value
