"""A handler, hook or receiver leaves no state for the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import (
    connection,
    transaction,
)
from django.db.backends.signals import connection_created
from django.dispatch import Signal
from django.utils import timezone, translation

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.signals import message_acked, message_dead, message_retried
from tests.database import second_connection
from tests.rows import add
from tests.slow import mostly_slow
from tests.worker.conftest import (
    BENCHES,
    Bench,
    add_many,
    effect,
    effects,
    mostly_fresh,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


# ---- between deliveries


SESSION = [
    "set statement_timeout = '7s'",
    "set search_path = pg_catalog",
    "set time zone 'Asia/Tokyo'",
    "set my.tenant = 'other'",
    "set local statement_timeout = '7s'",
    "set local lock_timeout = '7s'",
    "set role mq_other",
    "set local role mq_other",
    "set session authorization mq_other",
]
SHOW = (
    "select current_setting('statement_timeout'), current_setting('search_path'),"
    " current_setting('timezone'), coalesce(current_setting('my.tenant', true), ''),"
    " current_setting('lock_timeout'), current_user, session_user"
)


@pytest.fixture
def other_role(transactional_db: None) -> Iterator[None]:
    with second_connection() as other:
        other.execute(
            "do $$ begin create role mq_other; exception when duplicate_object then end $$"
        )
        other.execute("grant all on all tables in schema public to mq_other")
        yield
        other.execute("drop owned by mq_other; drop role mq_other")


@pytest.mark.parametrize(
    ("statement", "fails", "make_bench"),
    mostly_slow(SESSION, [False, True], BENCHES),
    indirect=["make_bench"],
)
def test_session_settings_are_taken_back(
    bench: Bench, statement: str, fails: bool, other_role: None
) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(SHOW)
            seen.append(cursor.fetchone())
            cursor.execute(statement)
        if fails:
            raise ValueError

    for _ in range(2):
        add_many(2, handler="h")
        bench.run_all(bench.claim())
    assert len(seen) == 4
    assert {each[4] for each in seen} == {"30s"}
    assert len({(*each[:4], *each[5:]) for each in seen}) == 1


def test_the_servers_limits_hold_for_each_handler_of_the_slice(bench: Bench) -> None:
    """Slices limit how long the server waits for us: guarantee 6."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", timeout=100)
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "select current_setting('idle_in_transaction_session_timeout'),"
                " current_setting('client_connection_check_interval')"
            )
            seen.append(cursor.fetchone())

    add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert seen == [("130s", "500ms")] * 3


def test_a_very_long_timeout_is_no_error(bench: Bench) -> None:
    """The server's limit ends at 2**31 milliseconds, 24 days."""

    @handler("#", queue="mail", name="h", timeout=timedelta(days=60))
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    bench.run_all(bench.claim())
    assert waiting() == set()


def test_translation_time_zone_and_context_end_with_the_handler(bench: Bench) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append((translation.get_language(), timezone.get_current_timezone_name()))
        translation.activate("fr")
        timezone.activate("Asia/Tokyo")

    add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert seen[0] == seen[1]


def test_execute_wrappers_end_with_their_handler(bench: Bench) -> None:
    seen: list[str] = []

    def spy(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        seen.append(str(sql))
        return execute(sql, params, many, context)

    @handler("a", queue="mail", name="a")
    def a(delivery: Any) -> None:
        connection.execute_wrappers.append(spy)

    @handler("b", queue="mail", name="b")
    def b(delivery: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select 'from b'")

    add(handler="a", type="a", after=-2)
    add(handler="b", type="b", after=-1)
    bench.run_all(bench.claim())
    assert not any("from b" in sql for sql in seen)


# ---- on_commit


def test_hooks_run_once_after_commit_and_not_for_a_failure(bench: Bench) -> None:
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        def hook() -> None:
            assert delivery.id not in waiting()
            hooks.append(delivery.payload)

        transaction.on_commit(hook)
        with transaction.atomic():
            transaction.on_commit(lambda: hooks.append(delivery.payload + " inner"))
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            transaction.on_commit(lambda: hooks.append("never"))
            1 / 0  # noqa: B018
        if delivery.payload == "bad":
            raise ValueError

    for n, payload in enumerate(["a", "bad", "b"]):
        add(handler="h", payload=payload, after=-60 + n)
    bench.run_all(bench.claim())
    assert hooks == ["a", "a inner", "b", "b inner"]
    assert bench.wrapper.run_on_commit == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_hook_that_raises_unacks_nothing(
    bench: Bench, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        def hook() -> None:
            hooks.append(delivery.payload)
            raise error

        transaction.on_commit(hook)

    for n, payload in enumerate(["a", "b"]):
        add(handler="h", payload=payload, after=-60 + n)
    bench.run_all(bench.claim())
    assert hooks == ["a", "b"]
    assert waiting() == set()
    assert [r.event for r in caplog.records if hasattr(r, "event")].count("hook_failed") == 2


@mostly_fresh
@pytest.mark.parametrize(
    "do",
    [
        lambda: connection.set_autocommit(False),
        lambda: transaction.atomic().__enter__(),
        lambda: connection.close(),
        lambda: connection.connection.close(),
        lambda: connection.cursor().execute("begin"),
        lambda: connection.cursor().execute("set statement_timeout = '7s'"),
    ],
    ids=["autocommit", "atomic", "close", "driver close", "begin", "set"],
)
def test_a_hook_leaves_the_connection_clean_for_the_next_slice(
    bench: Bench, do: Callable[[], Any]
) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        with connection.cursor() as cursor:
            cursor.execute(SHOW)
            seen.append(cursor.fetchone())
        transaction.on_commit(do)

    first = add(handler="h")
    bench.run_all(bench.claim())
    second = add(handler="h")
    bench.run_all(bench.claim())
    assert effects() == {first.pk, second.pk}
    assert waiting() == set()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("keeps", ["driver", "nothing"])
def test_a_hook_on_a_connection_that_was_made_meanwhile(bench: Bench, keeps: str) -> None:
    """A handler commits by itself, so the hooks of the one before it run on another connection."""
    made: list[Any] = []
    seen: list[str] = []

    def keep(connection: Any, **_: Any) -> None:
        made.append(connection.connection)

    def hook() -> None:
        driver = made[-1] if keeps == "driver" else connection.connection
        driver.execute("set statement_timeout = '7s'")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "hooks":
            effect(delivery)
            transaction.on_commit(hook)
        elif delivery.payload == "commits":
            connection.connection.commit()
        else:
            seen.append(connection.cursor().execute("show statement_timeout").fetchone()[0])

    connection_created.connect(keep)
    try:
        for n, payload in enumerate(["hooks", "commits", "looks"]):
            add(handler="h", payload=payload, after=-60 + n)
        bench.run_all(bench.claim(limit=2))
        bench.run_all(bench.claim())
    finally:
        connection_created.disconnect(keep)
    assert made
    assert seen == ["0"]


@pytest.mark.parametrize("signal", [message_acked, message_dead, message_retried])
def test_settings_of_a_receiver_do_not_reach_the_next_slice(bench: Bench, signal: Signal) -> None:
    """This holds even if the transaction is lost, and another one settles the reported messages."""
    seen: list[str] = []

    def told(**_: Any) -> None:
        seen.append("told")
        connection.cursor().execute("set statement_timeout = '7s'")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(connection.cursor().execute("show statement_timeout").fetchone()[0])
        if signal is not message_acked:
            connection.connection.rollback()

    signal.connect(told)
    try:
        for _ in range(2):
            add(handler="h", max_attempts=1 if signal is message_dead else 5)
            bench.run_all(bench.claim())
    finally:
        signal.disconnect(told)
    assert seen == ["0", "told"] * 2
