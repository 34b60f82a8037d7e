"""Handlers outside a transaction, in an executor's thread: leases, finish(), extend(), zombies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connection, connections, transaction
from django.utils import timezone

from django_mq import LeaseLost, Reject, Retry, RetryPolicy, Snooze, fixed, handler
from django_mq.conf import get_settings
from django_mq.executor.connections import plain_connection
from django_mq.executor.nonatomic import NonAtomic
from django_mq.executor.retry_policies import policies
from django_mq.executor.scoreboard import ExecutorEntries, Scoreboard
from django_mq.executor.session import Session
from django_mq.executor.settlement import Settlement
from django_mq.models import FailedAttempt
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import (
    PATIENCE,
    Bench,
    Said,
    ShortOutage,
    attempts_of,
    effect,
    effects,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


class NonAtomicBench(Bench):
    """One executor's `NonAtomic`, in the thread of the test."""

    def __init__(self) -> None:
        self.fresh = False
        self.wrapper = plain_connection(DEFAULT_DB_ALIAS)
        self.scoreboard = Scoreboard(200)
        self.settled: list[int] = []
        self.back: list[bool] = []
        self._claims = 0
        self.session = Session(self.wrapper)
        outage, policy = ShortOutage(threading.Event()), policies(get_settings())
        self.nonatomic = NonAtomic(
            self.session,
            entries=ExecutorEntries(self.scoreboard, 0, 200),
            outage=outage,
            policy=policy,
            settlement=Settlement(self.session, outage=outage, policy=policy, lease=60.0),
            settled=self._settled,
            lease=lambda queue: 60.0,
        )

    def go(self) -> list[bool]:
        """Claim what is due and run it; return whether each was started."""
        return [self.nonatomic.run(task) for task in self.claim()]


@pytest.fixture
def nonatomic(transactional_db: None) -> Iterator[NonAtomicBench]:
    before = connections[DEFAULT_DB_ALIAS]
    bench = NonAtomicBench()
    connections[DEFAULT_DB_ALIAS] = bench.wrapper
    yield bench
    bench.wrapper.close()
    connections[DEFAULT_DB_ALIAS] = before


def on(**options: Any) -> Callable[[Any], Any]:
    return handler("#", queue="mail", name="h", atomic=False, **options)


def take_over(id: int) -> None:
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set claimed_by = 'other:1', attempts = attempts + 1,"
            " leased_until = now() + interval '1 h' where id = %s",
            [id],
        )


def test_runs_outside_any_transaction_and_is_acked(nonatomic: NonAtomicBench, said: Said) -> None:
    @on()
    def h(delivery: Any) -> None:
        assert not connection.in_atomic_block
        effect(delivery)
        assert effects() == {delivery.id}  # committed at once

    message = add(handler="h")
    assert nonatomic.go() == [True]
    assert waiting() == set()
    assert nonatomic.settled == [message.pk]
    assert nonatomic.back == [False]
    assert [name for name, _, _ in said.all] == ["message_started", "message_acked"]


def test_a_failure_keeps_what_was_written(nonatomic: NonAtomicBench) -> None:
    """It may run more than once: documented, and so the retry is told apart."""

    @on(retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Any) -> None:
        effect(delivery)
        raise ValueError

    message = add(handler="h")
    nonatomic.go()
    assert effects() == {message.pk}
    assert stored(message).attempts == 1
    assert attempts_of(message) == ["ValueError"]


@pytest.mark.parametrize(
    ("error", "attempts", "dead"),
    [
        (Retry(50), 1, False),
        (Snooze(50), 0, False),
        (Reject("no"), 1, True),
        (SystemExit(), 1, False),
    ],
    ids=repr,
)
def test_its_errors_count(
    nonatomic: NonAtomicBench, error: BaseException, attempts: int, dead: bool
) -> None:
    @on()
    def h(delivery: Any) -> None:
        raise error

    message = add(handler="h")
    nonatomic.go()
    stored(message)
    assert (message.attempts, message.dead_at is not None) == (attempts, dead)
    assert message.claimed_by is None


def test_expired_or_taken_messages_do_not_start(nonatomic: NonAtomicBench, said: Said) -> None:
    @on()
    def h(delivery: Any) -> None:
        raise AssertionError

    expired, taken = add(handler="h", expires=-1), add(handler="h")
    tasks = nonatomic.claim()
    take_over(taken.pk)
    assert [nonatomic.nonatomic.run(task) for task in tasks] == [True, True]
    assert stored(expired).dead_reason == "expired"
    assert stored(taken).claimed_by == "other:1"
    assert said.count("message_started") == 0


# ---- finish()


def test_finish_commits_its_writes_and_the_ack_together(
    nonatomic: NonAtomicBench, said: Said
) -> None:
    """Guarantee 5."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            assert connection.in_atomic_block
            effect(delivery)
            assert (effects(), waiting()) == (set(), {delivery.id})
        assert (effects(), waiting()) == ({delivery.id}, set())

    message = add(handler="h")
    nonatomic.go()
    assert said.ids("message_acked") == [message.pk]
    assert FailedAttempt.objects.count() == 0


def test_a_zombies_writes_are_fenced(
    nonatomic: NonAtomicBench, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 5: refused before the block runs; not only its ack, its writes too."""
    seen: list[BaseException] = []

    @on()
    def h(delivery: Any) -> None:
        take_over(delivery.id)  # as if frozen meanwhile, for longer than its lease
        try:
            with delivery.finish():
                effect(delivery)
        except LeaseLost as error:
            seen.append(error)
            raise

    message = add(handler="h")
    nonatomic.go()
    assert len(seen) == 1
    assert str(message.pk) in str(seen[0])
    assert effects() == set()
    assert stored(message).claimed_by == "other:1"
    assert FailedAttempt.objects.count() == 0
    assert "lease_lost" in [getattr(r, "event", "") for r in caplog.records]
    assert said.count("message_acked") == 0


@pytest.mark.parametrize("fails", [True, False])
def test_a_zombie_without_finish_settles_nothing(nonatomic: NonAtomicBench, fails: bool) -> None:
    @on()
    def h(delivery: Any) -> None:
        take_over(delivery.id)
        if fails:
            raise ValueError

    message = add(handler="h")
    nonatomic.go()
    stored(message)
    assert (message.claimed_by, message.attempts) == ("other:1", 2)
    assert FailedAttempt.objects.count() == 0


def test_an_error_inside_finish_undoes_both(nonatomic: NonAtomicBench) -> None:
    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            raise ValueError

    message = add(handler="h")
    nonatomic.go()
    assert effects() == set()
    assert attempts_of(message) == ["ValueError"]


def test_an_error_inside_finish_that_is_caught_is_an_ack_without_it(
    nonatomic: NonAtomicBench,
) -> None:
    @on()
    def h(delivery: Any) -> None:
        try:
            with delivery.finish():
                effect(delivery)
                raise ValueError
        except ValueError:
            with delivery.finish():
                pass

    add(handler="h")
    nonatomic.go()
    assert (effects(), waiting()) == (set(), set())


def test_an_error_after_finish_changes_nothing(nonatomic: NonAtomicBench, said: Said) -> None:
    """The row is gone: there is nothing to retry."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
        raise ValueError

    message = add(handler="h")
    nonatomic.go()
    assert (effects(), waiting()) == ({message.pk}, set())
    assert FailedAttempt.objects.count() == 0
    assert said.ids("message_acked") == [message.pk]


def test_finish_twice_is_refused(nonatomic: NonAtomicBench) -> None:
    seen: list[str] = []

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
        try:
            with delivery.finish():
                seen.append("ran")
        except LeaseLost:
            seen.append("refused")

    add(handler="h")
    nonatomic.go()
    assert seen == ["refused"]


def test_finish_inside_a_block_is_refused(nonatomic: NonAtomicBench) -> None:
    """It commits: within somebody's transaction it could not."""

    @on()
    def h(delivery: Any) -> None:
        with transaction.atomic(), delivery.finish():
            effect(delivery)

    message = add(handler="h")
    nonatomic.go()
    assert effects() == set()
    assert attempts_of(message) == ["RuntimeError"]


def test_finish_with_a_swallowed_error_commits_nothing(nonatomic: NonAtomicBench) -> None:
    """What Django rolls back quietly must not look like an ack."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            with contextlib.suppress(DatabaseError):
                connection.cursor().execute("select 1/0")

    message = add(handler="h")
    nonatomic.go()
    assert effects() == set()
    assert message.pk in waiting()
    assert len(attempts_of(message)) == 1


@pytest.mark.parametrize("how", ["set_rollback", "close", "raw rollback", "raw commit"])
def test_ending_the_transaction_of_finish_is_no_silent_ack(
    nonatomic: NonAtomicBench, how: str
) -> None:
    """Guarantee 2, for the block that acks first: nothing committed must not count as done."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            if how == "set_rollback":
                transaction.set_rollback(True)
            elif how == "close":
                connection.close()
            elif how == "raw rollback":
                connection.cursor().execute("rollback")
            else:
                connection.cursor().execute("commit")

    message = add(handler="h")
    nonatomic.go()
    if how == "raw commit":
        assert (effects(), waiting()) == ({message.pk}, set())
        assert FailedAttempt.objects.count() == 0
    else:
        assert effects() == set()
        assert waiting() == {message.pk}
        assert len(attempts_of(message)) == 1


# ---- extend()


def test_extend_moves_lease_and_deadline(nonatomic: NonAtomicBench) -> None:
    """NSQ-21: a handler may run longer than its timeout, if it says so in time."""
    seen: list[float] = []

    @on(timeout=1000)
    def h(delivery: Any) -> None:
        for seconds in (None, 5000, 500):
            if seconds:
                delivery.extend(seconds)
            (entry,) = nonatomic.scoreboard.read("bench")
            assert not entry.atomic
            seen.append(entry.deadline - monotonic())
        assert stored(message).leased_until > timezone.now() + timedelta(seconds=4500)

    message = add(handler="h")
    nonatomic.go()
    for left, given in zip(seen, (1000, 5000, 500), strict=True):
        assert given - PATIENCE < left <= given
    assert waiting() == set()
    assert nonatomic.scoreboard.running() == []


def test_extend_refuses_a_zombie(nonatomic: NonAtomicBench) -> None:
    seen: list[str] = []

    @on()
    def h(delivery: Any) -> None:
        take_over(delivery.id)
        try:
            delivery.extend(60)
        except LeaseLost:
            seen.append("refused")

    message = add(handler="h")
    nonatomic.go()
    assert seen == ["refused"]
    assert stored(message).claimed_by == "other:1"


# ---- what a handler leaves behind


def leave_atomic_open() -> None:
    transaction.atomic().__enter__()


def leave_atomic_open_and_close() -> None:
    transaction.atomic().__enter__()
    connection.close()


def raw_begin() -> None:
    connection.cursor().execute("begin")


def autocommit_off() -> None:
    connection.set_autocommit(False)


@pytest.mark.parametrize(
    "leave", [leave_atomic_open, leave_atomic_open_and_close, raw_begin, autocommit_off]
)
def test_a_transaction_left_open_is_rolled_back_and_a_failure(
    nonatomic: NonAtomicBench, leave: Callable[[], None]
) -> None:
    @on()
    def h(delivery: Any) -> None:
        if delivery.payload == "bad":
            leave()
            if leave is not leave_atomic_open_and_close:
                effect(delivery)
        else:
            effect(delivery)

    bad, good = add(handler="h", payload="bad", after=-90), add(handler="h")
    assert nonatomic.go() == [True, True]
    assert effects() == {good.pk}
    assert attempts_of(bad) == ["django_mq.exceptions.HandlerBrokeTransaction"]
    assert waiting() == {bad.pk}


@pytest.mark.parametrize("how", ["close", "driver close", "terminate"])
def test_a_connection_that_is_gone_is_made_anew(nonatomic: NonAtomicBench, how: str) -> None:
    """Nothing of ours was open on it, so it is nobody's failure."""

    @on()
    def h(delivery: Any) -> None:
        effect(delivery)
        if how == "close":
            connection.close()
        elif how == "driver close":
            connection.connection.close()
        else:
            with second_connection() as other:
                other.execute(
                    "select pg_terminate_backend(%s, 5000)",
                    [connection.connection.info.backend_pid],
                )

    first, second = add(handler="h", after=-90), add(handler="h")
    assert nonatomic.go() == [True, True]
    assert effects() == {first.pk, second.pk}
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize(
    "statement",
    ["set statement_timeout = '7s'", "set time zone 'Asia/Tokyo'", "set role mq_nonatomic"],
)
def test_session_settings_are_taken_back(nonatomic: NonAtomicBench, statement: str) -> None:
    seen: list[Any] = []

    @on()
    def h(delivery: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "select current_setting('statement_timeout'), current_setting('timezone'),"
                " current_user"
            )
            seen.append(cursor.fetchone())
            cursor.execute(statement)

    with second_connection() as other:
        other.execute("create role mq_nonatomic")
        try:
            add(handler="h")
            add(handler="h")
            nonatomic.go()
        finally:
            other.execute("drop role mq_nonatomic")
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert waiting() == set()


def test_a_lost_database_before_the_start_leaves_it_in_hand(nonatomic: NonAtomicBench) -> None:
    ran: list[int] = []

    @on()
    def h(delivery: Any) -> None:
        ran.append(delivery.id)

    add(handler="h")
    add(handler="h")
    tasks = nonatomic.claim()
    assert nonatomic.nonatomic.run(tasks[0]) is True
    nonatomic.wrapper.connection.close()
    assert nonatomic.nonatomic.run(tasks[1]) is False
    assert nonatomic.nonatomic.run(tasks[1]) is True
    assert ran == [task.delivery.id for task in tasks]


def test_a_settle_that_the_database_refuses_stops_nobody(
    nonatomic: NonAtomicBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 11."""

    @on()
    def h(delivery: Any) -> None:
        raise ValueError

    message = add(handler="h")
    with second_connection() as other:
        other.execute(
            "create function mq_refuse() returns trigger language plpgsql as"
            " $$ begin raise exception 'refused'; end $$;"
            "create trigger mq_refuse before insert on django_mq_failedattempt"
            " for each row execute function mq_refuse()"
        )
        try:
            assert nonatomic.go() == [True]
        finally:
            other.execute("drop function mq_refuse cascade")
    assert stored(message).attempts == 1
    assert nonatomic.settled == [message.pk]
    assert "settle_refused" in [getattr(r, "event", "") for r in caplog.records]
