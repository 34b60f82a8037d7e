"""The worker as a whole, in a thread of the test: its run, its end, and its threads."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import RetryPolicy, broadcast, fixed, handler
from django_mq.executor.scoreboard import Scoreboard
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, WorkerHeartbeat
from django_mq.store import claim
from django_mq.store.claim import Lane
from django_mq.store.server_errors import LOST
from django_mq.worker import DeadWorker, Worker
from django_mq.worker.parts import Parts
from django_mq.worker.run import Run
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import (
    PATIENCE,
    Running,
    Said,
    Start,
    add_many,
    attempts_of,
    effect,
    effects,
    proxied,
    waiting,
)
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


# ---- running and ending


def test_until_empty_runs_due_messages_and_ends(start: Start, said: Said) -> None:
    """CAR-19, PMQ-23: no due message is left; later ones stay."""

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


def test_until_empty_also_runs_broadcasts_of_handlers(start: Start, settings: Any) -> None:
    """Including those of the last one: it looks again before it ends, without a ring or a poll."""
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


def test_until_empty_takes_over_lapsed_messages(start: Start) -> None:
    """Guarantee 6: lapsed leases come first."""

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


@pytest.mark.parametrize("times", [1, 20])
def test_a_signal_handler_stops_the_run_that_it_interrupts(times: int, said: Said) -> None:
    """It only asks, and returns at once: the run cannot end before the handler has returned."""
    worker = Worker()
    answers: list[bool] = []
    main = threading.get_ident()

    def send() -> None:
        said.wait("worker_started")
        for _ in range(times):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(
        signal.SIGUSR1, lambda *_: answers.append(worker.stop(timeout=2 * PATIENCE))
    )
    sender = threading.Thread(target=send)
    sender.start()
    began = monotonic()
    try:
        assert worker.run() is True
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert monotonic() - began < PATIENCE
    assert set(answers) == {False}
    assert not worker.running


@pytest.mark.parametrize("moment", ["begins", "ends"])
def test_a_signal_may_come_while_a_run_begins_or_ends(moment: str) -> None:
    """The handler interrupts code that holds the worker's lock; the next run is not stopped."""
    answers: list[bool] = []

    class Interrupted(Worker):
        moment = ""

        def scoreboard(self) -> Scoreboard:
            if self.moment == "begins":
                answers.append(self.stop())
            return super().scoreboard()

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "orders" and self.moment == "ends":
                answers.append(self.stop())

    worker = Interrupted()
    worker.moment = moment
    if moment == "ends":
        worker.max_seconds = 0.05
    assert Running(worker, until_empty=False).join() is True
    assert answers == [False]
    worker.moment, worker.max_seconds = "", None

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    message = add(handler="h")
    assert Running(worker, until_empty=True).join() is True
    assert effects() == {message.pk}


def test_a_stop_after_the_run_does_not_meet_the_next_run() -> None:
    """In the thread of the last run, too: a stop on its way in another one may come late."""
    threads: list[int] = []

    class Noting(Worker):
        def stop(self, timeout: float | timedelta | None = None) -> bool:
            threads.append(threading.get_ident())
            return super().stop(timeout)

    worker = Noting(max_seconds=0.05)
    assert worker.run() is True
    assert worker.stop() is False
    for each in threading.enumerate():
        if each.name == "mq-stop":
            each.join(PATIENCE)
    assert threads == [threading.get_ident()]


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


def test_a_run_may_end_while_another_thread_asks_about_it(start: Start, said: Said) -> None:
    """Each property and request looks at the run once: a second look may find none."""
    running = start()
    said.wait("worker_started")
    present = running.worker._run

    class Ending(Worker):
        """A worker whose run ends as soon as somebody has looked at it."""

        looks = 0

        @property
        def _run(self) -> Run | None:  # type: ignore[override]
            self.looks += 1
            return present if self.looks == 1 else None

    assert Ending().id == running.worker.id
    assert Ending().running
    assert Ending().running_messages == []
    assert Ending().sleeps >= 0
    Ending().recover(DeadWorker("w", "was killed"), lambda: None)
    Ending().ask_to_stop()
    running.stop()


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
    """CAR-24: a failed message comes again, even in the same worker."""
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


def test_max_messages_does_not_count_rows_unresolved_after_an_outage() -> None:
    """A quiet worker releases it; when it resumes, it still runs as many as it was told."""
    for name in ("one", "two"):

        @handler("#", queue="mail", name=name)
        def function(delivery: Delivery) -> None: ...

    # For two handlers: sorting one takes a statement. The first is released at once.
    messages = [add(handler=""), add(handler="")]
    parts = Parts(Worker(max_messages=5), "w", on_order=lambda order, by: None)
    try:
        cursor = parts.statements.cursor()
        rows = claim.claim(
            cursor, lanes=[Lane("mail", 0)], claimer="w:1", lease=30.0, limit=2, max_bytes=1 << 20
        ).rows
        with second_connection() as lost:
            dead = lost.cursor()
        with pytest.raises(LOST):
            parts.intake.take(dead, rows, taken_over=False)
        assert parts.quota.remaining == 4
        assert parts.dispatch.release([])
        assert parts.quota.remaining == 5
        assert [stored(each).attempts for each in messages] == [0, 0]
    finally:
        parts.statements.close()
