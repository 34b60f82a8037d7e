"""Probes that do not come back."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.db.models.functions import Now

from django_mq import queues
from django_mq.messages import Fence
from django_mq.models import QueueState
from django_mq.worker import DeadWorker
from tests.rows import add, decide, stored
from tests.waiting import until
from tests.worker.backing_off.conftest import backing_off, changes, rest
from tests.worker.conftest import PATIENCE, Said, Start, add_many, proxied, waiting
from tests.worker.proxy import Proxy
from tests.worker.service import Service

pytestmark = pytest.mark.django_db(transaction=True)


def later(seconds: float) -> Any:
    """A moment of the database, for columns that rows.MOMENTS does not name."""
    return Now() + timedelta(seconds=seconds)


def test_a_probe_whose_worker_is_gone_is_not_kept(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """Its supervisor reports it: the next message probes at once, not after the lease."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1, probe_by="gone:1", probe_until=later(3600))
    service.handle()
    lost = add(handler="h", leased=3600, claimed_by="gone:1", attempts=1)
    add_many(3, handler="h")
    worker = start()
    said.wait("worker_started")
    rest(1.2)
    assert service.calls == []
    recovered = threading.Event()
    worker.worker.recover(
        DeadWorker("gone", "was killed by SIGKILL", lost=[Fence(lost.pk, 1, "gone:1")]),
        recovered.set,
    )
    until(lambda: not waiting())
    assert recovered.wait(PATIENCE)
    assert worker.stop()
    assert changes(said) == [("backoff_ended", 0)]


def test_a_probe_lapses_with_its_host(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """Even when its message is the only one: it probes again, though it lapsed."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1, probe_by="gone:1", probe_until=later(0.3))
    service.handle()
    message = add(handler="h", leased=0.3, claimed_by="gone:1", attempts=1)
    worker = start()
    until(lambda: not waiting())
    assert worker.stop()
    assert service.calls == [(message.pk, 2)]
    assert changes(said) == [("backoff_ended", 0)]


def test_a_lapsed_message_that_kills_workers_is_not_taken_over_in_the_wait(
    start: Start, service: Service, settings: Any
) -> None:
    """It waits like all others, and then becomes the only probe."""
    backing_off(settings)
    decide(backoff_level=1, backoff=3600)
    service.handle()
    message = add(handler="h", leased=-1, attempts=1)
    worker = start()
    until(lambda: worker.worker.sleeps > 3)
    rest(1.2)
    assert service.calls == []
    QueueState.objects.filter(queue="mail").update(backoff_until=None)
    until(lambda: service.ids == [message.pk])
    assert worker.stop()


def test_probe_without_a_handler_makes_room_for_the_next(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """A message without a handler here is held, and says nothing about the service."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.handle()
    held = add(handler="unknown", after=-100)
    good = add(handler="h")
    worker = start()
    said.wait("backoff_ended")
    assert worker.stop()
    assert service.ids == [good.pk]
    assert waiting() == {held.pk}


def test_probe_whose_claim_got_no_answer_is_released(
    start: Start, said: Said, service: Service, settings: Any, proxy: Proxy
) -> None:
    """The claim was committed, and no worker holds its message."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1, paused=-1)
    service.handle()
    message = add(handler="h")
    with proxied(proxy):
        worker = start()
        until(lambda: worker.worker.sleeps > 3)
        rest(1.2)  # the chores of its start are over
        proxy.cut_at("COMMIT", arrives=True)  # the next is that of the probe's claim
        assert queues.resume("mail")
        until(lambda: not waiting())
        assert worker.stop()
        connections["default"].close()
    assert proxy.cuts == 1
    assert service.calls == [(message.pk, 1)]
    assert changes(said) == [("backoff_ended", 0)]


def test_a_drain_gives_the_probe_back(
    start: Start,
    service: Service,
    settings: Any,
    never_stuck: None,
) -> None:
    """It was claimed but did not start."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.gate.clear()
    slow = Service()
    slow.gate.clear()
    slow.handle("other", "slow")
    service.handle()
    add("other", handler="slow")
    worker = start(threads=1)
    until(lambda: slow.running)
    message = add(handler="h")
    until(lambda: stored(message).attempts == 1)
    worker.worker.ask_to_stop()
    until(lambda: stored(message).attempts == 0)
    assert QueueState.objects.get(queue="mail").probe_by is None
    slow.gate.set()
    assert worker.join()
    assert service.calls == []
