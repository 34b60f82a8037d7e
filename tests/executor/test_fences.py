"""A message runs and settles only while its row is ours: locks and fences."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import pytest
from django.db import (
    OperationalError,
    connection,
    transaction,
)

from django_mq import handler
from django_mq.executor import simple_protocol, slice_body, slice_limits
from django_mq.messages import LONG_AGO, Delivery
from django_mq.models import FailedAttempt
from django_mq.store.limits import Limits
from tests.database import second_connection, until_blocked
from tests.rows import add, stored
from tests.slow import slow
from tests.worker.conftest import (
    Bench,
    add_many,
    attempts_of,
    effect,
    effects,
    fresh,
    ids,
    locked_first,
    mostly_fresh,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


def take_over(id: int) -> None:
    """Act as if the lease had lapsed and another worker had claimed it."""
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set claimed_by = 'other:1', attempts = attempts + 1"
            " where id = %s",
            [id],
        )


def test_a_message_taken_before_the_slice_does_not_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 4."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        effect(delivery)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    take_over(messages[1].pk)
    bench.run_all(tasks)
    assert ran == [messages[0].pk, messages[2].pk]
    assert waiting() == {messages[1].pk}
    assert stored(messages[1]).claimed_by == "other:1"
    assert [r.event for r in caplog.records if hasattr(r, "event")] == ["lease_lost"]
    assert sorted(bench.settled) == sorted(ids(messages))


@mostly_fresh
@pytest.mark.parametrize("how", ["deleted", "taken"])
@pytest.mark.parametrize("fails", [False, True], ids=["acks", "fails"])
def test_lease_lost_while_it_runs_takes_the_writes_along(
    bench: Bench, how: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock prevents it, unless the handler releases the locks, or writes to the row itself."""
    ran: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)
        effect(delivery)
        if delivery.payload != "lost":
            return
        with connection.cursor() as cursor:
            if how == "deleted":
                cursor.execute("delete from django_mq_queuedmessage where id = %s", [delivery.id])
            else:
                cursor.execute(
                    "update django_mq_queuedmessage set claimed_by = 'other:1' where id = %s",
                    [delivery.id],
                )
        if fails:
            raise ValueError

    messages = [
        add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "lost", "b"])
    ]
    bench.run_all(bench.claim())
    if fails:  # its change of the row was undone with the rest
        assert attempts_of(messages[1]) == ["ValueError"]
    else:
        assert "lease_lost" in [getattr(r, "event", "") for r in caplog.records]
    assert effects() == {messages[0].pk, messages[2].pk}
    assert waiting() == {messages[1].pk}
    assert sorted(set(bench.settled)) == sorted(ids(messages))


@locked_first
def test_locked_row_runs_in_a_later_slice(bench: Bench) -> None:
    """A renewal holds it for a moment: it is still ours, and runs in a later slice."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    with second_connection() as other:
        with other.transaction():
            other.execute(
                "select from django_mq_queuedmessage where id = %s for update", [messages[1].pk]
            )
            remainder = bench.run(tasks)
            assert [task.delivery.id for task in remainder.not_locked] == [messages[1].pk]
            assert (remainder.left, remainder.to_rerun) == ([], [])
        assert ran == [m.pk for m in messages if m is not messages[1]]
        assert waiting() == {messages[1].pk}
        bench.run_all(remainder.not_locked)
    assert ran[-1] == messages[1].pk
    assert waiting() == set()


@fresh
@pytest.mark.parametrize(
    ("writes", "ends"),
    [
        (True, "returns"),
        (True, "commit"),
        (False, "rollback"),
        (True, "close"),
        (False, "swallows"),
        *slow((False, "commit"), (True, "rollback"), (False, "close"), (True, "swallows")),
    ],
)
def test_writes_made_while_another_session_has_the_row_are_not_kept(
    bench: Bench, writes: bool, ends: str
) -> None:
    """It cannot use its connection then, so it can end no message; it runs again, uncharged."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: ran.append(0))
        if len(ran) == 1 and ends == "swallows":
            for _ in range(2):
                with contextlib.suppress(Exception):
                    effect(delivery)
        elif len(ran) == 1 and ends == "close":
            connection.close()
        elif len(ran) == 1 and ends != "returns":
            connection.connection.execute(ends)
        if writes:
            effect(delivery)

    message = add(handler="h")
    tasks = bench.claim()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        remainder = bench.run(tasks)
        assert (remainder.not_locked, remainder.left, remainder.to_rerun) == (tasks, [], [])
    assert (effects(), bench.settled) == (set(), [])
    bench.run_all(tasks)
    assert ran == [message.pk, message.pk, 0]
    assert effects() == ({message.pk} if writes else set())
    assert (waiting(), FailedAttempt.objects.count()) == (set(), 0)


@fresh
@pytest.mark.parametrize("made", ["key", "suspect", "old", "taken over"])
def test_messages_that_must_not_start_before_their_row_is_locked(bench: Bench, made: str) -> None:
    """However new the claim is; the same holds for messages claimed long ago."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        ran.append(1)

    add(handler="h", suspect=made == "suspect")
    tasks = bench.claim()
    if made == "key":
        tasks = [task._replace(line=("mail", "h", "k")) for task in tasks]
    elif made == "old":
        tasks[0].delivery._leased_at -= 501  # half of the lease of 1,000 s
    elif made == "taken over":
        tasks[0].delivery._leased_at = LONG_AGO
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        assert bench.run(tasks).not_locked == tasks
    assert ran == []


@fresh
def test_a_machine_that_has_just_started_has_old_leases_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock reads a few seconds: "never renewed" is not "renewed when it started"."""
    monkeypatch.setattr(slice_body, "lease_clock", lambda: 3.0)

    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        raise AssertionError("it runs without its lock")

    add(handler="h")
    tasks = bench.claim()
    tasks[0].delivery._leased_at = LONG_AGO
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        assert bench.run(tasks).not_locked == tasks


@fresh
def test_a_machine_that_sleeps_within_a_slice_makes_leases_old(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers may have taken the messages over meanwhile: they are locked first."""
    ran: list[int] = []
    wakes_at = slice_body.lease_clock() + 501  # half of the lease of 1,000 s

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        monkeypatch.setattr(slice_body, "lease_clock", lambda: wakes_at)

    first, second = add_many(2, handler="h")
    tasks = bench.claim()
    take_over(second.pk)
    bench.run(tasks)
    assert ran == [first.pk]


def test_a_handler_that_swallows_that_the_lock_was_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran in vain: the rest of its transaction cannot be committed."""
    ran: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        try:
            connection.cursor()
            ran.append("fine")
        except OperationalError as error:  # Django's error, like for everything a handler does
            ran.append(type(error).__name__)

    first, message = add_many(2, handler="h")
    before, *tasks = bench.claim()
    bench.run([before])
    monkeypatch.setattr(slice_limits, "Limits", partial(Limits, lock=0.05))
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage")
        remainder = bench.run(tasks)
        unfinished = (remainder.to_rerun, remainder.left)[:: 1 if bench.fresh else -1]
        assert (*unfinished, remainder.not_locked) == (tasks, [], [])
    assert ran == ["fine"] + ["OperationalError"] * bench.fresh
    bench.run_all(tasks)
    assert ran[1 + bench.fresh :] == ["fine"]
    assert (bench.settled, waiting()) == ([first.pk, message.pk], set())
    assert FailedAttempt.objects.count() == 0


def test_the_time_of_a_handler_does_not_run_while_its_row_is_not_locked(bench: Bench) -> None:
    """Another session holds the whole table for long, which is not the handler's fault.

    Other threads, which share the driver's connection, wait until it is free.
    """

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.id == message.pk:
            connection.cursor()

    before, message = add_many(2, handler="h")
    tasks = bench.claim()
    bench.run(tasks[:1])
    driver = bench.session.connect()
    pid = driver.info.backend_pid
    seen: list[list[int]] = []
    held: list[bool] = []

    def wait_for_it() -> None:
        other.execute("begin; lock table django_mq_queuedmessage")
        locked.set()
        until_blocked(pid)
        seen.append(bench.scoreboard.running())
        held.append(driver.lock.locked())
        other.execute("commit")

    locked = threading.Event()
    with second_connection() as other:
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert locked.wait(30)
        bench.run(tasks[1:])
        thread.join()
    begun = [message.pk] * bench.fresh  # the handler locked late is to blame for events from now on
    assert (seen, bench.settled) == ([begun], [before.pk, message.pk])
    assert held == [bench.fresh]


def test_a_shut_queue_and_a_locked_row_give_back_one_task(bench: Bench) -> None:
    """Each task comes back once, whatever prevents it."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    tasks = bench.claim()
    bench.stopped_queues["mail"] = None
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        remainder = bench.run(tasks)
    assert [*remainder.left, *remainder.not_locked, *remainder.to_rerun] == tasks


def test_the_answer_that_a_handler_takes_away(bench: Bench) -> None:
    """Through libpq's connection, kept from an earlier message: it runs again, behind the lock."""
    kept: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        for pgconn in kept:
            pgconn.exec_(b"select 1")
        effect(delivery)
        kept.append(connection.connection.pgconn)

    messages = add_many(2, handler="h")
    for task in bench.claim():
        bench.run_all([task])
    assert (effects(), waiting()) == (ids(messages), set())
    assert FailedAttempt.objects.count() == 0


@fresh
def test_a_wait_for_the_lock_that_is_interrupted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit may raise in the thread: it runs again, on a sound connection."""

    class TimeUp(Exception):
        pass

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if not interrupted:
            interrupted.append(TimeUp())
            for _ in range(2):  # no data passes from then on
                with pytest.raises(TimeUp):
                    connection.cursor()
        effect(delivery)

    def answers(driver: Any) -> Any:
        if len(interrupted) == 1:
            interrupted.append(None)
            raise interrupted[0]
        return plain(driver)

    interrupted: list[Any] = []
    plain = simple_protocol.results
    monkeypatch.setattr(simple_protocol, "results", answers)
    message = add(handler="h")
    bench.run_all(bench.claim())
    assert (effects(), bench.settled) == ({message.pk}, [message.pk])


@locked_first
def test_a_row_that_stays_locked_is_not_asked_for_without_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 16: with no other work it rests before the next try."""
    rests: list[bool] = []
    monkeypatch.setattr(bench.slices._outage, "wait_quietly", lambda: rests.append(True))

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    first, _ = add_many(2, handler="h")
    tasks = bench.claim()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [first.pk])
        remainder = bench.run(tasks)
        assert rests == []  # it had other work
        assert waiting() == {first.pk}
        bench.run(remainder.not_locked)
        assert rests == [True]
