"""The worker's own statements have their own limits, whatever the role has set."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection, connections

from django_mq import Retry, RetryPolicy, Snooze, fixed, handler
from django_mq.executor.outage import Outage
from django_mq.executor.statements import Statements
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, UniqueKey
from django_mq.store import vacuum
from django_mq.store.limits import Limits
from tests.database import second_connection
from tests.rows import add
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import Running, Said, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]

#: A role's limits in milliseconds: far less than the worker's statements take here.
STRICT = {
    "statement_timeout": "100",
    "lock_timeout": "20",
    # On a busy machine a handler may pause for a while between two statements.
    "idle_in_transaction_session_timeout": "30000",
    "default_transaction_isolation": "serializable",
}
#: Settings for tests without a pooler, which would own the sessions.
IDLE = {"idle_session_timeout": "30000"}
#: Events that a limit of the role must not cause.
TROUBLE = {
    "database_lost",
    "statement_refused",
    "renewal_failed",
    "loop_failed",
    "settle_refused",
    "executor_failed",
    "lease_lost",
    "chore_failed",
    "maintenance_failed",
    "recovery_failed",
    "vacuum_failed",
}


@contextmanager
def role(*, pooled: bool = False, **settings: str) -> Iterator[None]:
    """Within the block, new connections of the alias have these settings as their role's."""
    alias = connections["default"].settings_dict
    before = alias["OPTIONS"], alias.get("DISABLE_SERVER_SIDE_CURSORS", False)
    words = " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items()
    )
    alias["OPTIONS"] = {**before[0], "options": words}
    alias["DISABLE_SERVER_SIDE_CURSORS"] = pooled
    try:
        yield
    finally:
        alias["OPTIONS"], alias["DISABLE_SERVER_SIDE_CURSORS"] = before


@contextmanager
def slow_rows(seconds: float) -> Iterator[None]:
    """Each claim, renewal and settle takes this long per row."""
    with second_connection() as other:
        other.execute(
            f"""
            create function mq_slow() returns trigger language plpgsql as
            $$ begin perform pg_sleep({seconds}); return coalesce(new, old); end $$;
            create trigger mq_slow before update or delete on django_mq_queuedmessage
            for each row execute function mq_slow()
            """
        )
        try:
            yield
        finally:
            other.execute("drop function mq_slow cascade")


@pytest.fixture(params=[False, True], ids=["direct", "pooled"])
def pooled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def statements(transactional_db: None, pooled: bool) -> Iterator[Statements]:
    with role(pooled=pooled, **STRICT, **IDLE):
        statements = Statements("default", limits=Limits(7, 3))
        statements.cursor()
    yield statements
    statements.close()


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {getattr(record, "event", "") for record in caplog.records}


def shown(cursor: Any) -> tuple[str, str, str]:
    cursor.execute(
        "select current_setting('statement_timeout'), current_setting('lock_timeout'),"
        " current_setting('transaction_isolation')"
    )
    found: tuple[str, str, str] = tuple(cursor.fetchone())
    return found


def test_each_statement_has_the_limits(statements: Statements) -> None:
    cursor = statements.cursor()
    for _ in range(2):
        assert shown(cursor) == ("7s", "3s", "read committed")
    with statements.transaction(lock=0.5):
        assert shown(cursor) == ("7s", "500ms", "read committed")
    assert shown(cursor) == ("7s", "3s", "read committed")


def test_a_refused_statement_leaves_no_transaction_open(statements: Statements) -> None:
    cursor = statements.cursor()
    with pytest.raises(psycopg.errors.DivisionByZero):
        cursor.execute("select 1 / 0")
    assert statements.is_idle()
    with pytest.raises(psycopg.errors.DivisionByZero), statements.transaction():
        cursor.execute("select 1 / 0")
    assert statements.is_idle()
    assert shown(cursor) == ("7s", "3s", "read committed")


def test_a_vacuum_may_take_longer(statements: Statements, pooled: bool) -> None:
    statements.allow(600)
    cursor = statements.cursor()
    assert shown(cursor)[0] == ("7s" if pooled else "10min")
    vacuum.vacuum(cursor, "django_mq_queuedmessage")
    statements.close()
    assert shown(statements.cursor())[0] == "7s"


def test_a_session_of_ours_is_not_ended_while_it_waits(
    statements: Statements, pooled: bool
) -> None:
    cursor = statements.cursor()
    cursor.execute("select current_setting('idle_session_timeout')")
    # Behind a pooler, sessions are the pooler's.
    assert cursor.fetchone()[0] == ("30s" if pooled else "0")


def run_every_way(start: Start, pooled: bool) -> dict[str, list[Any]]:
    """Run a message of each kind under a strict role; return the limits that handlers saw."""
    seen: dict[str, list[Any]] = {}

    def look(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            seen.setdefault(str(delivery.payload), []).append(shown(cursor)[:2])

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        if delivery.payload == "unused":
            return
        look(delivery)
        if delivery.attempt == 1 and delivery.payload == "fails":
            raise ValueError
        if delivery.attempt == 1 and delivery.payload == "retries":
            raise Retry(after=0)
        if delivery.payload == "snoozes" and len(seen["snoozes"]) == 1:
            raise Snooze(0)
        effect(delivery)

    @handler("#", queue="mail", name="call", atomic=False)
    def call(delivery: Delivery) -> None:
        look(delivery)

    @handler("#", queue="mail", name="async")
    async def ah(delivery: Delivery) -> None: ...

    for payload in ("unused", "uses", "fails", "uses", "retries", "snoozes", "uses", "unused"):
        add(handler="h", payload=payload)
    keyed = add(handler="h", payload="keyed", key="k", unique_id="u")
    UniqueKey.objects.create(queue="mail", type=keyed.type, unique_id="u", message_id=keyed.pk)
    add(handler="call", payload="call")
    add(handler="async", payload="async")
    add(handler="h", payload="lapsed", leased=-5, attempts=1)
    with role(pooled=pooled, **STRICT, **({} if pooled else IDLE)):
        assert start(until_empty=True, threads=1).join()
        connections["default"].close()
    return seen


@pytest.mark.parametrize("pooled", [False, *slow(True)], indirect=True)
def test_slow_statements_are_not_cancelled(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture, pooled: bool, settings: Any
) -> None:
    """Claims, take-overs, renewals and settles of every kind. Handlers have the role's limits."""
    settings.DJANGO_MQ = {"WAKEUP": "poll" if pooled else "notify"}
    with slow_rows(0.15):
        seen = run_every_way(start, pooled)
    assert waiting() == set()
    assert TROUBLE & events(caplog) == set()
    classes = list(FailedAttempt.objects.values_list("error_class", flat=True))
    assert sorted(classes) == ["ValueError", "WorkerVanished", "django_mq.exceptions.Retry"]
    assert len(effects()) == 8
    statement = {limits[0] for every in seen.values() for limits in every}
    assert statement == {"100ms"}
    # A slice of several messages has a shorter limit of its own: half of SLICE_SECONDS.
    assert {limits[1] for every in seen.values() for limits in every} <= {"20ms", "50ms"}
    assert seen["call"] == [("100ms", "20ms")]


def test_a_lock_on_the_table_is_waited_for(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """A migration's lock, held for longer than the role's lock timeout."""
    gate = threading.Event()
    started = threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        started.set()
        assert gate.wait(60)

    connection.ensure_connection()  # the limits below are the worker's alone
    with role(**STRICT):
        running = start()
        said.wait("worker_started")
        with second_connection() as other:
            with other.transaction():
                other.execute("lock table django_mq_queuedmessage")
                until(lambda: waits_for_a_lock(0.3))
            add(handler="h")
            assert started.wait(60)
        gate.set()
        said.wait("message_acked")
        assert running.stop()
        connections["default"].close()
    assert TROUBLE & events(caplog) == set()


@pytest.mark.parametrize("atomic", [True, *slow(False)], ids=["atomic", "not-atomic"])
def test_a_limit_of_transactions_does_not_end_a_slice(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture, atomic: bool
) -> None:
    with second_connection() as other:
        if other.info.server_version < 170000:
            pytest.skip("the server has no transaction_timeout")

    @handler("#", queue="mail", name="h", atomic=atomic)
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            for _ in range(3):
                cursor.execute("select pg_sleep(0.1)")

    messages = [add(handler="h") for _ in range(3)]
    with role(transaction_timeout="250"):
        assert start(until_empty=True).join()
        connections["default"].close()
    assert sorted(said.ids("message_acked")) == [message.pk for message in messages]
    assert TROUBLE & events(caplog) == set()


@pytest.mark.parametrize("atomic", [True, *slow(False)], ids=["atomic", "not-atomic"])
def test_a_limit_of_idle_sessions_does_not_end_those_of_handlers(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture, atomic: bool
) -> None:
    """Nor after a handler has used its session, which resets it."""
    seen: list[tuple[int, str]] = []

    @handler("#", queue="mail", name="h", atomic=atomic)
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select pg_backend_pid(), current_setting('idle_session_timeout')")
            seen.append(cursor.fetchone())

    connection.ensure_connection()  # the limit below is the worker's alone
    with role(idle_session_timeout="1000"):
        running = start(threads=1)
        for number in range(3):
            time.sleep(1.2 if number else 0)
            before = len(seen)
            add(handler="h")
            until(lambda: len(seen) > before)  # noqa: B023
        assert running.stop()
        connections["default"].close()
    assert len(set(seen)) == 1, seen
    assert seen[0][1] == "0"
    assert TROUBLE & events(caplog) == set()


@pytest.mark.slow
def test_a_limit_of_idle_sessions_does_not_end_a_session_that_a_handler_opened(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """A long call may close its connection, so that Django opens another."""
    seen: list[tuple[int, str]] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Delivery) -> None:
        if not seen:
            connection.close()
        with connection.cursor() as cursor:
            cursor.execute("select pg_backend_pid(), current_setting('idle_session_timeout')")
            seen.append(cursor.fetchone())

    connection.ensure_connection()  # the limit below is the worker's alone
    with role(idle_session_timeout="1000"):
        running = start(threads=1)
        for _ in range(2):
            before = len(seen)
            add(handler="h")
            until(lambda: len(seen) > before)  # noqa: B023
            time.sleep(1.2)
        assert running.stop()
        connections["default"].close()
    assert len({pid for pid, _ in seen}) == 1, seen
    assert seen[1][1] == "0"
    assert TROUBLE & events(caplog) == set()


def waits_for_a_lock(seconds: float) -> int:
    """Return the pid of a session that has waited this long for a lock on a table, or 0."""
    with second_connection() as other:
        found = other.execute(
            "select pid from pg_stat_activity where datname = current_database()"
            " and wait_event = 'relation'"
            " and query_start < clock_timestamp() - make_interval(secs => %s)"
            " and query like '%%django_mq_queuedmessage%%'",
            [seconds],
        ).fetchone()
    return int(found[0]) if found else 0


def test_a_cancelled_statement_is_no_lost_database(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="django_mq")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    said.wait("worker_started")
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage")
        until(lambda: waits_for_a_lock(0.05))
        other.execute("select pg_cancel_backend(%s)", [waits_for_a_lock(0.05)])
        until(lambda: "statement_refused" in events(caplog))
    add(handler="h")
    said.wait("message_acked")
    assert running.stop()
    assert not {"database_lost", "database_back", "loop_failed"} & events(caplog)


def test_the_end_of_refusals_is_logged_once_all_threads_are_past_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log of a worker beside a stuck migration ends with the news that it is over."""
    caplog.set_level(logging.INFO, logger="django_mq")
    stopped = threading.Event()
    stopped.set()
    outage = Outage(stopped)
    refused = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")

    def elsewhere(call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    met, answered = threading.Event(), threading.Event()

    def meet() -> None:
        outage.wait(refused)
        met.set()
        assert answered.wait(30)
        outage.record_answer()

    other = threading.Thread(target=meet)
    other.start()
    assert met.wait(30)
    outage.wait(refused)
    elsewhere(outage.record_answer)  # of a thread whose table is not locked
    outage.record_answer()
    assert "statement_accepted" not in events(caplog)
    answered.set()
    other.join(30)
    outage.record_answer()
    said = [getattr(record, "event", "") for record in caplog.records]
    assert said.count("statement_accepted") == 1
    assert said[-1] == "statement_accepted"


def test_a_thread_that_ends_does_not_hold_up_the_end_of_refusals(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work is done by others; each of their answers would look for it for ever."""
    now = 100.0
    monkeypatch.setattr("django_mq.executor.outage.monotonic", lambda: now)
    caplog.set_level(logging.INFO, logger="django_mq")
    stopped = threading.Event()
    stopped.set()
    outage = Outage(stopped)
    full = psycopg.errors.DiskFull("could not extend file")
    thread = threading.Thread(target=outage.wait, args=[full])
    thread.start()
    thread.join()
    outage.record_answer()
    assert events(caplog) == {"statement_refused"}  # it may try again
    now += 60
    outage.record_answer()
    assert events(caplog) == {"statement_refused", "statement_accepted"}
    assert not outage._refused


def test_a_bug_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that met an error of Python waits, too, but the database refused nothing."""
    caplog.set_level(logging.INFO, logger="django_mq")
    stopped = threading.Event()
    stopped.set()
    outage = Outage(stopped)
    outage.wait(KeyError(), logged=True)
    outage.record_answer()
    assert not caplog.records


def test_the_database_is_back_when_it_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The outage ends with an answer, not with a refused statement."""
    caplog.set_level(logging.INFO, logger="django_mq")
    stopped = threading.Event()
    stopped.set()
    outage = Outage(stopped)
    outage.wait(psycopg.errors.QueryCanceled("canceling statement due to user request"))
    outage.record_answer()
    assert events(caplog) == {"statement_refused", "statement_accepted"}
    caplog.clear()
    outage = Outage(stopped)
    outage.wait(psycopg.OperationalError("gone"))
    outage.record_answer()
    outage.record_answer()
    said = [getattr(record, "event", "") for record in caplog.records]
    assert said == ["database_lost", "database_back"]
