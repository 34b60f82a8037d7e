"""The turns of lanes whose claimed messages are released, since all threads are busy."""

from __future__ import annotations

from collections import Counter

import pytest

from django_mq.executor.tasks import Task
from django_mq.handlers import Handler, handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage
from tests.rows import add_all
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def any_handler() -> Handler:
    @handler("#", name="h")
    def h(delivery: object) -> None: ...

    return h


def poll(rig: Rig) -> None:
    """Let a poll find new lanes while there is no room."""
    rig.rooms["sync"] = 0
    rig.clock.now += 2.0
    rig.fetcher.fetch(rig.cursor)


def fill(rig: Rig) -> None:
    """Fetch until there is no more room."""
    for _ in range(20):
        rig.clock.now += rig.fetcher.fetch(rig.cursor)
        if rig.rooms["sync"] == 0:
            return
    raise AssertionError(f"it claims no more: {rig.cursor.asked[-10:]}")


def work(rig: Rig, any_handler: Handler, *, threads: int, rounds: int) -> list[str]:
    """Start `threads` messages per round, and release those claimed behind them.

    Returns the queues of the messages that started, in order.
    """
    started: list[str] = []
    for _ in range(rounds):
        for starts in True, False:
            rig.rooms["sync"] = threads
            fill(rig)
            rows, rig.taken = rig.taken, []
            if starts:
                rig.last_starts.record(Task(Delivery(row), any_handler, 300.0) for row in rows)
                started += [row.queue for row in rows]
                continue
            released = QueuedMessage.objects.filter(pk__in=[row.id for row in rows])
            released.update(claimed_by=None, leased_until=None, attempts=0)
            rig.fetcher.on_released()
    return started


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_equal_lanes_start_the_same_number_of_messages(
    rig: Rig, any_handler: Handler, threads: int, number: int
) -> None:
    queues = [f"q{n}" for n in range(number)]
    add_all({"queue": queue} for queue in queues for _ in range(20))
    rig.make()
    poll(rig)
    started = work(rig, any_handler, threads=threads, rounds=2 * number)
    assert Counter(started) == dict.fromkeys(queues, 2 * threads)


def test_a_lane_with_a_few_messages_does_not_wait_for_a_backlog(
    rig: Rig, any_handler: Handler
) -> None:
    """S19: it would starve if released messages simply gave the turn back to their lane."""
    add_all([{"queue": "few"}, *({"queue": "backlog"} for _ in range(20))])
    rig.make()
    poll(rig)
    assert work(rig, any_handler, threads=1, rounds=3) == ["backlog", "few", "backlog"]
    for _ in range(2):
        add_all([{"queue": "few"}])
        poll(rig)
        assert work(rig, any_handler, threads=1, rounds=2) == ["few", "backlog"]


def test_a_preferred_queue_comes_first_whichever_started_last(
    rig: Rig, any_handler: Handler
) -> None:
    add_all({"queue": queue} for queue in ("a", "z") for _ in range(20))
    rig.make("z", "#")
    assert set(work(rig, any_handler, threads=2, rounds=4)) == {"z"}


def test_an_urgent_lane_comes_first_whichever_started_last(rig: Rig, any_handler: Handler) -> None:
    add_all({"queue": "a"} for _ in range(20))
    add_all({"queue": "z", "priority": 5} for _ in range(20))
    rig.make()
    assert set(work(rig, any_handler, threads=2, rounds=4)) == {"z"}


def test_lanes_that_are_gone_are_forgotten(rig: Rig, any_handler: Handler) -> None:
    add_all({"queue": queue} for queue in ("a", "b"))
    rig.make("a", poll=0.0)
    rig.fetcher.fetch(rig.cursor)
    rows = [row._replace(queue="b") for row in rig.taken]
    rig.last_starts.record(Task(Delivery(row), any_handler, 300.0) for row in [*rig.taken, *rows])
    assert rig.last_starts.at(("b", 0)) > 0
    rig.fetcher.fetch(rig.cursor)
    assert rig.last_starts.at(("b", 0)) < 0 < rig.last_starts.at(("a", 0))
