"""Owners of ordered queues: moving a queue to another worker, and the log of it."""

from __future__ import annotations

import logging
import threading

import psycopg
import pytest
from django.db.models.functions import Now

from django_mq import handler
from django_mq.executor.simple_protocol import simple_query
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.policy.line_marks import FRONT, LineMarks
from django_mq.store import frozen_owner
from django_mq.store import ordered_queues as lines
from django_mq.worker import DeadWorker, queue_options
from django_mq.worker.ordered_queues import OrderedQueues
from tests.database import second_connection
from tests.rows import beat, pks
from tests.store.conftest import lock
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start, effect, effects
from tests.worker.lines.conftest import Log, empty, make_due, row

pytestmark = pytest.mark.django_db(transaction=True)


def test_signals_of_a_line(start: Start, said: Said, gate: threading.Event) -> None:
    """KAF-1, KAF-9, KAF-12: assigned, caught up once, unassigned after the last handler ended."""
    began = threading.Event()

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "slow":
            began.set()
            assert gate.wait(PATIENCE)

    row()
    running = start()
    said.wait("queue_caught_up")
    row(payload="slow")
    make_due()
    assert began.wait(PATIENCE)
    stopping = threading.Thread(target=running.stop)
    stopping.start()
    until(lambda: running.worker.stopping.is_set(), "it drains")
    gate.set()
    stopping.join(PATIENCE)
    found = [
        (name, data)
        for name, _, data in said.all
        if name.startswith("queue_") or name == "message_acked"
    ]
    names = [name for name, _ in found]
    # The thread that claims may see that the queue is empty before the executor reports the ack.
    assert [name for name in names if name != "message_acked"] == [
        "queue_assigned", "queue_caught_up", "queue_unassigned",
    ]  # fmt: skip
    assert names.count("message_acked") == 2
    assert names[-1] == "queue_unassigned"
    [(queue, worker)] = {(d["queue"], d["worker"]) for name, d in found if name != "message_acked"}
    assert queue == "line"
    assert worker
    assert QueueState.objects.get(queue="line").owner is None


def test_a_line_moves_when_its_owner_drains(start: Start, said: Said, log: Log) -> None:
    """KAF-9, KAF-12: at once, including messages that the first owner had not started."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    first = start()
    said.wait("queue_assigned")
    second = start()
    said.wait("worker_started", 2)
    said.wait("queue_caught_up")
    first.stop()
    said.wait("queue_assigned", 2)
    messages = [row(after=60) for _ in range(3)]
    make_due(*messages)
    log.wait(3)
    assert log.order == pks(*messages)
    assert said.count("queue_unassigned") == 1
    second.stop()


def test_a_line_of_a_host_that_is_gone_is_taken_when_its_lease_lapses(
    start: Start, said: Said, log: Log
) -> None:
    """KAF-9: of its claimed messages the first is charged, the others are released."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    with second_connection() as other:
        lines.own(other.cursor(), queue="line", worker="gone", lease=1.0)
    messages = [row(leased=0.5, claimed_by="gone:1", attempts=1) for _ in range(3)]
    # One claim gave all of them one lease.
    QueuedMessage.objects.update(leased_until=messages[0].leased_until)
    start()
    log.wait(3)
    assert log.order == pks(*messages)
    assert [a.message_id for a in FailedAttempt.objects.all()] == [messages[0].pk]


def test_line_owned_by_another_meanwhile_is_assigned_again(said: Said) -> None:
    """It froze too, after it had adopted messages that belong before the mark."""
    queues = OrderedQueues("me", ["line"], on_owned=lambda: None, busy=lambda queue: False)
    with second_connection() as other, other.cursor() as cursor:
        queues.maintain(cursor)
        queues.owned["line"] = LineMarks(first=1 << 40)
        queues._turn_at = 0.0
        queues.maintain(cursor)
        assert queues.owned["line"].first
        QueueState.objects.update(owner="gone", owned_until=Now())
        queues._turn_at = 0.0
        queues.maintain(cursor)
    assert queues.owned["line"] == FRONT
    assert said.count("queue_unassigned") == 1
    assert said.count("queue_assigned") == 2


def test_a_line_of_a_dead_sibling_is_free_at_once(start: Start, said: Said, log: Log) -> None:
    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    with second_connection() as other:
        lines.own(other.cursor(), queue="line", worker="gone", lease=3600.0)
    message = row(leased=3600, claimed_by="gone:1", attempts=1)
    running = start()
    said.wait("worker_started")
    settled = threading.Event()
    running.worker.recover(DeadWorker("gone", "it died"), settled.set)
    assert settled.wait(PATIENCE)
    log.wait(1)
    assert log.order == [message.pk]


def test_without_the_right_to_end_a_frozen_owner_the_line_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker logs it once, and continues with its other work."""
    caplog.set_level(logging.WARNING, "django_mq")
    message = row(leased=-1, claimed_by="gone:1", attempts=1)
    with second_connection() as admin:
        admin.execute(
            "do $$ begin create role mq_test_poor; exception when duplicate_object then end $$"
        )
        admin.execute("grant usage on schema public to mq_test_poor")
        admin.execute(
            "grant select, insert, update, delete on all tables in schema public to mq_test_poor"
        )
        admin.execute("grant usage on all sequences in schema public to mq_test_poor")
    try:
        with second_connection() as frozen, second_connection() as poor:
            lines.own(frozen.cursor(), queue="line", worker="gone", lease=-1.0)
            beat("gone", seen=-60)
            assert simple_query(frozen, frozen_owner.record("gone"))
            frozen.autocommit = False
            lock(frozen, message.pk)
            poor.execute("set role mq_test_poor")
            ordered_queues = OrderedQueues(
                "me", ["line"], on_owned=lambda: None, busy=lambda queue: False
            )
            ordered_queues.maintain(poor.cursor())
            assert ordered_queues.owned.keys() == {"line"}
            ordered_queues._turn_at = 0.0
            ordered_queues.maintain(poor.cursor())
            frozen.execute("select 1")  # it lives
            frozen.rollback()
    finally:
        with second_connection() as admin:
            admin.execute("drop owned by mq_test_poor; drop role mq_test_poor")
    said = [record for record in caplog.records if getattr(record, "event", "") == "owner_frozen"]
    assert len(said) == 1
    assert "cannot be ended" in said[0].getMessage()


def test_the_transaction_of_a_frozen_owner_is_ended(
    start: Start, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 6: its effects are rolled back, and the line continues."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    caplog.set_level(logging.WARNING, "django_mq")
    message = row(leased=-1, claimed_by="gone:1", attempts=1)
    behind = row()
    with second_connection() as frozen:
        lines.own(frozen.cursor(), queue="line", worker="gone", lease=-1.0)
        beat("gone", seen=-60)
        assert simple_query(frozen, frozen_owner.record("gone"))
        frozen.autocommit = False
        lock(frozen, message.pk)
        start()
        log.wait(2)
        with pytest.raises(psycopg.OperationalError):
            frozen.execute("select 1")
    assert log.order == pks(message, behind)
    assert any(getattr(record, "event", "") == "owner_frozen" for record in caplog.records)


def test_the_handler_of_a_living_owner_that_lost_its_queue_lives(
    start: Start,
    log: Log,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal receiver or a table lock held up the owner's loop for longer than it owns a queue.

    Its handlers and heartbeats went on. The next owner waits for the row, and charges nothing.
    """
    monkeypatch.setattr(queue_options, "OWNER_LEASE", 1.0)
    caplog.set_level(logging.WARNING, "django_mq")
    began = threading.Event()

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            began.set()
            assert gate.wait(PATIENCE)
            effect(delivery)

    message, behind = row(), row()
    start(threads=2)
    assert began.wait(PATIENCE)
    lapsed = QueuedMessage.objects.filter(pk=message.pk, leased_until__lte=Now())
    until(lapsed.exists, "its lease lapses: renewals skip the row, which is locked")
    next_owner = OrderedQueues("me", ["line"], on_owned=lambda: None, busy=lambda queue: False)
    with second_connection() as other:
        cursor = other.cursor()
        with other.transaction():  # the owner's loop would keep the queue
            cursor.execute("update django_mq_queuestate set owned_until = 'epoch'")
            next_owner.maintain(cursor)
        assert next_owner.owned.keys() == {"line"}
        next_owner._turn_at = 0.0
        next_owner.maintain(cursor)
        gate.set()
        log.wait(1)
        next_owner.disown(cursor)
    until(empty, "both are done")
    assert effects() == {message.pk, behind.pk}
    assert FailedAttempt.objects.count() == 0
    assert "owner_frozen" not in [getattr(each, "event", "") for each in caplog.records]
