"""Rings, due times and polls wake a worker."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import broadcast, handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage, WorkerHeartbeat
from tests.database import second_connection
from tests.rows import add, columns
from tests.waiting import until
from tests.worker.conftest import Said, Start

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def patient(settings: Any) -> None:
    """The poll is too far away to matter."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "LEASE": 3600}


def test_woken_by_notify(start: Start, said: Said, patient: None) -> None:
    """CAR-14: only the ring wakes it, which is guarantee 7 from its other side."""

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    until(lambda: listeners() == 1)
    with transaction.atomic():
        broadcast("a")
    said.wait("message_acked")
    running.stop()


def test_ring_wakes_all_sleeping_workers(start: Start, said: Said, patient: None) -> None:
    """CAR-32: one ring per commit, and each worker looks at its own queue."""

    @handler("a", queue="mail", queues=("post",), name="h")
    def h(delivery: Delivery) -> None: ...

    workers = [start(queues=[queue]) for queue in ("mail", "post")]
    until(lambda: listeners() == 2)
    with transaction.atomic():
        broadcast("a", queue="mail")
        broadcast("a", queue="post")
    said.wait("message_acked", 2)
    assert all(worker.stop() for worker in workers)


def listeners() -> int:
    with second_connection() as other:
        row = other.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and query like 'listen django_mq%'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_woken_by_the_next_due_time(start: Start, said: Said, patient: None) -> None:
    """PMQ-61, PMQ-62: the undelayed first, then each at its time; the poll plays no part."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    second = add(handler="h", after=3600, priority=5)
    first = add(handler="h", after=0.3)
    now = add(handler="h", after=-1)
    running = start()
    said.wait("message_acked", 2)
    until(lambda: listeners() == 1)
    QueuedMessage.objects.filter(pk=second.pk).update(**columns({"after": 0.3}))
    with connection.cursor() as cursor:
        cursor.execute("notify django_mq")  # which comes before it is due
    said.wait("message_acked", 3)
    running.stop()
    assert said.ids("message_acked") == [now.pk, first.pk, second.pk]


def test_woken_by_the_poll(start: Start, said: Said, settings: Any) -> None:
    """Guarantee 7: nothing depends on NOTIFY; no worker listens."""
    settings.DJANGO_MQ = {"WAKEUP": "poll", "POLL_INTERVAL": 0.05}

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    said.wait("worker_started")
    for n in range(1, 4):
        with transaction.atomic():  # add() reads it again: not handled before
            add(handler="h")
        said.wait("message_acked", n)
    until(lambda: WorkerHeartbeat.objects.filter(wakeup="poll").exists())
    assert listeners() == 0
    running.stop()


def test_a_dead_listener_costs_no_message(start: Start, said: Said) -> None:
    """PMQ-63: it is replaced, and rings, since a ring may have been missed."""

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    until(lambda: listeners() == 1)
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and query like 'listen django_mq%'"
        )
    with transaction.atomic():
        broadcast("a")
    said.wait("message_acked")
    until(lambda: listeners() == 1)
    running.stop()
