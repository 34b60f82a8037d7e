"""Levels between workers: another worker's writes, failed writes, and probes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.outage import Outage
from django_mq.executor.statements import Statements
from django_mq.executor.watchdog import Link
from django_mq.models import QueueState
from django_mq.policy.backoff import RetryPolicy
from django_mq.store import queue_backoff
from django_mq.worker.lease_keeper import LeaseKeeper
from django_mq.worker.recovery import DeadWorker, Recovery
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.worker.conftest import Told
from tests.worker.queue_backoff.conftest import Cursor, Fleet, now

pytestmark = pytest.mark.django_db(transaction=True)


FAR = timedelta(days=1000)


def test_worker_learns_a_level_that_another_wrote(
    fleet: Fleet, cursor: Cursor, heard: list[tuple[str, int]]
) -> None:
    """It releases the messages it holds although it changed nothing, and sends no signal."""
    deliveries = [fleet.claim(worker=1) for _ in range(5)]
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    assert fleet.end(deliveries[0], KeyError("host"), 1)
    fleet.write(1)
    assert fleet.stopped[1, "mail"] == fleet.state.backoff_changed_at
    assert not fleet.end(deliveries[1], KeyError("host"), 1)  # known to be older by now
    assert heard == [("backoff_started", 1)]


def test_unwritten_level_is_kept(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    """A lost database; then a session that has locked the row, which no worker waits for."""
    fleet.end(fleet.claim(), KeyError("host"))
    with second_connection() as lost:
        gone = lost.cursor()
    with pytest.raises(psycopg.OperationalError):
        fleet.workers[0].write(gone)
    decide()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate for update")
        fleet.write()
    assert heard == []
    assert fleet.workers[0].has_pending()
    assert fleet.stopped == {(0, "mail"): None}
    fleet.write()
    assert heard == [("backoff_started", 1)]
    assert not fleet.workers[0].has_pending()
    assert fleet.stopped == {(0, "mail"): fleet.state.backoff_changed_at}


@pytest.mark.parametrize("during", ["before a write", "a write that fails"])
def test_the_failure_of_the_latest_claim_counts_whichever_ended_first(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """That of the other may be older than a change by another worker, and would say nothing."""
    earlier, later = fleet.claim(), fleet.claim()

    def lose(cursor: Any, **given: Any) -> None:
        fleet.end(earlier, KeyError("host"))
        raise psycopg.OperationalError("gone")

    fleet.end(later, KeyError("host"))
    if during == "before a write":
        fleet.end(earlier, KeyError("host"))
    else:
        monkeypatch.setattr(queue_backoff, "raise_level", lose)
        with pytest.raises(psycopg.OperationalError):
            fleet.write()
    assert fleet.workers[0]._failed == {"mail": later._row.claimed_at}


def test_the_end_of_a_probe_is_kept_too(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    with second_connection() as other, second_connection() as lost:
        gone = lost.cursor()
        lost.close()
        delivery = fleet.claim()
        claimer = delivery._row.claimed_by
        queue_backoff.start_probe(fleet.cursor, queue="mail", claimer=claimer, lease=30.0)
        fleet.workers[0].probe_started("mail", claimer)
        fleet.end(delivery, None)
        with pytest.raises(psycopg.OperationalError):
            fleet.workers[0].write(gone)
        with other.transaction():
            other.execute("select from django_mq_queuestate for update")
            fleet.write()
    assert heard == [("backoff_started", 1)]
    assert fleet.workers[0].probes() == [("mail", claimer)]
    fleet.write()
    assert heard[1:] == [("backoff_ended", 0)]
    assert fleet.workers[0].probes() == []


def test_probe_that_found_no_message_is_cancelled(fleet: Fleet) -> None:
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    queue_backoff.start_probe(fleet.cursor, queue="mail", claimer="w0:9", lease=30.0)
    fleet.workers[0].probe_started("mail", "w0:9")
    assert fleet.allowance == "none"
    fleet.workers[0].cancel_probe(fleet.cursor, "mail", "w0:9")
    assert fleet.workers[0].probes() == []
    assert fleet.allowance == "one"


@pytest.fixture
def freed() -> Told:
    return Told()


@pytest.fixture
def keeper(transactional_db: None) -> Iterator[LeaseKeeper]:
    """A lease keeper in the thread of the test: its process runs the probe `w:1` of mail."""
    keeper = LeaseKeeper(
        alias="default",
        worker="w",
        local_queue=LocalQueue(
            batch=1, slice_size=1, poke=lambda: None, max_linger=3600.0, slots=Slots(100)
        ),
        lease_of=lambda queue: 30.0,
        shortest_lease=30.0,
        heartbeat=dict,
        on_heartbeat=lambda since: None,
        on_commands=lambda commands: None,
        probes=lambda: [("mail", "w:1")],
        link=Link(),
    )
    yield keeper
    keeper._statements.close()


@pytest.fixture
def statements(transactional_db: None) -> Iterator[Statements]:
    statements = Statements("default")
    yield statements
    statements.close()


def test_a_dying_worker_does_not_keep_its_probe(freed: Told, cursor: Cursor) -> None:
    """Its sibling, which settles its messages, gives the probe back, and looks for messages."""
    decide(backoff_level=1, backoff=-1, probe_by="dead:1", probe_until=now(cursor) + FAR)
    decide("other", backoff_level=1, backoff=-1, probe_by="alive:1", probe_until=now(cursor) + FAR)
    recovery = Recovery(
        "default",
        outage=Outage(threading.Event()),
        policy_of=lambda row: RetryPolicy(),
        limit_of=lambda row: None,
        on_freed=freed,
        on_charged=lambda: None,
        link=Link(),
    )
    recovery.settle(DeadWorker("dead", "killed"))
    assert freed.count == 1
    assert dict(QueueState.objects.values_list("queue", "probe_by")) == {
        "mail": None,
        "other": "alive:1",
    }
    assert queue_backoff.start_probe(cursor, queue="mail", claimer="alive:2", lease=30.0)
    recovery.settle(DeadWorker("dead", "killed"))
    assert freed.count == 1
    recovery._statements.close()


def test_a_probe_that_runs_long_is_renewed(keeper: LeaseKeeper, cursor: Cursor) -> None:
    """It is renewed with its message's lease: a handler may run longer than a lease."""
    soon = now(cursor) + timedelta(seconds=5)
    mine = decide(backoff_level=1, backoff=-1, probe_by="w:1", probe_until=soon)
    other = decide("other", backoff_level=1, backoff=-1, probe_by="x:1", probe_until=soon)
    add(leased=5, claimed_by="w:1", attempts=1)
    add("other", leased=5, claimed_by="x:1", attempts=1)
    keeper._renew()
    until = stored(mine).probe_until
    assert until is not None
    assert until - soon > timedelta(seconds=20)
    assert stored(other).probe_until == soon
