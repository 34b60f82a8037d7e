"""max_backlog: a full queue accepts no more messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from django_mq import BroadcastBusy, Message, broadcast, broadcast_many, handlers
from django_mq.models import QueuedMessage
from django_mq.outbox import backlog
from django_mq.store import backlog as backlog_store
from django_mq.testing import drain
from tests.rows import add

pytestmark = pytest.mark.django_db


class Clock:
    """The clock of this process, set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        #: Seconds that pass whenever it is read.
        self.ticking = 0.0

    def __call__(self) -> float:
        self.now += self.ticking
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(backlog, "monotonic", clock)
    monkeypatch.setattr(backlog, "_counts", {})
    return clock


@pytest.fixture(autouse=True)
def block(settings: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_backlog": 3}}}
    commits = request.node.get_closest_marker("django_db").kwargs.get("transaction")
    with handlers.isolated(), contextlib.nullcontext() if commits else transaction.atomic():
        yield


def send(**options: Any) -> Any:
    return broadcast("a.b", **{"queue": "mail", **options})


def test_full_queue_raises_with_a_hint() -> None:
    """S17: bounded growth."""
    for _ in range(3):
        send()
    with pytest.raises(
        BroadcastBusy, match=r"queue mail has 3 .*max_backlog is 3\. Try .*mq_status mail shows"
    ):
        send()
    assert send(queue="other")
    assert QueuedMessage.objects.filter(queue="mail").count() == 3


def test_only_waiting_messages_count() -> None:
    add(leased=30)
    add(leased=-30)
    add(dead=-1)
    add(blocked_by=1, key="k")
    add("other")
    for _ in range(3):
        send()
    with pytest.raises(BroadcastBusy):
        send()


def test_it_counts_once_a_second(clock: Clock, django_assert_num_queries: Any) -> None:
    send()
    with django_assert_num_queries(1):
        send()
    QueuedMessage.objects.all().delete()
    clock.now += 0.9
    with django_assert_num_queries(1):
        send()  # the third message that this process knows of
    clock.now += 0.2
    with django_assert_num_queries(2):
        send()


def test_a_slow_count_admits_for_longer(clock: Clock, counts: list[str]) -> None:
    """While a session holds a snapshot, a count walks over all messages handled since then."""
    clock.ticking = 0.5  # so that a count takes 0.5 s
    send()
    clock.ticking = 0.0
    clock.now += 4.9
    send()
    assert len(counts) == 1
    clock.now += 0.2
    send()
    assert len(counts) == 2


def test_an_old_count_admits_nothing(clock: Clock) -> None:
    """Other processes have broadcast since."""
    send()
    add()
    add()
    send()  # the fourth, admitted by the count
    clock.now += 1.1
    with pytest.raises(BroadcastBusy):
        send()


def in_block() -> None:
    with transaction.atomic():
        send()


#: Ways to broadcast one message and commit it.
PRODUCERS = {"block": in_block, "decorated": transaction.atomic(send), "autocommit": send}


@pytest.fixture(params=PRODUCERS)
def produce(request: pytest.FixtureRequest, settings: Any) -> Any:
    required = request.param != "autocommit"
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "REQUIRE_ATOMIC": required}
    return PRODUCERS[request.param]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the queues that were counted, in order."""
    counts: list[str] = []

    def count_unblocked(cursor: Any, *, queue: str, limit: int) -> int:
        counts.append(queue)
        return backlog_store.count_unblocked(cursor, queue=queue, limit=limit)

    monkeypatch.setattr(backlog, "count_unblocked", count_unblocked)
    return counts


def refused(produce: Any) -> None:
    with pytest.raises(BroadcastBusy):
        produce()


@pytest.mark.django_db(transaction=True)
def test_a_full_queue_is_looked_at_again_soon(
    clock: Clock, produce: Any, counts: list[str]
) -> None:
    """Producers continue as soon as there is room."""
    for _ in range(3):
        produce()
    clock.ticking = 0.001
    refused(produce)
    QueuedMessage.objects.all().delete()
    refused(produce)
    assert len(counts) == 2
    clock.now += 0.01
    produce()


@pytest.mark.django_db(transaction=True)
def test_the_count_of_a_long_queue_refuses_for_longer_but_not_for_long(
    clock: Clock, produce: Any, counts: list[str]
) -> None:
    """Producers that are refused do not keep the database busy with counts."""
    for _ in range(3):
        produce()
    clock.ticking = 0.2
    refused(produce)
    assert len(counts) == 2
    clock.ticking = 0
    clock.now += 0.04
    refused(produce)
    assert len(counts) == 2
    clock.now += 0.02
    refused(produce)
    assert len(counts) == 3


def test_backlog_counts_the_current_rows_of_the_transaction() -> None:
    """Also in a TestCase, which is one transaction."""
    broadcast_many([Message("a.b", queue="mail")] * 3)
    with pytest.raises(BroadcastBusy):
        send()
    QueuedMessage.objects.all().delete()
    assert send()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.django_db(transaction=True)
def test_rows_that_were_rolled_back_refuse_nothing(clock: Clock, refused: bool) -> None:
    clock.ticking = 0.001  # the count before them may refuse for a moment
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        broadcast_many([Message("a.b", queue="mail")] * 3)
        if refused:
            with pytest.raises(BroadcastBusy):
                send()
        raise ZeroDivisionError
    with transaction.atomic():
        assert send()


@pytest.mark.django_db(transaction=True)
def test_a_long_transaction_that_is_rolled_back_refuses_nothing(clock: Clock) -> None:
    """Its rows are counted once a second, too, and by then the first count is old."""
    with contextlib.suppress(BroadcastBusy), transaction.atomic():
        broadcast_many([Message("a.b", queue="mail")] * 3)
        clock.now += 5
        clock.ticking = 0.2
        send()
    clock.ticking = 0
    in_block()


@pytest.mark.django_db(transaction=True)
def test_a_transaction_that_is_rolled_back_by_hand_refuses_nothing(
    clock: Clock, settings: Any
) -> None:
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "REQUIRE_ATOMIC": False}
    transaction.set_autocommit(False)
    try:
        broadcast_many([Message("a.b", queue="mail")] * 3)
        clock.ticking = 0.2
        with pytest.raises(BroadcastBusy):
            send()
        transaction.rollback()
        clock.ticking = 0
        assert send()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.django_db(transaction=True)
def test_a_drained_queue_has_room_at_once(clock: Clock) -> None:
    handlers.handler("a.b", name="h", queue="mail")(lambda delivery: None)
    with transaction.atomic():
        broadcast_many([Message("a.b")] * 3)
    clock.ticking = 0.2
    with transaction.atomic(), pytest.raises(BroadcastBusy):
        send(queue=None)
    clock.ticking = 0
    assert drain() == 3
    with transaction.atomic():
        assert send(queue=None)


def test_a_call_is_refused_as_a_whole(clock: Clock) -> None:
    send()
    with pytest.raises(BroadcastBusy, match="has 1 message waiting and no room for 3 more"):
        broadcast_many([Message("a.b", queue="mail")] * 3)
    assert QueuedMessage.objects.count() == 1
    assert len(broadcast_many([Message("a.b", queue="mail")] * 2)) == 2


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_stream_does_not_count_its_own_rows_twice(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("django_mq.outbox.chunk.CHUNK_ROWS", 1)

    def messages(count: int) -> Iterator[Message]:
        for _ in range(count):
            yield Message("a.b", queue="mail")
            clock.now += seconds

    assert broadcast_many(messages(3)).count == 3
    QueuedMessage.objects.all().delete()
    clock.now += 5
    with pytest.raises(BroadcastBusy):
        broadcast_many(messages(4))
    assert not QueuedMessage.objects.exists()


def test_duplicates_and_updates_are_not_refused() -> None:
    for n in range(3):
        send(unique_id=str(n))
    assert send(unique_id="1").outcome == "duplicate"
    assert send(unique_id="1", on_duplicate="update").outcome == "updated"
    with pytest.raises(BroadcastBusy):
        send(unique_id="3")


@pytest.mark.django_db(transaction=True)
def test_put_aside_message_counts_behind_a_quiet_time_but_not_behind_a_claim() -> None:
    """The second takes the place of the claimed message, so it adds nothing."""
    handlers.handler("a.b", name="h", queue="mail")(lambda delivery: None)
    with transaction.atomic():
        send(unique_id="quiet", unique_for=60)
    drain()
    with transaction.atomic():
        send(unique_id="claimed")
        QueuedMessage.objects.update(leased_until="9000-01-01T00:00Z", claimed_by="w:1", attempts=1)
        for _ in range(3):
            send()
        assert send(unique_id="claimed", on_duplicate="rerun").outcome == "requeued"
        with pytest.raises(BroadcastBusy):
            send(unique_id="quiet", on_duplicate="rerun")


def test_other_queues_pay_nothing(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        send(queue="other")


@contextlib.contextmanager
def in_testcase() -> Iterator[None]:
    """The block of a TestCase, whose messages are rolled back, and one in it."""
    test = transaction.atomic()
    test._from_testcase = True
    with test:
        with transaction.atomic():
            yield
        transaction.set_rollback(True)


def test_a_count_ends_with_the_test_that_it_was_made_in() -> None:
    """The clock may not have moved since."""
    for _ in range(2):
        with in_testcase():
            for _ in range(3):
                send()
            with pytest.raises(BroadcastBusy):
                send()


def test_the_count_of_one_test_admits_nothing_in_the_next() -> None:
    with in_testcase():
        send()
    with in_testcase():
        for _ in range(3):
            add()
        with pytest.raises(BroadcastBusy):
            send()
