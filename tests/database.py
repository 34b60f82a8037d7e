"""Other connections to the test database, like those of another program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import psycopg
from django.db import connection

from django_mq.executor.simple_protocol import simple_query
from django_mq.store import row_locks
from django_mq.store.limits import set_each
from tests.waiting import until

#: The name of the session that empties the tables; whoever counts sessions knows it by this.
CLEANERS_NAME = "mq-tests-cleaner"


def open_second(**more: str) -> psycopg.Connection[Any]:
    """Open a connection of the bare driver, in autocommit mode; the caller closes it."""
    own = connection.get_connection_params()
    params = {k: v for k, v in own.items() if k in ("dbname", "user", "password", "host", "port")}
    return psycopg.connect(**{**params, **more}, autocommit=True)


@contextmanager
def second_connection(**more: str) -> Iterator[psycopg.Connection[Any]]:
    """Open a connection of the bare driver, in autocommit mode, for the length of the block."""
    with open_second(**more) as other:
        yield other


@contextmanager
def held_snapshot() -> Iterator[None]:
    """Keep the server from removing row versions for the length of the block, as a backup does."""
    with second_connection() as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with holder.transaction():
            holder.execute("select 1 from django_mq_queuedmessage limit 1")
            yield


def until_blocked(pid: int, *, seconds: float = 0.0) -> None:
    """Return once a statement of this backend waits for a lock of another session.

    `seconds`: how long ago the statement began, at least.
    """
    is_blocked = (
        "select wait_event_type = 'Lock' and"
        " clock_timestamp() > query_start + make_interval(secs => %s)"
        " from pg_stat_activity where pid = %s"
    )
    with second_connection() as other:
        until(
            lambda: other.execute(is_blocked, [seconds, pid]).fetchone() == (True,),
            "it is blocked",
        )


def until_any_blocked(event: str | None = None) -> None:
    """Return once a session of this database waits for a lock, of the kind `event` if given."""
    blocked = (
        "select 1 from pg_stat_activity where datname = current_database()"
        " and wait_event_type = 'Lock' and wait_event = coalesce(%s, wait_event)"
    )
    with second_connection() as other:
        until(lambda: other.execute(blocked, [event]).fetchone(), "one is blocked")


def until_alone() -> None:
    """Return once no session but the caller's and the tests' cleaner uses this database."""
    others = (
        "select 1 from pg_stat_activity where datname = current_database()"
        " and backend_type = 'client backend' and application_name <> %s"
        " and pid <> all(array[pg_backend_pid(), %s])"
    )
    own = connection.connection.info.backend_pid if connection.connection else 0
    with second_connection() as other:
        until(lambda: not other.execute(others, [CLEANERS_NAME, own]).fetchone(), "it is alone")


class Listener:
    """Hears the doorbell."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        connection.execute("listen django_mq; listen mark")

    def heard(self) -> list[str]:
        """Return the payloads of all rings committed before this call.

        Notifications arrive in commit order, so a marker, not a timeout, ends the wait.
        """
        self._connection.execute("notify mark")
        rings = []
        for notification in self._connection.notifies(timeout=30):
            if notification.channel == "mark":
                return rings
            rings.append(notification.payload)
        raise AssertionError("the mark did not come within 30 s")


@contextmanager
def listening() -> Iterator[Listener]:
    with second_connection() as other:
        yield Listener(other)


def lock(cursor: Any, fences: Any, settings: Any = MappingProxyType({})) -> row_locks.LockResult:
    """Lock messages like a slice, in the transaction of `cursor`."""
    cursor.execute("select")  # begins the transaction, if none is open
    rows = simple_query(cursor.connection, set_each(settings) + row_locks.lock(fences))
    return row_locks.parse_lock_result(rows[0] if rows else (), fences)
