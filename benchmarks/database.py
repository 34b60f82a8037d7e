"""The databases of the benchmarks, on the server that the test project uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from django.conf import settings
from django.core.management import call_command
from django.db import connection
from psycopg import sql

from benchmarks.app.handlers import QUEUE
from benchmarks.app.models import Counter
from benchmarks.bare import PAYLOAD_TEXT, TABLE

FILL = """
insert into django_mq_queuedmessage
       (queue, type, handler, payload, priority, processable_after, attempts, dead_at, dead_reason,
        key, ordered, unique_id, expires_at)
select concat(%(queue)s::text, n %% nullif(%(queues)s, 0)), %(type)s, %(type)s,
       %(payload)s::jsonb
           || jsonb_build_object('number', n, 'counter', 1 + (n::bigint * 7919) %% 500),
       %(priority)s, statement_timestamp() + %(after)s * interval '1 second',
       case when %(dead)s then 20 else 0 end,
       case when %(dead)s then statement_timestamp() end,
       case when %(dead)s then 'exhausted' else '' end,
       'key' || n %% nullif(%(keys)s, 0), %(ordered)s,
       case when %(unique)s then 'id' || n end,
       case when %(expires)s then statement_timestamp() + interval '1 hour' end
  from generate_series(1, %(count)s) n
"""


TAKE_IDS = """
insert into django_mq_uniquekey (queue, handler, type, unique_id, message_id)
select queue, handler, type, unique_id, id
  from django_mq_queuedmessage
 where unique_id is not null
"""


class Wrong(Exception):
    """A measurement that must not be printed, because the measured program did not do its work."""


def check(condition: object, text: str) -> None:
    """Raise Wrong with `text` unless `condition` holds."""
    if not condition:
        raise Wrong(text)


class Database:
    """One database; the bare driver sends the statements here, each in its own transaction."""

    def __init__(self, name: str) -> None:
        self.name = name

    def params(self) -> dict[str, Any]:
        """The arguments of `psycopg.connect`, with the driver's defaults and not Django's."""
        # Asking Django first starts the private server, if that is what the test project uses.
        params = connection.get_connection_params()
        for ours in ("cursor_factory", "context", "prepare_threshold"):
            params.pop(ours, None)
        return {**params, "dbname": self.name}

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """Open a connection of the bare driver."""
        return psycopg.connect(**self.params(), autocommit=autocommit)

    def execute(self, statement: str, params: Any = None) -> list[Any]:
        """Run one statement; return its rows."""
        with self.connect() as bare:
            cursor = bare.execute(statement, params)
            return cursor.fetchall() if cursor.description else []

    def fill(
        self, count: int, type: str = "bench.noop", *, priority: int = 0, after: float = 0.0,
        dead: bool = False, queue: str = QUEUE, keys: int = 0, ordered: bool = False,
        unique: bool = False, expires: bool = False, queues: int = 0,
    ) -> None:  # fmt: skip
        """Store `count` messages as a broadcast would, due in `after` seconds; or dead.

        With so many `keys` in turn, in one line, each with a unique id of its own, or to expire in
        an hour. Of so many `queues` in turn, the number is the end of its name.
        """
        params = {
            "count": count, "queue": queue, "type": type, "payload": PAYLOAD_TEXT,
            "priority": priority, "after": after, "dead": dead, "keys": keys, "ordered": ordered,
            "unique": unique, "expires": expires, "queues": queues,
        }  # fmt: skip
        self.execute(FILL, params)
        if unique:
            self.execute(TAKE_IDS)

    def clear(self) -> None:
        """Empty every table that a workload fills."""
        self.execute(
            f"truncate django_mq_queuedmessage, django_mq_failedattempt, {TABLE}, bench_order,"
            " bench_entry, bench_counter, django_mq_workerheartbeat, django_mq_queuestate,"
            " django_mq_uniquekey, django_mq_minutefigures, django_mq_hourfigures,"
            " django_mq_handledmessage, django_mq_result restart identity"
        )

    def settle(self) -> None:
        """Vacuum, analyze and checkpoint, so that every round starts from the same state."""
        self.vacuum()
        self.checkpoint()

    def vacuum(self) -> None:
        """Vacuum and analyze."""
        self.execute(f"vacuum (analyze) django_mq_queuedmessage, {TABLE}")

    def checkpoint(self) -> None:
        """Write pages out, if the login may."""
        with suppress(psycopg.errors.InsufficientPrivilege):
            self.execute("checkpoint")

    def ids(self) -> set[int]:
        """The ids of all messages that are due."""
        rows = self.execute(
            "select id from django_mq_queuedmessage"
            " where dead_at is null and processable_after <= statement_timestamp()"
        )
        return {id for (id,) in rows}

    def count(self, condition: str = "true", table: str = "django_mq_queuedmessage") -> int:
        """Count the rows of a table."""
        return int(self.execute(f"select count(*) from {table} where {condition}")[0][0])


@contextmanager
def databases() -> Iterator[Database]:
    """Create the database, with all tables; drop it and its copies at the end."""
    maintenance = Database(settings.BENCH_MAINTENANCE_DATABASE)
    with maintenance.connect() as guard:
        mine = guard.execute("select pg_try_advisory_lock(hashtext('mq_bench'))").fetchone()
        check(mine and mine[0], "benchmarks are running on this server already")
        database = Database(settings.BENCH_DATABASE)
        try:
            _drop_all(guard)
            guard.execute(sql.SQL("create database {}").format(sql.Identifier(database.name)))
            call_command("migrate", run_syncdb=True, verbosity=0, interactive=False)
            connection.close()
            database.execute(
                f"create table {TABLE}"
                " (id bigint generated always as identity primary key, payload jsonb not null)"
            )
            yield database
        finally:
            connection.close()
            _drop_all(guard)


@contextmanager
def copied(database: Database, name: str) -> Iterator[Database]:
    """Make another database like `database`, and drop it at the end."""
    maintenance = Database(settings.BENCH_MAINTENANCE_DATABASE)
    copy = Database(f"{database.name}_{name}")
    names = sql.Identifier(copy.name), sql.Identifier(database.name)
    connection.close()
    with maintenance.connect() as guard:
        guard.execute(sql.SQL("create database {} template {}").format(*names))
        try:
            yield copy
        finally:
            guard.execute(sql.SQL("drop database {} with (force)").format(names[0]))


def counters(count: int) -> None:
    """Insert the rows that handlers contend for, with ids from 1."""
    Counter.objects.bulk_create(Counter() for _ in range(count))


def _drop_all(guard: psycopg.Connection[Any]) -> None:
    found = guard.execute(
        "select datname from pg_database where datname = %s or starts_with(datname, %s)",
        (settings.BENCH_DATABASE, f"{settings.BENCH_DATABASE}_"),
    )
    for (name,) in found.fetchall():
        guard.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
