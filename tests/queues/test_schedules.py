"""Schedules as operators see and change them, in code and with mq_schedule."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import override_settings

from django_mq import InvalidName, InvalidOption, RoutingError, handler, queues
from django_mq.models import QueuedMessage, Schedule
from tests.database import second_connection
from tests.outbox.schedules.conftest import HOUR, put

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


def mq_schedule(*arguments):
    out = StringIO()
    call_command("mq_schedule", *arguments, stdout=out)
    return out.getvalue()


def as_json(*arguments):
    return json.loads(mq_schedule(*arguments, "--json"))


def test_all_schedules_by_name():
    assert queues.schedules() == []
    put("b")
    put("a", enabled=False, due=None)
    assert [each.name for each in queues.schedules()] == ["a", "b"]


def test_command_shows_the_times_in_words():
    put("a", cron="0 6 * * mon-fri", tz="Europe/Berlin")
    put("b")
    daily = "at 06:00 on Monday through Friday, Europe/Berlin"
    shown = mq_schedule()
    assert f"{daily} (0 6 * * mon-fri)" in shown
    assert " every 1 h " in shown
    assert [each["when"] for each in as_json("list")] == [daily, "every 1 h"]


def test_the_next_times():
    made = put(due=60)
    assert queues.next_times("hourly") == [made.next_at + n * HOUR for n in range(3)]
    assert queues.next_times(made, 1) == [made.next_at]


def test_without_time_zones_of_django_nothing_changes():
    """USE_TZ off: Django reads naive times, but calculations need aware ones."""
    made = put(due=60)
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
        assert queues.next_times("hourly", 2) == [made.next_at, made.next_at + HOUR]
        assert queues.next_times(queues.schedules()[0], 1) == [made.next_at]
        assert "hourly" in mq_schedule("next")
        queues.disable_schedule("hourly")
        queues.enable_schedule("hourly")
        assert as_json("list")[0]["enabled"]
    assert Schedule.objects.get().next_at >= made.next_at


def test_the_next_times_of_one_that_is_off_are_those_from_now_on():
    put(cron="30 6 * * *", tz="Asia/Kolkata", enabled=False, due=None)
    found = queues.next_times("hourly", 2)
    assert [f"{at:%H:%M}" for at in found] == ["01:00", "01:00"]
    assert found[1] - found[0] == timedelta(days=1)


def test_next_times_of_an_unreadable_schedule():
    put(cron="61 * * * *")
    with pytest.raises(InvalidOption, match="Bad minute"):
        queues.next_times("hourly")


@pytest.mark.parametrize(
    "call",
    [
        queues.run_schedule,
        queues.enable_schedule,
        queues.disable_schedule,
        queues.next_times,
    ],
)
def test_unknown_or_invalid_names_are_refused(call):
    with pytest.raises(ValueError, match="no schedule nothing"):
        call("nothing")
    with pytest.raises(InvalidName):
        call("a name")


@pytest.mark.parametrize("action", ["list", "run", "enable", "disable", "next"])
def test_misspelt_name_gets_a_suggestion(action):
    put()
    with pytest.raises(CommandError, match="no schedule houry: did you mean hourly"):
        mq_schedule(action, "houry")


def test_last_part_of_a_name_gets_a_suggestion():
    """The schedule of a handler has the handler's name, with its module."""
    put(name="shop.handlers.tick")
    with pytest.raises(CommandError, match=r"no schedule tick: did you mean shop\.handlers\.tick"):
        mq_schedule("run", "tick")


def test_run_enables_nothing():
    put(enabled=False, due=None)
    receipt = queues.run_schedule("hourly")
    [message] = QueuedMessage.objects.all()
    assert receipt.ids == (message.pk,)
    now = Schedule.objects.get()
    assert (now.enabled, now.next_at, now.last_message) == (False, None, message.pk)


def test_run_of_one_whose_broadcast_fails_raises_and_changes_nothing():
    before = put(queue="slow")
    handler("shop.ping", queue="mail", name="h")(lambda delivery: None)
    with pytest.raises(RoutingError):
        queues.run_schedule("hourly")
    now = Schedule.objects.get()
    assert (now.next_at, now.last_at, now.last_error) == (before.next_at, None, "")


def test_enable_and_disable():
    put(source="code")
    assert queues.disable_schedule("hourly")
    assert not queues.disable_schedule("hourly")
    off = Schedule.objects.get()
    assert (off.enabled, off.decision, off.next_at) == (False, False, None)
    assert queues.enable_schedule("hourly")
    on = Schedule.objects.get()
    assert (on.enabled, on.decision) == (True, True)
    assert on.next_at > on.created_at + timedelta(minutes=59), "what it missed stays missed"
    assert not queues.enable_schedule("hourly")
    assert Schedule.objects.get().next_at == on.next_at


def test_enabling_a_schedule_with_invalid_timing_gives_the_reason():
    put(cron="0 6 * * *", tz="Europe/Bonn", due=None)
    with pytest.raises(InvalidOption, match="Europe/Bonn"):
        queues.enable_schedule("hourly")


@pytest.mark.django_db(transaction=True)
def test_a_locked_row_is_waited_for_a_second_at_most():
    put()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_schedule for update")
        for call in (queues.run_schedule, queues.enable_schedule, queues.disable_schedule):
            with pytest.raises(OperationalError):
                call("hourly")
    assert not QueuedMessage.objects.exists()
    Schedule.objects.all().delete()


# ---- the command


def test_the_list():
    assert "No schedules" in mq_schedule()
    made = put("hourly", due=60, last_message=7)
    put("off", cron="0 6 * * *", tz="Europe/Berlin", enabled=False, due=None, last_error="full")
    shown = mq_schedule("list")
    lines = shown.splitlines()
    assert lines[0].split() == [
        "SCHEDULE",
        "TYPE",
        "WHEN",
        "STATE",
        "LAST",
        "MESSAGE",
        "NEXT",
        "ERROR",
    ]
    assert lines[1].split()[:7] == ["hourly", "shop.ping", "every", "1", "h", "enabled", "-"]
    assert f" 7  {made.next_at:%Y-%m-%d %H:%M}" in lines[1]
    assert "at 06:00 every day, Europe/Berlin (0 6 * * *)  disabled" in lines[2]
    assert lines[2].endswith("full")
    assert mq_schedule("list", "off").count("\n") == 2


def test_the_states_are_those_of_the_admin():
    put("failed", last_error="RoutingError: no")
    put("off", enabled=False, due=None, last_error="full")
    put("on")
    put("over", due=None)
    put("slow", due=-90)
    states = [line.split()[5] for line in mq_schedule().splitlines()[1:]]
    assert states == ["failed", "disabled", "enabled", "over", "overdue"]
    assert [each["state"] for each in as_json()] == states


def test_a_schedule_that_no_worker_broadcasts_is_overdue():
    """Its next time in the past says so only to those who compare it with a clock."""
    put("full", due=-300, last_error="BroadcastBusy: no room")
    put("late", due=-300)
    put("soon", due=-5)
    for options in ({}, {"USE_TZ": False, "TIME_ZONE": "Asia/Kolkata"}):
        with override_settings(**options):
            states = {each["name"]: each["state"] for each in as_json()}
            assert states == {"full": "overdue", "late": "overdue", "soon": "enabled"}


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 600})
def test_where_workers_look_rarely_a_schedule_is_overdue_later():
    put("late", due=-300)
    put("overdue", due=-900)
    assert [each["state"] for each in as_json()] == ["enabled", "overdue"]


def test_the_list_as_json_has_the_next_times_and_no_content():
    made = put(due=60, payload={"password": "canary"}, metadata={"x": "canary"})
    put("off", enabled=False, due=None)
    assert "canary" not in mq_schedule("--json")
    hourly, off = as_json("list")
    assert hourly["next"] == [(made.next_at + n * HOUR).isoformat() for n in range(3)]
    assert (hourly["every"], hourly["cron"], hourly["enabled"]) == (3600.0, "", True)
    assert (off["next"], off["enabled"], off["next_at"]) == ([], False, None)


def test_next():
    Schedule.objects.create(
        name="s", type="t", cron="0 6 * * *", next_at=datetime(2126, 3, 1, 6, tzinfo=UTC)
    )
    put("odd", cron="61 * * * *")
    put("off", enabled=False, due=None)
    shown = " ".join(mq_schedule("next").split())
    assert "s 2126-03-01 06:00:00 UTC 2126-03-02 06:00:00 UTC 2126-03-03 06:00:00 UTC" in shown
    assert "Bad minute" in shown
    assert "disabled" in shown
    assert as_json("next", "s")[0]["next"][1] == "2126-03-02T06:00:00+00:00"
    assert "odd" not in mq_schedule("next", "s")


def test_run():
    put(overlap="skip")
    said = mq_schedule("run", "hourly")
    [message] = QueuedMessage.objects.all()
    assert said == f"Schedule hourly is broadcast: message {message.pk}.\n"
    assert "Nothing was broadcast" in mq_schedule("run", "hourly")
    assert as_json("run", "hourly") == {"name": "hourly", "ids": []}


def test_disable_and_enable_by_command():
    put()
    assert mq_schedule("disable", "hourly") == "Schedule hourly is disabled.\n"
    assert as_json("disable", "hourly") == {
        "name": "hourly",
        "enabled": False,
        "next_at": None,
        "changed": False,
    }
    assert mq_schedule("disable", "hourly") == "Schedule hourly was already disabled.\n"
    assert "Schedule hourly is enabled: its next time is 2" in mq_schedule("enable", "hourly")
    assert "hourly was already enabled: its next time is 2" in mq_schedule("enable", "hourly")
    assert Schedule.objects.get().enabled


@pytest.mark.parametrize("action", ["list", "run", "enable", "disable", "next"])
def test_unknown_or_invalid_name_is_an_error(action):
    with pytest.raises(CommandError, match="no schedule nothing"):
        mq_schedule(action, "nothing")
    with pytest.raises(CommandError):
        mq_schedule(action, "a\x1b[2Jb")


@pytest.mark.parametrize("action", ["run", "enable", "disable"])
def test_an_action_that_needs_a_name(action):
    with pytest.raises(CommandError, match=f"mq_schedule {action} NAME"):
        mq_schedule(action)


def test_a_broadcast_that_fails_is_an_error():
    put(queue="slow")
    handler("shop.ping", queue="mail", name="h")(lambda delivery: None)
    with pytest.raises(CommandError, match="cannot go to queue slow"):
        mq_schedule("run", "hourly")
