"""A process with more ordered queues than threads hands some over to processes with unused ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db.models.functions import Now

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage, QueueState, WorkerHeartbeat
from django_mq.store import unused_workers
from django_mq.store.ordered_queues import hand_over
from django_mq.worker import line_sharing
from tests.database import second_connection
from tests.rows import beat, decide
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start
from tests.worker.lines.conftest import empty, row

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES = ["line1", "line2", "line3"]


@pytest.fixture(autouse=True)
def _queues(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DJANGO_MQ = {
        "POLL_INTERVAL": 0.2,
        "QUEUES": {queue: {"ordered": True} for queue in QUEUES},
    }
    monkeypatch.setattr(line_sharing, "TURN_SECONDS", 0.01)


def subscribe(run: Callable[[Delivery], object]) -> None:
    """Run all messages with `run`, by a handler for each queue."""
    for queue in QUEUES:

        def handle(delivery: Delivery) -> None:
            run(delivery)

        handler("#", queue=queue, name=f"h_{queue}", timeout=PATIENCE)(handle)


def owners() -> list[str | None]:
    return sorted(QueueState.objects.filter(queue__in=QUEUES).values_list("owner", flat=True))


def test_queues_that_wait_are_handed_over(start: Start, gate: threading.Event) -> None:
    """As many as the other has unused threads; their messages use no attempt."""
    running: list[str] = []

    def run(delivery: Delivery) -> None:
        running.append(delivery.queue)
        assert gate.wait(PATIENCE)

    subscribe(run)

    beat("other", queues=["#"], threads=2, threads_used=0.0)
    for queue in QUEUES:
        for _ in range(2):
            row(queue, handler=f"h_{queue}")
    worker = start(threads=1)
    until(lambda: owners().count("other") == 2)
    until(lambda: running)
    handed = set(QUEUES) - set(running)
    assert len(running) == 1
    waiting = QueuedMessage.objects.filter(queue__in=handed)
    assert set(waiting.values_list("attempts", "leased_until")) == {(0, None)}
    WorkerHeartbeat.objects.filter(pk="other").update(draining=True)
    QueueState.objects.filter(owner="other").update(owned_until=Now())
    gate.set()  # nobody is there: the first worker takes them back
    until(empty)
    worker.stop()


def test_process_with_a_thread_for_each_queue_keeps_them(start: Start) -> None:
    together = threading.Barrier(len(QUEUES))
    subscribe(lambda delivery: together.wait(PATIENCE))
    beat("other", queues=["#"], threads=2, threads_used=0.0)
    for queue in QUEUES:
        row(queue, handler=f"h_{queue}")
    start(until_empty=True, threads=3).join()
    assert empty()


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"threads": 4, "threads_used": 1.4}, 3),
        ({"threads": 1, "threads_used": 0.3}, 1),
        ({"threads": 1, "threads_used": 0.9}, None),
        ({"threads": 2, "threads_used": None}, None),
        ({"threads": None}, None),
        ({"threads": 2, "threads_used": 0.0, "draining": True}, None),
        ({"threads": 2, "threads_used": 0.0, "quiet": True}, None),
        ({"threads": 2, "threads_used": 0.0, "queues": ["a", {}]}, 2),
    ],
)
def test_unused_workers(given: dict[str, Any], unused: int | None) -> None:
    beat("other", **given)
    beat("me", threads=2, threads_used=0.0)
    with second_connection() as connection:
        found = unused_workers.find(connection.cursor(), worker="me", silent=15.0)
    assert [each.unused for each in found] == [unused] * (unused is not None)


def test_silent_worker_has_no_unused_threads() -> None:
    beat("other", threads=2, threads_used=0.0)
    with second_connection() as connection:
        assert unused_workers.find(connection.cursor(), worker="me", silent=0.0) == []


def test_only_the_owner_hands_a_queue_over_and_not_while_its_row_is_locked() -> None:
    decide("line1", owner="me", owned_until=Now())
    given = {"queue": "line1", "to": "other", "lease": 6.0}
    with second_connection() as connection:
        cursor = connection.cursor()
        assert not hand_over(cursor, worker="third", **given)
        with second_connection() as somebody, somebody.transaction():
            somebody.execute("select from django_mq_queuestate for no key update")
            assert not hand_over(cursor, worker="me", **given)
        assert hand_over(cursor, worker="me", **given)
    assert QueueState.objects.get(queue="line1").owner == "other"
