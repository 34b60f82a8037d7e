"""Lines in a real worker: in order, one at a time, whatever kind of handler, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, connections, transaction

from django_mq import (
    Message,
    Reject,
    RetryPolicy,
    broadcast,
    broadcast_many,
    cancel,
    fixed,
    handler,
    queues,
)
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.queues import actions as acting
from django_mq.store import claim_keyed as with_keys
from django_mq.store import ordered_queues as lines
from django_mq.testing import drain, due
from django_mq.worker import DeadWorker
from django_mq.worker.ordered_queues import OrderedQueues
from tests.database import second_connection
from tests.rows import add, add_all, decide, stored
from tests.store.conftest import lock
from tests.worker.conftest import PATIENCE, Running, Said

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]

AT_ONCE = RetryPolicy(max_attempts=50, backoff=fixed(0))
LATER = RetryPolicy(max_attempts=50, backoff=fixed(3600))


@pytest.fixture(autouse=True)
def _settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "POLL_INTERVAL": 0.2,  # no test waits for it; those that see nothing happen are shorter
        "QUEUES": {
            "line": {"ordered": True},
            "mail": {},
            "easy": {"on_dead_head": "skip"},
            "commits": {"key_order": "commit"},
        },
    }


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What handlers wait for; opened at the end whatever happens."""
    gate = threading.Event()
    yield gate
    gate.set()


class Log:
    """What ran, in order, and whatever ran at the same time as another of its line."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = defaultdict(list)
        self.order: list[int] = []
        self.overlaps: list[int] = []
        self.most = 0
        self._running: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def running(self, line: str, *ids: int) -> Iterator[None]:
        with self._changed:
            self.overlaps += ids if line in self._running else ()
            self._running.add(line)
            self.most = max(self.most, len(self._running))
        try:
            yield
        except BaseException:
            with self._changed:
                self._running.discard(line)
            raise
        with self._changed:
            self._running.discard(line)
            self.done[line] += ids
            self.order += ids
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) >= count, PATIENCE), self.order


@pytest.fixture
def log() -> Log:
    return Log()


def pks(*messages: QueuedMessage) -> list[int]:
    return [message.pk for message in messages]


def row(queue: str = "line", **given: Any) -> QueuedMessage:
    """Insert a message of an ordered queue, of handler h."""
    return add(queue, **{"handler": "h", "ordered": True, **given})


def keyed(key: str | None = "k", queue: str = "mail", **given: Any) -> QueuedMessage:
    return add(queue, **{"handler": "h", "key": key, **given})


def make_due(*messages: QueuedMessage) -> None:
    QueuedMessage.objects.filter(pk__in=pks(*messages)).update(
        processable_after="2000-01-01 00:00Z"
    )
    with connection.cursor() as cursor:
        cursor.execute("notify django_mq")


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the database shows it."""
    with second_connection() as other:
        for _ in range(int(PATIENCE / 0.01)):
            if condition():
                return
            other.execute("select pg_sleep(0.01)")
    raise AssertionError(what)


def empty() -> bool:
    return not QueuedMessage.objects.exists()


# ---- ordered queues


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


@pytest.mark.parametrize("form", [fails, fails_inside, rolls_back_inside, spoils_it, swallows])
@pytest.mark.parametrize("queue", ["line", "mail"])
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
    """PMQ-44: one that arrives meanwhile waits too; then the failed one goes first."""

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
    make_due(late)  # it is due, and the workers look
    if other:  # another key goes on meanwhile
        log.wait(1)
        assert log.order == [other.pk]
        until(lambda: stored(late).blocked_by == first.pk, "it is parked")
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
    """PMQ-45, PMQ-47 as changed: the attempts of the message, kept in its row over restarts."""
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
    """A dead one by default; when it is requeued, it goes first."""
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


def test_a_message_that_dies_stops_the_line_until_somebody_acts(
    start: Start, said: Said, log: Log
) -> None:
    """And what was claimed with it goes back, with no attempt used."""

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
    until(lambda: running.worker._stopping.is_set(), "it drains")
    gate.set()
    stopping.join(PATIENCE)
    found = [
        (name, data)
        for name, _, data in said.all
        if name.startswith("queue_") or name == "message_acked"
    ]
    assert [name for name, _ in found] == [
        "queue_assigned", "message_acked", "queue_caught_up", "message_acked", "queue_unassigned",
    ]  # fmt: skip
    [(queue, worker)] = {(d["queue"], d["worker"]) for name, d in found if name != "message_acked"}
    assert queue == "line"
    assert worker
    assert QueueState.objects.get(queue="line").owner is None


def test_a_line_moves_when_its_owner_drains(start: Start, said: Said, log: Log) -> None:
    """KAF-9, KAF-12: at once, and with what the first did not begin."""

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
    messages = [row() for _ in range(3)]
    make_due()
    log.wait(3)
    assert log.order == pks(*messages)
    assert said.count("queue_unassigned") == 1
    second.stop()


def test_a_line_of_a_host_that_is_gone_is_taken_when_its_lease_lapses(
    start: Start, said: Said, log: Log
) -> None:
    """KAF-9: what it had claimed is charged for the first, the others are given back."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    with second_connection() as other:
        lines.own(other.cursor(), queue="line", worker="gone", lease=1.0)
    messages = [row(leased=0.5, claimed_by="gone:1", attempts=1) for _ in range(3)]
    start()
    log.wait(3)
    assert log.order == pks(*messages)
    assert [a.message_id for a in FailedAttempt.objects.all()] == [messages[0].pk]


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


def test_rows_that_others_wrote_come_into_the_line(start: Start, log: Log) -> None:
    """By SQL, and from before the queue was ordered; unrouted, and parked by their key."""

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


def test_a_queue_that_becomes_ordered_waits_for_what_is_in_flight(
    start: Start, said: Said, log: Log
) -> None:
    """Claimed by a worker that does not know of the line, by key or not."""

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


def test_a_paused_line_stands_still(start: Start, said: Said, log: Log) -> None:
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


def test_handlers_of_every_kind_share_a_line(start: Start, log: Log) -> None:
    """In order of ids all the same: a thread, the loop and a batch wait for each other."""

    def run(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    @handler("a.atomic", queue="line", name="atomic")
    def atomic(delivery: Delivery) -> None:
        run(delivery)

    @handler("a.unbound", queue="line", name="unbound", atomic=False)
    def nonatomic(delivery: Any) -> None:
        with delivery.finish():
            run(delivery)

    @handler("a.coroutine", queue="line", name="coroutine")
    async def coroutine(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            await asyncio.sleep(0.001)

    @handler("a.batch", queue="line", name="batch", batch=True)
    def batch(deliveries: list[Delivery]) -> None:
        with log.running("line", *(each.id for each in deliveries)):
            pass

    dice = random.Random(3)
    names = [dice.choice(("atomic", "unbound", "coroutine", "batch")) for _ in range(60)]
    messages = [row(handler=name, type=f"a.{name}") for name in names]
    start(threads=3)
    log.wait(60)
    assert log.order == pks(*messages)
    assert log.overlaps == []


def test_an_unrouted_message_of_a_line_is_split_into_it(start: Start, log: Log) -> None:
    """The first handler gets it at its place, the others at the end."""
    for name in ("one", "two"):

        @handler("a.b", queue="line", name=name)
        def function(delivery: Delivery) -> None:
            with log.running("line", delivery.id):
                pass

    first = row(handler="", type="a.b")
    second = row(handler="one", type="a.b")
    start(until_empty=True).join()
    assert log.order[:2] == pks(first, second)
    assert len(log.order) == 3
    assert log.overlaps == []


def test_without_the_right_to_end_a_frozen_owner_the_line_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once, and the worker goes on with its other work."""
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
            frozen.autocommit = False
            lock(frozen, message.pk)
            poor.execute("set role mq_test_poor")
            ordered_queues = OrderedQueues("me", ["line"], on_owned=lambda: None)
            ordered_queues.tend(poor.cursor())
            assert ordered_queues.owned == {"line"}
            ordered_queues._turn_at = 0.0
            ordered_queues.tend(poor.cursor())
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
    """Guarantee 9: its effects are rolled back, and the line goes on."""

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    caplog.set_level(logging.WARNING, "django_mq")
    message = row(leased=-1, claimed_by="gone:1", attempts=1)
    behind = row()
    with second_connection() as frozen:
        lines.own(frozen.cursor(), queue="line", worker="gone", lease=-1.0)
        frozen.autocommit = False
        lock(frozen, message.pk)
        start()
        log.wait(2)
        with pytest.raises(psycopg.OperationalError):
            frozen.execute("select 1")
    assert log.order == pks(message, behind)
    assert any(getattr(record, "event", "") == "owner_frozen" for record in caplog.records)


# ---- keys


def test_keys_overlap_and_messages_of_a_key_do_not(start: Start) -> None:
    """KAF-2: two keys wait for each other, so they run at once; one key never meets itself."""
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


def test_followers_of_one_that_failed_go_back_uncharged(start: Start, said: Said, log: Log) -> None:
    """PMQ-43: their attempt is refunded; they are blocked by it, and free when it is done."""

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
def test_a_blocked_line_goes_on_when_its_head_is_gone(start: Start, log: Log, end: str) -> None:
    """Without a chore: what removed it has freed the next, and rung."""

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
    """What was parked behind it while it was held has its turn when it got a handler."""
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
    """It cannot run here: what was claimed with it goes back, uncharged."""

    @handler("#", queue=queue, name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.id):
            pass

    given = {"ordered": queue == "line", "key": None if queue == "line" else "k", "handler": "h"}
    first = add(queue, **given)
    newer = add(queue, schema_version=2, **given)
    behind = [add(queue, **given) for _ in range(3)]
    other = keyed("other") if queue == "mail" else None
    start(until_empty=True, threads=8).join()  # so that one claim takes them all
    assert sorted(log.order) == pks(first, *([other] if other else []))
    assert stored(newer).held_since is not None
    assert [stored(m).attempts for m in behind] == [0, 0, 0]
    QueuedMessage.objects.filter(pk=newer.pk).update(schema_version=1)
    make_due(newer)
    start(until_empty=True, threads=8).join()
    assert log.order[-4:] == pks(newer, *behind)


KINDS: dict[str, dict[str, Any]] = {
    "atomic": {},
    "unbound": {"atomic": False},
    "finish": {"atomic": False},
    "batch": {"batch": True},
    "coroutine": {},
    "afinish": {},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [2, 100])
def test_every_kind_of_handler_keeps_keys_in_order(
    start: Start, log: Log, kind: str, slots: int
) -> None:
    """Guarantee 8, KAF-5: a quarter of the messages fails at first, in three threads and a loop.

    A batch that fails is tried again by policy, message by message.
    """

    def fail(delivery: Delivery) -> None:
        if delivery.id % 4 == 0 and delivery.attempt == 1:
            raise ValueError

    options: dict[str, Any] = {**KINDS[kind], "queue": "mail", "name": "h", "retry": AT_ONCE}
    if kind == "batch":

        @handler("#", **options)
        def batch(deliveries: list[Delivery]) -> None:
            with contextlib.ExitStack() as stack:
                for each in {each.key for each in deliveries}:
                    ids = [one.id for one in deliveries if one.key == each]
                    stack.enter_context(log.running(str(each), *ids))
                for one in deliveries:
                    fail(one)

    elif kind in ("coroutine", "afinish"):

        @handler("#", **options)
        async def coroutine(delivery: Any) -> None:
            with log.running(delivery.key, delivery.id):
                await asyncio.sleep(0.001)
                fail(delivery)
                if kind == "afinish":
                    await delivery.afinish(lambda: None)

    else:

        @handler("#", **options)
        def plain(delivery: Any) -> None:
            with log.running(delivery.key, delivery.id):
                fail(delivery)
                if kind == "finish":
                    with delivery.finish():
                        pass

    expected: dict[str, list[int]] = defaultdict(list)
    for message in add_all({"handler": "h", "key": f"k{n % 5}"} for n in range(60)):
        expected[str(message.key)].append(message.pk)
    start(threads=3, async_slots=slots)
    until(empty, f"not all are done: {log.done}")
    # What finishes by itself is gone before its handler has ended.
    until(lambda: sum(map(len, log.done.values())) == 60, f"not all have ended: {log.done}")
    assert log.done == expected
    assert log.overlaps == []
    assert FailedAttempt.objects.count() == 15


def test_coroutines_of_different_keys_run_at_once(start: Start) -> None:
    """Each waits for all the others: one after another they would never end."""
    arrived: set[str | None] = set()
    everybody: asyncio.Event | None = None

    @handler("#", queue="mail", name="h", timeout=PATIENCE)
    async def h(delivery: Delivery) -> None:
        nonlocal everybody
        everybody = everybody or asyncio.Event()
        arrived.add(delivery.key)
        if len(arrived) == 10:
            everybody.set()
        await everybody.wait()

    for n in range(30):
        keyed(f"k{n % 10}")
    start(until_empty=True).join()
    assert empty()
    assert not FailedAttempt.objects.exists()


@pytest.mark.parametrize("slots", [1, 3])
def test_keys_never_take_more_slots_than_there_are(start: Start, log: Log, slots: int) -> None:
    """NSQ-23: what waits for its key will need a slot, too."""

    @handler("#", queue="mail", name="h")
    async def h(delivery: Delivery) -> None:
        with log.running(str(delivery.key), delivery.id):
            await asyncio.sleep(0)

    keys = (key for n in range(60) for key in (f"k{n % 7}", None))
    add_all({"handler": "h", "key": key} for key in keys)
    start(async_slots=slots)
    until(empty, "all are done")
    assert log.most <= slots
    assert len(log.order) == 120
    assert all(ids == sorted(ids) for key, ids in log.done.items() if key != "None")


class Conflict(OperationalError):
    """A deadlock, as Django raises it."""

    def __init__(self) -> None:
        super().__init__("deadlock detected")
        self.__cause__ = psycopg.errors.DeadlockDetected("deadlock detected")


def test_a_victim_of_a_deadlock_is_not_overtaken(start: Start, log: Log) -> None:
    """It runs again before what follows it in its key, also when that is to run again, too."""
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
    """With a window of 5 everything is parked at some time; two workers."""
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


@pytest.mark.parametrize("count", [1, 20, 200])
def test_bulk_keeps_the_order_of_a_list(start: Start, log: Log, count: int) -> None:
    """One statement or COPY: ids rise in the order of the list."""

    @handler("a.b", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with log.running(str(delivery.key), delivery.payload):
            pass

    with transaction.atomic():
        broadcast_many([Message("a.b", n, key=f"k{n % 3}") for n in range(count)])
        broadcast_many(Message("a.b", n, key=f"k{n % 3}") for n in range(count, 2 * count))
    start(threads=2)
    until(empty, "all are done")
    assert all(numbers == sorted(numbers) for numbers in log.done.values())
    assert len(log.order) == 2 * count


def test_commit_order_from_two_producers(start: Start, log: Log) -> None:
    """`key_order`: the one that commits second comes second, also when it wrote at once."""

    @handler("a.b", queue="commits", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.payload):
            pass

    turn = threading.Lock()
    committed: list[int] = []

    def produce(first: int) -> None:
        try:
            for n in range(first, 40, 2):
                with transaction.atomic():
                    broadcast("a.b", n, key="k")
                    with turn:  # nobody else holds the key: this is the order of commits
                        committed.append(n)
        finally:
            connections.close_all()

    start(threads=2)
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(produce, 0), pool.submit(produce, 1)]:
            call.result(PATIENCE)
    log.wait(40)
    assert log.order == committed


# ---- drain()


def test_drain_keeps_lines_in_order(log: Log) -> None:
    """In users' own tests as in a worker; a head that waits stops its line there, too."""
    for queue in ("line", "mail"):

        @handler(f"{queue}.#", queue=queue, name=queue, retry=LATER)
        def function(delivery: Delivery) -> None:
            with log.running(delivery.queue, delivery.id):
                if delivery.payload == "fails" and delivery.attempt == 1:
                    raise ValueError

    with transaction.atomic():
        sent = {
            queue: [
                broadcast(
                    f"{queue}.x",
                    "fails" if n == 1 else {},
                    priority=n,
                    key="k" if queue == "mail" else None,
                ).ids[0]
                for n in range(4)
            ]
            for queue in ("line", "mail")
        }
    assert drain(errors="keep").deliveries == 4
    assert log.done == {queue: ids[:1] for queue, ids in sent.items()}
    due()
    drain()
    assert log.done == sent
