"""A worker stores its figures with the heartbeat and when it ends, without delaying leases."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection
from django.db.models import Sum

from django_mq import Reject, RetryPolicy, Snooze, fixed, handler
from django_mq.messages import Delivery, Fence
from django_mq.models import MinuteFigures, WorkerHeartbeat
from django_mq.store import read_figures
from django_mq.worker import DeadWorker
from django_mq.worker import lease_keeper as keeping
from tests.database import second_connection
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start

pytestmark = pytest.mark.django_db(transaction=True)

COUNTS = ("acked", "failed", "retried", "dead", "broadcast")


def stored(**of: Any) -> tuple[int, ...]:
    found = MinuteFigures.objects.filter(**of).aggregate(**{name: Sum(name) for name in COUNTS})
    return tuple(found[name] or 0 for name in COUNTS)


def test_a_worker_that_ends_has_stored_everything(start: Start) -> None:
    @handler(
        "#", queue="mail", queues=("mail", "post"), name="h", retry=RetryPolicy(backoff=fixed(0))
    )
    def h(delivery: Delivery) -> None:
        if delivery.payload.get("fail") and delivery.attempt == 1:
            raise ValueError("no")
        if delivery.payload.get("reject"):
            raise Reject("no")

    for payload in ({}, {}, {"fail": True}, {"reject": True}):
        add(handler="h", payload=payload, created=-70)
    add("post", handler="h")
    assert start(until_empty=True, queues=["mail", "post"]).join()
    assert stored(queue="mail", handler="h") == (3, 2, 1, 1, 4)
    assert stored(queue="post", handler="h") == (1, 0, 0, 0, 1)
    ran = [sum(each.ran.values()) for each in MinuteFigures.objects.filter(queue="mail")]
    waited = [sum(each.waited.values()) for each in MinuteFigures.objects.filter(queue="mail")]
    assert (sum(ran), sum(waited)) == (5, 4)


def test_a_handler_that_only_snoozes_or_fails_is_found(start: Start) -> None:
    """The column of snoozes is missing: they are the runs without another outcome."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=1))
    def h(delivery: Delivery) -> None:
        if delivery.payload:
            raise ValueError("no")
        raise Snooze(600)

    @handler("#", queue="post", name="acks")
    def acks(delivery: Delivery) -> None: ...

    for payload in ({}, {}, {"fail": True}):
        add(handler="h", payload=payload)
    add("post", handler="acks")
    assert start(until_empty=True, queues=["mail", "post"]).join()
    with connection.cursor() as cursor:
        assert read_figures.unsuccessful(cursor, since=600.0) == [("mail", "h", 3)]


def test_failures_of_dead_processes_are_stored_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that kills its processes may also end the one that counts its failures."""
    monkeypatch.setattr(keeping, "HEARTBEAT_SECONDS", 600.0)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    message = add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    running = start()
    until(WorkerHeartbeat.objects.exists, "it has stored its first figures, which are none")
    dead = DeadWorker("dead", "was killed by SIGKILL", lost=[Fence(message.pk, 1, "dead:4")])
    running.worker.recover(dead, lambda: None)
    until(lambda: stored(queue="mail", handler="h") == (0, 1, 1, 0, 1), "its failure is stored")
    running.stop()


def test_figures_that_cannot_be_stored_delay_nothing_and_are_stored_later(
    start: Start, said: Said, gate: threading.Event, monkeypatch: Any
) -> None:
    """Guarantee 25: leases are renewed and heartbeats written while storing fails."""
    monkeypatch.setattr(keeping, "HEARTBEAT_SECONDS", 0.05)

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Delivery) -> None:
        if delivery.payload:
            assert gate.wait(PATIENCE)

    with second_connection() as other, other.transaction(force_rollback=True):
        other.execute("lock table django_mq_minutefigures")
        add(handler="h")
        add(handler="h", payload={"wait": True})
        running = start()
        said.wait("message_acked")
        beats = []

        def beaten() -> bool:
            rows = other.execute("select last_seen from django_mq_workerheartbeat").fetchall()
            beats.extend(row for row in rows if row not in beats)
            return len(beats) > 3

        until(beaten)
    until(lambda: stored()[0] == 1)
    gate.set()
    running.stop()
    assert stored() == (2, 0, 0, 0, 2)
