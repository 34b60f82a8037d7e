"""The parts of a process, before it runs: who wakes up whom, and who is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.worker import Worker
from django_mq.worker.database import plain_connection
from django_mq.worker.early import EarlyStart
from django_mq.worker.process import Process
from django_mq.worker.session import Session
from tests.rows import add

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def process() -> Iterator[Process]:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    process = Process(Worker(queues=["mail"]))
    process.fetcher.fetch(process.statements.cursor())
    yield process
    process.statements.close()


def test_executors_are_woken_for_messages_only(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For nothing it would be each turn of the loop, while somebody waits for its claim."""
    put: list[Any] = []
    monkeypatch.setattr(process.hand, "put", lambda tasks, **_: put.append(tasks))
    process._fetch()
    assert put == []
    add(handler="h")
    process.wakeup.ring()
    process._fetch()
    process._fetch()
    assert [len(tasks) for tasks in put] == [1]


@pytest.mark.parametrize("lapsed", [False, True])
def test_what_is_claimed_knows_since_when_it_is_ours(process: Process, lapsed: bool) -> None:
    """Of what lapsed nobody knows that: its last handler may still run somewhere."""
    add(handler="h")
    took: list[Any] = []
    process.fetcher._take = lambda cursor, rows, first: took.append((cursor, rows))
    process.wakeup.ring()
    before = monotonic()
    process._fetch()
    ((cursor, rows),) = took
    process._take(cursor, rows, lapsed)
    slice_ = process.hand.take()
    assert slice_ is not None
    asked_at = slice_.tasks[0].delivery._asked_at
    assert asked_at == 0.0 if lapsed else before <= asked_at <= monotonic()


@pytest.mark.parametrize(("lease", "young"), [(30.0, 0.1), (0.2, 0.05)])
def test_it_is_ours_for_sure_for_a_quarter_of_the_shortest_lease(
    settings: Any, lease: float, young: float
) -> None:
    """Who was frozen since starts nothing that has lapsed meanwhile, however short its lease."""
    settings.DJANGO_MQ = {"QUEUES": {"quick": {"lease": lease}}}
    executor = Process(Worker(queues=["mail"])).executors[0]
    session = Session(plain_connection("default"))
    early = EarlyStart(session, None, None, ours_for=executor._ours_for)  # type: ignore[arg-type]
    assert (executor._ours_for, early._young_for) == (lease / 4, young)
    session.close()


def test_the_loop_is_woken_for_room_only_where_it_waits_for_it(process: Process) -> None:
    """NSQ-24: it claims again as soon as there is room, and sleeps where it took all there was."""

    def woken() -> bool:
        return not process.wakeup._quiet.locked()

    add(handler="h")
    process.wakeup.ring()
    process._fetch()
    process.wakeup.sleep(0)
    assert process.hand.take() is not None
    assert not woken()
    process.appetite.lose()
    for _ in range(2):
        add(handler="h")
    process.wakeup.ring()
    while process.hand.waiting() == 0:
        process._fetch()
    process._fetch()
    process.wakeup.sleep(0)
    assert process.hand.take() is not None
    assert woken()


@pytest.mark.parametrize("before", ["a ring", "in doubt", "a level to write", "one in hand"])
def test_a_ring_is_claimed_for_before_all_else_unless_that_matters(
    process: Process, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Somebody waits for it. But a queue that is to back off is not claimed from first."""
    looked: list[bool] = []
    look_after = process._look_after_hand
    for _ in range(3):
        process._fetch()

    def looking_after(cursor: Any) -> None:
        looked.append(process.hand.idle())
        look_after(cursor)

    monkeypatch.setattr(process, "_look_after_hand", looking_after)
    if before == "in doubt":
        process._in_doubt = True
    elif before == "a level to write":
        monkeypatch.setattr(process.backoffs, "noted", lambda: not looked)
        monkeypatch.setattr(process.backoffs, "write", lambda cursor: None)
    elif before == "one in hand":
        add(handler="h")
        process.wakeup.ring()
        while process.hand.waiting() == 0:
            process._fetch()
        process._fetch()
        looked.clear()
    process.wakeup.ring()
    process._fetch()
    assert len(looked) == (before != "a ring")
    process.wakeup.ring()
    process._fetch()
    assert len(looked) == 1 + (before != "a ring")  # rings of many producers do not end
