"""Handlers outside a transaction, in an executor's thread: errors and leftovers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import Reject, Retry, RetryPolicy, Snooze, fixed
from django_mq.executor import session
from django_mq.models import FailedAttempt
from tests.database import second_connection
from tests.executor.nonatomic.conftest import NonAtomicBench, on, take_over
from tests.rows import add, stored
from tests.worker.conftest import Said, attempts_of, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_a_call_that_uses_nothing_takes_two_round_trips(
    nonatomic: NonAtomicBench, tmp_path: Path
) -> None:
    """There is nothing to reset in its session. The start also finds out that a link was cut."""

    @on()
    def h(delivery: Any) -> None: ...

    sent, second = nonatomic.traced(tmp_path)
    nonatomic.nonatomic.run([second])
    start, ack = sent.queries()
    assert "update django_mq_queuedmessage" in start
    assert "delete from django_mq_queuedmessage" in ack


@pytest.mark.parametrize(("silent_for", "probes"), [(-1.0, 1), (60.0, 0)])
def test_a_silent_connection_is_probed_before_the_start(
    nonatomic: NonAtomicBench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent_for: float,
    probes: int,
) -> None:
    """The limit of a probe is shorter than that of a start."""

    @on()
    def h(delivery: Any) -> None: ...

    sent, second = nonatomic.traced(tmp_path)
    monkeypatch.setattr(session, "STALE_AFTER", silent_for)
    nonatomic.nonatomic.run([second])
    assert ['"select 1"' in query for query in sent.queries()] == [True] * probes + [False, False]


def test_failure_keeps_the_writes_of_the_handler(nonatomic: NonAtomicBench) -> None:
    """It may run more than once, as documented; the test distinguishes the retry."""

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


@pytest.mark.parametrize(
    "zone",
    [timezone(timedelta(hours=23)), timezone(timedelta(seconds=0.5))],
    ids=["16 hours or more", "part of a second"],
)
@pytest.mark.parametrize("error", [Retry, Snooze])
def test_a_moment_may_have_an_offset_that_the_server_refuses(
    nonatomic: NonAtomicBench, error: type[Retry | Snooze], zone: timezone
) -> None:
    """Otherwise the settle would fail, and the message would stay leased until its lease lapses."""
    at = datetime.now(zone) + timedelta(hours=1)

    @on()
    def h(delivery: Any) -> None:
        raise error(at)

    message = add(handler="h")
    nonatomic.go()
    left = stored(message)
    assert (left.processable_after, left.leased_until) == (at, None)
    assert left.attempts == (error is Retry)


def test_expired_or_taken_messages_do_not_start(nonatomic: NonAtomicBench, said: Said) -> None:
    @on()
    def h(delivery: Any) -> None:
        raise AssertionError

    expired, taken = add(handler="h", expires=-1), add(handler="h")
    tasks = nonatomic.claim()
    take_over(taken.pk)
    assert [nonatomic.nonatomic.run([task]) for task in tasks] == [True, True]
    assert stored(expired).dead_reason == "expired"
    assert stored(taken).claimed_by == "other:1"
    assert said.count("message_started") == 0


def leave_atomic_open() -> None:
    transaction.atomic().__enter__()


def leave_atomic_open_and_close() -> None:
    transaction.atomic().__enter__()
    connection.close()


def raw_begin() -> None:
    connection.cursor().execute("begin")


def autocommit_off() -> None:
    connection.set_autocommit(False)


def leave_pipeline_open() -> None:
    connection.ensure_connection()
    pipeline = connection.connection.pipeline()
    pipeline.__enter__()
    kept.append(pipeline)


#: The collector would close these.
kept: list[object] = []


@pytest.mark.parametrize(
    "leave",
    [
        leave_atomic_open,
        leave_atomic_open_and_close,
        raw_begin,
        autocommit_off,
        leave_pipeline_open,
    ],
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
def test_lost_connection_is_opened_again(nonatomic: NonAtomicBench, how: str) -> None:
    """It held no work of ours, so it is nobody's failure."""

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
    assert nonatomic.nonatomic.run([tasks[0]]) is True
    nonatomic.wrapper.connection.close()
    assert nonatomic.nonatomic.run([tasks[1]]) is False
    assert nonatomic.nonatomic.run([tasks[1]]) is True
    assert ran == [task.delivery.id for task in tasks]


@pytest.mark.parametrize("code", ["raise_exception", "disk_full"])
def test_refused_settle_stops_no_other_message(
    nonatomic: NonAtomicBench, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """Guarantee 11. A full disk is waited for, but not for ever."""

    @on()
    def h(delivery: Any) -> None:
        raise ValueError

    message = add(handler="h")
    with second_connection() as other:
        other.execute(
            "create function mq_refuse() returns trigger language plpgsql as"
            " $$ begin raise exception 'refused' using errcode = "
            f"'{code}'; end $$;"
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


def test_a_message_that_the_database_refuses_to_start_stops_no_other(
    nonatomic: NonAtomicBench,
) -> None:
    """Guarantee 24: a constraint that its row breaks was added after the claim."""
    ran: list[int] = []

    @on(batch=True)
    def h(deliveries: Any) -> None:
        ran.extend(each.id for each in deliveries)

    ids = [add(handler="h", payload=payload).pk for payload in ({}, "bad", {})]
    tasks = nonatomic.claim()
    with second_connection() as other:
        other.execute(
            "alter table django_mq_queuedmessage"
            " add constraint refuse check (payload <> '\"bad\"') not valid"
        )
        try:
            assert nonatomic.nonatomic.run(tasks)
        finally:
            other.execute("alter table django_mq_queuedmessage drop constraint refuse")
    assert ran == [ids[0], ids[2]]
    assert waiting() == {ids[1]}
