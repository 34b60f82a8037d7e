"""Guarantee 25: a renewal does not wait for handlers, operators, or the rest of the worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection, connections
from django.utils import timezone

from django_mq import handler, signals
from django_mq.messages import Delivery, Fence
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.worker import DeadWorker
from tests.database import CLEANERS_NAME, second_connection
from tests.rows import add, decide, stored
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start

pytestmark = pytest.mark.django_db(transaction=True)


#: Seconds; a sibling that polls looks for lapsed leases each second. A busy machine may stand still
#: for two thirds of it.
LEASE = 5.0
#: Seconds; after them a sibling has seen a lease that was not renewed.
LONGER = 6.0


class Block(logging.Handler):
    """A blocking log handler, or a blocking receiver of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __call__(self, *args: Any, **data: Any) -> None:
        self.entered.set()
        assert self.gate.wait(PATIENCE * 4)

    def handle(self, record: logging.LogRecord) -> bool:
        self()
        return True


@pytest.fixture
def block() -> Iterator[Block]:
    block = Block()
    yield block
    block.gate.set()


@contextmanager
def locked(statement: str) -> Iterator[psycopg.Connection[Any]]:
    """Hold the locks of `statement` in the transaction of another session."""
    with second_connection() as other, other.transaction(force_rollback=True):
        other.execute(statement)
        yield other


class Long:
    """A message whose handler runs in no transaction: only its lease protects it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.attempts: list[int] = []

        @handler("#", queue="mail", name="long", atomic=False)
        def long(delivery: Delivery) -> None:
            self.attempts.append(delivery.attempt)
            assert self.gate.wait(PATIENCE * 4)

        self.message = add(handler="long")

    def outlives(self, seconds: float) -> None:
        """Wait while its lease is renewed for that long; no other worker may take it."""
        until(lambda: stored(self.message).leased_until is not None)
        began = timezone.now()
        enough = began + timedelta(seconds=seconds + LEASE)

        def renewed_or_taken() -> bool:
            row = stored(self.message)
            assert row.leased_until is not None
            return row.attempts > 1 or row.leased_until > enough

        until(renewed_or_taken)
        assert self.attempts == [1]

    def ends(self, said: Said) -> None:
        self.gate.set()
        said.wait("message_acked")
        assert self.attempts == [1]
        assert FailedAttempt.objects.count() == 0
        assert not QueuedMessage.objects.filter(pk=self.message.pk).exists()


@pytest.fixture
def long(settings: Any) -> Iterator[Long]:
    settings.DJANGO_MQ = {
        "LEASE": LEASE,
        "WAKEUP": "poll",
        "QUEUES": {"post": {"warn_depth": 1}, "slow": {"backoff": {}}},
    }
    long = Long()
    yield long
    long.gate.set()


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(
            "select from django_mq_queuestate where queue = ':' for update", id="turn-of-chores"
        ),
        *slow(
            pytest.param("lock table django_mq_failedattempt", id="table-of-a-chore"),
            pytest.param("lock table django_mq_uniquekey", id="unique-ids"),
        ),
    ],
)
def test_chores_that_are_held_up_delay_no_renewal(
    start: Start, said: Said, long: Long, statement: str
) -> None:
    """A live worker keeps its message, though siblings look for lapsed leases."""
    decide(":", chores_resume={})
    with locked(statement):
        start()
        start()
        long.outlives(LONGER)
    long.ends(said)


@pytest.mark.slow
def test_a_locked_heartbeat_delays_no_renewal(start: Start, said: Said, long: Long) -> None:
    """An operator's update or delete locks it: the heartbeat is skipped."""
    start()
    start()
    said.wait("worker_started", 2)
    with locked("select from django_mq_workerheartbeat for update"):
        long.outlives(2 * LONGER)
    long.ends(said)


@pytest.mark.slow
def test_a_table_of_heartbeats_that_a_migration_has_delays_no_renewal(
    start: Start, said: Said, long: Long
) -> None:
    with locked("lock table django_mq_workerheartbeat"):
        start()
        start()
        long.outlives(LONGER)
    long.ends(said)


def test_a_table_of_queues_that_a_migration_has_delays_no_renewal(
    start: Start, said: Said, long: Long
) -> None:
    """No worker can claim in this time; afterwards siblings look for lapsed leases at once."""
    start()
    start()
    said.wait("message_started")
    with locked("lock table django_mq_queuestate"):
        long.outlives(LONGER)
    long.ends(said)


@pytest.mark.slow
def test_a_receiver_that_blocks_delays_no_renewal(
    start: Start, said: Said, long: Long, block: Block
) -> None:
    """The chores announce a queue that is too deep; the receiver blocks."""
    signals.queue_deep.connect(block, weak=False)
    try:
        for _ in range(3):
            add("post")
        start(queues=["mail"])
        start(queues=["mail"])
        assert block.entered.wait(PATIENCE)
        long.outlives(LONGER)
        block.gate.set()
        long.ends(said)
    finally:
        signals.queue_deep.disconnect(block)


def test_a_dead_sibling_delays_no_renewal(
    start: Start, said: Said, long: Long, block: Block
) -> None:
    """Its messages are settled while a receiver of that signal blocks."""
    lost = add(handler="long", leased=600, claimed_by="dead:1", attempts=1, max_attempts=1)
    signals.message_dead.connect(block, weak=False)
    try:
        running, _ = start(), start()
        said.wait("message_started")
        dead = DeadWorker("dead", "was killed", lost=[Fence(lost.pk, 1, "dead:1")])
        done = threading.Event()
        running.worker.recover(dead, done.set)
        assert block.entered.wait(PATIENCE)
        assert running.worker.running
        long.outlives(LONGER)
        assert not done.is_set()
        block.gate.set()
        assert done.wait(PATIENCE)
    finally:
        signals.message_dead.disconnect(block)
    long.gate.set()
    said.wait("message_acked")
    assert long.attempts == [1]


@pytest.mark.slow
def test_a_log_handler_that_blocks_delays_no_renewal(
    start: Start, said: Said, long: Long, block: Block
) -> None:
    """All connections are cut once; other threads log that."""
    start()
    start()
    said.wait("message_started")
    logger = logging.getLogger("django_mq")
    logger.addHandler(block)
    try:
        with second_connection() as other:
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> all(%s)",
                [[other.info.backend_pid, connection.connection.info.backend_pid]],
            )
        assert block.entered.wait(PATIENCE)
        long.outlives(LONGER)
    finally:
        logger.removeHandler(block)
        block.gate.set()
    long.ends(said)


@pytest.mark.slow
def test_limits_of_the_role_cut_no_renewal(start: Start, said: Said, long: Long) -> None:
    """Guarantee 24: a role's limits are for handlers; our statements have their own."""
    with second_connection() as own:
        name = own.execute("select current_database()").fetchone()[0]  # type: ignore[index]
        own.execute(
            "create function pg_temp.slow() returns trigger language plpgsql as"
            " 'begin perform pg_sleep(0.2); return new; end'"
        )
        own.execute(f'alter database "{name}" set statement_timeout = 100')
        try:
            start()
            said.wait("message_started")
            own.execute(
                "create trigger slow before update on django_mq_queuedmessage"
                " for each row execute function pg_temp.slow()"
            )
            try:
                long.outlives(LONGER)
            finally:
                own.execute("drop trigger slow on django_mq_queuedmessage")
        finally:
            own.execute(f'alter database "{name}" reset statement_timeout')
    long.ends(said)


def backends() -> int:
    """Return the number of this database's sessions, without the asking one."""
    with second_connection() as other:
        row = other.execute(
            "select count(*) - 1 from pg_stat_activity"
            " where datname = current_database() and backend_type = 'client backend'"
            " and application_name <> %s",
            [CLEANERS_NAME],
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_worker_has_a_connection_more_only_while_chores_run(
    start: Start, said: Said, settings: Any, block: Block
) -> None:
    """`threads + 3`: executors, claims, renewals, LISTEN, as in the manual."""
    settings.DJANGO_MQ = {"QUEUES": {"post": {"warn_depth": 1}}}
    gate = threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("select 1")
        assert gate.wait(PATIENCE * 4)

    for queue in ("mail", "mail", "post", "post"):
        add(queue, handler="h")
    signals.queue_deep.connect(block, weak=False)
    before = backends()
    try:
        start(queues=["mail"], threads=2, batch_size=1)
        said.wait("message_started", 2)
        assert block.entered.wait(PATIENCE)
        until(lambda: backends() == before + 2 + 3 + 1)
        block.gate.set()
        until(lambda: backends() == before + 2 + 3)
    finally:
        signals.queue_deep.disconnect(block)
        gate.set()


def said_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if getattr(each, "event", "") == "renewal_failed"]


def test_failed_renewal_is_logged_and_repeated(
    start: Start, said: Said, long: Long, caplog: pytest.LogCaptureFixture
) -> None:
    """One line every few seconds, from the loop."""
    start()
    said.wait("message_started")
    trouble = [
        "create function pg_temp.no() returns trigger language plpgsql as"
        " 'begin raise exception ''no more leases''; end'",
        "create trigger no before update on django_mq_queuedmessage"
        " for each row execute function pg_temp.no()",
    ]
    with second_connection() as own:
        for statement in trouble:
            own.execute(statement)
        try:
            until(lambda: bool(said_of(caplog)))
        finally:
            own.execute("drop trigger no on django_mq_queuedmessage")
    [line] = said_of(caplog)
    assert "psycopg.errors.RaiseException" in line.getMessage()
    assert line.threadName != "mq-lease-keeper"
    QueueState.objects.all().delete()
    long.ends(said)


def test_a_heartbeat_that_is_requested_while_the_thread_wakes_up_does_not_make_it_spin(
    start: Start, said: Said
) -> None:
    """The second step of a request may come when the first has been obeyed."""
    running = start()
    said.wait("worker_started")
    assert running.worker._run is not None
    keeper = running.worker._run.parts.lease_keeper
    keeper._wake.set()
    until(lambda: not keeper._wake.is_set(), "it sleeps")


def test_a_message_that_waits_in_a_slice_behind_a_slow_one_is_protected_by_the_heartbeat(
    start: Start, said: Said, settings: Any, gate: threading.Event
) -> None:
    """The slice has locked it, so its lease lapses; the locks may go without the worker knowing."""
    # No slice is late, however busy the machine is: so its handler gets larger ones.
    settings.DJANGO_MQ = {"LEASE": LEASE, "WAKEUP": "poll", "SLICE_SECONDS": PATIENCE}
    begun = threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        connection.cursor().execute("select 1")
        if delivery.payload == "slow":
            begun.set()
            assert gate.wait(PATIENCE)

    for n in range(3):  # slices of one, of two, then of up to four messages
        add(handler="h", after=-60 + n)
    add(handler="h", payload="slow", after=-10)
    behind = add(handler="h", after=-5)
    start(threads=1)
    assert begun.wait(PATIENCE)
    listed = "select ran from django_mq_workerheartbeat"

    def lapsed_and_listed() -> bool:
        with second_connection() as other:
            ((ran,),) = other.execute(listed).fetchall()
        row = stored(behind)
        return str(behind.pk) in ran and row.leased_until < timezone.now()

    until(lapsed_and_listed, "its lease has lapsed")
    assert stored(behind).attempts == 1
    gate.set()
    said.wait("message_acked", 5)
    assert FailedAttempt.objects.count() == 0
