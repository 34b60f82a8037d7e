"""Keys in a real worker: one message of a key at a time, and the events that block or free it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, transaction

from django_mq import Reject, broadcast, cancel, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.queues import actions as acting
from django_mq.store import claim_keyed as with_keys
from django_mq.worker import parking
from tests.rows import add, pks, stored
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start
from tests.worker.lines.conftest import (
    AT_ONCE,
    LATER,
    Log,
    empty,
    keyed,
    make_due,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_keys_overlap_and_messages_of_a_key_do_not(start: Start) -> None:
    """KAF-2: messages of two keys wait for each other, so they overlap; one key never does."""
    both = threading.Barrier(2)
    running: list[str] = []
    overlaps: list[str] = []
    lock = threading.Lock()

    @handler("#", queue="mail", name="h", timeout=PATIENCE)
    def h(delivery: Delivery) -> None:
        assert delivery.key is not None
        with lock:
            overlaps.extend(key for key in running if key == delivery.key)
            running.append(delivery.key)
        both.wait(PATIENCE)
        with lock:
            running.remove(delivery.key)
        both.wait(PATIENCE)

    for _ in range(4):
        keyed("a")
        keyed("b")
    start(until_empty=True, threads=3).join()
    assert overlaps == []
    assert empty()


def test_two_handlers_of_a_key_do_not_wait_for_each_other(
    start: Start, gate: threading.Event, log: Log
) -> None:
    @handler("a.b", queue="mail", name="slow")
    def slow(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    @handler("a.b", queue="mail", name="quick")
    def quick(delivery: Delivery) -> None:
        with log.running("quick", delivery.id):
            pass

    with transaction.atomic():
        receipts = [broadcast("a.b", key="k") for _ in range(3)]
    start(threads=2)
    log.wait(3)
    ids = [copy.id for r in receipts for copy in r.copies if copy.handler == "quick"]
    assert log.order == ids
    gate.set()


def test_followers_of_one_that_failed_go_back_uncharged(
    start: Start, said: Said, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PMQ-43: their attempt is refunded; the failed one blocks them until it is done."""
    monkeypatch.setattr(parking, "PAUSE_SECONDS", 0.0)  # the claim before took many of the line

    @handler("#", queue="mail", name="h", retry=LATER)
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            if delivery.payload == "fails" and delivery.attempt == 1:
                raise ValueError

    first = keyed()
    head = keyed(payload="fails")
    behind = [keyed() for _ in range(3)]
    start(until_empty=True).join()
    assert log.order == [first.pk]
    assert [(m.attempts, m.blocked_by) for m in map(stored, behind)] == [(0, head.pk)] * 3
    assert [m.state for m in map(stored, (head, *behind))] == ["retrying", *["blocked"] * 3]
    make_due(head)
    start(until_empty=True).join()
    assert log.order == pks(first, head, *behind)
    assert list(FailedAttempt.objects.values_list("message_id", flat=True)) == [head.pk]


@pytest.mark.parametrize("queue", ["mail", "easy"])
def test_one_that_dies_blocks_its_key_or_is_passed(start: Start, log: Log, queue: str) -> None:
    @handler("#", queue=queue, name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "dies":
            raise Reject("no")
        with log.running("k", delivery.id):
            pass

    head = keyed(queue=queue, payload="dies")
    behind = [keyed(queue=queue) for _ in range(3)]
    start(until_empty=True).join()
    assert log.order == (pks(*behind) if queue == "easy" else [])
    QueuedMessage.objects.filter(pk=head.pk).update(payload={})
    assert acting.requeue(head.pk)
    start(until_empty=True).join()
    assert log.order == (pks(*behind, head) if queue == "easy" else pks(head, *behind))


ENDS: dict[str, Callable[[QueuedMessage], Any]] = {
    "cancelled": lambda head: cancel(id=head.pk),
    "by hand": lambda head: acting.cancel(head.pk),
    "purged": lambda head: acting.purge("mail", type="the.head", waiting=True),
}


@pytest.mark.parametrize("end", ENDS)
def test_blocked_line_continues_when_its_head_is_removed(start: Start, log: Log, end: str) -> None:
    """It needs no chore: the statement that removed the head has freed the next, and rung."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            pass

    head = keyed(after=3600, type="the.head")
    behind = [keyed(), keyed()]
    start()
    until(lambda: stored(behind[1]).blocked_by == head.pk, "they are parked")
    with transaction.atomic():
        assert ENDS[end](head)
    log.wait(2)
    assert log.order == pks(*behind)


def test_an_expired_head_is_passed_where_dead_ones_are(start: Start, log: Log) -> None:
    @handler("#", queue="easy", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            pass

    keyed(queue="easy", expires=-1)
    behind = [keyed(queue="easy"), keyed(queue="easy", expires=-1), keyed(queue="easy")]
    start(until_empty=True).join()
    assert log.order == pks(behind[0], behind[2])


def test_an_unrouted_head_leaves_its_line_to_those_behind_it(start: Start, log: Log) -> None:
    """Messages parked behind it while it was held run once it has a handler."""
    head = keyed(handler="", after=3600, held=-5, type="a.b")
    behind = keyed(handler="", type="a.b")

    @handler("a.b", queue="mail", name="h", retry=LATER)
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            if delivery.id == head.pk and delivery.attempt == 1:
                raise ValueError

    start(until_empty=True).join()
    assert stored(behind).blocked_by == head.pk
    make_due(head)
    start(until_empty=True).join()
    assert [m.handler for m in (stored(head), stored(behind))] == ["h", "h"]
    make_due(head)
    start(until_empty=True).join()
    assert log.order == pks(head, behind)


@pytest.mark.parametrize("queue", ["line", "mail"])
def test_one_that_is_held_holds_those_behind_it(start: Start, log: Log, queue: str) -> None:
    """It cannot run here: messages claimed with it are released, uncharged."""

    @handler("#", queue=queue, name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            pass

    given = {"ordered": queue == "line", "key": None if queue == "line" else "k", "handler": "h"}
    first = add(queue, **given)
    newer = add(queue, schema_version=2, **given)
    behind = [add(queue, **given) for _ in range(3)]
    other = keyed("other") if queue == "mail" else None
    start(until_empty=True, threads=8).join()  # so that a single claim takes them all
    assert sorted(log.order) == pks(first, *([other] if other else []))
    assert stored(newer).held_since is not None
    assert [stored(m).attempts for m in behind] == [0, 0, 0]
    QueuedMessage.objects.filter(pk=newer.pk).update(schema_version=1)
    make_due(newer)
    start(until_empty=True, threads=8).join()
    assert log.order[-4:] == pks(newer, *behind)


class Conflict(OperationalError):
    """A deadlock, as Django raises it."""

    def __init__(self) -> None:
        super().__init__("deadlock detected")
        self.__cause__ = psycopg.errors.DeadlockDetected("deadlock detected")


def test_a_victim_of_a_deadlock_is_not_overtaken(start: Start, log: Log) -> None:
    """It runs again before the next of its key, even if that one runs again, too."""
    conflicts = 0
    together: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        nonlocal conflicts
        if len(deliveries) > 1:
            together.append(len(deliveries))
            raise ValueError  # so each runs alone
        if deliveries[0].payload == "victim" and conflicts < 2:
            conflicts += 1
            raise Conflict
        with log.running("k", deliveries[0].id):
            pass

    messages = [keyed(payload="victim"), keyed(), keyed(), keyed("other")]
    start(until_empty=True, batch_size=4, threads=4).join()  # so the first claim takes them all
    assert conflicts == 2
    assert together
    assert [id for id in log.order if id != messages[3].pk] == pks(*messages[:3])


def test_a_suspect_is_first_of_its_key_and_alone(start: Start, log: Log) -> None:
    head = keyed(leased=-1, attempts=1, suspect=True, claimed_by="gone:1")
    behind = [keyed(leased=-1, attempts=1, claimed_by="gone:1") for _ in range(2)]

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            pass

    start(until_empty=True, threads=2).join()
    assert log.order == pks(head, *behind)
    assert [a.message_id for a in FailedAttempt.objects.all()] == [head.pk]


def test_long_lines_are_parked_and_handled_in_order(
    start: Start, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window of 5 every message is parked at some time; two workers."""
    monkeypatch.setattr(with_keys, "WINDOW", 5)

    @handler("#", queue="mail", name="h", retry=AT_ONCE)
    def h(delivery: Delivery) -> None:
        with log.running(str(delivery.key), delivery.id):
            if delivery.id % 7 == 0 and delivery.attempt == 1:
                raise ValueError

    expected: dict[str, list[int]] = defaultdict(list)
    for n in range(120):
        key = "long" if n < 60 else f"k{n % 4}"
        expected[key].append(keyed(key).pk)
    for _ in range(2):
        start(threads=2, batch_size=4)
    until(empty, f"not all are done: {log.done}")
    # A slice that waited too long for a lock runs again, uncharged: its effects count once.
    assert {key: [*dict.fromkeys(done)] for key, done in log.done.items()} == expected
    assert log.overlaps == []
