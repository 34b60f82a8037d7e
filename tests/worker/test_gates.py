"""Limits of messages in flight and pauses: workers obey changes while they run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast, handler, queues
from django_mq.models import FailedAttempt
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import Said, Start, add_many, waiting
from tests.worker.service import FAR, Service, in_flight

pytestmark = pytest.mark.django_db(transaction=True)

#: Seconds; enough for 200 messages one after another on a busy machine, but not with a poll before
#: each.
ONE_BY_ONE = 150.0


# ---- limits


@pytest.mark.parametrize("kind", ["plain", "keyed", "ordered", "async", *slow("unbound", "batch")])
def test_never_more_in_flight_than_the_settings_allow(
    start: Start, service: Service, settings: Any, kind: str
) -> None:
    """NSQ-23: 4 of many, over two workers with more threads than that."""
    options = {"max_in_flight": 4, "ordered": kind == "ordered"}
    settings.DJANGO_MQ = {"QUEUES": {"mail": options}}
    service.pause = 0.005
    service.handle_as(kind)
    with transaction.atomic():
        for n in range(60):
            broadcast("a", key=f"k{n % 9}" if kind == "keyed" else None)
    service.pause = 0.01  # otherwise each may end before another thread gets its turn
    workers = [start(threads=4) for _ in range(2)]
    until(lambda: not waiting())
    assert all(worker.stop() for worker in workers)
    assert service.most <= 4
    assert max(service.in_flight) <= 4
    assert len(service.calls) == 60
    if kind not in ("ordered", "batch"):
        assert service.most >= 2
    if kind == "ordered":
        assert service.ids == sorted(service.ids)


def obeyed(service: Service, limit: int) -> bool:
    """Say whether the number in flight stays within the limit; a claim may be under way."""
    seen, service.most = len(service.in_flight), 0
    if limit == 0:
        threading.Event().wait(1.5)  # no signal announces that nothing happens
        return service.most == 0 and in_flight() == 0
    until(lambda: len(service.in_flight) > seen + 20)
    return max(service.in_flight[seen:]) <= limit and 0 < service.most <= limit


def test_a_limit_is_obeyed_while_workers_run(start: Start, service: Service) -> None:
    """NSQ-23: set, raised, lowered, 0 and lifted, each within a second or so."""
    service.pause = 0.01
    service.handle()
    add_many(2000, handler="h")
    workers = [start(threads=6) for _ in range(2)]
    until(lambda: service.most > 6)
    for limit in (2, 5, 1, 0, 3):
        queues.limit("mail", limit)
        until(lambda limit=limit: obeyed(service, limit))
    queues.limit("mail", None)
    until(lambda: service.most > 3)
    assert all(worker.stop() for worker in workers)
    assert FailedAttempt.objects.count() == 0


def test_decided_limit_overrides_the_settings(
    start: Start, service: Service, settings: Any
) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 1}}}
    decide(max_in_flight=3)
    service.gate.clear()
    service.handle()
    add_many(9, handler="h")
    worker = start(threads=6)
    until(lambda: service.running == 3)
    queues.limit("mail", None)
    service.gate.set()
    until(lambda: not waiting())
    assert service.most == 3
    assert worker.stop()


@pytest.mark.parametrize("limit", [1, *slow(2)])
def test_a_limited_queue_drains_without_waiting_for_the_poll(
    start: Start, service: Service, settings: Any, limit: int
) -> None:
    """A worker that ends a message of the queue takes the next one at once."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"max_in_flight": limit}}}
    service.handle()
    add_many(200, handler="h")
    worker = start(threads=4)
    until(lambda: not waiting(), seconds=ONE_BY_ONE)
    assert worker.stop()
    assert service.most <= limit


def test_a_place_is_taken_as_soon_as_it_is_free(
    start: Start, service: Service, settings: Any
) -> None:
    """Even while another message of the limited queue takes long."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"max_in_flight": 2}}}
    service.gate.clear()
    handler("shop.#", queue="mail", name="slow")(lambda delivery: service(delivery))
    quick = Service()
    handler("a", queue="mail", name="quick")(lambda delivery: quick(delivery))
    add(handler="slow")
    worker = start(threads=4)
    until(lambda: service.running)
    with transaction.atomic():
        for _ in range(30):
            broadcast("a")
    until(lambda: len(waiting()) == 1)
    assert quick.most == 1
    service.gate.set()
    assert worker.stop()


@pytest.mark.parametrize("workers", [2, *slow(3)])
def test_workers_share_a_limited_queue(
    start: Start, service: Service, settings: Any, workers: int
) -> None:
    """However many workers compete for the one slot, it drains promptly."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 1}}}
    service.handle()
    add_many(200, handler="h")
    running = [start(threads=2) for _ in range(workers)]
    until(lambda: not waiting(), seconds=ONE_BY_ONE)
    assert service.most == 1
    assert all(worker.stop() for worker in running)


def test_an_idle_worker_keeps_no_place(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-26: two workers, a limit of one, ten rounds; and when one of them is gone."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"max_in_flight": 1}}}
    service.handle()
    first, second = start(), start()
    until(lambda: first.worker.sleeps and second.worker.sleeps)
    for n in range(1, 11):
        with transaction.atomic():
            broadcast("a")
        said.wait("message_acked", n)
    assert first.stop()
    with transaction.atomic():
        broadcast("a")
    said.wait("message_acked", 11)
    assert second.stop()


def test_a_full_queue_does_not_hold_up_the_others(
    start: Start, service: Service, settings: Any
) -> None:
    """Neither due messages nor those that fall due wait: the poll is far away."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"max_in_flight": 1}}}
    service.gate.clear()
    handler("#", queue="mail", name="h")(lambda delivery: service(delivery))
    other = Service()
    handler("#", queue="other", name="other")(lambda delivery: other(delivery))
    add_many(5, handler="h")
    add_many(50, queue="other", handler="other")
    worker = start(threads=3)
    until(lambda: service.running == 1 and len(other.calls) == 50)
    add("other", handler="other", after=0.5)
    with transaction.atomic():  # its ring shows the delayed one, too
        broadcast("b")
    until(lambda: len(other.calls) == 52)
    service.gate.set()
    until(lambda: not waiting())
    assert worker.stop()


def test_until_empty_ends_when_all_is_held(start: Start, service: Service) -> None:
    """NSQ-23: 0 holds all, including lapsed messages; none of them can run now."""
    decide(max_in_flight=0)
    service.handle()
    held, lapsed = add(handler="h"), add(handler="h", leased=-1)
    assert start(until_empty=True).join()
    assert waiting() == {held.pk, lapsed.pk}
    assert service.calls == []
    queues.limit("mail", None)
    assert start(until_empty=True).join()
    assert waiting() == set()


def test_until_empty_waits_for_messages_in_flight_with_others(
    start: Start, service: Service, settings: Any
) -> None:
    """NSQ-25: there is work left; a worker without room looks again with each poll."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 1}}, "POLL_INTERVAL": 0.1}
    service.handle()
    elsewhere, mine = add(leased=300), add(handler="h")
    worker = start(until_empty=True)
    until(lambda: worker.worker.sleeps > 10)
    assert service.calls == []
    elsewhere.delete()
    assert worker.join()
    assert service.ids == [mine.pk]


def test_lower_limit_releases_waiting_messages(
    start: Start, service: Service, never_stuck: None
) -> None:
    """Their attempts are refunded; running messages continue."""
    service.gate.clear()
    service.handle()
    messages = add_many(20, handler="h")
    worker = start(threads=3)
    until(lambda: service.running == 3 and in_flight() > 3)
    queues.limit("mail", 2)
    until(lambda: in_flight() == 3)
    assert sum(stored(message).attempts for message in messages) == 3
    service.gate.set()
    until(lambda: not waiting())
    assert worker.stop()
    assert {attempt for _, attempt in service.calls} == {1}


def test_a_full_queue_does_not_spin(start: Start, service: Service, settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 1}}, "POLL_INTERVAL": 0.5}
    service.gate.clear()
    service.handle()
    add_many(20, handler="h")
    worker = start(threads=3)
    until(lambda: service.running)
    before = worker.worker.sleeps
    threading.Event().wait(1.0)
    assert worker.worker.sleeps - before < 25
    service.gate.set()
    assert worker.stop()


def test_worker_frozen_in_its_claim_blocks_no_other(
    start: Start, service: Service, settings: Any
) -> None:
    """Other workers do not wait for the gate: their other queues continue."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 5}}}
    handler("#", queue="mail", name="h")(lambda delivery: service(delivery))
    handler("#", queue="other", name="other")(lambda delivery: service(delivery))
    add_many(10, handler="h")
    with second_connection() as frozen:
        frozen.autocommit = False
        frozen.execute("select pg_advisory_xact_lock(hashtextextended('mail', 2))")
        worker = start(threads=2)
        until(lambda: worker.worker.sleeps > 3)
        others = add_many(10, queue="other", handler="other")
        until(lambda: len(service.calls) == 10)
        assert set(service.ids) == {message.pk for message in others}
        before = worker.worker.sleeps
        threading.Event().wait(1.0)
        assert worker.worker.sleeps - before < 200
        frozen.rollback()
        until(lambda: not waiting())
    assert worker.stop()


def test_lapsed_messages_keep_to_the_limit(start: Start, service: Service, settings: Any) -> None:
    """They have been in flight all the time: they are taken over one after another."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 2}}}
    service.pause = 0.05
    service.handle()
    for _ in range(2):
        add(handler="h", leased=-1, attempts=1)
    add_many(5, handler="h")
    worker = start(threads=4)
    until(lambda: not waiting())
    assert worker.stop()
    assert service.most <= 2
    assert max(service.in_flight) <= 2


# ---- pauses


@pytest.mark.parametrize("until_when", [None, *slow(3600)], ids=["for good", "until a time"])
def test_a_pause_is_obeyed_while_workers_run(
    start: Start, service: Service, never_stuck: None, until_when: float | None
) -> None:
    """Waiting messages are released, their attempts refunded; nothing more starts."""
    service.gate.clear()
    service.handle()
    messages = add_many(30, handler="h")
    worker = start(threads=2)
    until(lambda: service.running == 2 and in_flight() > 2)
    queues.pause("mail", until=until_when)
    until(lambda: in_flight() == 2)
    assert sum(stored(message).attempts for message in messages) == 2
    service.gate.set()
    until(lambda: len(waiting()) == 28)
    threading.Event().wait(0.5)
    assert len(service.calls) == 2
    assert queues.resume("mail")
    until(lambda: not waiting())
    assert worker.stop()
    assert {attempt for _, attempt in service.calls} == {1}


def test_a_pause_ends_at_its_time(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """To the moment, not to the poll."""
    settings.DJANGO_MQ = FAR
    service.handle()
    decide(paused=-1, until=1.0)
    add(handler="h")
    worker = start()
    said.wait("message_acked")
    assert worker.stop()


def test_a_paused_queue_does_not_spin(start: Start, service: Service, settings: Any) -> None:
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.5}
    service.handle()
    decide(paused=-1)
    add_many(20, handler="h")
    worker = start(threads=3)
    until(lambda: worker.worker.sleeps)
    before = worker.worker.sleeps
    threading.Event().wait(1.0)
    assert worker.worker.sleeps - before < 25
    assert service.calls == []
    assert worker.stop()
