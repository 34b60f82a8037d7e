"""Queue backoff while the database is away or a row is locked, and what it costs when idle."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from tests.database import second_connection
from tests.rows import add, decide
from tests.slow import slow
from tests.waiting import until
from tests.worker.backing_off.conftest import AT_ONCE, LONG, backing_off, changes, rest
from tests.worker.conftest import Said, Start, add_many, proxied, waiting
from tests.worker.proxy import Proxy
from tests.worker.service import FAR, Service

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_lost_database_loses_no_step(
    start: Start, said: Said, service: Service, settings: Any, proxy: Proxy
) -> None:
    """An unwritten step is written later; until then no message starts."""
    backing_off(settings, 0.5)
    service.handle(retry=AT_ONCE)
    add_many(50, handler="h")
    service.error = KeyError("host")
    proxy.cut_at("backoff_level = 1", arrives=False)
    with proxied(proxy):
        worker = start(threads=1)
        said.wait("backoff_started")
        assert service.failed == 1
        service.error = None
        until(lambda: not waiting())
        assert worker.stop()
        connections["default"].close()
    assert proxy.cuts == 1
    assert changes(said) == [("backoff_started", 1), ("backoff_ended", 0)]


def test_a_locked_row_delays_a_step(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """An operator may hold the lock; no other message of the queue starts in the meantime."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"backoff": LONG}}}
    decide()
    service.error = KeyError("host")
    service.handle(retry=AT_ONCE)
    add_many(50, handler="h")
    with second_connection() as other:
        other.autocommit = False
        other.execute("select from django_mq_queuestate for update")
        worker = start(threads=1)
        until(lambda: service.failed)
        before = worker.worker.sleeps
        rest(1.5)
        assert worker.worker.sleeps - before < 50  # it does not claim and release in turn
        assert service.failed == 1
        assert changes(said) == []
        other.rollback()
    said.wait("backoff_started")
    assert worker.stop()
    assert service.failed == 1


@pytest.mark.parametrize("waits", ["the probe", "a dead head", *slow("nothing", "the wait")])
def test_a_queue_that_backs_off_does_not_spin(
    start: Start, service: Service, settings: Any, waits: str
) -> None:
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.5, "QUEUES": {"mail": {"backoff": LONG}}}
    decide(backoff_level=1, backoff=3600 if waits == "the wait" else -1)
    service.gate.clear()
    service.handle()
    if waits == "a dead head":
        head = add(handler="h", key="k", dead=-1)
        add(handler="h", key="k")
        add(handler="h", key="k", blocked_by=head.pk)
    elif waits != "nothing":
        add_many(20, handler="h")
    worker = start(threads=3)
    until(lambda: service.running if waits == "the probe" else worker.worker.sleeps > 5)
    before = worker.worker.sleeps
    rest(1.0)
    assert worker.worker.sleeps - before < 25
    assert service.running == (waits == "the probe")
    service.gate.set()
    assert worker.stop()


def test_until_empty_does_not_wait_for_a_backoff(
    start: Start, service: Service, settings: Any
) -> None:
    """Nothing is due while the queue waits; the same is true of a retry."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.error = KeyError("host")
    service.handle()
    add_many(5, handler="h")
    assert start(until_empty=True).join()
    assert len(waiting()) == 5
    assert service.failed == 1
