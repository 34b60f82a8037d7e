"""`run(until_empty=True)` ends when the queue is empty, and not before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from django.db import transaction
from psycopg.errors import DeadlockDetected

from django_mq import broadcast, handler
from django_mq.messages import Delivery
from django_mq.store import gates, ordered_queues
from django_mq.worker import Worker
from django_mq.worker import claims as claiming
from django_mq.worker.scheduler import Scheduler
from django_mq.worker.watermarks import Rest
from tests.database import second_connection
from tests.rows import add, decide
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("kind", ["plain", *slow("keyed", "ordered")])
def test_as_many_attempts_as_can_be_do_not_stop_the_queue(settings: Any, kind: str) -> None:
    """S17."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": kind == "ordered"}}}
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    options = {"key": "k"} if kind == "keyed" else {"ordered": kind == "ordered"}
    many = add(handler="h", attempts=2**31 - 2, **options)
    one = add(handler="h", **options)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert ran == [many.pk, one.pk]


def test_claims_that_fail_leave_a_queue_that_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Empty" means empty, however many claims in a row failed."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    for _ in range(5):
        add(handler="h")
    real, left = claiming.claim.claim, [6]

    def claim(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise DeadlockDetected("again and again")
        return real(*args, **options)

    monkeypatch.setattr(claiming.claim, "claim", claim)
    monkeypatch.setattr("django_mq.executor.outage.MAX_RECONNECT_WAIT", 0.25)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert len(ran) == 5


@pytest.fixture
def ran(settings: Any) -> list[int]:
    """The messages that ran, of `mail` or of the ordered queue `line`."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    ran: list[int] = []

    @handler("#", queue="mail", queues=("mail", "line"), name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    return ran


def own(worker: str, lease: float) -> None:
    with second_connection() as other:
        assert ordered_queues.own(other.cursor(), queue="line", worker=worker, lease=lease)


def test_a_line_whose_owner_was_killed_is_waited_for(ran: list[int]) -> None:
    """The owner's lease lapses; so do the leases of its messages in flight."""
    own("gone", 1.0)
    messages = [add("line", handler="h", ordered=True, leased=1.0, claimed_by="gone:1", attempts=1)]
    messages += [add("line", handler="h", ordered=True) for _ in range(2)]
    assert Worker().run(until_empty=True)
    assert ran == [message.pk for message in messages]


def test_a_line_is_waited_for_though_nothing_is_in_it_yet(ran: list[int]) -> None:
    """Messages broadcast before the queue was ordered join it when it gets an owner."""
    own("gone", 1.0)
    message = add("line", handler="h")
    assert Worker().run(until_empty=True)
    assert ran == [message.pk]


def test_a_line_whose_ownership_was_cut_is_waited_for(
    ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = add("line", handler="h", ordered=True)
    real, left = ordered_queues.own, [1]

    def own_(cursor: Any, **options: Any) -> Any:
        if left.pop() if left else 0:
            cursor.connection.close()
        return real(cursor, **options)

    monkeypatch.setattr(ordered_queues, "own", own_)
    assert Worker().run(until_empty=True)
    assert ran == [message.pk]


@pytest.mark.parametrize(
    "head", [{"after": 3600}, {"dead": -1}, {"after": 3600, "key": "k"}], ids=str
)
def test_stalled_line_is_not_waited_for(ran: list[int], head: dict[str, Any]) -> None:
    """Whichever worker owns it."""
    own("other", 3600)
    add("line", handler="h", ordered=True, **head)
    add("line", handler="h", ordered=True)
    assert Worker().run(until_empty=True)
    assert ran == []


@pytest.mark.parametrize(
    "state", [{"paused": -1}, {"max_in_flight": 0}, {"backoff_level": 3, "backoff": 3600}]
)
def test_a_line_that_is_closed_is_not_waited_for(ran: list[int], state: dict[str, Any]) -> None:
    decide("line", **state)
    add("line", handler="h", ordered=True)
    assert Worker().run(until_empty=True)
    assert ran == []


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True}], ids=str)
def test_released_message_is_run(ran: list[int], line: dict[str, Any]) -> None:
    """The first claim only meets a message that lapsed before the head of its line."""
    queue = "line" if "ordered" in line else "mail"
    head = add(queue, handler="h", leased=-1, attempts=1, **line)
    behind = add(queue, handler="h", leased=-9, attempts=1, **line)
    assert Worker(batch_size=1).run(until_empty=True)
    assert ran == [head.pk, behind.pk]


def test_a_gate_that_a_sibling_holds_is_waited_for(ran: list[int]) -> None:
    """A sibling is claiming from the queue at this moment, and may die in its claim."""
    decide("mail", max_in_flight=1)
    message = add(handler="h")
    with second_connection() as other, ThreadPoolExecutor() as pool:
        with other.transaction():
            gates.enter(other.cursor(), queue="mail", limit=None)
            worker = Worker()
            running = pool.submit(worker.run, until_empty=True)
            until(lambda: running.done() or worker.sleeps > 10)
            assert not running.done()
        assert running.result(PATIENCE)
    assert ran == [message.pk]


def test_what_a_busy_part_broadcasts_is_not_left(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Into a queue that the last look did not see, while the next look rests."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "LEASE": 300}
    ran: list[int] = []
    asked = count(1)

    @handler("late", queue="late", name="late")
    def late(delivery: Delivery) -> None:
        ran.append(delivery.id)

    def busy(scheduler: Scheduler) -> bool:
        number = next(asked)
        if number == 2:  # the first look has been followed by the second, which is the last
            with transaction.atomic():
                broadcast("late")
        return number == 2

    monkeypatch.setattr(Rest, "after", lambda rest, seconds: 1.0)
    monkeypatch.setattr(Scheduler, "busy", busy)
    assert Worker().run(until_empty=True)
    assert len(ran) == 1
