"""The database goes away and comes back, or refuses work, under a running worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import log2
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import connection, connections

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor.outage import Outage
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.policy.line_marks import LineMarks
from django_mq.store import poll as store_poll
from django_mq.worker.watermarks import Watermarks
from tests.database import second_connection
from tests.rows import add, stored
from tests.waiting import until
from tests.worker.conftest import Said, Start, add_many, effect, effects, proxied, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


def terminate_all() -> None:
    """End every other session of the test database, like a restart of the server."""
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )


def test_a_restart_of_the_server_is_survived(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantees 1, 16: running messages rerun or are charged once; nothing is lost or doubled."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        effect(delivery)

    @handler("#", queue="mail", name="async", retry=RetryPolicy(backoff=fixed(0)))
    async def ah(delivery: Delivery) -> None:
        await delivery.afinish(effect, delivery)  # type: ignore[attr-defined]

    messages = add_many(40, handler="h") + add_many(40, handler="async")
    running = start(threads=2, batch_size=10)
    for count in (10, 30):
        said.wait("message_acked", count)
        terminate_all()
        connection.close()
    more = add_many(5, handler="h")
    # If the answer to the COMMIT of afinish() is lost, its message is done without a signal.
    until(lambda: not waiting())
    running.stop()
    assert effects() == {m.pk for m in messages + more}
    ids = said.ids("message_acked")
    assert len(ids) == len(set(ids))
    lines = [r for r in caplog.records if getattr(r, "event", "") == "database_lost"]
    assert len(lines) <= 20


def test_claims_of_a_line_begin_at_the_front_after_an_outage(
    start: Start, settings: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may be another one: ids that were not replicated are drawn again."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2, "QUEUES": {"line": {"ordered": True}}}
    monkeypatch.setattr(
        Watermarks, "full_in", lambda own: 0.0 if own._last_full == float("-inf") else 60.0
    )

    @handler("#", queue="line", name="h")
    def h(delivery: Delivery) -> None:
        """Acked."""

    add("line", handler="h", ordered=True)
    running = start()
    said.wait("message_acked")
    assert running.worker._run is not None
    running.worker._run.parts.ordered_queues.owned["line"] = LineMarks(first=1 << 40)
    terminate_all()
    connection.close()
    add("line", handler="h", ordered=True)
    said.wait("message_acked", 2)


def test_a_server_that_stays_away_is_waited_for_quietly(
    start: Start, said: Said, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 16, S20: at most one line per try, for all threads together."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    with proxied(proxy):
        running = start(threads=3)
        said.wait("worker_started")
        add(handler="h")
        said.wait("message_acked")
        began = monotonic()
        proxy.refuse(True)
        until(lambda: any("database lost" in r.getMessage() for r in caplog.records))
        threading.Event().wait(1.0)
        lines = sum("database lost" in r.getMessage() for r in caplog.records)
        waited = monotonic() - began
        # A try at once, and after 0.25 s, 0.5 s, 1 s and so on; and one line more.
        assert lines <= 2 + log2(1 + waited / 0.25)
        with second_connection_without(proxy) as other:
            other.execute(
                "insert into django_mq_queuedmessage (queue, type, payload, handler)"
                " values ('mail', 'a', '{}', 'h')"
            )
        proxy.refuse(False)
        said.wait("message_acked", 2)
        running.stop()
        connections["default"].close()
    assert [r.event for r in caplog.records if hasattr(r, "event")].count("database_back") >= 1


def second_connection_without(proxy: Proxy) -> psycopg.Connection[Any]:
    own = connection.get_connection_params()
    params = {k: v for k, v in own.items() if k in ("dbname", "user", "password")}
    return psycopg.connect(**params, **proxy.address, autocommit=True)


class Clock:
    """The time that an `Outage` reads."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("django_mq.executor.outage.monotonic", lambda: clock.now)
    return clock


def unwaited_outage() -> Outage:
    """Return an `Outage` for which nobody waits."""
    over = threading.Event()
    over.set()
    return Outage(over)


def test_an_outage_lasts_while_the_thread_that_met_it_fails(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """The server keeps the connections of other threads: their answers say nothing of a new one."""
    caplog.set_level("INFO", logger="django_mq")
    outage = unwaited_outage()

    def elsewhere(call: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=call, args=given)
        thread.start()
        thread.join()

    full = psycopg.OperationalError("FATAL: sorry, too many clients already")
    outage.wait(full)
    elsewhere(outage.record_answer)
    assert outage.lost
    outage.record_answer()
    assert not outage.lost
    clock.now += 60
    outage.wait(full)
    clock.now += 60  # its work is done by others
    elsewhere(outage.record_answer)
    assert not outage.lost
    outage.wait(full)
    elsewhere(outage.wait, full)
    outage.record_answer()
    assert outage.lost  # one of the two got a connection
    clock.now += 60
    outage.record_answer()
    assert not outage.lost
    events = [getattr(each, "event", "") for each in caplog.records]
    assert events == ["database_lost", "database_back"] * 3
    assert "raise max_connections" in caplog.text


def test_a_connection_that_the_last_outage_cut_is_no_other_outage(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """After a restart of the server, idle threads find out one by one that theirs is dead."""
    caplog.set_level("INFO", logger="django_mq")
    outage = unwaited_outage()
    cut = psycopg.OperationalError("the connection is lost")

    def events() -> list[str]:
        return [getattr(each, "event", "") for each in caplog.records]

    def idle_since() -> None:
        clock.now += 1
        outage.wait(cut)
        outage.record_answer()
        assert events() == ["database_lost", "database_back"]
        clock.now += 1
        outage.wait(cut)  # this connection was made after the outage
        outage.record_answer()

    outage.wait(cut)
    outage.record_answer()
    thread = threading.Thread(target=idle_since)
    thread.start()
    thread.join()
    assert events() == ["database_lost", "database_back"] * 2
    clock.now += 3600
    outage.wait(cut)
    assert events()[4:] == ["database_lost"]


def test_a_thread_that_meets_an_outage_late_tries_again_soon(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """Its own connection was cut long ago: perhaps the server is back, and a message waits."""
    waits: list[float | None] = []

    class Recording(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return False

    outage = Outage(Recording())
    cut = psycopg.OperationalError("the connection is lost")
    for _ in range(4):
        outage.wait(cut)
        clock.now += 5

    def twice() -> None:
        outage.wait(cut)
        outage.wait(cut)

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert waits == [0.25, 0.5, 1, 2, 0.25, 4]
    assert [record.getMessage()[-5:] for record in caplog.records][-1] == "n 4 s"
    assert len(caplog.records) == 5


def test_claim_whose_answer_is_lost_is_released(start: Start, said: Said, proxy: Proxy) -> None:
    """No worker holds its rows: otherwise they would wait for the lease, and be charged."""
    attempts: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)

    add_many(3, handler="h")
    proxy.cut_at("with taken as materialized", arrives=True)
    with proxied(proxy):
        running = start()
        said.wait("message_acked", 3)
        running.stop()
        connections["default"].close()
    assert proxy.cuts == 1
    assert attempts == [1, 1, 1]
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("word", ["held.reason", "with original as"])
def test_message_whose_hold_or_routing_gets_no_answer_is_released(
    start: Start, said: Said, proxy: Proxy, caplog: pytest.LogCaptureFixture, word: str
) -> None:
    """The server has held or routed it: its lease is not lost, and nothing waits for its end."""

    @handler("known", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    routed, held = add(type="known"), add(type="unknown")
    proxy.cut_at(word, arrives=True)
    with proxied(proxy):
        running = start()
        until(lambda: proxy.cuts)
        later = add(type="known")
        said.wait("message_acked", 2)
        running.stop()
        connections["default"].close()
    assert effects() == {routed.pk, later.pk}
    assert stored(held).held_since
    assert FailedAttempt.objects.count() == 0
    assert "LeaseLost" not in caplog.text


def test_lost_connection_during_resolving_strands_no_message(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are claimed and their leases renewed: they must not be forgotten."""
    from django_mq.worker.resolver import Resolver

    sort, failures = Resolver.resolve, [psycopg.OperationalError("gone")]

    def failing(self: Any, cursor: Any, delivery: Delivery) -> Any:
        if failures and delivery.payload == "second":
            raise failures.pop()
        return sort(self, cursor, delivery)

    monkeypatch.setattr(Resolver, "resolve", failing)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    warm_up = add(handler="h", after=-100)
    to_be_routed = [add(handler=name, payload=p) for name, p in
                    (("h", "first"), ("", "second"), ("h", "third"))]  # fmt: skip
    messages = [warm_up, *to_be_routed]
    assert start(until_empty=True).join()
    assert failures == []
    assert effects() == {m.pk for m in messages}
    assert FailedAttempt.objects.count() == 0


def test_an_error_in_the_loop_is_logged_and_survived(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CAR-36: the loop never dies; but a worker that never worked reports the error at once."""
    look = store_poll.poll
    failures = [RuntimeError("one"), RuntimeError("two")]
    worked = threading.Event()

    def failing(cursor: Any) -> Any:
        if worked.is_set() and failures:
            raise failures.pop()
        return look(cursor)

    monkeypatch.setattr(store_poll, "poll", failing)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    running = start()
    add(handler="h")
    said.wait("message_acked")
    worked.set()
    until(lambda: not failures)
    last = add(handler="h")
    said.wait("message_acked", 2)
    running.stop()
    assert last.pk in effects()
    assert [r.event for r in caplog.records if hasattr(r, "event")].count("loop_failed") == 2


def test_tables_that_are_missing_end_the_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(cursor: Any) -> Any:
        raise psycopg.errors.UndefinedTable("no such table")

    monkeypatch.setattr(store_poll, "poll", failing)
    running = start()
    with pytest.raises(psycopg.errors.UndefinedTable):
        running.join()
