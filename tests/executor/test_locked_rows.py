"""A lazy transaction meets rows that another session has locked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from django_mq import handler
from django_mq.executor import settlement
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from tests.database import second_connection, until_blocked
from tests.rows import add, stored
from tests.store.keyed import take_open
from tests.worker.conftest import PATIENCE, Bench, add_many, effect, effects, pid_of, waiting

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("make_bench", ["fresh"], indirect=True),
]


@contextlib.contextmanager
def row_locked(id: int) -> Iterator[psycopg.Connection[Any]]:
    """Another session has the row of a message within the block."""
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [id])
        yield other


def test_a_user_waits_for_a_renewal_that_has_its_row(bench: Bench) -> None:
    """Otherwise a long handler would run twice in vain."""
    released = threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.id == message.pk:
            threading.Thread(target=let_go).start()
        effect(delivery)

    def let_go() -> None:
        until_blocked(pid)
        released.set()

    before, message = add_many(2, handler="h")
    first, *tasks = bench.claim()
    bench.run([first])
    pid = pid_of(bench)
    with second_connection() as other:
        held = threading.Event()

        def hold() -> None:
            with other.transaction():
                other.execute(
                    "select from django_mq_queuedmessage where id = %s for update", [message.pk]
                )
                held.set()
                assert released.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(PATIENCE)
        remainder = bench.run(tasks)
        thread.join()
    # The wait is limited to half a second, which a busy machine may need for itself.
    if remainder.not_locked:
        bench.run_all(remainder.not_locked)
    assert effects() == {before.pk, message.pk}
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("swallows", [True, False])
def test_a_user_whose_row_another_session_keeps_runs_again_uncharged(
    bench: Bench, swallows: bool
) -> None:
    ran: list[int] = []
    errors: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        for _ in range(2 if len(ran) == 1 else 1):  # no data passes, however often it is tried
            try:
                effect(delivery)
            except Exception as error:
                errors.append(str(error))
                if not swallows:
                    raise

    message, after = add_many(2, handler="h")
    tasks = bench.claim()
    with row_locked(message.pk):
        remainder = bench.run(tasks)
        assert remainder.not_locked == tasks[:1]
        assert remainder.left == tasks[1:]
        assert (effects(), ran) == (set(), [message.pk])
    bench.run_all([*remainder.left, *remainder.not_locked])
    assert effects() == {message.pk, after.pk}
    assert ran.count(message.pk) == 2
    assert len(errors) == (2 if swallows else 1)
    assert all("another session has locked or removed" in error for error in errors)
    assert FailedAttempt.objects.count() == 0


def test_a_row_that_cannot_be_locked_joins_a_later_slice(bench: Bench) -> None:
    """It has not started when a neighbour uses the connection; that neighbour is done."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        effect(delivery)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    with row_locked(messages[1].pk):
        remainder = bench.run(tasks)
        assert (remainder.not_locked, remainder.left, remainder.to_rerun) == ([tasks[1]], [], [])
        assert effects() == {messages[0].pk, messages[2].pk}
    bench.run_all(remainder.not_locked)
    assert ran == [messages[0].pk, messages[2].pk, messages[1].pk]


def test_a_locked_row_of_one_that_used_nothing_is_waited_for(bench: Bench) -> None:
    """Its neighbours are settled in the meantime; it does not run again."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    bench.session.connect()
    pid = pid_of(bench)
    with second_connection() as other:
        other.execute("begin")
        other.execute(
            "select from django_mq_queuedmessage where id = %s for update", [messages[1].pk]
        )
        thread = threading.Thread(target=lambda: (until_blocked(pid), other.execute("commit")))
        thread.start()
        bench.run_all(tasks)
        thread.join()
    assert waiting() == set()
    assert ran == [m.pk for m in messages]
    assert sorted(bench.settled) == ran


def test_a_row_that_stays_locked_does_not_hold_the_executor_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After several waits of half a second its lease is left to lapse; nothing is charged here."""
    monkeypatch.setattr(settlement, "MAX_CONFLICTS", 1)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    messages = add_many(2, handler="h")
    tasks = bench.claim()
    with row_locked(messages[0].pk):
        remainder = bench.run(tasks)
    assert (remainder.left, remainder.to_rerun, remainder.not_locked) == ([], [], [])
    assert waiting() == {messages[0].pk}
    assert sorted(bench.settled) == [m.pk for m in messages]
    assert FailedAttempt.objects.count() == 0
    assert stored(messages[0]).claimed_by is not None


def test_once_the_drain_is_over_a_locked_row_is_tried_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lapses; the process does not outlive its time for it."""
    tries: list[int] = []
    write = settlement.Settlement._write
    monkeypatch.setattr(
        settlement.Settlement,
        "_write",
        lambda self, ended, *a, **k: (tries.append(len(ended)), write(self, ended, *a, **k))[1],
    )

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        bench.stopping.set()

    message = add(handler="h")
    tasks = bench.claim()
    with row_locked(message.pk):
        bench.run(tasks)
    assert tries == [1]
    assert waiting() == {message.pk}
    assert FailedAttempt.objects.count() == 0


def test_ack_locks_heads_by_id_as_a_claim_that_parks_does(bench: Bench) -> None:
    """In the order of the table, which a small one is read in, the two could deadlock."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        """Do nothing."""

    first, second = add(handler="h", key="a", after=-10), add(handler="h", key="b", after=-60)
    with second_connection() as claiming, claiming.transaction():
        tasks = [bench.task(row) for row in take_open(claiming.cursor()).rows]
    # The claim also wrote them in this order.
    assert [task.delivery.id for task in tasks] == [second.pk, first.pk]
    bench.session.connect()
    pid = pid_of(bench)
    one = "select id from django_mq_queuedmessage where id = %s for key share nowait"
    seen: list[Any] = []
    with second_connection() as other, second_connection() as third:
        other.execute("vacuum (analyze) django_mq_queuedmessage")
        other.execute("begin")
        other.execute(one, [first.pk])

        def look() -> None:
            try:
                until_blocked(pid)
                with contextlib.suppress(psycopg.errors.LockNotAvailable):
                    seen.extend(third.execute(one, [second.pk]).fetchall())
            finally:
                other.execute("rollback")

        looking = threading.Thread(target=look)
        looking.start()
        bench.run_all(tasks)
        looking.join()
    assert seen == [(second.pk,)]
    assert waiting() == set()


def test_ack_waits_for_a_claim_that_parks_followers(make_bench: Any) -> None:
    """Such a claim briefly locks the head of the line. Otherwise the whole slice runs again."""
    ran: list[int] = []
    seconds = 0.02
    bench = make_bench(slice_seconds=seconds)  # its statements wait for locks half that long

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    for key in "ab":
        add(handler="h", key=key)
    with second_connection() as claiming, claiming.transaction():
        tasks = [bench.task(row) for row in take_open(claiming.cursor()).rows]
    bench.session.connect()
    pid = pid_of(bench)
    with second_connection() as other:
        other.execute("begin")
        other.execute("select from django_mq_queuedmessage for key share")

        def let_go() -> None:
            until_blocked(pid, seconds=5 * seconds)
            other.execute("rollback")

        letting_go = threading.Thread(target=let_go)
        letting_go.start()
        remainder = bench.run(tasks)
        letting_go.join()
    assert remainder.to_rerun == []
    if remainder.left:
        bench.run_all(remainder.left)
    assert sorted(ran) == sorted(task.delivery.id for task in tasks)
    assert waiting() == set()
