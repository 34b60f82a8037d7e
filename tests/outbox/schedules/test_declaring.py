"""A worker stores the schedules of its code, and keeps the decisions of operators."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import OperationalError, connection
from django.db.models import F
from django.db.models.functions import Now

from django_mq import periodic
from django_mq.conf import get_settings
from django_mq.handlers import isolated
from django_mq.models import Schedule
from django_mq.outbox.schedules.declaring import declare_all, keep_declared, retire
from django_mq.store import schedules
from tests.database import second_connection
from tests.outbox.schedules.conftest import block, put, turn

pytestmark = pytest.mark.django_db(transaction=True)


def start(*declare):
    """Store the schedules of a process that starts now; `declare` are its declarations."""
    with isolated():
        for each in declare:
            periodic(**{"name": "daily", "type": "shop.ping", "every": 3600, **each})
        declare_all(block, get_settings())


def keep(*declare):
    """Act like a process after an hour."""
    with isolated():
        for each in declare:
            periodic(**{"name": "daily", "type": "shop.ping", "every": 3600, **each})
        keep_declared(block, get_settings())
        retire(block)


@contextmanager
def hasty():
    """A block with a short lock timeout."""
    with block() as cursor:
        cursor.execute("set local lock_timeout = 50")
        yield cursor


def the():
    return Schedule.objects.annotate(now=Now()).get()


def age(hours, name="daily"):
    ago = timedelta(hours=hours)
    Schedule.objects.filter(name=name).update(
        declared_at=F("declared_at") - ago, next_at=F("next_at") - ago
    )


def version(name="daily"):
    with connection.cursor() as cursor:
        cursor.execute("select xmin::text from django_mq_schedule where name = %s", [name])
        return cursor.fetchone()


def test_the_columns_of_a_declared_schedule():
    start(
        {
            "payload": {"n": 1},
            "metadata": {"tier": "gold"},
            "queue": "mail",
            "catch_up": "all",
            "overlap": "skip",
            "expires": 60,
        }
    )
    found = the()
    assert (found.type, found.payload, found.metadata) == ("shop.ping", {"n": 1}, {"tier": "gold"})
    assert (found.cron, found.every, found.tz, found.queue) == (
        "",
        timedelta(hours=1),
        "UTC",
        "mail",
    )
    assert (found.catch_up, found.overlap, found.expires) == ("all", "skip", timedelta(minutes=1))
    assert (found.source, found.enabled, found.decision) == ("code", True, None)
    assert found.next_at - found.created_at <= timedelta(hours=1)
    assert found.next_at - found.now > timedelta(minutes=50)
    assert (found.last_at, found.last_message, found.last_error) == (None, None, "")


def test_a_cron_expression_in_its_time_zone():
    start({"every": None, "cron": "30 6 * * *", "tz": "Asia/Kolkata"})
    found = the()
    assert f"{found.next_at:%H:%M}" == "01:00"
    assert found.now < found.next_at <= found.now + timedelta(days=1)


def test_declaring_the_same_again_writes_nothing():
    start({})
    before, row = version(), the()
    start({})
    keep({})
    assert version() == before
    age(2)
    start({})
    assert version() != before
    assert row.now - timedelta(minutes=1) < the().declared_at


def test_a_time_that_a_stopped_fleet_missed_is_not_forgotten_by_its_start():
    start({})
    age(3)
    start({"payload": {"other": "content"}})
    assert the().next_at < the().now
    with isolated():
        periodic("daily", "shop.ping", every=3600)
        assert turn() == 1


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"every": 7200}, True),
        ({"every": None, "cron": "* * * * *"}, True),
        ({"payload": {"n": 2}, "type": "shop.pong", "queue": "mail", "catch_up": "none"}, False),
        ({"metadata": {"n": 2}, "overlap": "skip", "expires": 5}, False),
    ],
)
def test_change_of_the_timing_moves_the_next_time(change, moves):
    start({})
    before = the()
    start(change)
    now = the()
    assert (now.next_at != before.next_at) == moves
    assert {name: getattr(now, name) for name in ("type", "payload", "metadata", "queue")} == {
        "type": change.get("type", "shop.ping"),
        "payload": change.get("payload", {}),
        "metadata": change.get("metadata", {}),
        "queue": change.get("queue", ""),
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("type", "shop.pong"),
        ("payload", {"n": 2}),
        ("metadata", {"n": 2}),
        ("queue", "mail"),
        ("catch_up", "none"),
        ("overlap", "skip"),
        ("expires", timedelta(seconds=5)),
        ("every", timedelta(hours=2)),
        ("tz", "Asia/Tokyo"),
        ("enabled", False),
    ],
)
def test_a_change_of_one_option_alone_is_stored(option, value):
    start({})
    start({option: value})
    assert getattr(the(), option) == value


def test_a_change_of_the_time_zone_too():
    start({"every": None, "cron": "30 6 * * *"})
    before = the().next_at
    start({"every": None, "cron": "30 6 * * *", "tz": "Asia/Tokyo"})
    assert (the().next_at - before) % timedelta(days=1) == timedelta(hours=15)


def decide(enabled):
    with block() as cursor:
        next_at = schedules.now(cursor) + timedelta(hours=1) if enabled else None
        schedules.decide(cursor, "daily", enabled=enabled, next_at=next_at)


def test_the_code_enables_and_disables_until_an_operator_does():
    start({"enabled": False})
    assert (the().enabled, the().next_at) == (False, None)
    start({"enabled": True})
    assert the().enabled
    assert the().next_at
    decide(False)
    start({"enabled": True, "every": 60})
    assert (the().enabled, the().next_at) == (False, None)
    decide(True)
    start({"enabled": False})
    assert the().enabled
    assert the().next_at


def test_schedule_undeclared_for_a_day_is_disabled_and_not_deleted(caplog):
    start({}, {"name": "kept"})
    put("of-an-operator")
    age(23.9)
    keep({"name": "kept"})
    assert Schedule.objects.filter(enabled=True).count() == 3
    age(0.2)
    keep({"name": "kept"})
    retired = Schedule.objects.get(enabled=False)
    assert (retired.name, retired.next_at) == ("daily", None)
    [line] = caplog.records
    assert (line.event, line.schedule) == ("schedule_retired", "daily")


def test_redeclared_schedule_is_enabled_unless_an_operator_disabled_it():
    start({})
    age(25)
    keep()
    assert not the().enabled
    keep({})  # from a process that was cut off for a day
    assert the().enabled
    assert the().next_at > the().now
    decide(False)
    age(25)
    keep()
    start({})
    assert not the().enabled


def test_retired_schedule_enabled_by_an_operator_lasts_a_day():
    start({})
    age(25)
    keep()
    decide(True)
    keep()
    assert the().enabled
    age(25)
    keep()
    assert not the().enabled


def test_old_process_does_not_overwrite_a_newer_declaration():
    start({"payload": {"version": 1}})
    start({"payload": {"version": 2}})
    age(2)
    keep({"payload": {"version": 1}})
    assert the().payload == {"version": 2}
    assert the().declared_at > the().now - timedelta(minutes=1)


def test_a_schedule_that_was_removed_by_sql_comes_back():
    start({})
    Schedule.objects.all().delete()
    keep({})
    assert the().enabled


def test_the_code_takes_over_a_schedule_made_in_the_admin():
    put("daily", enabled=False, due=None, decision=False)
    start({})
    assert (the().source, the().enabled) == ("code", False)


def test_the_code_takes_over_a_schedule_that_an_operator_has_just_enabled():
    put("daily", enabled=False, due=None)
    decide(True)
    start({})
    assert (the().source, the().enabled) == ("code", True)


def test_schedule_taken_from_the_code_by_sql_is_not_disabled():
    """The code has dropped it, and the admin only edits what is its own."""
    start({})
    Schedule.objects.update(source="admin")
    age(25)
    keep()
    assert the().enabled


def test_invalid_schedule_is_logged_and_stops_no_other(caplog):
    start(
        {"name": "bad", "every": None, "cron": "61 * * * *"}, {"payload": object()}, {"name": "g"}
    )
    assert the().name == "g"
    assert {each.schedule for each in caplog.records} == {"bad", "daily"}
    assert {each.event for each in caplog.records} == {"schedule_invalid"}


def test_a_row_that_is_locked_stops_no_other():
    start({"name": "a"}, {"name": "b"})

    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_schedule where name = 'a' for update")
        with isolated():
            for name in ("a", "b"):
                periodic(name, "shop.pong", every=3600)
            assert declare_all(hasty, get_settings()) == {"a"}
    assert Schedule.objects.get(name="a").type == "shop.ping"
    assert Schedule.objects.get(name="b").type == "shop.pong"


def test_a_row_that_the_database_refuses_stops_no_other(caplog):
    """The project has a constraint of its own."""
    table = "alter table django_mq_schedule"
    with connection.cursor() as cursor:
        cursor.execute(f"{table} add constraint own check (type <> 'shop.refused')")
    try:
        start({"name": "bad", "type": "shop.refused"}, {})
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"{table} drop constraint own")
    assert the().name == "daily"
    assert [(each.event, each.schedule) for each in caplog.records] == [("schedule_invalid", "bad")]


def test_a_lost_database_ends_the_declaring_at_once():
    tried = []

    @contextmanager
    def lost():
        tried.append(True)
        raise OperationalError("the connection is lost")
        yield

    with isolated():
        for name in ("a", "b"):
            periodic(name, "shop.ping", every=3600)
        with pytest.raises(OperationalError, match="lost"):
            declare_all(lost, get_settings())
    assert len(tried) == 1


def test_a_schedule_of_a_task_is_not_stored(caplog):
    start({"name": "task", "type": "tasks.shop.more.low"}, {})
    assert the().name == "daily"
    assert "schedule task cannot run: its type tasks.shop.more.low is that of a" in caplog.text
