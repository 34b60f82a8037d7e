"""The length of the fetcher's sleep, and the events that end it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from django.db.models.functions import Now

from django_mq.models import QueuedMessage, QueueState
from django_mq.store import poll
from django_mq.worker import claims as claims_module
from django_mq.worker.claims import MAX_BATCHES, PLAIN
from django_mq.worker.fetcher import REPOLL_DELAY
from django_mq.worker.queue_options import ClaimOptions
from django_mq.worker.watermarks import Rest
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)


def test_fetcher_claims_due_messages_and_sleeps_until_the_poll(rig: Rig) -> None:
    """CAR-18: the messages to handle, and the time to sleep."""
    messages = [add(after=-60 + n) for n in range(3)]
    rig.make(poll=1.0)
    assert 0 < rig.settle() <= 1.0
    assert rig.ids() == [m.pk for m in messages]
    assert rig.fetcher.empty


def test_sleeps_until_the_next_due_time(rig: Rig) -> None:
    """PMQ-61, PMQ-62: exactly until then, not until the poll; and then it claims the message."""
    soon = add(after=30, priority=3)
    add(after=60)
    rig.make(poll=600.0)
    assert 25 < rig.settle() <= 30
    assert rig.ids() == []
    QueuedMessage.objects.filter(pk=soon.pk).update(processable_after=soon.created_at)
    rig.clock.now += 31
    rig.settle()
    assert rig.ids() == [soon.pk]


def test_a_message_that_is_retried_while_it_looks_is_not_overlooked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor commits the retry after the statement has run, and before its rows are read."""
    rig.make(poll=600.0)
    statement = poll.poll

    def look(cursor: Any) -> Any:
        seen = statement(cursor)
        if not QueuedMessage.objects.exists():
            add(after=30)
            rig.fetcher.on_freed()
        return seen

    monkeypatch.setattr(poll, "poll", look)
    assert 25 < rig.settle() <= 30


def test_a_ring_makes_it_look_at_once_and_once_more(rig: Rig) -> None:
    """PMQ-60: producers coalesce their rings, so the later look is needed."""
    rig.make(poll=600.0)
    rig.settle()
    first = add()
    rig.fetcher.on_ring()
    while not rig.taken:
        sleep = rig.fetcher.fetch(rig.cursor)
        assert sleep <= REPOLL_DELAY
        rig.clock.now += sleep
    assert rig.ids() == [first.pk]
    second = add()  # whose ring was coalesced
    rig.settle()
    assert rig.ids() == [second.pk]


def test_ring_claims_before_any_other_statement(rig: Rig) -> None:
    """Other questions would keep the handler from the CPU."""
    add()
    rig.make(poll=600.0)
    rig.settle()
    rig.ids()
    message = add()
    rig.fetcher.on_ring()
    rig.cursor.asked.clear()
    assert 0 < rig.fetcher.fetch(rig.cursor) <= REPOLL_DELAY
    assert (rig.ids(), rig.cursor.asked) == ([message.pk], ["claim"])
    for _ in range(3):  # but with constant rings, the other questions are asked in between
        add()
        rig.fetcher.on_ring()
        rig.fetcher.fetch(rig.cursor)
    assert "poll" in rig.cursor.asked


def test_a_ring_does_not_shorten_a_backoff(rig: Rig) -> None:
    """PMQ-40: however many rings arrive; when the wait is over, one message probes."""
    state = decide(backoff_level=3, backoff=3600)
    messages = [add() for _ in range(3)]
    rig.make(poll=600.0)
    rig.settle()
    for _ in range(5):
        rig.fetcher.on_ring()
        rig.settle()
    assert rig.ids() == []
    assert stored(state).backoff_until == state.backoff_until
    QueueState.objects.update(backoff_until=Now())
    rig.fetcher.on_ring()
    rig.settle()
    assert rig.ids() == [messages[0].pk]


def test_a_ring_that_was_too_early_is_looked_after(rig: Rig) -> None:
    """Another message's ring stood in for this one, which was committed a little later."""
    rig.make(poll=600.0)
    rig.settle()
    rig.fetcher.on_ring()
    while not rig.fetcher.empty:
        assert rig.fetcher.fetch(rig.cursor) <= REPOLL_DELAY
        rig.clock.now += 0.002
    late = add()
    rig.settle()
    assert rig.ids() == [late.pk]


def test_rings_and_slow_looks_do_not_hide_that_nothing_is_due(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker with --until-empty would go on while other queues get messages."""
    rig.make(poll=600.0)
    rig.settle()
    monkeypatch.setattr(Rest, "after", lambda rest, seconds: 60.0)
    rig.clock.now += 1.0
    for _ in range(10):
        rig.fetcher.on_ring()
        rig.clock.now += 0.02
        rig.fetcher.fetch(rig.cursor)
        assert rig.fetcher.empty
    rig.fetcher.on_freed()
    for _ in range(10):
        rig.fetcher.fetch(rig.cursor)
        assert not rig.fetcher.empty
        rig.clock.now += 1.0
    rig.clock.now += 60.0
    rig.settle()
    assert rig.fetcher.empty


def test_a_storm_of_rings_is_not_a_storm_of_scans(rig: Rig, monkeypatch: Any) -> None:
    """Every login may NOTIFY; expensive scans take a tenth of the time at most."""
    costs = iter(range(10**6))
    monkeypatch.setattr(claims_module, "perf_counter", lambda: next(costs) * 0.05)
    rig.make(poll=600.0)
    rig.settle()
    rig.marks[PLAIN]._usual = 0.001  # a bad day: full scans take 50 ms, others 1 ms
    rig.cursor.asked.clear()
    until = rig.clock.now + 5.0
    while rig.clock.now < until:
        rig.fetcher.on_ring()
        rig.clock.now += max(rig.fetcher.fetch(rig.cursor), 0.01)
    assert rig.cursor.asked.count("claim") < 5.0 / 0.05 / 4


def test_locked_row_does_not_make_the_fetcher_spin(rig: Rig) -> None:
    """PMQ-27: a row locked elsewhere is not waited for at full speed."""
    message = add()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        rig.make(poll=1.0)
        rig.settle()
        assert rig.fetcher.empty
        rig.cursor.asked.clear()
        until = rig.clock.now + 10.0
        while rig.clock.now < until:
            rig.clock.now += rig.fetcher.fetch(rig.cursor)
        assert rig.cursor.asked.count("claim") <= 20
        assert rig.cursor.asked.count("poll") <= 11
        assert rig.ids() == []
    rig.clock.now += 1.1
    rig.settle()
    assert rig.ids() == [message.pk]


def test_an_idle_queue_costs_one_look_a_poll(rig: Rig) -> None:
    """CAR-20, CAR-31 as changed: sleeps do not grow; a ring or a due time ends them."""
    rig.make(poll=1.0)
    rig.settle()
    rig.cursor.asked.clear()
    until = rig.clock.now + 10.0
    while rig.clock.now < until:
        rig.clock.now += rig.fetcher.fetch(rig.cursor)
    assert 9 <= len(rig.cursor.asked) <= 11


@pytest.mark.parametrize(("poll", "takes"), [(1.0, 0.003), (1.0, 0.08), (0.1, 0.008)])
def test_idle_fetcher_wakes_once_per_poll_interval(rig: Rig, poll: float, takes: float) -> None:
    """A handler beside it runs past its lease; the time of the last ring does not matter."""
    add(leased=-1, attempts=1)
    rig.cursor.takes = takes
    rig.make(poll=poll)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        rig.settle(maximum=0.05)
        rig.clock.now += 0.4 * poll
        rig.fetcher.on_ring()
        rig.settle(maximum=0.05)
        rig.pass_time(2 * poll)  # of the poll interval in which it rang
        rig.cursor.asked.clear()
        wakes = rig.pass_time(10 * poll)
    assert wakes <= 10
    assert Counter(rig.cursor.asked) == {"poll": wakes, "lapsed": wakes}


def test_message_between_claim_and_poll_is_not_missed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look before the sleep finds it due, so the sleep is skipped: also with until_empty."""
    rig.make("mail", poll=600.0)  # a lane known to it
    rig.settle()
    look = poll.poll
    added: list[QueuedMessage] = []

    def late(cursor: Any) -> Any:
        if not added:
            added.append(add())
        return look(cursor)

    rig.fetcher.on_freed()
    monkeypatch.setattr(poll, "poll", late)
    rig.settle()
    assert added[0].pk in rig.ids()


def test_a_busy_fetcher_sleeps_not_at_all(rig: Rig) -> None:
    rig.options["mail"] = ClaimOptions("sync", 30.0, 1, 1 << 22)
    for _ in range(3 * MAX_BATCHES):
        add()
    rig.make()
    assert [rig.fetcher.fetch(rig.cursor) for _ in range(3)] == [0.0] * 3
