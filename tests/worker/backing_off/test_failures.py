"""Failures that make a queue back off, and failures that do not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from django_mq import Reject, Retry, Snooze, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.policy.outcomes import TimedOut
from tests.rows import add, insert_all
from tests.waiting import until
from tests.worker.backing_off.conftest import AT_ONCE, LONG, backing_off, changes, level, rest
from tests.worker.conftest import PATIENCE, Said, Start, add_many
from tests.worker.service import Service, in_flight

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("kind", ["plain", "keyed", "unbound", "async", "batch"])
def test_first_failure_stops_all_further_starts(
    start: Start, said: Said, service: Service, settings: Any, kind: str
) -> None:
    """NSQ-5, NSQ-16: not even in the same slice; waiting messages are released, refunded."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.handle_as(kind)
    insert_all(
        {
            "handler": "h",
            "after": -60 + n / 1000,
            "key": f"k{n % 50}" if kind == "keyed" else None,
        }
        for n in range(200)
    )
    service.break_at(51, KeyError("host"))
    worker = start(threads=1, async_slots=8)
    until(level)
    until(lambda: in_flight() == 0)
    rest(0.5)
    assert worker.stop()
    maximum = {"async": 8, "batch": 2}.get(kind, 1)  # a batch fails, then its first message alone
    assert 1 <= service.failed <= maximum
    assert FailedAttempt.objects.count() == service.failed - (kind == "batch")
    left = QueuedMessage.objects.all()
    assert sum(message.attempts for message in left) == FailedAttempt.objects.count()
    assert changes(said) == [("backoff_started", 1)]


def test_other_processes_release_their_messages_at_their_next_poll(
    start: Start, service: Service, settings: Any, never_stuck: None, gate: threading.Event
) -> None:
    """Only running messages continue."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.gate.clear()
    service.handle()
    began = threading.Event()

    @handler("#", queue="mail", name="bad")
    def bad(delivery: Delivery) -> None:
        began.set()
        assert gate.wait(PATIENCE)
        raise KeyError("host")

    add(handler="bad", after=-100)
    failing = start(threads=1)
    assert began.wait(PATIENCE)
    add_many(30, handler="h")
    other = start(threads=2)

    def held() -> int:
        mine = f"{other.worker.id}:"
        return QueuedMessage.objects.filter(claimed_by__startswith=mine).count()

    until(lambda: service.running == 2 and held() > 2)
    gate.set()
    until(level)
    until(lambda: in_flight() == service.running)
    service.gate.set()
    until(lambda: in_flight() == 0)
    assert failing.stop()
    assert other.stop()
    assert len(service.calls) <= 4
    assert sum(message.attempts for message in QueuedMessage.objects.all()) == 1


@pytest.mark.parametrize("error", [Retry(), Retry(0), Snooze(1), Reject("no"), TimedOut("slow")])
def test_end_unrelated_to_the_service_changes_nothing(
    start: Start, service: Service, settings: Any, error: BaseException
) -> None:
    """NSQ-2, NSQ-12, NSQ-13, NSQ-14, NSQ-20."""
    backing_off(settings)
    service.handle(retry=AT_ONCE)
    service.error = error
    add_many(10, handler="h")
    worker = start(threads=2)
    until(lambda: service.failed >= 10)
    assert worker.stop()
    assert not QueueState.objects.filter(queue="mail").exists()


def test_a_timeout_of_a_coroutine_changes_nothing(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-20."""
    backing_off(settings)
    service.gate.clear()
    service.ahandle(timeout=0.05)
    add(handler="h")
    worker = start()
    said.wait("message_retried")
    service.gate.set()
    assert worker.stop()
    assert level() == 0


def test_retry_with_backoff_is_a_step_up(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-13: Retry(after, backoff=True) is a step up."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.handle()
    service.error = Retry(60, backoff=True)
    add_many(10, handler="h")
    worker = start()
    said.wait("backoff_started")
    rest(0.3)
    assert worker.stop()
    assert service.failed == 1
