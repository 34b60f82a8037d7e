"""A queue that backed off returns, probe by probe, to its full rate."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from django_mq import Reject, Retry, Snooze, broadcast, handler, queues
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.policy.outcomes import TimedOut
from tests.rows import add, decide, stored
from tests.slow import slow
from tests.waiting import until
from tests.worker.backing_off.conftest import AT_ONCE, LONG, backing_off, changes, level, rest
from tests.worker.conftest import Said, Start, add_many, waiting
from tests.worker.service import FAR, Service, in_flight

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_sequence_over_a_fleet(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-4, NSQ-5, NSQ-7, NSQ-8, NSQ-9: all, none, one, none, one, none, one, all; each change
    is announced once.

    The test ends each wait, since a busy machine might let one pass too soon.
    """
    backing_off(settings, 1000.0, POLL_INTERVAL=0.3)
    service.handle(retry=AT_ONCE)
    add(handler="h")
    workers = [start(threads=4) for _ in range(2)]
    said.wait("message_acked")
    assert not QueueState.objects.filter(
        queue="mail"
    ).exists()  # a success at full rate writes nothing
    service.error = KeyError("host")
    service.gate.clear()
    add_many(100, handler="h")
    until(lambda: service.running == 8)  # both are full: none begins while the gate is open
    service.gate.set()
    until(lambda: service.failed >= 8)  # all have passed it
    until(level)
    service.gate.clear()
    until(lambda: in_flight() == 0)
    at_once = service.failed
    assert at_once == 8  # already running ones, over the fleet
    for error, after in ((KeyError("host"), 2), (None, 1), (None, 0)):
        rest(0.5)  # more than a poll of each worker: none takes any
        assert service.running == in_flight() == 0
        QueueState.objects.filter(queue="mail").update(backoff_until=None)
        until(lambda: service.running)
        rest(0.5)  # none takes another one
        assert service.running == in_flight() == 1
        service.error = error
        service.gate.set()
        until(lambda after=after: level() == after)
        if after:
            service.gate.clear()
    until(lambda: not waiting())
    assert all(worker.stop() for worker in workers)
    assert changes(said) == [
        ("backoff_started", 1),
        ("backoff_changed", 2),
        ("backoff_changed", 1),
        ("backoff_ended", 0),
    ]
    assert FailedAttempt.objects.count() == at_once + 1  # waiting messages used no attempts


@pytest.mark.parametrize("error", [Retry(), *slow(Snooze(60), TimedOut("slow"))])
def test_inconclusive_probe_starts_a_new_wait(
    start: Start, said: Said, service: Service, settings: Any, error: BaseException
) -> None:
    """NSQ-2, NSQ-5, NSQ-12: the level stays; then another message probes."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.handle(retry=AT_ONCE)
    service.error = error
    add_many(5, handler="h")
    worker = start()
    until(lambda: service.failed >= 2)
    assert level() == 1
    assert changes(said) == []
    service.error = None
    said.wait("backoff_ended")
    assert worker.stop()


def test_a_rejected_probe_is_a_handler_that_works(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-14."""
    backing_off(settings)
    decide(backoff_level=1, backoff=-1)
    service.handle()
    service.error = Reject("no such user")
    add(handler="h")
    worker = start()
    said.wait("backoff_ended")
    assert worker.stop()


def test_at_full_rate_again_the_backlog_drains_at_once(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """NSQ-4: neither a ring nor the poll is needed."""
    backing_off(settings, **FAR)
    decide(backoff_level=1, backoff=0.5)
    service.gate.clear()
    service.handle()
    add_many(300, handler="h")
    worker = start(threads=2)
    until(lambda: service.running)
    rest(0.2)
    service.gate.set()
    until(lambda: not waiting())
    assert worker.stop()
    assert changes(said) == [("backoff_ended", 0)]


def test_64_failures_at_once_are_over_soon(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """They are a single step; once the service is back all are done in minutes (here: seconds)."""
    backing_off(settings)
    service.gate.clear()
    service.error = KeyError("host")
    service.recover_at(64)
    service.ahandle(retry=AT_ONCE)
    add_many(64, handler="h")
    workers = [start(async_slots=32) for _ in range(2)]
    until(lambda: service.running == 64)
    service.gate.set()
    until(lambda: not waiting())
    assert service.failed == 64
    assert all(worker.stop() for worker in workers)
    assert changes(said)[0] == ("backoff_started", 1)
    assert changes(said)[-1] == ("backoff_ended", 0)
    assert max(level for _, level in changes(said)) <= 2


def test_during_an_outage_no_message_burns_its_attempts(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """64 messages, a service that is down for long: only the probes are charged."""
    backing_off(settings, 0.05)
    service.error = KeyError("host")
    service.handle(retry=AT_ONCE)
    messages = add_many(64, handler="h")
    workers = [start(threads=2) for _ in range(2)]
    until(lambda: level() >= 5)
    failed = FailedAttempt.objects.count()
    attempts = [stored(message).attempts for message in messages]
    raised = level()  # after both: it may rise further in the meantime
    assert failed <= 4 + raised
    assert sum(attempts) <= 4 + raised + 1
    service.error = None
    assert all(worker.stop() for worker in workers)


def test_other_queues_run_at_full_rate(start: Start, service: Service, settings: Any) -> None:
    """They run at their full rate, in the same worker."""
    settings.DJANGO_MQ = {**FAR, "QUEUES": {"mail": {"backoff": LONG}}}
    service.error = KeyError("host")
    handler("#", queue="mail", name="bad")(lambda delivery: service(delivery))
    good = Service()
    handler("#", queue="other", name="good")(lambda delivery: good(delivery))
    add_many(50, handler="bad")
    worker = start(threads=1)
    until(level)
    add_many(300, queue="other", handler="good")
    with transaction.atomic():
        broadcast("good")
    until(lambda: len(good.calls) == 301)
    assert worker.stop()
    assert service.failed == 1


@pytest.mark.parametrize("kind", ["keyed", *slow("ordered")])
def test_lines_keep_their_order(
    start: Start, said: Said, service: Service, settings: Any, kind: str
) -> None:
    """Their heads probe repeatedly; the messages behind them wait."""
    backing_off(settings, 0.05, mail={"ordered": kind == "ordered"})
    service.handle(retry=AT_ONCE)
    with transaction.atomic():
        for n in range(40):
            broadcast("a", key=f"k{n % 2}" if kind == "keyed" else None)
    keys = dict(QueuedMessage.objects.values_list("pk", "key"))
    service.break_at(6, KeyError("host"))
    worker = start(threads=2)
    until(lambda: level() >= 3)
    service.error = None
    until(lambda: not waiting())
    assert worker.stop()
    runs: dict[str | None, list[int]] = {}
    for id, _ in service.calls:
        runs.setdefault(keys[id], []).append(id)
    for line in runs.values():
        assert line == sorted(line)
        assert len(set(line)) == 40 // len(runs)
    assert changes(said)[-1] == ("backoff_ended", 0)


def test_with_a_limit_too(start: Start, said: Said, service: Service, settings: Any) -> None:
    """NSQ-10: the limit holds at full rate, and does not change the backoff."""
    backing_off(settings, 0.05, mail={"max_in_flight": 3})
    service.pause = 0.002
    service.handle(retry=AT_ONCE)
    add_many(100, handler="h")
    service.break_at(21, KeyError("host"))
    workers = [start(threads=4) for _ in range(2)]
    until(lambda: level() >= 2)
    queues.limit("mail", 500)
    queues.limit("mail", None)
    assert level() >= 2
    service.error = None
    until(lambda: not waiting())
    assert all(worker.stop() for worker in workers)
    assert max(service.in_flight) <= 3
