"""The short-lived tables of a busy fleet are vacuumed, and nothing waits for that."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_mq.conf import get_settings
from django_mq.executor.watchdog import Link
from django_mq.models import QueueState
from django_mq.store.vacuum import versions
from django_mq.worker import vacuum as vacuuming
from django_mq.worker.maintenance import Maintenance
from tests.database import second_connection
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = "django_mq_queuedmessage"
MANY = 300

Cursor = psycopg.Cursor[Any]


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[Cursor]:
    """The cursor of maintenance: nothing is dead at first, and a few rows count as many.

    The server's own vacuum comes once a minute, in any of these tests.
    """
    with pytest.MonkeyPatch.context() as patch, second_connection() as own:
        patch.setattr(vacuuming, "MIN_DEAD_ROWS", MANY)
        for table in (TABLE, "django_mq_uniquekey"):
            own.execute(f"alter table {table} set (autovacuum_enabled = off)")
            own.execute(f"vacuum {table}")
        yield own.cursor()
        for table in (TABLE, "django_mq_uniquekey"):
            own.execute(f"alter table {table} reset (autovacuum_enabled)")


class Vacuuming:
    """The vacuums of a fleet: each knows the result of the last one."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def maintain(self, cursor: Cursor) -> None:
        self.kept = vacuuming.vacuum_due(cursor, self.kept)


@pytest.fixture
def vacuums() -> Vacuuming:
    return Vacuuming()


def die(cursor: Cursor, count: int) -> None:
    """Leave `count` dead row versions, and make the server count them."""
    cursor.execute(
        f"insert into {TABLE} (queue, type, payload)"
        " select 'mail', 't', to_jsonb(repeat(md5(n::text), 6)) from generate_series(1, %s) n",
        [count],
    )
    cursor.execute(f"delete from {TABLE}")
    cursor.execute("select pg_stat_force_next_flush()")
    assert dead(cursor) >= count, versions(cursor)


def dead(cursor: Cursor) -> int:
    return versions(cursor)[TABLE].dead


def tries(vacuums: Vacuuming, cursor: Cursor) -> bool:
    """Say whether this turn tried a vacuum."""
    with pytest.MonkeyPatch.context() as patch:
        tried: list[str] = []

        def vacuum(cursor: Any, table: str) -> None:
            tried.append(table)
            run(cursor, table)

        run = vacuuming.vacuum
        patch.setattr(vacuuming, "vacuum", vacuum)
        vacuums.maintain(cursor)
    return bool(tried)


def test_many_dead_rows_are_vacuumed_and_few_are_left(
    vacuums: Vacuuming, cursor: Cursor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_mq")
    die(cursor, MANY - 1)
    assert dead(cursor) == MANY - 1
    assert not tries(vacuums, cursor)
    die(cursor, 1)
    assert tries(vacuums, cursor)
    assert dead(cursor) == 0
    [line] = [each for each in caplog.records if getattr(each, "event", "") == "vacuumed"]
    assert line.getMessage().startswith(f"vacuumed {TABLE} in ")
    assert not tries(vacuums, cursor)
    die(cursor, MANY)
    assert tries(vacuums, cursor)


def test_beside_many_that_wait_more_must_be_dead(vacuums: Vacuuming, cursor: Cursor) -> None:
    """A vacuum walks over the indexes of waiting messages, too."""
    die(cursor, MANY)
    cursor.execute(
        f"insert into {TABLE} (queue, type, payload)"
        " select 'mail', 't', '{}' from generate_series(1, %s)",
        [20 * MANY],
    )
    cursor.execute("select pg_stat_force_next_flush()")
    assert not tries(vacuums, cursor)
    cursor.execute(f"delete from {TABLE} where id in (select id from {TABLE} limit {2 * MANY})")
    cursor.execute("select pg_stat_force_next_flush()")
    assert tries(vacuums, cursor)


def test_rows_kept_by_a_snapshot_are_vacuumed_less_often(
    vacuums: Vacuuming, cursor: Cursor
) -> None:
    """The number must double; once a vacuum could remove them, the first limit applies again."""
    with second_connection() as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with other.transaction():
            other.execute("select 1")
            die(cursor, MANY)
            assert tries(vacuums, cursor)
            assert dead(cursor) == MANY
            die(cursor, MANY - 1)
            assert not tries(vacuums, cursor)
            die(cursor, 1)
            assert tries(vacuums, cursor)
            assert dead(cursor) == 2 * MANY
    assert not tries(vacuums, cursor)
    cursor.execute(f"vacuum {TABLE}")
    assert not tries(vacuums, cursor)
    die(cursor, MANY)
    assert tries(vacuums, cursor)
    assert dead(cursor) == 0


@pytest.mark.parametrize("mode", ["share update exclusive", "access exclusive"])
def test_locked_table_is_not_vacuumed(vacuums: Vacuuming, cursor: Cursor, mode: str) -> None:
    """A migration, or the server's own vacuum: maintenance waits for neither."""
    die(cursor, MANY)
    with second_connection() as other, other.transaction():
        other.execute(f"lock table {TABLE} in {mode} mode")
        assert tries(vacuums, cursor)
        assert dead(cursor) == MANY


def test_role_without_ownership_does_not_vacuum(vacuums: Vacuuming, cursor: Cursor) -> None:
    """S07: the grants of the manual suffice; the server's own vacuum does the work."""
    die(cursor, MANY)
    role = f"mq_vacuum_{os.getpid()}"
    ((able,),) = cursor.execute(
        "select rolcreaterole or rolsuper from pg_roles where rolname = user"
    ).fetchall()
    if not able:
        pytest.skip("the login of the test database may not create roles")
    cursor.execute(f"create role {role}")
    try:
        cursor.execute(f"grant {role} to current_user; set role {role}")
        assert not any(each.may_vacuum for each in versions(cursor).values())
        assert not tries(vacuums, cursor)
    finally:
        cursor.execute(f"reset role; drop role {role}")


def test_a_refused_vacuum_is_help_that_did_not_come(
    vacuums: Vacuuming, cursor: Cursor, caplog: pytest.LogCaptureFixture
) -> None:
    """A vacuum that the server cancels is not retried each turn; only the debug log mentions it."""
    caplog.set_level(logging.DEBUG, "django_mq")
    die(cursor, 30 * MANY)
    cursor.execute("set vacuum_cost_delay = 100; set vacuum_cost_limit = 1")
    cursor.execute("set statement_timeout = 50")
    assert tries(vacuums, cursor)
    [line] = [each for each in caplog.records if each.name == "django_mq"]
    assert (line.levelname, getattr(line, "event", "")) == ("DEBUG", "vacuum_failed")
    assert not tries(vacuums, cursor)


def test_the_end_of_the_worker_cancels_it(
    maintenance: Maintenance, cursor: Cursor, database_set: Any
) -> None:
    die(cursor, 30 * MANY)
    database_set("vacuum_cost_delay", "100")
    database_set("vacuum_cost_limit", "1")
    maintenance.start()
    maintenance.on_heartbeat(None)
    runs = "select true from pg_stat_progress_vacuum where datname = current_database()"
    until(lambda: cursor.execute(runs).fetchall())
    maintenance.end()
    assert not maintenance.is_alive()
    until(lambda: not cursor.execute(runs).fetchall())


@pytest.fixture
def database_set() -> Iterator[Callable[[str, str], None]]:
    """Set something for all new connections from now on."""
    name, done = connection.settings_dict["NAME"], []

    def set_(what: str, value: str) -> None:
        with second_connection() as own:
            own.execute(f'alter database "{name}" set {what} = {value}')
        done.append(what)

    yield set_
    with second_connection() as own:
        for what in done:
            own.execute(f'alter database "{name}" reset {what}')


@pytest.fixture
def maintenance(transactional_db: None) -> Iterator[Maintenance]:
    maintenance = Maintenance("default", get_settings(), link=Link())
    yield maintenance
    maintenance.end()


def test_one_of_the_fleet_looks_after_it_at_each_turn(
    maintenance: Maintenance, cursor: Cursor
) -> None:
    """No connection stays open between two turns."""
    backends = "select count(*) from pg_stat_activity where datname = current_database()"
    before = cursor.execute(backends).fetchone()
    die(cursor, MANY)
    maintenance.take_turn()
    assert dead(cursor) == 0
    until(lambda: cursor.execute(backends).fetchone() == before)
    die(cursor, MANY)
    maintenance.take_turn()  # a sibling may have it
    assert dead(cursor) == MANY
    QueueState.objects.update(chores_ran_at=None)
    maintenance.take_turn()
    assert dead(cursor) == 0


def test_fleet_tries_rows_kept_by_a_snapshot_once(
    maintenance: Maintenance, cursor: Cursor, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of twenty processes would find it due in turn, and none could remove any row."""
    caplog.set_level(logging.DEBUG, "django_mq")

    def vacuumed() -> int:
        return sum(getattr(each, "event", "") == "vacuumed" for each in caplog.records)

    def take_turns(count: int) -> None:
        for _ in range(count):
            QueueState.objects.update(chores_ran_at=None)
            Maintenance("default", get_settings(), link=Link()).take_turn()

    with second_connection() as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with other.transaction():
            other.execute("select 1")
            die(cursor, MANY)
            take_turns(5)
            assert vacuumed() == 1
            die(cursor, MANY)
            take_turns(5)
            assert vacuumed() == 2
    QueueState.objects.update(chores_resume={"vacuum": {TABLE: "odd"}})
    take_turns(2)
    assert vacuumed() == 3
    assert dead(cursor) == 0
