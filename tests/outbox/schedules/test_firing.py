"""The broadcast of a due schedule, and its row afterwards."""

from __future__ import annotations

import json
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test import override_settings

from django_mq import broadcast, handler
from django_mq.models import QueuedMessage, Schedule
from django_mq.outbox.schedules import firing
from django_mq.outbox.schedules.firing import MAX_PER_TRANSACTION, fire_due, fire_now
from django_mq.store import schedules
from tests.database import second_connection
from tests.outbox.schedules.conftest import HOUR, block, messages, put, times, turn

pytestmark = pytest.mark.django_db(transaction=True)


def iso(at):
    return at.astimezone(UTC).isoformat()


def test_a_due_schedule_is_broadcast_once_and_moves_on():
    before = put(payload={"shop": 7}, metadata={"tier": "gold"}, expires=timedelta(minutes=5))
    put("later", due=60)
    put("off", due=None)
    assert turn() == 1
    assert turn() == 0
    [message] = QueuedMessage.objects.all()
    assert (message.type, message.payload) == ("shop.ping", {"shop": 7})
    assert message.metadata == {
        "tier": "gold",
        "mq.schedule": "hourly",
        "mq.scheduled_for": iso(before.next_at),
    }
    assert message.expires_at - message.created_at == timedelta(minutes=5)
    now = Schedule.objects.get(name="hourly")
    assert (now.last_at, now.next_at) == (before.next_at, before.next_at + HOUR)
    assert (now.last_message, now.last_error) == (message.pk, "")


def test_every_subscriber_gets_a_copy_and_the_queue_may_be_chosen():
    handler("shop.ping", queue="mail", name="a")(lambda delivery: None)
    handler("shop.#", queue="mail", queues=["slow"], name="b")(lambda delivery: None)
    put()
    assert turn() == 1
    assert [each.handler for each in messages()] == ["a", "b"]
    assert Schedule.objects.get().last_message == messages()[0].pk
    QueuedMessage.objects.all().delete()
    put("chosen", queue="slow")
    assert turn() == 0  # `a` does not allow it
    assert "RoutingError" in Schedule.objects.get(name="chosen").last_error


def test_cron_is_read_in_its_time_zone():
    put(cron="0 6 * * *", tz="Europe/Berlin")
    assert turn() == 1
    Schedule.objects.update(next_at=datetime(2026, 3, 28, 5, tzinfo=UTC))
    assert turn() == 1
    assert times()[1][11:] in ("04:00:00+00:00", "05:00:00+00:00")  # depending on the season


@pytest.mark.parametrize(
    ("catch_up", "overlap", "missed"),
    [
        ("once", "allow", [4]),
        ("none", "allow", []),
        ("all", "allow", [0, 1, 2, 3, 4]),
        ("all", "skip", [4]),
    ],
)
def test_a_stopped_fleet_catches_up(catch_up, overlap, missed):
    put(due=-4.5 * 3600, catch_up=catch_up, overlap=overlap)
    first = Schedule.objects.get().next_at
    assert turn() == len(missed)
    assert times() == [iso(first + number * HOUR) for number in missed]
    now = Schedule.objects.get()
    assert now.next_at == first + 5 * HOUR
    assert now.last_error == ""


@pytest.mark.parametrize(("every", "stood"), [(60, 5 * 3600), (10, 95)])
def test_nothing_that_a_schedule_by_the_minute_missed_is_broadcast_with_none(every, stood):
    put(due=-stood, every=timedelta(seconds=every), catch_up="none")
    assert turn() == 0
    Schedule.objects.update(next_at=Now() - timedelta(seconds=5))
    assert turn() == 1, "a busy worker is late, and misses nothing"


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 600})
def test_workers_that_look_rarely_are_later_without_missing_a_time():
    put(due=-300, catch_up="none")
    assert turn() == 1


def test_catch_up_continues_in_further_transactions():
    """A transaction needs a savepoint per broadcast, and PostgreSQL caches only a few."""
    put("a", due=-3 * MAX_PER_TRANSACTION, every=timedelta(seconds=1), catch_up="all")
    put("b")
    with block() as cursor:
        first = fire_due(cursor, "default")
    assert first.broadcasts == MAX_PER_TRANSACTION
    assert first.after is not None
    assert turn() >= 2 * MAX_PER_TRANSACTION
    stored = times("a")
    assert stored == sorted(set(stored))
    assert len(stored) >= 3 * MAX_PER_TRANSACTION
    assert len(messages("b")) == 1


def test_overlap_skips_while_a_message_waits_or_runs(caplog):
    caplog.set_level(logging.DEBUG, "django_mq")
    put(overlap="skip")
    assert turn() == 1
    [message] = messages()
    before = Schedule.objects.get()
    for state in ({}, {"leased_until": datetime(9000, 1, 1, tzinfo=UTC), "claimed_by": "w:1"}):
        QueuedMessage.objects.update(**state)
        Schedule.objects.update(next_at=before.last_at + timedelta(milliseconds=1))
        assert turn() == 0
        now = Schedule.objects.get()
        assert (now.last_at, now.last_message) == (before.last_at, message.pk)
        assert now.next_at > before.last_at + timedelta(milliseconds=1)
    QueuedMessage.objects.all().delete()
    Schedule.objects.update(next_at=before.last_at)
    assert turn() == 1
    told = [(each.event, each.levelname, each.schedule, each.type) for each in caplog.records]
    fired, skipped = (
        (event, level, "hourly", "shop.ping")
        for event, level in (("schedule_fired", "DEBUG"), ("schedule_skipped", "INFO"))
    )
    assert told == [fired, skipped, skipped, fired]


def test_a_dead_message_does_not_hold_up_its_schedule():
    put(overlap="skip")
    assert turn() == 1
    QueuedMessage.objects.update(dead_at=datetime(2026, 1, 1, tzinfo=UTC))
    Schedule.objects.update(next_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert turn() == 1


def test_a_handler_that_is_done_is_not_held_up_by_one_that_is_not():
    for name in ("quick", "slow"):
        handler("shop.ping", queue=name, name=name)(lambda delivery: None)
    put(overlap="skip")
    assert turn() == 1
    QueuedMessage.objects.filter(handler="quick").delete()
    Schedule.objects.update(next_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert turn() == 1
    assert [each.handler for each in messages()] == ["slow", "quick"]


def test_a_broadcast_that_fails_moves_on_and_harms_no_other(caplog):
    put("a-bad", queue="no", due=-3)
    put("b-good", due=-2)
    handler("shop.ping", queue="mail", name="h")(lambda delivery: None)
    assert turn() == 1
    bad, good = Schedule.objects.order_by("name")
    assert "RoutingError: shop.ping cannot go to queue no" in bad.last_error
    assert (bad.last_at, bad.last_message) == (None, None)
    assert bad.next_at > good.last_at
    assert [each.event for each in caplog.records] == ["schedule_failed"]
    Schedule.objects.filter(name="a-bad").update(queue="", next_at=good.last_at)
    assert turn() == 1
    assert Schedule.objects.get(name="a-bad").last_error == ""


def test_all_schedules_of_a_transaction_share_its_size():
    for name in ("a", "b"):
        put(name, due=-60, every=timedelta(seconds=2), catch_up="all")
    with block() as cursor:
        assert fire_due(cursor, "default").broadcasts == MAX_PER_TRANSACTION


def test_times_that_fail_count_against_the_size_of_a_transaction_too():
    handler("shop.ping", queue="mail", name="h")(lambda delivery: None)
    put(queue="no", due=-3 * MAX_PER_TRANSACTION, every=timedelta(seconds=1), catch_up="all")
    with block() as cursor:
        fired = fire_due(cursor, "default")
    assert fired.broadcasts == 0
    assert fired.after is not None
    assert turn() == 0
    assert Schedule.objects.filter(next_at__gt=F("created_at")).exists()


def test_an_error_of_the_database_stays_in_its_savepoint():
    """A trigger of the project refuses one type of message."""
    put("a-bad", type="shop.refused", due=-3)
    put("b-good", due=-2)
    with connection.cursor() as cursor:
        cursor.execute(
            "create function refuse() returns trigger language plpgsql as"
            " $$ begin raise 'not this one' using detail = 'secret'; end $$;"
            " create trigger refuse before insert on django_mq_queuedmessage for each row"
            " when (new.type = 'shop.refused') execute function refuse()"
        )
    try:
        assert turn() == 1
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop function refuse cascade")
    text = Schedule.objects.get(name="a-bad").last_error
    assert "not this one" in text
    assert "secret" not in text
    assert len(messages("b-good")) == 1


def test_exactly_as_many_times_as_one_transaction_takes():
    before = put(due=-3600 * (MAX_PER_TRANSACTION - 1) - 3, catch_up="all")
    assert turn() == MAX_PER_TRANSACTION
    assert Schedule.objects.get().next_at == before.next_at + MAX_PER_TRANSACTION * HOUR


def test_a_broadcast_that_a_lock_held_up_stays_due_and_its_error_goes():
    before = put()
    with connection.cursor() as cursor:
        cursor.execute(
            "create function held() returns trigger language plpgsql as"
            " $$ begin raise 'held' using errcode = 'lock_not_available'; end $$;"
            " create trigger held before insert on django_mq_queuedmessage"
            " for each row execute function held()"
        )
    try:
        assert turn() == 0
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop trigger held on django_mq_queuedmessage; drop function held()")
    held = Schedule.objects.get()
    assert (held.next_at, held.last_at) == (before.next_at, None)
    assert "held" in held.last_error
    assert turn() == 1
    assert times() == [iso(before.next_at)]
    assert Schedule.objects.get().last_error == ""


@override_settings(DJANGO_MQ={"QUEUES": {"full": {"max_backlog": 2}}})
def test_a_full_queue_leaves_a_schedule_due(caplog):
    put("a-full", queue="full", due=-4 * 3600 - 3, catch_up="all")
    put("b-good", due=-2)
    first = Schedule.objects.get(name="a-full").next_at
    assert turn() == 3
    assert times("a-full") == [iso(first), iso(first + HOUR)]
    full = Schedule.objects.get(name="a-full")
    assert (full.last_at, full.next_at) == (first + HOUR, first + 2 * HOUR)
    assert "BroadcastBusy" in full.last_error
    with block() as cursor:
        before = state_of(cursor, "a-full")
    assert turn() == 0
    with block() as cursor:
        assert state_of(cursor, "a-full") == before, "nothing is written while nothing changes"
    told = [each.getMessage() for each in caplog.records if each.event == "schedule_failed"]
    assert len(told) == 1, "once, not at each try"
    assert "a-full could not be broadcast: " in told[0]
    assert "BroadcastBusy: queue full has 2 or more messages" in told[0]


def state_of(cursor, name):
    cursor.execute("select xmin, ctid from django_mq_schedule where name = %s", [name])
    return cursor.fetchone()


def test_locked_schedule_is_skipped():
    put("a", due=-3)
    put("b", due=-2)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_schedule where name = 'a' for update")
        assert turn() == 1
    assert turn() == 1
    assert [len(messages(name)) for name in ("a", "b")] == [1, 1]


def test_a_rollback_takes_the_broadcast_and_the_next_time_back():
    before = put()
    with block() as cursor:
        assert fire_due(cursor, "default").broadcasts == 1
        transaction.set_rollback(True)
    assert not messages()
    assert Schedule.objects.get().next_at == before.next_at
    assert turn() == 1


def test_many_sessions_at_once_broadcast_each_time_once():
    for number in range(40):
        put(f"s{number}", due=-3 * 3600 - 1, catch_up="all")
    start = threading.Barrier(4)
    counts = []

    def run():
        try:
            start.wait()
            for _ in range(3):
                counts.append(turn())
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    counts.append(turn())
    assert sum(counts) == 40 * 4
    for number in range(40):
        assert len(times(f"s{number}")) == len(set(times(f"s{number}"))) == 4


@pytest.mark.parametrize(
    "odd",
    [
        {"cron": "61 * * * *"},
        {"cron": "* * */20 * 1L"},
    ],
    ids=str,
)
def test_unreadable_timing_stops_only_its_schedule(odd):
    put("a-odd", due=-3, **odd)
    put("b-good", due=-2)
    assert turn() == 1
    bad = Schedule.objects.get(name="a-odd")
    assert bad.next_at is None
    assert "InvalidOption: " in bad.last_error
    assert bad.enabled


@pytest.mark.parametrize(
    "odd", [{"cron": "0 6 * * *", "tz": "Europe/Bonn"}, {"tz": "../../etc/passwd"}], ids=str
)
def test_unknown_time_zone_stops_no_other_schedule(odd, caplog):
    before = put("a-odd", due=-3, **odd)
    put("b-good", due=-2)
    assert turn() == 1
    turn()
    bad = Schedule.objects.get(name="a-odd")
    assert bad.next_at == before.next_at
    assert "unknown time zone" in bad.last_error
    assert [each.schedule for each in caplog.records if each.event == "schedule_failed"] == [
        "a-odd"
    ]


def test_a_host_that_knows_the_zone_broadcasts_in_place_of_one_that_does_not(monkeypatch):
    """Hosts have different data: older data lacks Europe/Kyiv."""
    put(due=-3, cron="0 6 * * *", tz="Europe/Kyiv")
    with monkeypatch.context() as patch:
        patch.setattr("django_mq.handlers.cron.ZoneInfo", {}.__getitem__)
        assert turn() == 0
    assert turn() == 1
    known = Schedule.objects.get()
    assert known.next_at is not None
    assert known.last_error == ""


def test_whatever_a_timing_raises_stops_its_schedule_alone(monkeypatch):
    def times_of(cron, every, tz, *, start):
        if tz == "odd":
            raise ZeroDivisionError("nobody thought of that")
        return real(cron, every, tz, start=start)

    real = firing.times_of
    monkeypatch.setattr(firing, "times_of", times_of)
    put("a-odd", due=-3, tz="odd")
    put("b-good", due=-2)
    assert turn() == 1
    assert "nobody thought of that" in Schedule.objects.get(name="a-odd").last_error


@pytest.mark.parametrize(
    "odd",
    [
        {"payload": "1" * 5000},
        {"payload": "[" * 3000 + "]" * 3000},
        {"metadata": '{"mq.schedule": "another"}'},
        {"metadata": json.dumps({"x": "y" * 20_000})},
        {"expires": "0"},
    ],
    ids=lambda odd: str(odd)[:30],
)
def test_content_that_cannot_be_broadcast_is_an_error_of_its_row(odd):
    put("a-odd", due=-3)
    put("b-good", due=-2)
    with connection.cursor() as cursor:
        for column, value in odd.items():
            cursor.execute(
                f"update django_mq_schedule set {column} = %s where name = 'a-odd'", [value]
            )
    assert turn() == 1
    bad = Schedule.objects.defer("payload").get(name="a-odd")
    assert bad.last_error
    assert bad.next_at > bad.created_at


def test_where_cronsim_is_missing_only_intervals_are_broadcast(monkeypatch):
    """Another worker has it: schedules with cron expressions stay due for that worker."""
    put("a-cron", cron="0 6 * * *", due=-3)
    put("b-hourly", due=-2)
    monkeypatch.setattr("django_mq.outbox.schedules.firing.can_read_cron", lambda: False)
    assert turn() == 1
    cron = Schedule.objects.get(name="a-cron")
    assert cron.next_at < cron.created_at
    assert cron.last_error == ""


def test_time_zones_of_django_do_not_matter():
    before = put()
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
        assert turn() == 1
    assert times() == [iso(before.next_at)]
    now = Schedule.objects.get()
    assert (now.last_at, now.next_at) == (before.next_at, before.next_at + HOUR)


def test_a_schedule_by_hand_keeps_its_next_time():
    before = put(due=600)
    with block() as cursor:
        row = schedules.take(cursor, "hourly")
        receipt = fire_now(cursor, "default", row)
    now = Schedule.objects.get()
    assert now.next_at == before.next_at
    assert (now.last_at, now.last_message) == (row.now, receipt.ids[0])
    assert times() == [iso(row.now)]


def test_users_cannot_set_the_metadata_of_a_schedule():
    from django_mq import InvalidOption

    with transaction.atomic(), pytest.raises(InvalidOption):
        broadcast("shop.ping", metadata={"mq.schedule": "hourly"})


def test_transaction_has_no_more_savepoints_than_postgresql_caches():
    for number in range(MAX_PER_TRANSACTION):
        put(f"skips-{number}", overlap="skip")
    with block() as cursor:
        before = connection.savepoint_state
        assert fire_due(cursor, "default").broadcasts == MAX_PER_TRANSACTION
        assert MAX_PER_TRANSACTION <= connection.savepoint_state - before <= 64
