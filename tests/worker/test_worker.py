"""The worker as a whole, in a thread of the test: what it starts, ends, says and survives."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction

from django_mq import RetryPolicy, broadcast, fixed, handler
from django_mq.messages import Delivery, Fence
from django_mq.models import FailedAttempt, QueuedMessage, WorkerHeartbeat
from django_mq.signals import message_acked
from django_mq.store import look as store_looking
from django_mq.worker import DeadWorker, Worker
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.worker.conftest import (
    PATIENCE,
    Running,
    Said,
    add_many,
    attempts_of,
    effect,
    effects,
    proxied,
    waiting,
)
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What handlers wait for; opened at the end whatever happens."""
    gate = threading.Event()
    yield gate
    gate.set()


def terminate_all() -> None:
    """Kill every other session of the test database, as a restart of the server does."""
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )


# ---- running and ending


def test_until_empty_runs_what_is_due_and_ends(start: Start, said: Said) -> None:
    """CAR-19, PMQ-23: nothing stays behind; what is not due yet does."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    messages = add_many(30, handler="h")
    later = add(handler="h", after=3600)
    assert start(until_empty=True).join() is True
    assert effects() == {m.pk for m in messages}
    assert waiting() == {later.pk}
    assert said.ids("message_acked").sort() == [m.pk for m in messages].sort()
    assert (said.count("worker_started"), said.count("worker_stopped")) == (1, 1)
    assert said.all[-1][2]["drained"] is True
    assert WorkerHeartbeat.objects.count() == 0


def test_until_empty_also_runs_what_handlers_broadcast(start: Start, settings: Any) -> None:
    """Also the last one's: without a ring and without a poll, it looks before it says empty."""
    settings.DJANGO_MQ = {"WAKEUP": "poll", "POLL_INTERVAL": 600, "LEASE": 3600}

    @handler("a", queue="mail", name="a")
    def a(delivery: Delivery) -> None:
        if delivery.payload["n"]:
            broadcast("a", {"n": delivery.payload["n"] - 1})
        effect(delivery)

    with transaction.atomic():
        broadcast("a", {"n": 5})
    assert start(until_empty=True).join()
    assert len(effects()) == 6


def test_until_empty_takes_over_what_lapsed(start: Start) -> None:
    """Guarantee 6: a lapsed lease is looked for first."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert delivery.attempt == 2
        effect(delivery)

    lapsed = [add(handler="h", leased=-1, attempts=1) for _ in range(5)]
    assert start(until_empty=True).join()
    assert effects() == {m.pk for m in lapsed}
    assert [attempts_of(m) for m in lapsed] == [["WorkerVanished"]] * 5


def test_an_empty_queue_ends_at_once(start: Start) -> None:
    """PMQ-19."""
    assert start(until_empty=True).join() is True


def test_stop_and_start_again(start: Start, said: Said) -> None:
    """KAF-11, CAR-35: a worker can be started again after a stop; its next run has another id."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    worker = Worker()
    assert worker.stop(timeout=1) is False
    ids = []
    for _ in range(2):
        running = Running(worker, until_empty=False)
        message = add(handler="h")
        said.wait("message_acked", len(ids) + 1)
        ids.append(worker.id)
        assert worker.stop(timeout=PATIENCE) is True
        assert running.join() is True
        assert message.pk in effects()
    assert len(set(ids)) == 2
    assert worker.id == ""
    assert worker.stop(timeout=1) is False


def test_a_running_worker_is_not_run_twice(start: Start, said: Said) -> None:
    """PMQ-35, CAR-35."""
    running = start()
    said.wait("worker_started")
    with pytest.raises(RuntimeError, match="already running"):
        running.worker.run()
    assert running.stop() is True


def test_a_stop_that_comes_before_the_start_is_not_lost() -> None:
    """SIGTERM may come while the process is still starting."""
    worker = Worker()
    worker.ask_to_stop()
    assert Running(worker, until_empty=False).join() is True


def test_refuses_to_run_inside_a_transaction() -> None:
    with transaction.atomic(), pytest.raises(RuntimeError, match="TestCase"):
        Worker().run(until_empty=True)


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"batch_size": 0}, {"async_slots": 0}, {"threads": -1}]
)
def test_numbers_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="from 1 to"):
        Worker(**options)  # type: ignore[arg-type]


def test_an_unreachable_database_is_an_error_at_the_start(start: Start, proxy: Proxy) -> None:
    proxy.refuse(True)
    with proxied(proxy):
        running = start()
        with pytest.raises(Exception, match="connection"):
            running.join()


@pytest.mark.parametrize("count", [1, 7])
def test_max_messages(start: Start, count: int) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    messages = add_many(10, handler="h")
    assert start(max_messages=count).join() is True
    assert effects() == {m.pk for m in messages[:count]}
    assert waiting() == {m.pk for m in messages[count:]}
    assert not QueuedMessage.objects.exclude(attempts=0, claimed_by=None).exists()


def test_max_seconds(start: Start) -> None:
    assert start(max_seconds=0.05).join() is True


# ---- threads


def test_threads_run_in_parallel(start: Start) -> None:
    """PMQ-48, PMQ-59 as changed: each on its own connection."""
    together = threading.Barrier(3, timeout=PATIENCE)
    pids: set[int] = set()

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        pids.add(connection.connection.info.backend_pid)
        together.wait()

    messages = add_many(3, handler="h")
    assert start(until_empty=True, threads=3).join()
    assert waiting() == set()
    assert len(pids) == 3
    assert not FailedAttempt.objects.filter(message_id__in=[m.pk for m in messages]).exists()


def test_a_slow_message_does_not_hold_up_the_others(
    start: Start, said: Said, gate: threading.Event
) -> None:
    """PMQ-48, PMQ-49, PMQ-57."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "slow":
            assert gate.wait(PATIENCE)
        effect(delivery)

    slow = add(handler="h", payload="slow", after=-100)
    quick = add_many(20, handler="h")
    running = start(threads=2)
    said.wait("message_acked", 20)
    assert effects() == {m.pk for m in quick}
    gate.set()
    said.wait("message_acked", 21)
    running.stop()
    assert slow.pk in effects()


def test_two_workers_share_a_queue(start: Start, said: Said) -> None:
    """RMQ-7, PMQ-22, PMQ-59: each message once."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    messages = add_many(60, handler="h")
    workers = [start(batch_size=5, threads=2) for _ in range(2)]
    said.wait("message_acked", 60)
    for each in workers:
        each.stop()
    assert sorted(said.ids("message_acked")) == sorted(m.pk for m in messages)
    assert FailedAttempt.objects.count() == 0


def test_retries_run_when_they_are_due(start: Start, said: Said) -> None:
    """CAR-24: a message that failed comes again, and so in the same worker."""
    attempts: list[int] = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0.05)))
    def h(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt < 4:
            raise ValueError
        effect(delivery)

    message = add(handler="h")
    running = start()
    said.wait("message_acked")
    running.stop()
    assert attempts == [1, 2, 3, 4]
    assert effects() == {message.pk}
    assert said.count("message_retried") == 3


# ---- draining


def test_a_drain_ends_what_runs_and_gives_the_rest_back(
    start: Start, said: Said, gate: threading.Event
) -> None:
    """KAF-7, NSQ-28, guarantee 3: refunded, and in its old place in line."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)
        effect(delivery)

    messages = add_many(30, handler="h")
    entries = {m.pk: m.processable_after for m in messages}
    running = start(threads=2)
    said.wait("message_started", 2)
    thread = threading.Thread(target=running.stop, daemon=True)
    thread.start()
    gate.set()
    assert running.join() is True
    started = set(said.ids("message_started"))
    assert effects() == started
    assert len(started) < 30
    left = QueuedMessage.objects.all()
    assert {m.pk for m in left} == {m.pk for m in messages} - started
    for message in left:
        assert (message.attempts, message.claimed_by, message.leased_until) == (0, None, None)
        assert message.processable_after == entries[message.pk]
    assert FailedAttempt.objects.count() == 0


def test_a_drain_gives_back_also_what_somebody_has_locked_for_a_moment(
    start: Start, said: Said, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal has rows locked while it runs, and a release skips what is locked."""
    from django_mq.store import settle

    released = settle.release
    calls: list[int] = []

    def release(cursor: Any, fences: Any) -> set[int]:
        calls.append(len(fences))
        if len(calls) > 1:
            return released(cursor, fences)
        with second_connection() as other, other.transaction():
            other.execute("select from django_mq_queuedmessage for update skip locked")
            return released(cursor, fences)

    monkeypatch.setattr(settle, "release", release)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    @handler("b", queue="mail", name="held")
    def held(delivery: Delivery) -> None: ...

    # Claimed with the first, and behind it.
    message = add(handler="h", after=-100)
    add(handler="h", suspect=True, after=-90)
    running = start(batch_size=2)
    said.wait("message_started")
    claimed = QueuedMessage.objects.filter(claimed_by__isnull=False)
    while claimed.count() < 2 and not calls:
        add(handler="h")
    thread = threading.Thread(target=running.stop, daemon=True)
    thread.start()
    while not calls:
        pass
    gate.set()
    running.join()
    assert len(calls) >= 2
    assert message.pk not in waiting()
    assert not QueuedMessage.objects.exclude(claimed_by=None).exists()
    assert not QueuedMessage.objects.exclude(attempts=0).exists()


def test_a_drain_that_runs_out_of_time_says_so(
    start: Start, said: Said, gate: threading.Event
) -> None:
    """KAF-7: drain_seconds in total, not for each part."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        gate.wait(PATIENCE)

    add_many(2, handler="h")
    running = start(drain_seconds=0.05, threads=2)
    said.wait("message_started", 2)
    assert running.stop() is False
    assert said.all[-1][2]["drained"] is False
    assert waiting()


# ---- suspects


def test_suspects_run_while_nothing_else_runs(start: Start, said: Said) -> None:
    """Guarantee 3: whatever kills the process costs no other message an attempt."""
    running: set[int] = set()
    beside: list[set[int]] = []
    lock = threading.Lock()

    def note(delivery: Delivery) -> None:
        with lock:
            running.add(delivery.id)
            if delivery.payload == "suspect":
                beside.append(set(running))
        for _ in range(200):
            with lock:
                if delivery.payload == "suspect":
                    beside.append(set(running))
        with lock:
            running.discard(delivery.id)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        note(delivery)

    @handler("b", queue="mail", name="async")
    async def ah(delivery: Delivery) -> None:
        await asyncio.to_thread(note, delivery)

    suspects = set()
    for n in range(40):
        add(handler="h" if n % 2 else "async", payload="plain", after=-60 + n / 100)
        if n % 8 == 0:
            name = "async" if n % 16 else "h"
            suspects.add(add(handler=name, payload="suspect", suspect=True, after=-60 + n / 100).pk)
    assert start(until_empty=True, threads=3).join()
    assert waiting() == set()
    assert {id for ids in beside for id in ids} == suspects
    assert all(len(ids) == 1 for ids in beside)


# ---- what is said


def test_log_lines_have_events_and_no_payload(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """PMQ-65: message, cause, delay; S-numbers of security: no payload."""
    caplog.set_level(logging.DEBUG, "django_mq")

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=2, backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        if delivery.type == "bad":
            raise ValueError("no")

    add(handler="h", type="good", payload={"password": "sesame"})
    bad = add(handler="h", type="bad", payload={"password": "sesame"}, max_attempts=2)
    running = start()
    said.wait("message_dead")
    said.wait("message_acked")
    running.stop()
    events = [r.event for r in caplog.records if hasattr(r, "event")]
    assert events.count("message_retried") == 1
    assert events.count("message_dead") == 1
    assert events.count("worker_started") == events.count("worker_stopped") == 1
    assert "sesame" not in str([record.__dict__ for record in caplog.records])
    (retried,) = (r for r in caplog.records if getattr(r, "event", "") == "message_retried")
    assert str(bad.pk) in retried.getMessage()
    assert "ValueError: no" in retried.getMessage()
    assert "again in 0 s" in retried.getMessage()


def test_receivers_that_raise_change_nothing(start: Start, said: Said) -> None:
    """KAF-4: what listens cannot bring the worker down."""

    def rude(sender: str, **data: Any) -> None:
        raise RuntimeError

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    message_acked.connect(rude)
    try:
        messages = add_many(3, handler="h")
        start(until_empty=True).join()
    finally:
        message_acked.disconnect(rude)
    assert said.ids("message_acked") == [m.pk for m in messages]


def test_the_heart_beats_while_it_runs(start: Start, said: Said, gate: threading.Event) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    add(handler="h")
    running = start(queues=["mail"])
    said.wait("message_started")
    until(lambda: WorkerHeartbeat.objects.filter(id=running.worker.id).exists())
    beat = WorkerHeartbeat.objects.get()
    assert beat.queues == ["mail"]
    assert beat.draining is False
    gate.set()
    running.stop()
    assert not WorkerHeartbeat.objects.exists()


def until(condition: Callable[[], Any]) -> None:
    """Wait for what no signal announces."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


# ---- the database goes away and comes back


def test_a_restart_of_the_server_is_survived(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantees 1, 16: what ran runs again or is charged once; nothing is lost or doubled."""

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
    # A COMMIT of afinish() whose answer was lost is done, and says nothing.
    until(lambda: not waiting())
    running.stop()
    assert effects() == {m.pk for m in messages + more}
    ids = said.ids("message_acked")
    assert len(ids) == len(set(ids))
    lines = [r for r in caplog.records if getattr(r, "event", "") == "database_lost"]
    assert len(lines) <= 20


def test_a_server_that_stays_away_is_waited_for_quietly(
    start: Start, said: Said, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 16: a line per try at most, of all threads together."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    with proxied(proxy):
        running = start(threads=3)
        said.wait("worker_started")
        add(handler="h")
        said.wait("message_acked")
        proxy.refuse(True)
        until(lambda: any("database lost" in r.getMessage() for r in caplog.records))
        threading.Event().wait(1.0)  # 0.25 + 0.5 + 1: three tries at most
        assert sum("database lost" in r.getMessage() for r in caplog.records) <= 4
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


def test_a_claim_whose_answer_is_lost_is_given_back(start: Start, said: Said, proxy: Proxy) -> None:
    """No worker holds its rows: without this they would wait for the lease, and be charged."""
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


def test_a_loss_while_claimed_messages_are_sorted_strands_nobody(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are claimed and their leases renewed: they must not be forgotten."""
    from django_mq.worker.resolver import Resolver

    sort, failures = Resolver.sort, [psycopg.OperationalError("gone")]

    def failing(self: Any, cursor: Any, delivery: Delivery) -> Any:
        if failures and delivery.payload == "second":
            raise failures.pop()
        return sort(self, cursor, delivery)

    monkeypatch.setattr(Resolver, "sort", failing)

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
    """CAR-36: the loop never dies; but a worker that never worked says so at once."""
    look = store_looking.look
    failures = [RuntimeError("one"), RuntimeError("two")]
    worked = threading.Event()

    def failing(cursor: Any) -> Any:
        if worked.is_set() and failures:
            raise failures.pop()
        return look(cursor)

    monkeypatch.setattr(store_looking, "look", failing)

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

    monkeypatch.setattr(store_looking, "look", failing)
    running = start()
    with pytest.raises(psycopg.errors.UndefinedTable):
        running.join()


# ---- what wakes it


@pytest.fixture
def patient(settings: Any) -> None:
    """The poll is too far away to help."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 600, "LEASE": 3600}


def test_woken_by_notify(start: Start, said: Said, patient: None) -> None:
    """CAR-14: Nothing but the ring tells it: guarantee 7 from its other side."""

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    until(lambda: listeners() == 1)
    with transaction.atomic():
        broadcast("a")
    said.wait("message_acked")
    running.stop()


def test_a_ring_wakes_all_who_sleep(start: Start, said: Said, patient: None) -> None:
    """CAR-32: one ring of one commit, and each looks at its own queue."""

    @handler("a", queue="mail", queues=("post",), name="h")
    def h(delivery: Delivery) -> None: ...

    workers = [start(queues=[queue]) for queue in ("mail", "post")]
    until(lambda: listeners() == 2)
    with transaction.atomic():
        broadcast("a", queue="mail")
        broadcast("a", queue="post")
    said.wait("message_acked", 2)
    assert all(worker.stop() for worker in workers)


def listeners() -> int:
    with second_connection() as other:
        row = other.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and query = 'listen django_mq'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_woken_by_the_next_due_time(start: Start, said: Said, patient: None) -> None:
    """PMQ-61, PMQ-62: the undelayed first, then each at its time; the poll has no part in it."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    second = add(handler="h", after=0.6, priority=5)
    first = add(handler="h", after=0.3)
    now = add(handler="h", after=-1)
    running = start()
    said.wait("message_acked", 3)
    running.stop()
    assert said.ids("message_acked") == [now.pk, first.pk, second.pk]


def test_woken_by_the_poll(start: Start, said: Said, settings: Any) -> None:
    """Guarantee 7: nothing depends on NOTIFY; no worker listens."""
    settings.DJANGO_MQ = {"WAKEUP": "poll", "POLL_INTERVAL": 0.05}

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    said.wait("worker_started")
    for n in range(1, 4):
        with transaction.atomic():  # add() reads it once more: not handled before
            add(handler="h")
        said.wait("message_acked", n)
    until(lambda: WorkerHeartbeat.objects.filter(wakeup="poll").exists())
    assert listeners() == 0
    running.stop()


def test_a_dead_listener_costs_no_message(start: Start, said: Said) -> None:
    """PMQ-63: it is made anew, and rings, since a ring may have been missed."""

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    running = start()
    until(lambda: listeners() == 1)
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and query = 'listen django_mq'"
        )
    with transaction.atomic():
        broadcast("a")
    said.wait("message_acked")
    until(lambda: listeners() == 1)
    running.stop()


# ---- leases, recovery


def test_leases_are_renewed_in_hand_and_while_it_runs(
    start: Start, said: Said, gate: threading.Event, settings: Any
) -> None:
    """Guarantee 6: also those of a queue whose lease is shorter than the others'."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"lease": 0.3}}}

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)
        with delivery.finish():  # type: ignore[attr-defined]
            effect(delivery)

    messages = add_many(3, handler="h")
    running = start(threads=2)
    said.wait("message_started", 2)
    leases = stored(messages[0]).leased_until
    assert leases is not None
    # Several leases later it is still ours.
    until(lambda: stored(messages[0]).leased_until > leases + timedelta(seconds=1))
    gate.set()
    said.wait("message_acked", 3)
    running.stop()
    assert effects() == {m.pk for m in messages}
    assert FailedAttempt.objects.count() == 0


def test_recovers_what_a_dead_sibling_held(start: Start, said: Said) -> None:
    """Guarantee 3: what ran is charged and suspect, the rest refunded, in its place."""
    attempts: dict[int, int] = {}

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        attempts[delivery.id] = delivery.attempt

    ran, overran, waited = (
        add(handler="h", leased=600, claimed_by="dead:4", attempts=1) for _ in range(3)
    )
    other = add(handler="h", leased=600, claimed_by="deadly:4", attempts=1)
    running = start()
    said.wait("worker_started")
    done = threading.Event()
    running.worker.recover(
        DeadWorker(
            worker="dead",
            reason="was killed by SIGKILL",
            timed_out=[Fence(overran.pk, 1, "dead:4")],
            lost=[Fence(ran.pk, 1, "dead:4")],
        ),
        done.set,
    )
    assert done.wait(PATIENCE)
    said.wait("message_acked", 3)
    running.stop()
    assert attempts == {ran.pk: 2, overran.pk: 2, waited.pk: 1}
    assert waiting() == {other.pk}
    assert attempts_of(ran) == ["django_mq.policy.outcomes.WorkerLost"]
    assert attempts_of(overran) == ["django_mq.policy.outcomes.TimedOut"]
    assert attempts_of(waited) == []


# ---- queues


def test_queues_in_strict_preference(start: Start, settings: Any) -> None:
    """As named, whatever terms each has; within a queue by priority, due time, id."""
    settings.DJANGO_MQ = {"QUEUES": {"second": {"lease": 99}}}
    ran: list[str] = []

    @handler("#", queue="first", queues=("second", "third"), name="h")
    def h(delivery: Delivery) -> None:
        ran.append(f"{delivery.queue} {delivery.priority}")

    for queue in ("third", "second", "first"):
        for priority in (0, 9):
            add(queue, handler="h", priority=priority)
    add("other", handler="h")
    start(until_empty=True, queues=["first", "second", "third"], batch_size=1).join()
    assert ran == ["first 9", "first 0", "second 9", "second 0", "third 9", "third 0"]
    assert len(waiting()) == 1


def test_patterns_of_queues(start: Start) -> None:
    @handler("#", queue="mail.a", queues=("mail.b", "post"), name="h")
    def h(delivery: Delivery) -> None: ...

    add("mail.a", handler="h")
    add("mail.b", handler="h")
    left = add("post", handler="h")
    start(until_empty=True, queues=["mail.*"]).join()
    assert waiting() == {left.pk}


def test_a_paused_queue_rests(start: Start, said: Said) -> None:
    """Also what lapsed there: it may be paused because its messages kill workers."""

    @handler("#", queue="mail", queues=("post",), name="h")
    def h(delivery: Delivery) -> None: ...

    decide("mail", paused=-1)
    due = add(handler="h")
    lapsed = add(handler="h", leased=-1)
    add("post", handler="h")
    assert start(until_empty=True).join()
    assert waiting() == {due.pk, lapsed.pk}
    with second_connection() as other:
        other.execute("update django_mq_queuestate set paused_until = now() where queue = 'mail'")
    assert start(until_empty=True).join()
    assert waiting() == set()


def test_another_message_is_not_run_while_its_row_is_locked(start: Start, said: Said) -> None:
    """Guarantee 13 from the worker's side, NSQ-23: skipped, not waited for."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    locked, free = add_many(2, handler="h")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [locked.pk])
        assert start(until_empty=True).join()
        assert effects() == {free.pk}
    assert start(until_empty=True).join()
    assert effects() == {locked.pk, free.pk}
