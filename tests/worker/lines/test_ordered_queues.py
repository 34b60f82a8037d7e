"""Ordered queues in a real worker run in order, one message at a time, despite failures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import Message, Reject, RetryPolicy, broadcast_many, handler, queues
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.queues import actions as acting
from tests.database import second_connection
from tests.rows import add, decide, pks, stored
from tests.slow import mostly_slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start
from tests.worker.lines.conftest import AT_ONCE, LATER, Log, empty, make_due, row

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_line_over_two_workers(start: Start, said: Said, log: Log) -> None:
    """PMQ-41, KAF-2, KAF-12: five batches of twenty in one transaction, several subscribers,
    priorities without effect: in order of ids, one at a time, by one of the two workers.
    """
    threads: set[str] = set()
    for name in ("h", "other"):

        @handler(f"a.{name}", "a.both", queue="line", name=name)
        def function(delivery: Delivery) -> None:
            with log.running("line", delivery.id):
                threads.add(threading.current_thread().name)

    with transaction.atomic():
        ids = [
            id
            for batch in range(5)
            for receipt in broadcast_many(
                [
                    Message(("a.h", "a.other", "a.both")[n % 3], priority=(batch * n) % 7)
                    for n in range(20)
                ]
            )
            for id in receipt.ids
        ]
    workers = [start(threads=2), start(threads=2)]
    log.wait(len(ids))
    assert log.order == sorted(ids)
    assert len(ids) > 100
    assert log.overlaps == []
    assert said.count("queue_assigned") == 1
    for worker in workers:
        worker.stop()
    assert empty()


def test_the_second_stays_free_while_the_first_runs(start: Start, gate: threading.Event) -> None:
    """PMQ-37, PMQ-42: with a batch size of 1 it is neither claimed nor locked."""
    began = threading.Event()

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        began.set()
        assert gate.wait(PATIENCE)

    first, second = row(), row()
    start(batch_size=1, threads=2)
    assert began.wait(PATIENCE)
    with second_connection() as other:
        free = other.execute(
            "select id from django_mq_queuedmessage where leased_until is null"
            " for update skip locked"
        ).fetchall()
    assert free == [(second.pk,)]
    assert stored(first).attempts == 1
    gate.set()
    until(empty, "both are done")


@pytest.mark.parametrize("size", [2, 100])
def test_batches_keep_the_order(start: Start, log: Log, size: int) -> None:
    """PMQ-57, PMQ-58 as changed: the second fails: the first is done once, then the second again,

    then the third.
    """
    failing: list[int] = []

    @handler("#", queue="line", name="h", retry=AT_ONCE)
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            if delivery.id == failing[0] and delivery.attempt < 3:
                raise ValueError

    messages = [row() for _ in range(6)]
    failing.append(messages[1].pk)
    start(batch_size=size, until_empty=True).join()
    assert log.order == pks(*messages)
    assert [(a.message_id, a.attempt) for a in FailedAttempt.objects.order_by("id")] == [
        (messages[1].pk, 1), (messages[1].pk, 2),
    ]  # fmt: skip


def fails(delivery: Delivery) -> None:
    raise ValueError


def fails_inside(delivery: Delivery) -> None:
    with transaction.atomic():
        raise ValueError


def rolls_back_inside(delivery: Delivery) -> None:
    with transaction.atomic():
        transaction.set_rollback(True)
    raise ValueError


def spoils_it(delivery: Delivery) -> None:
    transaction.set_rollback(True)


def swallows(delivery: Delivery) -> None:
    with contextlib.suppress(Exception), connection.cursor() as cursor:
        cursor.execute("select 1/0")


@pytest.mark.parametrize(
    ("form", "queue"),
    mostly_slow([fails, fails_inside, rolls_back_inside, spoils_it, swallows], ["line", "mail"]),
)
def test_a_failing_first_goes_before_the_second_however_it_fails(
    start: Start, log: Log, form: Callable[[Delivery], None], queue: str
) -> None:
    """PMQ-43, PMQ-46: always; in an ordered queue and in a key."""
    first: list[int] = []

    @handler("#", queue=queue, name="h", retry=AT_ONCE)
    def h(delivery: Delivery) -> None:
        log.order.append(delivery.id)
        if delivery.id == first[0] and delivery.attempt < 4:
            form(delivery)

    given = {"ordered": queue == "line", "key": None if queue == "line" else "k"}
    messages = [add(queue, handler="h", **given) for _ in range(3)]
    first.append(messages[0].pk)
    start(until_empty=True, threads=2).join()
    assert log.order == [*[messages[0].pk] * 4, *pks(*messages[1:])]


def untouched(message: QueuedMessage) -> bool:
    stored(message)
    return (message.attempts, message.leased_until) == (0, None)


@pytest.mark.parametrize("queue", ["line", "mail"])
def test_its_backoff_pauses_the_line(start: Start, said: Said, log: Log, queue: str) -> None:
    """PMQ-44: a message that arrives in between waits too; then the failed one goes first."""

    @handler("#", queue=queue, name="h", retry=LATER)
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            if delivery.attempt == 1 and delivery.payload == "fails":
                raise ValueError

    given = {"ordered": queue == "line", "key": None if queue == "line" else "k"}
    first = add(queue, handler="h", payload="fails", **given)
    second = add(queue, handler="h", **given)
    start(threads=2)
    said.wait("message_retried")
    late = add(queue, handler="h", **given)
    other = add(handler="h", queue="mail", key="other") if queue == "mail" else None
    make_due(late)  # it is due, and the workers are awake
    if other:  # another key continues in the meantime
        log.wait(1)
        assert log.order == [other.pk]
        # A claim parks the messages it meets: `second` had been released by then.
        for waiting in (second, late):
            until(lambda m=waiting: stored(m).blocked_by == first.pk, "it is parked")
        assert [stored(m).state for m in (first, second, late)] == [
            "retrying", "blocked", "blocked",
        ]  # fmt: skip
    else:
        said.wait("queue_assigned")
    until(lambda: all(map(untouched, (second, late))), "what was taken with it is given back")
    make_due(first)
    until(empty, "all are done")
    assert log.order[-3:] == pks(first, second, late)


def test_the_attempt_that_a_policy_is_asked_with(start: Start) -> None:
    """PMQ-45, PMQ-47 as changed: the message's attempts, kept in its row over restarts."""
    asked: list[int] = []

    def backoff(attempt: int) -> float:
        asked.append(attempt)
        return 0.0

    @handler("#", queue="line", name="h", retry=RetryPolicy(backoff=backoff, max_attempts=9))
    def h(delivery: Delivery) -> None:
        if delivery.attempt < 4:
            raise ValueError

    row()
    row()
    for _ in range(3):
        start(until_empty=True, max_messages=2, batch_size=1).join()
    assert asked == [1, 2, 3, 1, 2]  # six attempts, of which the fourth was a success
    start(until_empty=True).join()
    assert asked == [1, 2, 3, 1, 2, 3]
    assert empty()


@pytest.mark.parametrize(
    ("on_dead", "state", "goes"),
    [
        ("block", {"after": 3600}, False),
        ("block", {"dead": -1, "attempts": 20}, False),
        ("skip", {"after": 3600}, False),
        ("skip", {"dead": -1, "attempts": 20}, True),
    ],
)
def test_a_head_that_waits_blocks(
    start: Start, log: Log, settings: Any, on_dead: str, state: dict[str, Any], goes: bool
) -> None:
    """By default a dead one does; when it is requeued, it goes first."""
    queue = "line"
    settings.DJANGO_MQ = {"QUEUES": {queue: {"ordered": True, "on_dead_head": on_dead}}}

    @handler("#", queue=queue, name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    head, behind = row(queue, **state), row(queue)
    start(until_empty=True).join()
    assert log.order == ([behind.pk] if goes else [])
    late = row(queue)
    if "dead" in state:
        assert acting.requeue(head.pk)
    else:
        make_due(head)
    start(until_empty=True).join()
    assert log.order[-2:] == ([head.pk, late.pk] if goes else [behind.pk, late.pk])
    assert log.order[0] == (behind.pk if goes else head.pk)


def test_dead_letter_stops_the_line_until_it_is_discarded(
    start: Start, said: Said, log: Log
) -> None:
    """Messages claimed with it are released, without using an attempt."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "dies":
            raise Reject("no")
        with log.running("line", delivery.id):
            pass

    messages = [row(), row(payload="dies"), row(), row()]
    start(until_empty=True).join()
    assert log.order == pks(messages[0])
    assert [stored(m).attempts for m in messages[2:]] == [0, 0]
    assert acting.discard(messages[1].pk)
    start(until_empty=True).join()
    assert log.order == pks(messages[0], *messages[2:])


def test_rows_that_others_wrote_come_into_the_line(start: Start, log: Log) -> None:
    """Rows by SQL, and from before the queue was ordered; unrouted, and parked by their key."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    head = add("line", handler="h", key="k", dead=-1)
    parked = add("line", handler="h", key="k", blocked_by=head.pk)
    old = add("line", handler="h")
    with connection.cursor() as cursor:
        cursor.execute("select mq_broadcast('line', 'a.b', '{}', '{}', now())")
    start()
    log.wait(3)
    assert log.order[:2] == pks(parked, old)


def test_queue_that_becomes_ordered_waits_for_messages_in_flight(
    start: Start, said: Said, log: Log
) -> None:
    """Messages claimed by a worker that does not know the line, with or without a key."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    flying = add("line", handler="h", leased=3600, claimed_by="old:1", attempts=1)
    behind = row()
    start(until_empty=True).join()
    assert said.count("queue_assigned") == 1
    assert log.order == []
    flying.delete()
    start(until_empty=True).join()
    assert log.order == [behind.pk]


def test_paused_line_runs_nothing(start: Start, said: Said, log: Log) -> None:
    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    decide("line", paused=-1)
    messages = [row(), row()]
    start(until_empty=True).join()
    assert log.order == []
    queues.resume("line")
    start(until_empty=True).join()
    assert log.order == pks(*messages)
