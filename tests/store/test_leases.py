"""Leases are renewed only for their owner, and never shortened."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.utils import timezone

from django_mq.messages import Fence
from django_mq.models import WorkerCommand, WorkerHeartbeat
from django_mq.store import leases
from tests.database import second_connection
from tests.rows import add, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def left(message: Any) -> float:
    until = stored(message).leased_until
    assert until is not None
    return (until - timezone.now()).total_seconds()


@pytest.mark.parametrize("how", [leases.renew, leases.start])
def test_a_lease_is_moved_and_never_shortened(cursor: Cursor, how: Any) -> None:
    short = add(leased=5, attempts=1)
    lapsed = add(leased=-5, attempts=1)
    long = add(leased=500, attempts=1)
    how(cursor, [Fence(m.pk, 1, "worker:1") for m in (short, lapsed, long)], lease=60.0)
    assert 50 < left(short) <= 60
    assert 50 < left(lapsed) <= 60
    assert 490 < left(long) <= 500


@pytest.mark.parametrize(
    "fence", [(2, "worker:1"), (1, "worker:2"), (1, "other:1"), (0, "worker:1")]
)
def test_lease_of_another_claimer_is_not_renewed(cursor: Cursor, fence: tuple[int, str]) -> None:
    """Guarantee 4."""
    message = add(leased=5, attempts=1)
    before = message.leased_until
    leases.renew(cursor, [Fence(message.pk, *fence)], lease=60.0)
    assert leases.start(cursor, [Fence(message.pk, *fence)], lease=60.0) == {}
    assert stored(message).leased_until == before


def test_renewal_skips_locked_rows(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """A row locked by its own slice needs no lease during the lock."""
    busy, free = (add(leased=5, attempts=1) for _ in range(2))
    lock(other, busy.pk)
    cursor.execute("set statement_timeout = '60s'")
    leases.renew(cursor, [Fence(m.pk, 1, "worker:1") for m in (busy, free)], lease=60.0)
    assert left(busy) < 10
    assert left(free) > 50


def test_start_reports_expired_messages(cursor: Cursor) -> None:
    rows = [add(leased=5, attempts=1, **given) for given in ({}, {"expires": 9}, {"expires": 0})]
    fences = [Fence(m.pk, 1, "worker:1") for m in rows]
    assert leases.start(cursor, fences, lease=9.0) == dict(
        zip([m.pk for m in rows], [False, False, True], strict=True)
    )


BEAT: dict[str, Any] = {
    "worker": "w", "queues": ["a", "b.*"], "host": "h", "pid": 7, "version": "1",
    "wakeup": "notify", "draining": False, "running": {1: 2.5, 2: 0.0},
    "timings": {"h": {"acked": 1}}, "capacity": leases.Capacity(),
}  # fmt: skip


def test_a_heartbeat_takes_each_command_once(cursor: Cursor) -> None:
    """Those of this worker, in order: one that was quieted and resumed stays resumed."""
    for worker, action in (("w", "quiet"), ("other", "leave"), ("w", "resume")):
        WorkerCommand.objects.create(worker=worker, action=action, asked_by="ada")
    taken = leases.record_heartbeat(cursor, **BEAT).commands
    assert [(each.action, each.by) for each in taken] == [("quiet", "ada"), ("resume", "ada")]
    assert leases.record_heartbeat(cursor, **BEAT).commands == []
    assert WorkerCommand.objects.get(taken_at=None).worker == "other"


def test_a_heartbeat_whose_row_is_locked_is_not_stored(cursor: Cursor) -> None:
    """An earlier one may still be committed, or an operator has the row."""
    assert leases.record_heartbeat(cursor, **BEAT).stored
    assert leases.record_heartbeat(cursor, **BEAT).stored
    with second_connection() as other, other.transaction(force_rollback=True):
        other.execute("select from django_mq_workerheartbeat for update")
        assert not leases.record_heartbeat(cursor, **BEAT).stored
    assert leases.record_heartbeat(cursor, **BEAT).stored


def test_a_heartbeat_is_written_once_and_then_moved(cursor: Cursor) -> None:
    leases.record_heartbeat(cursor, **BEAT)
    first = WorkerHeartbeat.objects.get()
    assert (first.queues, first.running, first.pid) == (["a", "b.*"], [1, 2], 7)
    assert first.ran == {"1": 2.5, "2": 0.0}
    assert first.timings == {"h": {"acked": 1}}
    assert (first.threads, first.threads_used, first.slots, first.slots_used) == (None,) * 4
    changed = {"running": {}, "draining": True, "wakeup": "degraded", "timings": {"i": {}}}
    changed["capacity"] = leases.Capacity(4, 3.5, 100, 0.25)
    leases.record_heartbeat(cursor, **{**BEAT, **changed})
    second = WorkerHeartbeat.objects.get()
    assert second.timings == {"i": {}}
    assert (second.running, second.draining, second.wakeup) == ([], True, "degraded")
    assert (second.threads, second.threads_used) == (4, 3.5)
    assert (second.slots, second.slots_used) == (100, 0.25)
    assert second.started_at == first.started_at
    assert second.last_seen - first.last_seen > timedelta(0)
    leases.leave(cursor, worker="other")
    assert WorkerHeartbeat.objects.exists()
    leases.leave(cursor, worker="w")
    assert not WorkerHeartbeat.objects.exists()
