"""The worker processes, and the holders of snapshots."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import F
from psycopg.errors import QueryCanceled

from django_mq import queues
from django_mq.models import WorkerHeartbeat
from tests.database import second_connection
from tests.rows import add, beat, tally
from tests.waiting import SOON, until

pytestmark = pytest.mark.django_db


def test_a_worker_that_is_alive_has_run_until_now():
    """The second heartbeat comes after 10 s; until then the two times are the same."""
    beat("new", seen=-9)
    beat("gone", seen=-90)
    WorkerHeartbeat.objects.update(started_at=F("last_seen"))
    new, gone = queues.workers()
    assert new.uptime == new.silent >= timedelta(seconds=9)
    assert gone.uptime == timedelta(0)


def test_workers_last_seen_first():
    beat("old", seen=-31, queues=["mail"], running=[4, 5], draining=True, wakeup="degraded")
    beat("new", seen=-25, host="other", pid=8)
    new, old = queues.workers()
    assert (new.id, new.host, new.pid, new.alive) == ("new", "other", 8, True)
    assert (old.id, old.queues, old.running, old.alive) == ("old", ("mail",), (4, 5), False)
    assert (old.draining, old.wakeup) == (True, "degraded")
    assert timedelta(seconds=31) <= old.silent < timedelta(seconds=60)


@pytest.mark.parametrize("style", ["sql_standard", "postgres_verbose", "iso_8601"])
def test_a_role_that_writes_intervals_another_way_sees_the_workers(style):
    """Guarantee 24."""
    message = add(leased=30)
    beat(seen=-10, running=[message.pk], ran={str(message.pk): 5.0})
    with connection.cursor() as cursor:
        cursor.execute(f"set local intervalstyle = {style}")
    (worker,) = queues.workers()
    assert timedelta(seconds=10) <= worker.silent < timedelta(seconds=25)
    (running,) = queues.running()
    assert timedelta(seconds=15) <= running.ran_for < timedelta(seconds=30)


@pytest.mark.parametrize(
    ("columns", "busy", "shown"),
    [
        ({}, None, ""),
        ({"threads": 4, "slots": 100}, None, ""),
        ({"threads": 4, "threads_used": 3.5}, 0.875, "88%"),
        ({"threads": 4, "threads_used": 1.0, "slots": 10, "slots_used": 9.0}, 0.9, "90%"),
        ({"threads": 1, "threads_used": 1.01, "slots": 10, "slots_used": 0.0}, 1.0, "100%"),
        ({"threads": 0, "threads_used": 1.0}, None, ""),
    ],
)
def test_how_busy_a_worker_is(columns, busy, shown):
    beat(**columns)
    (worker,) = queues.workers()
    assert (worker.busy, worker.shown_busy) == (busy, shown)


def test_timings_of_live_workers_add_up():
    """CAR-42, NSQ-34: including percentiles, since buckets add up."""
    beat("old", seen=-20, timings={"h": tally(acked=90, ran=[0.010] * 90)})
    beat("new", timings={"h": tally(acked=9, failed=1, dead=1, ran=[2.0] * 10)})
    beat("gone", seen=-31, timings={"h": tally(acked=7), "i": tally(acked=1)})
    found = queues.timings()
    assert list(found) == ["h"]
    h = found["h"]
    assert (h.handler, h.acked, h.failed, h.retried, h.snoozed, h.dead) == ("h", 99, 1, 0, 0, 1)
    assert (h.waited, h.last_at) == (None, None)
    assert (h.ran.count, h.ran.last, h.ran.min, h.ran.max) == (100, 2.0, 0.010, 2.0)
    assert h.ran.mean == pytest.approx(0.209)
    assert h.ran.p50 == pytest.approx(0.010, rel=0.13)
    assert h.ran.p99 == pytest.approx(2.0, rel=0.13)
    assert queues.timings(worker="gone")["i"].acked == 1


def test_malformed_timings_are_left_out():
    good = tally(acked=1)
    bad = ({}, None, 7, [], {**good, "acked": -1}, {**good, "last_at": "soon"}, {**good, "ran": 1})
    for number, each in enumerate((*bad, {**good, "last_at": "2026-01-01T00:00"})):
        beat(f"w{number}", timings={"h": each})
    assert queues.timings() == {}
    beat("good", timings={"h": good})
    assert queues.timings()["h"].acked == 1


@pytest.mark.parametrize(
    ("served", "queue", "serves"),
    [
        ([], "mail", True),
        (["mail"], "mail", True),
        (["mail"], "mailbox", False),
        (["shop.*", "mail"], "shop.eu", True),
        (["shop.*"], "shop.eu.north", False),
        (["#"], "shop.eu.north", True),
        (["no such pattern*"], "mail", False),
    ],
)
def test_a_worker_serves_names_and_patterns(served, queue, serves):
    beat(queues=served)
    assert queues.workers()[0].serves(queue) is serves


def test_the_session_that_holds_a_snapshot_is_named(other):
    """Guarantee 19."""
    other.execute("set application_name = 'a\x01report'")
    other.connection.commit()
    other.execute("set transaction isolation level repeatable read")
    other.execute("select pg_backend_pid()")
    pid = other.fetchone()[0]
    found = {holder.name: holder for holder in queues.horizon(older_than=0, limit=100)}
    holder = found[str(pid)]
    assert (holder.kind, holder.state) == ("session", "idle in transaction")
    assert holder.login == connection.settings_dict["USER"]
    assert holder.since is not None


def test_a_session_that_has_only_written_is_named(other):
    """At READ COMMITTED it keeps no snapshot between statements, but vacuum waits for its id."""
    other.execute("select pg_backend_pid(), pg_current_xact_id()")
    pid = other.fetchone()[0]
    with second_connection() as observer:
        held = observer.execute(
            "select backend_xmin is null, backend_xid is not null"
            " from pg_stat_activity where pid = %s",
            [pid],
        )
        assert held.fetchone() == (True, True)
    assert str(pid) in {holder.name for holder in queues.horizon(older_than=0, limit=100)}


def test_the_oldest_holder_is_first_whether_it_has_read_or_written(other):
    with second_connection() as reader:
        reader.execute("begin isolation level repeatable read; select 1")
        with second_connection() as writer:
            writer.execute("select pg_current_xact_id()")  # uses up an id, and commits
        other.execute("select pg_current_xact_id(), pg_backend_pid()")
        late = str(other.fetchone()[1])
        names = [holder.name for holder in queues.horizon(older_than=0, limit=100)]
        assert names.index(str(reader.info.backend_pid)) < names.index(late)


def test_a_short_transaction_is_not_named(other):
    other.execute("set transaction isolation level repeatable read")
    other.execute("select pg_backend_pid()")
    pid = other.fetchone()[0]
    assert str(pid) not in {holder.name for holder in queues.horizon(older_than=60)}


def test_a_vacuum_is_not_named(transactional_db):
    """It has a snapshot, which other vacuums ignore."""
    with second_connection() as vacuum, ThreadPoolExecutor(1) as beside:
        pid = vacuum.info.backend_pid
        vacuum.execute("set vacuum_cost_delay = 100; set vacuum_cost_limit = 1")  # minutes for it
        vacuum.execute(
            "create table mq_test_vacuumed (n) with (autovacuum_enabled = off, fillfactor = 10)"
            " as select generate_series(1, 20000)"
        )
        running = beside.submit(vacuum.execute, "vacuum mq_test_vacuumed")
        try:
            until(lambda: _vacuums_with_a_snapshot(pid), "it runs")
            names = {holder.name for holder in queues.horizon(older_than=0, limit=100)}
            assert _vacuums_with_a_snapshot(pid)
        finally:
            vacuum.cancel()
            assert isinstance(running.exception(SOON), QueryCanceled)
            vacuum.execute("drop table mq_test_vacuumed")
    assert str(pid) not in names


def _vacuums_with_a_snapshot(pid):
    with second_connection() as observer:
        running = observer.execute(
            "select a.backend_xmin is not null"
            " from pg_stat_progress_vacuum v join pg_stat_activity a using (pid) where pid = %s",
            [pid],
        )
        return running.fetchone() == (True,)


def test_asking_is_not_holding(transactional_db):
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        own = str(cursor.fetchone()[0])
    assert own not in {holder.name for holder in queues.horizon(older_than=0, limit=100)}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"queues": [7, "mail", None, {}]}, {"queues": ("mail",)}),
        ({"running": [True, "x", 7, 2**63, 1.5, [], -1]}, {"running": (7, -1)}),
        ({"queues": [None], "running": [[]]}, {"queues": (), "running": ()}),
    ],
)
def test_readable_parts_of_an_odd_heartbeat_are_shown(written, read):
    """Guarantee 24: and it is marked as odd; unreadable names serve no queue."""
    beat("good", queues=["mail"], running=[7])
    beat("odd", **written)
    found = {each.id: each for each in queues.workers()}
    assert found["good"].unreadable == ()
    assert found["odd"].unreadable == tuple(written)
    assert {name: getattr(found["odd"], name) for name in read} == read
    assert found["odd"].serves("shop") == ("queues" not in written)


def test_one_heartbeat_that_cannot_be_decoded_hides_no_other():
    beat("good", queues=["mail"])
    for name, text in (("digits", "1" * 5000), ("depth", "[" * 5000 + "]" * 5000)):
        beat(name)
        with connection.cursor() as cursor:
            cursor.execute(
                "update django_mq_workerheartbeat set queues = %(json)s, running = %(json)s"
                " where id = %(id)s",
                {"json": f"[{text}]", "id": name},
            )
    found = {each.id: each for each in queues.workers()}
    assert found["good"].queues == ("mail",)
    for name in ("digits", "depth"):
        assert found[name].unreadable == ("queues", "running")
        assert not found[name].serves("mail")
