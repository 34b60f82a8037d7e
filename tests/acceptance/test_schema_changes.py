"""Guarantee 18: the tables change while messages are in them, and while workers run."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.conf import settings

from tests.acceptance.app import effects
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import SOON, Worker
from tests.database import second_connection
from tests.waiting import until

#: A migration that must wait for all other sessions, and makes all others wait.
CHANGES = (
    "alter table django_mq_queuedmessage add column came_and_went int",
    "alter table django_mq_queuedmessage drop column came_and_went",
)
WAITS = """
select count(*) from pg_locks
 where relation = 'django_mq_queuedmessage'::regclass and not granted
"""

# Rows as an old worker left them; `now()` is one moment per transaction.
OLD_ROWS = """
insert into django_mq_queuedmessage
       (queue, type, handler, payload, attempts, max_attempts, processable_after, leased_until,
        claimed_by, key, unique_id, ordered, suspect, held_since, expires_at, dead_at, dead_reason)
select 'work', 'acceptance.write', case state when 'unrouted' then '' else %(handler)s end,
       jsonb_build_object('name', state),
       case when state in ('retrying', 'suspect', 'leased', 'lapsed') then 1
            when state = 'dead' then 3 else 0 end, 3,
       now() + case when state in ('delayed', 'retrying', 'held') then interval '1 hour'
                    else interval '0' end,
       case state when 'leased' then now() + interval '1 hour'
                  when 'lapsed' then now() - interval '1 hour' end,
       case when state in ('leased', 'lapsed') then 'gone:1' end,
       case when state in ('first', 'second') then 'line' end,
       case state when 'unique' then 'one' end,
       state = 'ordered', state = 'suspect',
       case state when 'held' then now() end,
       case state when 'expired' then now() - interval '1 hour' end,
       case state when 'dead' then now() end, case state when 'dead' then 'exhausted' else '' end
  from unnest(%(states)s::text[]) with ordinality s (state, place) order by place
"""
#: Messages in these states end with an effect.
LIVE = (
    *("due", "delayed", "retrying", "leased", "lapsed", "first", "second"),
    *("unique", "ordered", "suspect", "held", "unrouted"),
)
STATES = (*LIVE, "expired", "dead")
OTHER_ROWS = """
insert into django_mq_failedattempt
       (message_id, queue, type, handler, attempt, worker, error_class, error_text, traceback)
select id, queue, type, handler, 1, 'gone:1', 'ValueError', 'as asked for', ''
  from django_mq_queuedmessage
 where payload ->> 'name' in ('retrying', 'dead');
insert into django_mq_queuestate (queue, paused_at) values ('paused', now())
"""
TABLES = ("queuedmessage", "failedattempt", "queuestate")
MAKE_DUE = """
update django_mq_queuedmessage
   set processable_after = now(), leased_until = leased_until - interval '2 hours'
 where dead_at is null
"""


@pytest.mark.slow
def test_a_table_that_changes_under_load(start: Callable[..., Worker], queue: Queue) -> None:
    """Sessions that wait for the lock continue after it: nothing is lost, charged or run again."""
    worker = start("--processes", 2)
    worker.has_started(2)
    names: list[str] = []
    with second_connection() as dba, second_connection() as watcher:
        dba.execute("set lock_timeout = '200ms'")
        for change in CHANGES * 3:
            names += [f"m{len(names) + n}" for n in range(100)]
            queue.send("write", *names[-100:-20], pause=0.005)
            queue.send("line", *names[-20:], line="one", queue="keyed")
            while not changes(dba, watcher, change):
                pass  # a migration tries again, too
    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys(names, 1)
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    assert "Traceback" not in worker.said()
    assert "database lost" not in worker.said()
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


def changes(dba: psycopg.Connection[Any], watcher: psycopg.Connection[Any], change: str) -> bool:
    """Change the table, and commit once a session waits for it; False if the lock was refused."""
    try:
        with dba.transaction():
            dba.execute(change)
            # Even an idle worker polls the table.
            until(lambda: watcher.execute(WAITS).fetchall()[0][0], "somebody waits")
    except psycopg.errors.LockNotAvailable:
        return False
    return True


@pytest.fixture
def old(django_db_setup: None) -> Iterator[str]:
    """Return the URL of a separate database at the migrations of 0002, with rows in every state."""
    name = f"mq_old_{secrets.token_hex(4)}"
    with second_connection() as server:
        server.execute(f"create database {name} template template0")
        try:
            url = database_url(dbname=name)
            migrate(url, "django_mq", "0002")
            with second_connection(dbname=name) as own:
                own.execute(effects.CREATE)
                handler = "tests.acceptance.app.handlers.write"
                own.execute(OLD_ROWS, {"handler": handler, "states": list(STATES)})
                own.execute(OTHER_ROWS)
            yield url
        finally:
            server.execute(f"drop database {name} with (force)")


def migrate(url: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), "migrate", "-v", "0", *arguments],
        env=os.environ
        | {"DJANGO_SETTINGS_MODULE": "tests.acceptance.settings", "DATABASE_URL": url},
        check=True,
        timeout=SOON,
    )


@pytest.mark.thorough
def test_rows_of_an_old_schema_survive(start: Callable[..., Worker], old: str) -> None:
    """From 0002 to the newest: no value changes, and a current worker runs the old messages."""
    with psycopg.connect(old, autocommit=True) as own:
        before = rows(own)
        migrate(old)
        after = rows(own)
        for table in TABLES:
            kept = [{name: row[name] for name in was} for was, row in pairs(before, after, table)]
            assert kept == before[table]
        own.execute(MAKE_DUE)
        worker = start(url=old)
        left = "select payload ->> 'name' from django_mq_queuedmessage where dead_at is null"
        worker.until(lambda: not own.execute(left).fetchall(), "all is done")
        done = [name for name, _, _ in effects.rows(own.cursor())]
        assert sorted(done) == sorted(LIVE)
        assert done.index("first") < done.index("second")
        dead = own.execute("select payload ->> 'name' from django_mq_queuedmessage order by 1")
        assert dead.fetchall() == [("dead",), ("expired",)]
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0


def rows(connection: psycopg.Connection[Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table."""
    return {
        table: [
            row
            for (row,) in connection.execute(
                f"select to_jsonb(t) from django_mq_{table} t order by to_jsonb(t) ->> 'id'"
            )
        ]
        for table in TABLES
    }


def pairs(before: dict[str, Any], after: dict[str, Any], table: str) -> Iterator[tuple[Any, Any]]:
    return zip(before[table], after[table], strict=True)


@pytest.mark.thorough
def test_orders_to_workers_do_not_keep_migrations_from_being_undone(old: str) -> None:
    migrate(old)
    with psycopg.connect(old, autocommit=True) as database:
        database.execute(
            "insert into django_mq_workercommand (worker, action, message_id, attempt)"
            " values ('w', 'quiet', null, null), ('w', 'stop', 7, 1)"
        )
        migrate(old, "django_mq", "0009")
        rows = database.execute("select action, message_id from django_mq_workercommand")
        assert rows.fetchall() == [("stop", 7)]
