"""Only the sessions of a frozen owner are ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_mq.executor.simple_protocol import simple_query
from django_mq.models import WorkerHeartbeat
from django_mq.store import frozen_owner, leases
from tests.database import second_connection
from tests.rows import add, beat, columns, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
Session = psycopg.Connection[Any]

#: Seconds without a heartbeat after which a worker counts as frozen.
SILENT = 6.0


def row(**given: Any) -> Any:
    return add("line", **{"ordered": True, "leased": -1, "claimed_by": "gone:3", **given})


def end(cursor: Cursor) -> list[int]:
    return frozen_owner.end(cursor, queue="line", worker="gone", silent=SILENT)


def record(session: Session, worker: str = "gone") -> bool:
    found = simple_query(session, frozen_owner.record(worker))
    session.rollback()
    return bool(found)


@pytest.fixture
def sessions(transactional_db: None) -> Iterator[list[Session]]:
    """Sessions of the worker `gone`."""
    own = connection.get_connection_params()
    params = {k: v for k, v in own.items() if k in ("dbname", "user", "password", "host", "port")}
    opened: list[Session] = [psycopg.connect(**params) for _ in range(4)]
    beat("gone", seen=-SILENT)
    for each in opened:
        assert record(each)
    yield opened
    for each in opened:
        each.close()


def alive(session: Session) -> bool:
    try:
        session.execute("select 1")
    except psycopg.OperationalError:
        return False
    return True


def test_only_the_transaction_of_the_frozen_owner_is_ended(
    cursor: Cursor, sessions: list[Session]
) -> None:
    """Others with locks in the queue live, and so do its sessions with other locks."""
    messages = [
        row(),
        row(leased=30, claimed_by="gone:4"),  # still renewed: it runs
        row(claimed_by="other:3"),
        add("mail", leased=-1, claimed_by="gone:5"),
    ]
    for each, message in zip(sessions, messages, strict=True):
        lock(each, message.pk)
    assert end(cursor) == [messages[0].pk]
    assert not alive(sessions[0])
    assert all(map(alive, sessions[1:]))
    assert end(cursor) == []


def test_the_transaction_of_a_worker_that_beats_lives(
    cursor: Cursor, sessions: list[Session]
) -> None:
    """Its loop only waited, for a lock or a signal receiver, until its queue had another owner."""
    message = row()
    lock(sessions[0], message.pk)
    WorkerHeartbeat.objects.update(**columns({"seen": 1 - SILENT}))
    assert end(cursor) == []
    assert alive(sessions[0])
    WorkerHeartbeat.objects.update(**columns({"seen": -SILENT}))
    assert end(cursor) == [message.pk]


def test_a_stranger_that_has_the_row_locked_lives(cursor: Cursor) -> None:
    """An operator, or any session whose transaction id equals the id of a group of lockers."""
    message = row()
    beat("gone", seen=-SILENT)
    with second_connection() as stranger:
        stranger.autocommit = False
        lock(stranger, message.pk)
        assert end(cursor) == []
        assert alive(stranger)
        stranger.rollback()


def test_a_session_with_the_process_id_of_one_that_ended_lives(cursor: Cursor) -> None:
    """Process ids are reused."""
    message = row()
    with second_connection() as stranger:
        beat("gone", seen=-SILENT, sessions=[f"{stranger.info.backend_pid} 1600000000.123456"])
        stranger.autocommit = False
        lock(stranger, message.pk)
        assert end(cursor) == []
        assert alive(stranger)
        stranger.rollback()


def test_claimer_with_the_same_prefix_is_another_worker(
    cursor: Cursor, sessions: list[Session]
) -> None:
    message = row(claimed_by="gone2:1")
    lock(sessions[0], message.pk)
    assert end(cursor) == []
    assert alive(sessions[0])


def test_unlocked_row_ends_no_session(cursor: Cursor, sessions: list[Session]) -> None:
    row()
    assert end(cursor) == []


def test_sessions_that_ended_are_dropped_and_no_heartbeat_is_waited_for(
    cursor: Cursor, sessions: list[Session]
) -> None:
    heartbeat = WorkerHeartbeat.objects.get()
    recorded = {int(each.split()[0]) for each in heartbeat.sessions}
    assert recorded == {each.info.backend_pid for each in sessions}
    ended = sessions[1].info.backend_pid
    cursor.execute("select pg_terminate_backend(%s, 60000)", [ended])
    assert record(sessions[0])
    left = {int(each.split()[0]) for each in stored(heartbeat).sessions}
    assert left == {sessions[place].info.backend_pid for place in (0, 2, 3)}
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_workerheartbeat for update")
        assert not record(sessions[0])
    leases.leave(cursor, worker="gone")
    assert not record(sessions[0])


@pytest.mark.parametrize("odd", [[], [7, None, {}], ["", "x y", [1]]])
def test_odd_sessions_of_another_program_are_harmless(cursor: Cursor, odd: list[Any]) -> None:
    """Guarantee 24."""
    message = row()
    with second_connection() as stranger:
        heartbeat = beat("gone", seen=-SILENT, sessions=odd)
        stranger.autocommit = False
        lock(stranger, message.pk)
        assert end(cursor) == []
        stranger.rollback()
        assert record(stranger)
        stranger.rollback()
        assert len(stored(heartbeat).sessions) == 1
