"""What a hostile reader found in lines: each of these once went wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.store import claim, lapsed
from django_mq.store import keyed as with_keys
from django_mq.store.claim import Lane
from django_mq.testing import drain
from django_mq.worker import aio, ownership, terms
from django_mq.worker.database import Statements
from django_mq.worker.shut import Shut
from django_mq.worker.unbound import Unbound
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.store.conftest import lock
from tests.worker.conftest import PATIENCE, Bench, Running, Said, proxied
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]

LATER = RetryPolicy(max_attempts=50, backoff=fixed(3600))


def keyed(key: str | None = "k", queue: str = "mail", **given: Any) -> QueuedMessage:
    return add(queue, **{"handler": "h", "key": key, **given})


def pks(*messages: QueuedMessage) -> list[int]:
    return [message.pk for message in messages]


@pytest.mark.parametrize("why", ["locked", "expired"])
def test_a_batch_does_not_overtake_what_cannot_start(bench: Bench, why: str) -> None:
    """Guarantee 8: the first of a key is locked by somebody for a moment, or expired."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        ran.extend(delivery.id for delivery in deliveries)

    tasks = [bench.task(row) for row in claimed_with_keys(3)]
    other = keyed("other")
    tasks += [bench.task(row) for row in claimed_with_keys(0)]
    first = tasks[0].delivery.id
    with second_connection() as somebody, somebody.transaction():
        if why == "locked":
            lock(somebody, first)
        else:
            QueuedMessage.objects.filter(pk=first).update(expires_at="2000-01-01 00:00Z")
        remainder = bench.run(tasks)
    assert ran == [other.pk]
    left = [task.delivery.id for task in (*remainder.left, *remainder.locked)]
    assert sorted(left) == [task.delivery.id for task in tasks[why == "expired" : 3]]


def claimed_with_keys(count: int) -> list[Any]:
    """Add `count` messages of one key, and claim what is due."""
    for _ in range(count):
        keyed()
    with second_connection() as other, other.transaction():
        return with_keys.claim(
            other.cursor(),
            lanes=[Lane("mail", 0)],
            claimer="bench:1",
            lease=60.0,
            limit=100,
            max_bytes=1 << 20,
            skip_dead=False,
        ).rows


def test_a_line_behind_a_dead_head_delays_nobody(start: Start, settings: Any) -> None:
    """It is parked window by window without a pause: others are reached at once."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600}
    done = threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        done.set()

    keyed(dead=-100)
    with second_connection() as other:
        other.execute(
            "insert into django_mq_queuedmessage"
            " (queue, type, handler, key, payload, processable_after)"
            " select 'mail', 'a', 'h', 'k', '{}', now() - interval '1 h'"
            "   from generate_series(1, 5000)"
        )
    keyed("other", after=-1)
    start()
    assert done.wait(PATIENCE)


def test_statements_see_what_was_committed_before_them(transactional_db: None) -> None:
    """Guarantee 17: whatever level the alias has, a snapshot must follow a lock."""
    options = connection.settings_dict["OPTIONS"]
    before = dict(options)
    options["isolation_level"] = psycopg.IsolationLevel.REPEATABLE_READ
    statements = Statements("default")
    try:
        cursor = statements.cursor()
        with statements.transaction():
            cursor.execute("select count(*) from django_mq_queuedmessage")
            assert cursor.fetchone() == (0,)
            with second_connection() as other:
                other.execute(
                    "insert into django_mq_queuedmessage (queue, type, payload)"
                    " values ('mail', 'a', '{}')"
                )
            cursor.execute("select count(*) from django_mq_queuedmessage")
            assert cursor.fetchone() == (1,)
    finally:
        statements.close()
        options.clear()
        options.update(before)


def test_a_locked_decision_about_a_line_stops_no_other_queue(start: Start, settings: Any) -> None:
    """Who froze in a claim of the line, or pauses it in a long transaction."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    ran: list[int] = []
    done = threading.Event()

    @handler("#", queue="mail", queues=("mail", "line"), name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        done.set()

    decide("line")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate where queue = 'line' for update")
        message = add(handler="h")
        start()
        assert done.wait(5.0)
    assert ran == [message.pk]


def test_an_owner_that_is_told_nothing_keeps_its_line(
    start: Start, settings: Any, said: Said
) -> None:
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    done = threading.Event()

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        done.set()

    start()
    said.wait("queue_assigned")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate where queue = 'line' for update")
        add("line", handler="h", ordered=True)
        other.execute("notify django_mq")
        assert not done.wait(2.0)  # longer than a turn
    assert done.wait(PATIENCE)
    assert said.count("queue_unassigned") == 0


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True}])
@pytest.mark.parametrize("first", [{"after": 3600, "attempts": 1}, {"dead": -1}])
def test_what_was_behind_a_failed_first_is_not_taken_over(
    line: dict[str, Any], first: dict[str, Any]
) -> None:
    """Guarantee 8: its worker vanished after the first failed, before it gave the others back."""
    add(**line, **first)
    behind = [add(**line, leased=-1, attempts=1) for _ in range(2)]
    with second_connection() as other:
        found = lapsed.claim_lapsed(
            other.cursor(), queues=["mail"], claimer="me:8", lease=30.0, limit=10, max_bytes=1000
        )
    assert found == ([], [])
    assert [(m.attempts, m.leased_until) for m in map(stored, behind)] == [(0, None)] * 2
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True}])
def test_a_dead_first_that_is_passed_does_not_keep_others_from_being_taken_over(
    line: dict[str, Any],
) -> None:
    add(**line, dead=-1)
    behind = [add(**line, leased=-1, attempts=1) for _ in range(2)]
    with second_connection() as other:
        found = lapsed.claim_lapsed(
            other.cursor(),
            queues=["mail"],
            claimer="me:8",
            lease=30.0,
            limit=10,
            max_bytes=1000,
            skip_dead=True,
        )
    assert [row.id for row in found.taken] == pks(behind[0])


def test_a_line_is_not_mixed_up_with_a_message_that_came_meanwhile() -> None:
    """Between the two statements of a claim; the first of the line is locked at that moment."""
    first, second = keyed(), keyed()
    came = keyed(None, after=-1000)
    with second_connection() as somebody, somebody.transaction():
        lock(somebody, first.pk)
        with second_connection() as other:
            found = other.cursor().execute(
                with_keys.CLAIM_LINES,
                {
                    **claim.lane_columns([Lane("mail", 0)]),
                    "limit": 100,
                    "window": 1000,
                    "skip_dead": False,
                    "admitted": False,
                    "line_queues": ["mail"],
                    "line_handlers": ["h"],
                    "line_keys": ["k"],
                    "line_places": [1],
                    "claimer": "me:1",
                    "lease": 30.0,
                    "bytes": 1 << 20,
                },
            )
            assert [row[0] for row in found] == [came.pk]
    assert stored(second).attempts == 0


def test_an_executor_that_fails_gives_back_what_is_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 8: what it had keeps its lease, so nothing of its line may start."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    first, second, third = keyed(), keyed(), keyed()
    real = Unbound.run

    def run(self: Unbound, task: Any) -> bool:
        if task.delivery.id == first.pk:
            raise ZeroDivisionError("a bug of ours")
        return real(self, task)

    monkeypatch.setattr(Unbound, "run", run)
    start(until_empty=True).join()
    assert ran == []
    assert [m.attempts for m in map(stored, (first, second, third))] == [1, 0, 0]


def test_max_messages_does_not_count_what_goes_back(start: Start) -> None:
    """Behind one that cannot run here: the worker does not end for what it did not do."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    keyed(handler="unknown")
    for _ in range(4):
        keyed(handler="unknown")
    others = [keyed("other", after=-1) for _ in range(3)]
    start(until_empty=True, threads=8, max_messages=5).join()
    assert ran == pks(*others)


def test_an_owner_that_is_busy_lets_its_line_go(start: Start, settings: Any, said: Said) -> None:
    """PMQ-44: a line does not wait for a long message of another queue."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    gate, done = threading.Event(), threading.Event()
    started = threading.Event()

    @handler("#", queue="mail", name="long", timeout=PATIENCE * 2)
    def long(delivery: Delivery) -> None:
        started.set()
        gate.wait(PATIENCE)

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        done.set()

    try:
        start()
        said.wait("queue_assigned")
        add(handler="long")
        with second_connection() as other:
            other.execute("notify django_mq")
            assert started.wait(PATIENCE)
            start(queues=["line"])
            other.execute("select pg_sleep(1.2)")
            add("line", handler="h", ordered=True)
            other.execute("notify django_mq")
        assert done.wait(8.0)
    finally:
        gate.set()


def test_drain_gets_past_a_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_keys, "WINDOW", 5)
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    keyed(dead=-100)
    for _ in range(12):
        keyed()
    other = keyed("other", after=-1)
    drain()
    assert ran == [other.pk]


def test_what_could_not_be_sorted_does_not_overtake_what_failed_meanwhile(
    start: Start, settings: Any, said: Said
) -> None:
    """Guarantee 8: the connection is lost when the second, which has no handler yet, is split."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    ran: list[int] = []

    @handler("#", queue="line", name="h", retry=LATER)
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        raise ValueError

    first = add("line", handler="h", ordered=True)
    second = add("line", ordered=True)
    proxy = Proxy(connection.get_connection_params())
    proxy.cut_at("with original as", arrives=False)
    try:
        with proxied(proxy):
            running = start(threads=8)
            said.wait("message_retried")
            with second_connection() as other:
                for _ in range(300):
                    if said.count("message_retried") > 1 or stored(second).attempts == 0:
                        break
                    other.execute("select pg_sleep(0.01)")
            running.stop()
    finally:
        proxy.close()
    assert proxy.cuts == 1
    assert ran == [first.pk]
    assert (stored(second).attempts, stored(second).leased_until) == (0, None)


def test_a_batch_of_a_queue_that_was_shut_does_not_start(bench: Bench) -> None:
    """Another thread's message failed since the batch was taken from the hand."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        ran.extend(delivery.id for delivery in deliveries)

    for _ in range(3):
        add(handler="h")
    tasks = bench.claim()
    bench.slices._shut = shut = Shut()
    shut.queue("mail")
    assert bench.run(tasks).left == tasks
    assert ran == []


def test_a_runner_that_fails_keeps_no_lease(
    start: Start, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Else it would be renewed for ever, and its line stand still for as long."""

    @handler("#", queue="mail", name="h")
    async def h(delivery: Delivery) -> None: ...

    def ended(*args: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(aio, "ended_unbound", ended)
    messages = [keyed(), keyed()]
    start(until_empty=True, threads=4).join()
    assert [m.attempts for m in map(stored, messages)] == [1, 0]


def test_a_small_claim_passes_by_a_line_that_is_being_claimed() -> None:
    """Else workers that have room for one message each stand still beside each other."""
    first = keyed("a")
    second = keyed("b")
    with second_connection() as somebody, somebody.transaction():
        assert claimed(somebody.cursor(), limit=1) == pks(first)
        with second_connection() as other, other.transaction():
            assert claimed(other.cursor(), limit=1) == pks(second)


def claimed(cursor: psycopg.Cursor[Any], *, limit: int) -> list[int]:
    taken = with_keys.claim(
        cursor,
        lanes=[Lane("mail", 0)],
        claimer="me:1",
        lease=60.0,
        limit=limit,
        max_bytes=1 << 20,
        skip_dead=False,
    )
    return [row.id for row in taken.rows]


def test_a_worker_without_room_keeps_what_it_owns(start: Start, settings: Any, said: Said) -> None:
    """However long its poll interval: who lets its lease lapse is taken for frozen."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "QUEUES": {"line": {"ordered": True}}}
    gate, started = threading.Event(), threading.Event()

    @handler("#", queue="mail", name="h", timeout=PATIENCE * 2)
    def h(delivery: Delivery) -> None:
        started.set()
        gate.wait(PATIENCE)

    try:
        for _ in range(3):
            add(handler="h")
        start()
        assert started.wait(PATIENCE)
        said.wait("queue_assigned")
        seen = set()
        with second_connection() as other:
            for _ in range(1000):
                seen.add(QueueState.objects.get(queue="line").owned_until)
                if len(seen) > 3:
                    break
                other.execute("select pg_sleep(0.01)")
    finally:
        gate.set()
    assert len(seen) > 3  # it was renewed again and again


def test_a_drain_keeps_the_line_of_what_still_runs(
    start: Start, settings: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PMQ-44: the next owner would take it for frozen, and end its transaction."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(ownership, "LEASE", 1.0)
    monkeypatch.setattr(ownership, "TURN", 0.2)
    monkeypatch.setattr(terms, "OWNER_LEASE", 1.0)
    gate, started = threading.Event(), threading.Event()
    ran: list[int] = []

    @handler("#", queue="line", name="h", timeout=PATIENCE * 2)
    def h(delivery: Delivery) -> None:
        started.set()
        ran.append(delivery.id)
        gate.wait(PATIENCE)

    message = add("line", handler="h", ordered=True)
    first = start()
    try:
        assert started.wait(PATIENCE)
        stopping = threading.Thread(target=first.stop)
        stopping.start()
        start()
        with second_connection() as other:
            other.execute("select pg_sleep(2.5)")  # two leases
    finally:
        gate.set()
    stopping.join(PATIENCE)
    assert ran == [message.pk]
    assert FailedAttempt.objects.count() == 0
    said.wait("queue_assigned", 2)
    assert not QueuedMessage.objects.exists()
