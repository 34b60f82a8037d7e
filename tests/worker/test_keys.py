"""Order keys in a worker: messages that must not overtake, and messages that must not wait."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from django_mq import handler
from django_mq.executor import async_caller
from django_mq.executor.nonatomic import NonAtomic
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import claim_keyed as with_keys
from django_mq.store import claim_lapsed as lapsed
from django_mq.store.claim import Lane
from django_mq.testing import drain
from tests.database import second_connection
from tests.rows import add, pks, stored
from tests.store.conftest import lock
from tests.store.keyed import line_params
from tests.worker.conftest import PATIENCE, Bench, Said, Start, mostly_fresh

pytestmark = pytest.mark.django_db(transaction=True)


def keyed(key: str | None = "k", queue: str = "mail", **given: Any) -> QueuedMessage:
    return add(queue, **{"handler": "h", "key": key, **given})


@mostly_fresh
@pytest.mark.parametrize("why", ["locked", "expired"])
def test_batch_does_not_overtake_a_head_that_cannot_start(bench: Bench, why: str) -> None:
    """Guarantee 8: another session briefly locks the first of a key, or it has expired."""
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
    left = [task.delivery.id for task in (*remainder.left, *remainder.not_locked)]
    assert sorted(left) == [task.delivery.id for task in tasks[why == "expired" : 3]]


def claimed_with_keys(count: int) -> list[Any]:
    """Add `count` messages of one key, and claim the due ones."""
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


def test_line_behind_a_dead_head_delays_no_other_message(start: Start, settings: Any) -> None:
    """It is parked window by window without a pause: other messages are reached at once."""
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


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True}])
@pytest.mark.parametrize("first", [{"after": 3600, "attempts": 1}, {"dead": -1}])
def test_followers_of_a_failed_head_are_not_taken_over(
    line: dict[str, Any], first: dict[str, Any]
) -> None:
    """Guarantee 8: its worker vanished after the first failed, before it released the others."""
    add(**line, **first)
    behind = [add(**line, leased=-1, attempts=1) for _ in range(2)]
    with second_connection() as other:
        found = lapsed.claim_lapsed(
            other.cursor(), queues=["mail"], claimer="me:8", lease=30.0, limit=10, max_bytes=1000
        )
    assert (found.taken, found.dead, found.released) == ([], [], 2)
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
    """The message comes between a claim's two statements, while the first of the line is locked."""
    first, second = keyed(), keyed()
    came = keyed(None, after=-1000)
    with second_connection() as somebody, somebody.transaction():
        lock(somebody, first.pk)
        with second_connection() as other:
            params = line_params(("mail", "h", "k", 1))
            found = other.cursor().execute(with_keys.CLAIM_LINES, params)
            assert [row[0] for row in found] == [came.pk]
    assert stored(second).attempts == 0


def test_failed_executor_releases_the_followers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 8: its messages keep their leases, so nothing of their lines may start."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    first, second, third = keyed(), keyed(), keyed()
    real = NonAtomic.run

    def run(self: NonAtomic, tasks: Any) -> bool:
        if tasks[0].delivery.id == first.pk:
            raise ZeroDivisionError("a bug of ours")
        return real(self, tasks)

    monkeypatch.setattr(NonAtomic, "run", run)
    start(until_empty=True).join()
    assert ran == []
    assert [m.attempts for m in map(stored, (first, second, third))] == [1, 0, 0]


def test_max_messages_does_not_count_released_messages(start: Start) -> None:
    """It is behind one that cannot run here; a worker counts only the work that it did."""
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


def test_max_messages_does_not_count_held_messages(start: Start) -> None:
    """Otherwise a job of a few messages would end without running any."""
    ran: list[int] = []

    @handler("known", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    for n in range(3):
        add(handler="", type="nobody.knows", after=-60 + n)
    known = [add(handler="h", type="known", after=-30 + n).pk for n in range(4)]
    start(until_empty=True, max_messages=3).join()
    assert ran == known[:3]


def test_max_messages_counts_a_routed_message_once(start: Start) -> None:
    """It is claimed again, in the line of its handler."""
    ran: list[int] = []
    for name in ("a", "b"):

        @handler("#", queue="mail", name=name)
        def h(delivery: Delivery) -> None:
            ran.append(delivery.id)

    keyed(handler="")
    start(until_empty=True, max_messages=2).join()
    assert len(ran) == 2
    assert not QueuedMessage.objects.exists()


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


def test_a_runner_that_fails_keeps_no_lease(
    start: Start, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Otherwise the lease would be renewed for ever, and its line blocked for as long."""

    @handler("#", queue="mail", name="h")
    async def h(delivery: Delivery) -> None: ...

    def ended(*args: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(async_caller, "leased_call", ended)
    messages = [keyed(), keyed()]
    start(until_empty=True, threads=4).join()
    assert [m.attempts for m in map(stored, messages)] == [1, 0]


def test_a_small_claim_passes_by_a_line_that_is_being_claimed() -> None:
    """Otherwise workers with room for a single message would block each other."""
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
