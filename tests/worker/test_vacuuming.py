"""The short-lived tables of a busy fleet are vacuumed; nobody waits for that."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_mq.models import QueueState
from django_mq.store.vacuum import versions
from django_mq.worker import Worker, vacuuming
from django_mq.worker.process import Process
from django_mq.worker.vacuuming import Vacuuming
from tests.database import second_connection
from tests.worker.service import until

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = "django_mq_queuedmessage"
MANY = 300

Cursor = psycopg.Cursor[Any]


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[Cursor]:
    """What the keeper asks with: nothing is dead at first, and few are many."""
    with pytest.MonkeyPatch.context() as patch, second_connection() as own:
        patch.setattr(vacuuming, "MANY", MANY)
        own.execute(f"vacuum {TABLE}")
        own.execute("vacuum django_mq_uniquekey")
        yield own.cursor()


@pytest.fixture
def vacuums() -> Iterator[Vacuuming]:
    vacuums = Vacuuming("default")
    yield vacuums
    vacuums.end()


def die(cursor: Cursor, count: int) -> None:
    """Leave so many dead row versions, and let the server count them."""
    cursor.execute(
        f"insert into {TABLE} (queue, type, payload)"
        " select 'mail', 't', to_jsonb(repeat(md5(n::text), 6)) from generate_series(1, %s) n",
        [count],
    )
    cursor.execute(f"delete from {TABLE}")
    cursor.execute("select pg_stat_force_next_flush()")


def dead(cursor: Cursor) -> int:
    return versions(cursor)[TABLE].dead


def tend(vacuums: Vacuuming, cursor: Cursor) -> bool:
    """Say whether that began a vacuum; wait for its end."""
    before = vacuums._thread
    vacuums.tend(cursor)
    if (thread := vacuums._thread) is None or thread is before:
        return False
    thread.join(30)
    assert not thread.is_alive()
    return True


def test_many_dead_rows_are_vacuumed_and_few_are_left(
    vacuums: Vacuuming, cursor: Cursor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_mq")
    die(cursor, MANY - 1)
    assert dead(cursor) == MANY - 1
    assert not tend(vacuums, cursor)
    die(cursor, 1)
    assert tend(vacuums, cursor)
    assert dead(cursor) == 0
    [line] = [each for each in caplog.records if getattr(each, "event", "") == "vacuumed"]
    assert line.getMessage().startswith(f"vacuumed {TABLE} in ")
    assert not tend(vacuums, cursor)
    die(cursor, MANY)
    assert tend(vacuums, cursor)


def test_beside_many_that_wait_more_must_be_dead(vacuums: Vacuuming, cursor: Cursor) -> None:
    """A vacuum walks over the indexes of what waits, too."""
    die(cursor, MANY)
    cursor.execute(
        f"insert into {TABLE} (queue, type, payload)"
        " select 'mail', 't', '{}' from generate_series(1, %s)",
        [20 * MANY],
    )
    cursor.execute("select pg_stat_force_next_flush()")
    assert not tend(vacuums, cursor)
    cursor.execute(f"delete from {TABLE} where id in (select id from {TABLE} limit {MANY})")
    cursor.execute("select pg_stat_force_next_flush()")
    assert tend(vacuums, cursor)


def test_its_connection_ends_with_it(vacuums: Vacuuming, cursor: Cursor) -> None:
    """Between two vacuums nothing is kept open."""
    backends = "select count(*) from pg_stat_activity where datname = current_database()"
    before = cursor.execute(backends).fetchone()
    die(cursor, MANY)
    assert tend(vacuums, cursor)
    until(lambda: cursor.execute(backends).fetchone() == before)


def test_what_a_snapshot_keeps_is_not_tried_again_and_again(
    vacuums: Vacuuming, cursor: Cursor
) -> None:
    """It must have doubled; and once somebody could remove it, all is as it was."""
    with second_connection() as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with other.transaction():
            other.execute("select 1")
            die(cursor, MANY)
            assert tend(vacuums, cursor)
            assert dead(cursor) == MANY
            die(cursor, MANY - 1)
            assert not tend(vacuums, cursor)
            die(cursor, 1)
            assert tend(vacuums, cursor)
            assert dead(cursor) == 2 * MANY
    assert not tend(vacuums, cursor)
    cursor.execute(f"vacuum {TABLE}")
    assert not tend(vacuums, cursor)
    die(cursor, MANY)
    assert tend(vacuums, cursor)
    assert dead(cursor) == 0


@pytest.mark.parametrize("mode", ["share update exclusive", "access exclusive"])
def test_a_table_that_somebody_has_is_left_alone(
    vacuums: Vacuuming, cursor: Cursor, mode: str
) -> None:
    """A migration, or the server's own vacuum: neither is waited for."""
    die(cursor, MANY)
    with second_connection() as other, other.transaction():
        other.execute(f"lock table {TABLE} in {mode} mode")
        assert tend(vacuums, cursor)
        assert dead(cursor) == MANY


def test_who_does_not_own_the_tables_does_not_try(vacuums: Vacuuming, cursor: Cursor) -> None:
    """S07: the grants of the manual are enough; the server's own vacuum does it."""
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
        assert versions(cursor) == {}
        assert not tend(vacuums, cursor)
    finally:
        cursor.execute(f"reset role; drop role {role}")


def test_a_refused_vacuum_is_help_that_did_not_come(
    vacuums: Vacuuming, cursor: Cursor, caplog: pytest.LogCaptureFixture, database_set: Any
) -> None:
    """What the server cuts is not tried at each turn, and nobody is told but who asks."""
    caplog.set_level(logging.DEBUG, "django_mq")
    die(cursor, 30 * MANY)
    database_set("vacuum_cost_delay", "100")
    database_set("vacuum_cost_limit", "1")
    database_set("statement_timeout", "50")
    assert tend(vacuums, cursor)
    [line] = [each for each in caplog.records if each.name == "django_mq"]
    assert (line.levelname, getattr(line, "event", "")) == ("DEBUG", "vacuum_failed")
    assert not tend(vacuums, cursor)


def test_the_end_of_the_worker_cancels_it(
    vacuums: Vacuuming, cursor: Cursor, database_set: Any
) -> None:
    die(cursor, 30 * MANY)
    database_set("vacuum_cost_delay", "100")
    database_set("vacuum_cost_limit", "1")
    vacuums.tend(cursor)
    thread = vacuums._thread
    assert isinstance(thread, threading.Thread)
    runs = "select true from pg_stat_progress_vacuum where datname = current_database()"
    until(lambda: cursor.execute(runs).fetchall())
    vacuums.tend(cursor)  # one is enough
    assert vacuums._thread is thread
    vacuums.end()
    thread.join(10)
    assert not thread.is_alive()
    assert cursor.execute(runs).fetchall() == []
    die(cursor, 30 * MANY)
    vacuums.tend(cursor)
    assert vacuums._thread is thread


@pytest.fixture
def database_set() -> Iterator[Callable[[str, str], None]]:
    """Set something for all connections that are made from now on."""
    name, done = connection.settings_dict["NAME"], []

    def set_(what: str, value: str) -> None:
        with second_connection() as own:
            own.execute(f'alter database "{name}" set {what} = {value}')
        done.append(what)

    yield set_
    with second_connection() as own:
        for what in done:
            own.execute(f'alter database "{name}" reset {what}')


def test_one_of_the_fleet_looks_after_it_at_each_turn(cursor: Cursor) -> None:
    die(cursor, MANY)
    process = Process(Worker(queues=["mail"]))
    process._chores(cursor)
    thread = process.vacuuming._thread
    assert thread is not None
    thread.join(30)
    assert dead(cursor) == 0
    die(cursor, MANY)
    process._chores(cursor)
    assert process.vacuuming._thread is thread
    QueueState.objects.update(chores_ran_at=None)
    process._chores(cursor)
    assert process.vacuuming._thread is not thread
    process.vacuuming.end()
