"""The types that reach each handler, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module

import pytest
from django.core.management import CommandError
from django.db.models.functions import Now
from django.utils import timezone

from django_mq import handler, handlers, queues
from django_mq.models import HandledMessage, HourFigures, MinuteFigures, Schedule
from tests.management.conftest import run, run_json
from tests.rows import add, beat, insert_all, tally

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handlers.isolated():
        handler("shop.placed", queue="mail", name="mails")(lambda delivery: None)
        handler("shop.*", queue="audit", name="audits")(lambda delivery: None)
        handler("odd.#", queue="odd", name="odds", where={"a": 1})(lambda delivery: None)
        yield


def reached(found: queues.Topology) -> dict[str, tuple[tuple[str, ...], int]]:
    return {each.type: (each.handlers, each.messages) for each in found.types}


def test_types_come_from_handlers_schedules_and_messages() -> None:
    add(type="shop.cancelled")
    add(type="shop.cancelled", dead=-1)
    add(type="nobody.hears")
    add(type="tasks.one")
    HandledMessage.objects.create(id=1, queue="mail", type="shop.placed", keep_until=Now())
    Schedule.objects.create(name="on", type="nobody.scheduled", every=timedelta(days=1))
    Schedule.objects.create(name="off", type="is.off", every=timedelta(days=1), enabled=False)
    found = queues.topology()
    assert reached(found) == {
        "nobody.hears": ((), 1),
        "nobody.scheduled": ((), 0),
        "shop.cancelled": (("audits",), 2),
        "shop.placed": (("mails", "audits"), 1),
    }
    assert [each.type for each in found.unheard] == ["nobody.hears", "nobody.scheduled"]
    assert [(each.name, each.queues, each.where) for each in found.handlers] == [
        ("audits", ("audit",), False),
        ("mails", ("mail",), False),
        ("odds", ("odd",), True),
    ]


def test_handlers_that_no_worker_called() -> None:
    """Without a worker the answer is unknown."""
    assert (queues.topology().observed, queues.topology().uncalled) == (False, ())
    now = timezone.now()
    beat(timings={"mails": tally(acked=2, last_at=now), "odds": tally(failed=1, last_at=now)})
    found = queues.topology()
    assert [each.name for each in found.uncalled] == ["audits"]
    assert {each.name: each.attempts for each in found.handlers}["mails"] == 2


def test_calls_outlive_the_worker_that_made_them() -> None:
    """The figures of a replaced process count; last month's figures say nothing about today."""
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    for ago, name in ((5 * 24, "mails"), (20 * 24, "odds")):
        HourFigures.objects.create(
            hour=hour - timedelta(hours=ago), queue="mail", handler=name, acked=3, failed=1
        )
    MinuteFigures.objects.create(minute=hour, worker="gone", queue="q", handler="odds", dead=1)
    MinuteFigures.objects.create(  # the hour has added them up
        minute=hour - timedelta(days=5), worker="gone", queue="mail", handler="mails", acked=3
    )
    beat("new")
    found = queues.topology()
    assert found.observed
    assert [each.name for each in found.uncalled] == ["audits", "odds"]
    mails = next(each for each in found.handlers if each.name == "mails")
    assert (mails.attempts, mails.last_at) == (4, hour - timedelta(days=5))
    MinuteFigures.objects.create(minute=hour, worker="gone", queue="q", handler="audits", acked=1)
    assert [each.name for each in queues.topology().uncalled] == ["odds"]


def test_types_of_held_messages_stay_among_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type without handlers is listed for as long as its messages are held."""
    monkeypatch.setattr(import_module("django_mq.queues.topology"), "NEWEST", 5)
    monkeypatch.setattr(import_module("django_mq.queues.topology"), "HELD_PER_LANE", 3)
    for name, after in (("due.longest", -900), ("due.last", -10), ("due.next", 5)):
        add(type=name, held=-600, after=after)
    insert_all({"type": "shop.placed", "after": -60} for _ in range(20))
    insert_all({"type": "shop.placed", "after": 60} for _ in range(20))
    found = {each.type: each.held for each in queues.topology().types}
    held = {"due.longest": True, "due.last": True, "due.next": True}
    assert found == {**held, "shop.placed": False}
    assert {each.type for each in queues.topology().unheard} == set(held)
    assert {each.type for each in queues.topology(only={"other"}).types} == set()
    assert ["due.next", "0,", "held", "none", "-"] in [
        line.split() for line in run("mq_routes").splitlines()
    ]


def test_only_some_queues() -> None:
    add(type="shop.secret", queue="audit")
    for only in ({"mail"}, ["mail"], "mail"):
        assert reached(queues.topology(only=only)) == {"shop.placed": (("mails",), 0)}
    for only in ("mails", "xmailx", ()):  # a text that contains the name is another queue
        assert not queues.topology(only=only).handlers


def test_the_command_without_a_type() -> None:
    add(type="nobody.hears")
    beat(timings={"mails": tally(acked=2, last_at=timezone.now())})
    lines = [line.split() for line in run("mq_routes").splitlines()]
    assert ["nobody.hears", "1", "none", "-"] in lines
    assert ["shop.placed", "0", "audits", "audit"] in lines
    text = run("mq_routes")
    assert "Handlers that take none of these types: odds (odd.#)\n" in text
    assert "Types that no handler here takes: nobody.hears\n" in text
    assert "Handlers without a counted call in the last 7 days: audits, odds\n" in text
    told = run_json("mq_routes")
    assert (told["unheard"], told["uncalled"]) == (["nobody.hears"], ["audits", "odds"])
    assert told["types"][0] == {
        "type": "nobody.hears",
        "handlers": [],
        "messages": 1,
        "held": False,
    }
    with pytest.raises(CommandError, match="name its type"):
        run("mq_routes", "--metadata", "{}")


def test_the_command_of_an_empty_project() -> None:
    with handlers.isolated():
        assert run("mq_routes") == "No handler is registered, and no message is stored.\n"
