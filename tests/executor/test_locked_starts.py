"""Another session keeps the row of a message that runs outside transactions, before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.test import override_settings

from django_mq import handler
from django_mq.executor.async_settler import LOCKED_PAUSE, AsyncSettler
from django_mq.executor.nonatomic import NonAtomic
from django_mq.executor.tasks import Task
from django_mq.models import FailedAttempt
from tests.database import second_connection
from tests.rows import insert_all
from tests.waiting import until
from tests.worker.conftest import Running, waiting

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("never_stuck"),
]

Start = Callable[..., Running]

LOCK = "select from django_mq_queuedmessage where id = %s for update"
#: For what takes a moment, and took until the other session ended.
MOMENT = 8.0


class Locking:
    """Locks the row of the first message that is about to start, until `release()`."""

    def __init__(self, other: psycopg.Connection[Any]) -> None:
        #: 0 before.
        self.id = 0
        self._other = other

    def before(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        """Lock it before the next call of a method, whose first argument is a list of tasks."""
        real = getattr(owner, name)

        def locking(self: Any, tasks: Sequence[Task], *args: Any) -> Any:
            lock(tasks[0].delivery.id)
            return real(self, tasks, *args)

        lock = self._lock
        monkeypatch.setattr(owner, name, locking)

    def release(self) -> None:
        self._other.execute("commit")

    def _lock(self, id: int) -> None:
        if not self.id:
            self.id = id
            self._other.execute("begin")
            self._other.execute(
                "select from django_mq_queuedmessage where id = %s for update", [id]
            )


@pytest.fixture
def locking() -> Iterator[Locking]:
    with second_connection() as other:
        locking = Locking(other)
        yield locking
        locking.release()


def check(running: Running, locking: Locking, ran: list[int]) -> None:
    """The neighbours of the locked message end; it runs once it is free, and is not charged."""
    id = until(lambda: locking.id)
    until(lambda: waiting() == {id}, "its neighbours end", seconds=MOMENT)
    assert id not in ran
    locking.release()
    until(lambda: not waiting(), seconds=MOMENT)
    running.stop()
    assert ran.count(id) == 1
    assert FailedAttempt.objects.count() == 0


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.1})
def test_it_does_not_hold_up_other_coroutines(
    start: Start, locking: Locking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that start, nor those that have ended and are to be settled."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        ran.append(delivery.id)

    locking.before(monkeypatch, AsyncSettler, "start_leases")
    insert_all({"handler": "h", "key": key} for key in "abc")  # of a line: leases come first
    check(start(), locking, ran)


def test_locked_message_is_tried_again_after_a_pause(
    start: Start, locking: Locking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further messages whose rows are locked do not put off the next look, nor hasten it."""
    ran: list[int] = []
    looks: list[float] = []
    loop = asyncio.new_event_loop()
    real = AsyncSettler._start_all

    def start_all(self: AsyncSettler, tasks: list[Task]) -> Any:
        started = real(self, tasks)
        if len(tasks) > 1:
            looks.append(monotonic())
        if len(looks) < 3:  # another one comes meanwhile
            self.start_leases(tasks[:1], asyncio.Future(loop=loop))
        return started

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        ran.append(delivery.id)

    locking.before(monkeypatch, AsyncSettler, "start_leases")
    monkeypatch.setattr(AsyncSettler, "_start_all", start_all)
    insert_all([{"handler": "h", "key": "a"}])
    running = start()
    until(lambda: len(looks) >= 3, "the locked message is looked at", seconds=MOMENT)
    assert looks[2] - looks[1] >= LOCKED_PAUSE
    check(running, locking, ran)
    loop.close()


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.1})
def test_it_does_not_hold_up_the_executor(
    start: Start, locking: Locking, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        ran.append(delivery.id)

    locking.before(monkeypatch, NonAtomic, "run")
    insert_all({"handler": "h", "after": at} for at in (-60, -50, -40))
    check(start(), locking, ran)


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.1})
def test_first_of_a_line_does_not_hold_up_the_executor(
    start: Start, locking: Locking, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        ran.append(delivery.id)

    locking.before(monkeypatch, NonAtomic, "run")
    insert_all({"handler": "h", "after": at, "key": key} for at, key in ((-60, "a"), (-50, "b")))
    check(start(), locking, ran)
