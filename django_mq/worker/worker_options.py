"""The options of a worker, and the requests that reach it while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

from django.db import connections

from django_mq.conf import MAX_ASYNC_SLOTS, MAX_BATCH_SIZE, MAX_THREADS, alias_of, get_settings
from django_mq.exceptions import InvalidName
from django_mq.executor.scoreboard import Scoreboard
from django_mq.policy.column_bounds import MAX_INTEGER
from django_mq.policy.names import check_pattern
from django_mq.values import as_seconds, short_repr
from django_mq.worker.commands import EndProcess
from django_mq.worker.orders import Orders
from django_mq.worker.recovery import DeadWorker

Default = TypeVar("Default", int, float, None)


class WorkerOptions:
    """The checked options of a worker, and the requests that reached it since.

    The parts of a run read these; `django_mq.worker.Worker` adds the run.
    """

    def __init__(
        self,
        queues: Sequence[str] | str = (),
        *,
        threads: int | None = None,
        batch_size: int | None = None,
        async_slots: int | None = None,
        max_messages: int | None = None,
        max_seconds: float | timedelta | None = None,
        drain_seconds: float | timedelta | None = None,
        using: str | None = None,
        id: str | None = None,
        scoreboard: Scoreboard | None = None,
    ) -> None:
        """Raise InvalidName for a queue that is neither a name nor a pattern, and ValueError for a
        number or a duration out of range; nothing connects yet."""
        settings = get_settings()
        self.settings = settings
        self.queues = _checked_queues(queues) or ("#",)
        self.threads = _number("threads", threads, settings.threads, MAX_THREADS)
        self.batch_size = _number("batch_size", batch_size, None, MAX_BATCH_SIZE)
        #: How many messages one call may get, whatever the batch size of its queue.
        self.batch = self.batch_size or settings.batch_size
        self.async_slots = _number(
            "async_slots", async_slots, settings.async_slots, MAX_ASYNC_SLOTS
        )
        # 0 is for the replacement of a process that had claimed its share.
        self.max_messages = _number("max_messages", max_messages, None, MAX_INTEGER, 0)
        self.max_seconds = seconds_or(None, "max_seconds", max_seconds)
        self.drain_seconds = seconds_or(settings.drain_seconds, "drain_seconds", drain_seconds)
        self.alias = alias_of(using)
        self._given_scoreboard = scoreboard
        self.given_id = id
        self.to_recover: list[tuple[DeadWorker, Callable[[], None]]] = []
        self.end_process: EndProcess | None = None
        self.declares = True
        #: Whether the next run only settles what dead siblings held.
        self.only_settles = False
        self.on_declared: Callable[[], None] = lambda: None
        self.orders = Orders()
        self.stopping = threading.Event()
        #: Held while a run begins or ends. A signal handler may take it in the same thread.
        self.lock = threading.RLock()

    def refuse_transaction(self) -> None:
        """Raise RuntimeError if this thread is in a transaction on the worker's alias."""
        if connections[self.alias].in_atomic_block:
            raise RuntimeError(
                "a worker uses its own connections, which cannot see the changes of this"
                " transaction: in a TestCase use django_mq.testing.drain()"
            )

    def scoreboard(self) -> Scoreboard:
        """Return the scoreboard on which this worker shows what it runs."""
        return self._given_scoreboard or Scoreboard(self.entries_needed())

    def entries_needed(self) -> int:
        """Return how many entries the scoreboard of such a worker must have."""
        return self.threads * self.batch + self.async_slots


def seconds_or(default: Default, what: str, value: float | timedelta | None) -> float | Default:
    """Return a duration in seconds, `default` for None. Raises ValueError for anything else."""
    if value is None:
        return default
    seconds = as_seconds(value)
    if seconds is None:
        raise ValueError(f"{what} is {short_repr(value)}; it must be seconds or a timedelta")
    return seconds


def _checked_queues(queues: Sequence[str] | str) -> tuple[str, ...]:
    if isinstance(queues, str):
        queues = (queues,)
    if not isinstance(queues, Iterable):
        raise InvalidName(
            "queues must be a list of names or patterns such as ['mail', 'shop.*'], not"
            f" {short_repr(queues)}: leave it out for all queues"
        )
    return tuple(check_pattern(name, "queue") for name in queues)


def _number(
    what: str, value: int | None, default: Default, maximum: int, minimum: int = 1
) -> int | Default:
    if value is None:
        return default
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a whole number from {minimum}"
            f" to {maximum:,}"
        )
    return value
