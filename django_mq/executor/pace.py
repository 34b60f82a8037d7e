"""How many messages of a handler a slice may have: slow start, fast retreat."""

from __future__ import annotations

from dataclasses import dataclass

from django_mq.handlers import Handler

#: Messages that take longer, in seconds, are divided among idle threads: eight of 20 ms, on eight
#: threads, took 46 ms instead of 175, and a queue with `max_in_flight=4` ran 123 per second instead
#: of 49 (medians of three). For shorter ones, more transactions cost as much as more threads save.
WORTH_DIVIDING = 0.005


@dataclass(slots=True)
class Pace:
    """A slice may have `limit` messages of one handler. The limit doubles while slices end in time.

    After a conflict (deadlock, serialization) the limit is 1 until `run_singly` messages have run:
    handlers that update shared counters ran 75 a second, with 22 deadlocks, in transactions of 100,
    and 3,200 one by one.
    `seconds` is how long a message of the last slice took, on average over all its handlers; or the
    last coroutine; or a message of the last non-atomic call, with its statements, since they occupy
    the thread, too. The handler may get lists (`listed`), or be async.
    """

    limit: int = 1
    seconds: float = 0.0
    patience: int = 0
    run_singly: int = 0
    listed: bool = False
    is_async: bool = False

    def ended_in_time(self, ran: int, slice_size: int) -> None:
        """Record that a slice with `ran` messages of this handler ended in time."""
        if self.run_singly > 0:
            self.run_singly -= ran
        elif ran >= self.limit:
            self.limit = min(self.limit * 2, slice_size)

    def overran(self) -> None:
        """Note that a slice did not end in time."""
        self.limit = max(1, self.limit // 2)

    def conflict(self) -> None:
        """Note a conflict: run messages of this handler one by one for a long time."""
        self.limit = 1
        self.patience = min(max(500, self.patience * 4), 100_000)
        self.run_singly = self.patience


class Paces:
    """The paces of the handlers of this process. Thread-safe."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}

    def of(self, handler: Handler) -> Pace:
        """Return the pace of `handler`."""
        pace = self._paces.get(handler.name)
        if pace is None:
            pace = Pace(listed=handler.batch, is_async=handler.is_async)
            pace = self._paces.setdefault(handler.name, pace)
        return pace

    def find(self, name: str) -> Pace | None:
        """Return the pace of the handler `name`; None if it has not run yet."""
        return self._paces.get(name)
