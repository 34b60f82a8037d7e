"""A fetcher with a real table, and without the rest of a worker."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import psycopg
import pytest

from django_mq.executor.last_starts import LastStarts
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.messages import ClaimedRow
from django_mq.policy.line_marks import LineMarks
from django_mq.store.claim_keyed import LineLimits, without_limits
from django_mq.worker import claims as claims_module
from django_mq.worker import due_fetcher as due_fetcher_module
from django_mq.worker import fetcher as fetcher_module
from django_mq.worker import lapsed_fetcher as lapsed_fetcher_module
from django_mq.worker import watermarks as marks_module
from django_mq.worker.claims import ClaimRouter
from django_mq.worker.fetcher import Fetcher
from django_mq.worker.intake import Intake
from django_mq.worker.ordered_queues import OrderedQueues
from django_mq.worker.queue_options import ClaimOptions
from django_mq.worker.watermarks import GroupWatermarks
from tests.database import second_connection

#: The kinds of statements, by how they begin.
KINDS = {
    "with taken": "claim",
    "with seen": "keyed",
    "with found": "lapsed",
    "with recursive": "poll",
}


class Counting:
    """A cursor that records its statements."""

    def __init__(self, cursor: psycopg.Cursor[Any], clock: Clock) -> None:
        self._cursor = cursor
        self._clock = clock
        #: The seconds that a statement takes.
        self.takes = 0.0
        self.asked: list[str] = []
        #: How many lanes each claim had.
        self.lanes: list[int] = []

    def execute(self, statement: str, params: Any = None) -> Any:
        self._clock.now += self.takes
        head = statement.strip()
        found = (kind for start, kind in KINDS.items() if head.startswith(start))
        self.asked.append(next(found, "gate"))
        if self.asked[-1] == "claim":
            self.lanes.append(params["queues"].count(",") + 1)
        return self._cursor.execute(statement, params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class Clock:
    """Stands still unless told to move."""

    def __init__(self) -> None:
        self.now = 1000.0  # not the machine's time: sums would be rounded more the longer it is up

    def __call__(self) -> float:
        return self.now


class Rig:
    """A fetcher with options and room set by the test."""

    def __init__(self, cursor: Counting, clock: Clock) -> None:
        self.cursor = cursor
        self.clock = clock
        self.taken: list[ClaimedRow] = []
        self.rooms: dict[str, int] = {"sync": 1000, "async": 1000, "both": 1000}
        self.default = ClaimOptions("sync", 30.0, 100, 1 << 22)
        self.options: dict[str, ClaimOptions] = {}
        self.last_starts = LastStarts()
        self.owned: dict[str, LineMarks] = {}
        self.line_limits: LineLimits = without_limits
        self.thread_is_free = True

    def make(self, *patterns: str, poll: float = 1.0) -> Rig:
        self.fetcher = Fetcher(
            patterns=patterns or ["#"],
            options=lambda queue: self.options.get(queue, self.default),
            intake=cast(Intake, self),
            claims=ClaimRouter(
                worker="rig",
                owned=self.owned,
                stopped_queues=StoppedQueues(),
                line_limits=lambda handlers: self.line_limits(handlers),
            ),
            ordered_queues=OrderedQueues(
                "rig", [], on_owned=lambda: None, busy=lambda queue: False
            ),
            last_starts=self.last_starts,
            poll_interval=poll,
            shuffle=lambda lanes: None,  # by name
        )
        return self

    @property
    def marks(self) -> GroupWatermarks:
        return self.fetcher._due._marks

    def room(self, kind: str, list_size: int = 1, *, ahead: bool = True) -> int:
        return self.rooms[kind]

    def waits_for_thread(self, kind: str) -> bool:
        return kind != "async" and not self.thread_is_free

    def drop(self, withdrawn: Collection[str], backing_off: Collection[str]) -> None:
        """No task waits here."""

    def take(self, cursor: Any, rows: list[ClaimedRow], **given: Any) -> None:
        self.taken.extend(rows)
        for row in rows:
            kind = self.options.get(row.queue, self.default).kind
            self.rooms[kind] -= 1

    def settle(self, *, maximum: float = 0.1) -> float:
        """Fetch, moving the clock through short sleeps, until it would sleep for long."""
        for _ in range(100):
            sleep = self.fetcher.fetch(self.cursor)
            if sleep > maximum:
                return sleep
            self.clock.now += sleep
        raise AssertionError(f"it spins: {self.cursor.asked[-10:]}")

    def pass_time(self, seconds: float) -> int:
        """Fetch whenever it is due; return the number of fetches."""
        end, wakes = self.clock.now + seconds, 0
        while self.clock.now < end:
            sleep = self.fetcher.fetch(self.cursor)  # which takes its time
            self.clock.now += sleep
            wakes += 1
        return wakes

    def ids(self) -> list[int]:
        ids = [row.id for row in self.taken]
        self.taken.clear()
        return ids


@pytest.fixture
def rig(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    clock = Clock()
    monkeypatch.setattr(fetcher_module, "monotonic", clock)
    monkeypatch.setattr(due_fetcher_module, "monotonic", clock)
    monkeypatch.setattr(lapsed_fetcher_module, "monotonic", clock)
    # A slow full scan, as on a busy machine, would put off the next one.
    monkeypatch.setattr(claims_module, "perf_counter", clock)
    monkeypatch.setattr(marks_module, "monotonic", clock)
    with second_connection() as own, own.cursor() as cursor:
        yield Rig(Counting(cursor, clock), clock)
