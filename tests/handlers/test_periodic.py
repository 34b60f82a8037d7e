"""Declaring schedules: errors raised at once, and errors that the system check reports."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.test import override_settings

from django_mq import InvalidHandler, InvalidName, InvalidOption, handler, message, periodic
from django_mq.checks import check_schedules
from django_mq.handlers import all_handlers, all_schedules, isolated
from django_mq.messages import classes


@pytest.fixture(autouse=True)
def alone():
    with isolated():
        yield


def reported():
    return [(each.id, each.msg) for each in check_schedules(None)]


def test_declared_options_are_kept():
    periodic("daily", "shop.reports.daily", cron="0  6 * * mon-fri", tz="Europe/Berlin")
    periodic(
        "often",
        "shop.ping",
        {"n": 1},
        every=90,
        queue="mail",
        metadata={"tier": "gold"},
        catch_up="all",
        overlap="skip",
        expires=timedelta(minutes=5),
        enabled=False,
    )
    daily, often = all_schedules()
    assert (daily.cron, daily.every, daily.tz, daily.payload) == (
        "0 6 * * mon-fri",
        None,
        "Europe/Berlin",
        {},
    )
    assert (daily.catch_up, daily.overlap, daily.enabled) == ("once", "allow", True)
    assert (often.every, often.expires) == (timedelta(seconds=90), timedelta(minutes=5))
    assert not reported()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"cron": "* * * * *", "every": 60},
        {"cron": ""},
        {"cron": 5},
        {"every": 0.5},
        {"every": 0},
        {"every": -1},
        {"every": "60"},
        {"every": float("inf")},
        {"every": timedelta(days=36_526)},
        {"every": True},
        {"every": 60, "tz": None},
        {"every": 60, "catch_up": "twice"},
        {"every": 60, "overlap": "never"},
        {"every": 60, "expires": 0},
        {"every": 60, "expires": 1e-9},  # zero, since durations are stored to the microsecond
        {"every": 60, "expires": 1e300},
        {"every": 60, "expires": "1"},
        {"every": 60, "enabled": "yes"},
        {"every": 60, "metadata": [1]},
        {"every": 60, "metadata": {1: 2}},
        {"every": 60, "metadata": {"mq.schedule": "x"}},
    ],
    ids=str,
)
def test_options_that_are_refused_where_they_stand(wrong):
    with pytest.raises(InvalidOption):
        periodic("name", "shop.ping", **wrong)
    assert not all_schedules()


@pytest.mark.parametrize(
    "wrong",
    [{"name": "a name"}, {"type": "shop.*"}, {"type": ""}, {"queue": "a b"}, {"name": "x" * 129}],
    ids=str,
)
def test_names_that_are_refused_where_they_stand(wrong):
    with pytest.raises(InvalidName):
        periodic(**{"name": "name", "type": "shop.ping", "every": 60, **wrong})


@dataclass
class Placed:
    order_id: int


# Like the tasks of django.tasks, which may not be installed.
Task = type("Task", (), {"__module__": "django_tasks.base", "func": reported})


def test_a_task_is_not_scheduled_but_a_handler_that_enqueues_it():
    with pytest.raises(InvalidName, match=r"reported is a Django task: .*reported.enqueue\(\)"):
        periodic("name", Task(), every=60)


@pytest.mark.parametrize("given", [Placed, Placed(7)], ids=["class", "instance"])
def test_an_instance_is_not_scheduled_but_a_handler_that_broadcasts_it(given):
    with classes.isolated():
        message("shop.orders.placed", version=2)(Placed)
        with pytest.raises(InvalidName, match=r"not Placed: .* broadcasts the instance"):
            periodic("name", given, every=60)


def test_a_handler_with_a_clock_is_a_schedule_of_its_name():
    @handler("shop.#", "shop.reports.daily", name="report", cron="0 6 * * *", tz="Europe/Berlin")
    def report(delivery):
        """Nothing."""

    [found] = all_schedules()
    assert (found.name, found.type) == ("report", "shop.reports.daily")
    assert (found.cron, found.tz) == ("0 6 * * *", "Europe/Berlin")


@pytest.mark.parametrize(
    ("patterns", "options"),
    [
        (["shop.#", "shop.*.daily"], {"every": 60}),
        (["shop.ping"], {"every": 60, "cron": "* * * * *"}),
        (["shop.ping"], {"every": 0}),
        (["shop.ping"], {"every": 60, "where": {"tier": "gold"}}),
    ],
)
def test_a_handler_that_no_schedule_can_be_made_of_is_no_handler(patterns, options):
    with pytest.raises(InvalidHandler):

        @handler(*patterns, **options)
        def report(delivery):
            """Nothing."""

    assert not all_handlers()
    assert not all_schedules()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "0 6 * * *", "tz": "Europe/Bonn"}, "unknown time zone 'Europe/Bonn'"),
        ({"every": 60, "tz": "Europe/Bonn"}, "unknown time zone 'Europe/Bonn'"),
        ({"every": 60, "type": "tasks.shop.more.low"}, "whose function calls the task's enqueue()"),
        ({"every": 60, "payload": {"at": object()}}, "payload.at"),
        ({"every": 60, "metadata": {"at": float("nan")}}, "metadata.at"),
        ({"every": 60, "expires": timedelta(days=400)}, "more than 31,622,400 s ahead"),
    ],
)
def test_e010_reports_a_schedule_that_cannot_run(options, says):
    periodic(**{"name": "bad", "type": "shop.ping", **options})
    periodic("good", "shop.ping", every=60)
    [(id, message)] = reported()
    assert id == "django_mq.E010"
    assert message.startswith("The schedule 'bad' cannot run: ")
    assert says in message


@override_settings(DJANGO_MQ={"ENCODER": "shop.nowhere.Encoder"})
def test_e010_does_not_report_an_encoder_that_is_missing():
    """That is E008, and the other checks go on."""
    periodic("hourly", "shop.ping", every=3600)
    assert not reported()


def test_e010_reports_a_queue_that_a_handler_of_the_type_does_not_allow():
    periodic("nobody", "shop.pong", every=60, queue="nowhere")
    assert not reported()  # another process may have the handlers
    handler("shop.ping", name="one", queue="mail", queues=("slow",))(lambda delivery: None)
    handler("shop.ping", name="gold", queue="gold", where={"tier": "gold"})(lambda delivery: None)
    periodic("good", "shop.ping", every=60, queue="slow")
    assert not reported()
    periodic("bad", "shop.ping", every=60, queue="slow", metadata={"tier": "gold"})
    [(id, message)] = reported()
    assert id == "django_mq.E010"
    assert "'bad' cannot run: shop.ping cannot go to queue slow: its handler gold allows" in message


@pytest.mark.parametrize("every", [60, 61])
def test_e010_reports_equal_names_also_of_equal_schedules(every):
    periodic("same", "shop.ping", every=60); periodic("same", "shop.ping", every=every)  # noqa: E702  # fmt: skip
    [(id, message)] = reported()
    assert id == "django_mq.E010"
    assert "'same' cannot run: it is declared twice" in message


def test_e010_reports_a_schedule_named_like_a_handler_with_a_clock():
    handler("shop.ping", name="same", every=60)(lambda delivery: None)
    periodic("same", "shop.ping", every=60)
    [(_, message)] = reported()
    assert "declared twice" in message


SCHEDULES = """\
from django_mq import handler, periodic

periodic("one", "shop.ping", every=60)


@handler("shop.ping", name="two", every=60)
def two(delivery):
    pass
"""


def test_e010_does_not_report_a_module_that_was_imported_twice(tmp_path):
    """As its handlers are not refused either: tests and the shell import modules anew."""
    path = tmp_path / "handlers.py"
    path.write_text(SCHEDULES)
    for _ in range(2):
        runpy.run_path(str(path))
    assert [each.name for each in all_schedules()] == ["one", "two"] * 2
    assert not reported()


def test_e010_names_the_extra_where_cronsim_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    periodic("hourly", "shop.ping", every=3600)
    periodic("daily", "shop.ping", cron="0 6 * * *")
    [(_, message)] = reported()
    assert "'daily'" in message
    assert "pip install 'django-mq[periodic]'" in message


def test_the_check_waits_for_valid_settings():
    periodic("bad", "shop.ping", cron="61 * * * *")
    with override_settings(DJANGO_MQ={"NO_SUCH": 1}):
        assert not reported()
