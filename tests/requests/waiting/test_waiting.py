"""Waiting for answers: thousands on one connection, by ring or poll, despite failures."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction

from django_mq import ReplyTimeout, Unanswered, agather, arequest, ask, handler, queues, request
from django_mq.executor.watchdog import Link
from django_mq.requests import connection as link
from django_mq.requests import waiter
from django_mq.store import results
from django_mq.testing import drain
from tests.database import CLEANERS_NAME
from tests.requests.questions import NEVER, echo
from tests.requests.waiting.conftest import names, waiting, wanted
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start

pytestmark = pytest.mark.django_db(transaction=True)


def others() -> list[int]:
    """The backends of this database other than the test's own."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select pid from pg_stat_activity where datname = current_database()"
            " and backend_type = 'client backend' and pid <> pg_backend_pid()"
            " and application_name <> %s",
            [CLEANERS_NAME],
        )
        return [pid for (pid,) in cursor.fetchall()]


# ---- thousands


@pytest.mark.slow
def test_thousands_wait_on_one_connection(start: Start) -> None:
    """Waiters do not take a connection or a thread each."""

    @handler("test.batch", name="batch", batch=True)
    def batch(deliveries: list[Any]) -> Any:
        return [each.payload for each in deliveries]

    with transaction.atomic():
        pendings = [request("test.batch", n) for n in range(2000)]
    with waiting(*pendings) as replies:
        until(lambda: wanted() == 2000, "all are waited for")
        until(others, "it is connected")
        assert len(others()) == 1
        assert names().count("mq-replies") == 1
        start()
        assert replies.result() == list(range(2000))


def test_many_tasks_wait_without_threads(start: Start) -> None:
    echo()

    async def main() -> list[Any]:
        pendings = [await arequest("test.echo", n) for n in range(200)]
        tasks = [asyncio.create_task(each.aresult(PATIENCE)) for each in pendings]
        while wanted() < 200:
            await asyncio.sleep(0.01)
        threads.update(names())
        start()
        return await asyncio.gather(*tasks)

    before, threads = set(names()), set[str]()
    assert async_to_sync(main)() == list(range(200))
    assert len(threads - before) < 10


def test_a_cancelled_wait_leaves_nothing() -> None:
    """A client disconnects, a task is cancelled, a timeout passes."""
    echo()

    async def main() -> None:
        pending = await arequest("test.echo")
        task = asyncio.create_task(pending.aresult())
        while not wanted():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wanted() == 0
        with pytest.raises(ReplyTimeout):
            await agather(pending, pending, timeout=0.02)
        assert wanted() == 0
        [error] = await agather(pending, timeout=0, return_exceptions=True)
        assert type(error) is ReplyTimeout
        assert await sync_to_async(drain)() == 1
        assert await pending.aresult(timeout=0) == {}

    async_to_sync(main)()


def test_two_wait_for_the_same(start: Start) -> None:
    echo()
    pending = request("test.echo", 1)
    with waiting(pending) as first, waiting(pending, pending) as second:
        with pytest.raises(ReplyTimeout):
            pending.result(timeout=0.02)  # and the others keep waiting
        start()
        assert (first.result(), second.result()) == ([1], [1, 1])


def test_a_reply_that_is_waited_for_again_is_not_lost_to_the_end_of_the_first_wait() -> None:
    """Its message was dead and is requeued, while the first wait goes on for another reply."""

    @handler("test.fails", name="fails", retry=NEVER)
    def fails(delivery: Any) -> None:
        raise ValueError

    pending = request("test.fails")
    drain(errors="keep")
    with ExitStack() as first:
        answered = first.enter_context(waiter.waiter_of("default").waiting_for(pending.id))
        assert answered.result(PATIENCE).answered
        assert queues.requeue(pending.id)
        with waiter.waiter_of("default").waiting_for(pending.id):
            first.close()
            assert wanted() == 1


def test_a_wait_that_is_cancelled_as_its_reply_comes_disturbs_no_other() -> None:
    waits = waiter.waiter_of("default")
    pending = request("test.echo", 1)
    with waits.waiting_for(pending.id) as cancelled, waits.waiting_for(pending.id) as other:
        assert cancelled.cancel()
        assert queues.cancel(pending.id)
        assert other.result(PATIENCE).answered


# ---- ring, poll, and failures


def test_a_ring_is_enough(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiter, "MAX_QUERY_INTERVAL", 3600.0)
    echo()
    pending = request("test.echo", 1)
    with waiting(pending) as replies:
        until(others, "it is connected")
        start()
        assert replies.result() == [1]


@pytest.mark.parametrize("how", ["poll", "deaf", "elsewhere", "nowhere"])
def test_a_poll_is_enough(
    start: Start, monkeypatch: pytest.MonkeyPatch, settings: Any, how: str
) -> None:
    """Nothing depends on LISTEN.

    It may be off, its rings may be lost, or it may use another alias, which may be out of reach.
    """
    connected: list[str] = []
    connect, listen = link.driver_connection, link.ServerLink._listen

    def connect_to(alias: str, *options: Any) -> Any:
        connected.append(alias)
        if alias == "nowhere":
            raise psycopg.OperationalError("no such server")
        return connect("default", *options)

    monkeypatch.setattr(link, "driver_connection", connect_to)
    if how == "poll":
        settings.DJANGO_MQ = {"WAKEUP": "poll"}
    elif how == "deaf":
        monkeypatch.setattr(results, "LISTEN", "listen something_else")
    else:  # the effect of WAKEUP = "elsewhere", without that alias in the worker
        monkeypatch.setattr(link.ServerLink, "_listen", lambda self, wakeup: listen(self, how))
    echo()
    pending = request("test.echo", 1)
    with waiting(pending) as replies:
        start()
        assert replies.result() == [1]
    assert connected[:2] == (["default", how] if how.endswith("where") else ["default"])


def test_its_connection_is_cut(start: Start) -> None:
    """A lost database is waited out."""
    echo()
    pending = request("test.echo", 1)
    with waiting(pending) as replies:
        for _ in range(3):
            [pid] = until(others, "it is connected")
            with connection.cursor() as cursor:
                cursor.execute("select pg_terminate_backend(%s)", [pid])
            until(lambda pid=pid: others() and pid not in others(), "it is connected again")
        start()
        assert replies.result() == [1]


def ring() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"notify {results.CHANNEL}")


def test_backoff_starts_again_with_each_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks at once when it is connected again, since a ring may be lost with a connection."""
    monkeypatch.setattr(waiter, "MAX_QUERY_INTERVAL", 3600.0)
    asked: list[int] = []
    query = link.ServerLink.query

    def noted(self: link.ServerLink, ids: Any) -> Any:
        found = query(self, ids)
        assert self._query_connection is not None
        asked.append(self._query_connection.info.backend_pid)
        return found

    monkeypatch.setattr(link.ServerLink, "query", noted)
    pending = request("test.echo")
    with waiting(pending) as replies:
        lost = 0
        for _ in range(3):
            if lost:
                with connection.cursor() as cursor:
                    cursor.execute("select pg_terminate_backend(%s)", [lost])
            until(lambda lost=lost: asked and asked[-1] != lost, "it has asked")
            lost = asked[-1]
        assert queues.cancel(pending.id)
        ring()
        with pytest.raises(Unanswered):
            replies.result()
    told = [
        each.getMessage() for each in caplog.records if "waiting for replies" in each.getMessage()
    ]
    assert len(told) == 2
    assert all(each.endswith("trying again in 0.02 s") for each in told)


def test_rings_in_quick_succession_are_answered_by_few_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any login may ring."""
    monkeypatch.setattr(waiter, "MAX_QUERY_INTERVAL", 3600.0)
    monkeypatch.setattr(waiter, "MIN_QUERY_INTERVAL", 0.1)
    asked: list[float] = []
    query = link.ServerLink.query

    def timed(self: link.ServerLink, ids: Any) -> Any:
        asked.append(monotonic())
        return query(self, ids)

    monkeypatch.setattr(link.ServerLink, "query", timed)

    pending = request("test.echo")
    with waiting(pending) as replies:
        until(lambda: ring() or len(asked) > 3, "it asks four times")
        assert queues.cancel(pending.id)
        ring()
        with pytest.raises(Unanswered):
            replies.result()
    assert asked[3] - asked[0] > 0.2


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    """Waiters listen on a second connection: WAKEUP names an alias."""
    monkeypatch.setitem(connections.settings, "direct", connections.settings["default"])
    settings.DJANGO_MQ = {"WAKEUP": "direct"}
    yield
    with contextlib.suppress(AttributeError):  # a test may not have opened it
        del connections["direct"]


def test_a_connection_that_may_not_listen_is_closed(
    monkeypatch: pytest.MonkeyPatch, direct: None
) -> None:
    opened = link.ServerLink("default", link.SleepBreaker())
    with monkeypatch.context() as patch:
        patch.setattr(results, "LISTEN", "listen")
        with pytest.raises(psycopg.errors.SyntaxError) as refused:
            opened.query([1])
    assert len(others()) == 2
    opened.close()
    until(lambda: not others(), "both are closed")
    del refused  # its traceback kept an open connection alive until here


def test_a_connection_that_is_lost_as_it_listens_stops_no_query(
    monkeypatch: pytest.MonkeyPatch, direct: None
) -> None:
    monkeypatch.setattr(results, "LISTEN", "select pg_terminate_backend(pg_backend_pid())")
    opened = link.ServerLink("default", link.SleepBreaker())
    try:
        assert [each.id for each in opened.query([1])] == [1]
        assert not opened.is_listening()
    finally:
        opened.close()


@pytest.mark.parametrize("wakeup", ["notify", "direct"])
def test_a_listen_that_the_server_refused_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, direct: None, settings: Any, wakeup: str
) -> None:
    settings.DJANGO_MQ = {"WAKEUP": wakeup}
    monkeypatch.setattr(link, "LISTEN_INTERVAL", 0.0)
    opened = link.ServerLink("default", link.SleepBreaker())
    try:
        with monkeypatch.context() as patch:
            canceled = "do $$ begin raise exception 'canceled' using errcode = '57014'; end $$"
            patch.setattr(results, "LISTEN", canceled)
            with contextlib.suppress(psycopg.errors.QueryCanceled):
                opened.query([1])
            assert not opened.is_listening()
        opened.query([1])
        assert opened.is_listening()
    finally:
        opened.close()


def test_a_connection_after_the_first_listens_too_and_ends_the_next_sleep() -> None:
    opened = link.ServerLink("default", link.SleepBreaker())
    try:
        opened.query([1])
        opened.close()
        assert opened.sleep(PATIENCE)  # a ring may be lost
        opened.query([1])
        assert opened.is_listening()
        with connection.cursor() as cursor:
            cursor.execute(f"notify {results.CHANNEL}")
        opened.query([1])
        began = monotonic()
        assert opened.sleep(PATIENCE)  # it rang during the query
        assert monotonic() - began < PATIENCE
    finally:
        opened.close()


def test_it_asks_in_the_role_of_the_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**connection.settings_dict["OPTIONS"], "assume_role": "pg_monitor"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    made = link.driver_connection("default", Link())
    try:
        assert made.execute("select current_user").fetchone() == ("pg_monitor",)
    finally:
        made.close()


@pytest.mark.parametrize("timeout", [1e300, timedelta.max])
def test_a_timeout_beyond_all_clocks_is_as_none(start: Start, timeout: Any) -> None:
    echo()
    start()
    assert request("test.echo", 1).result(timeout=timeout) == 1
    assert async_to_sync(request("test.echo", 2).aresult)(timeout=timeout) == 2


def test_no_thread_to_be_had_is_an_error_and_no_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an attempt that could not start a thread, the next waiter works normally."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    echo()
    pending = request("test.echo", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pending.result()
    start()
    assert pending.result(timeout=PATIENCE) == 1


def test_a_database_that_refuses_is_an_error_and_no_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo()
    pending = request("test.echo", 1)
    with monkeypatch.context() as patch:
        patch.setattr(results, "REPLY_STATES", "select nothing")
        with pytest.raises(psycopg.errors.UndefinedColumn):
            pending.result()
    start()
    assert pending.result(timeout=PATIENCE) == 1


def test_the_connection_is_kept_for_a_while(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside tests the next question reuses it; after some idle time it is closed."""
    monkeypatch.delattr("django.core.mail.outbox")
    monkeypatch.setattr(waiter, "IDLE_SECONDS", 1.0)
    echo()
    start(until_empty=False)
    assert ask("test.echo", 1, timeout=PATIENCE) == 1
    assert "mq-replies" in names()
    first = next(each for each in threading.enumerate() if each.name == "mq-replies")
    assert ask("test.echo", 2, timeout=PATIENCE) == 2
    assert first.is_alive()
    until(lambda: not first.is_alive(), "it ends")
    assert ask("test.echo", 3, timeout=PATIENCE) == 3


def test_waiting_needs_no_connection_of_the_thread(start: Start) -> None:
    echo()
    start()
    pending = request("test.echo", 1)
    connection.close()
    assert pending.result(timeout=PATIENCE) == 1
    assert connection.connection is None
