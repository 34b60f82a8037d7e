"""Which types reach which handlers, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.db.models.functions import Now

from django_mq import handler, handlers, queues
from django_mq.models import HandledMessage, Schedule
from tests.management.conftest import run, run_json
from tests.rows import add, beat, tally

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
    """Without a worker nobody can tell."""
    assert (queues.topology().observed, queues.topology().uncalled) == (False, ())
    beat(timings={"mails": tally(acked=2), "odds": tally(failed=1)})
    found = queues.topology()
    assert [each.name for each in found.uncalled] == ["audits"]
    assert {each.name: each.attempts for each in found.handlers}["mails"] == 2


def test_only_some_queues() -> None:
    add(type="shop.secret", queue="audit")
    assert reached(queues.topology(only={"mail"})) == {"shop.placed": (("mails",), 0)}


def test_the_command_without_a_type() -> None:
    add(type="nobody.hears")
    beat(timings={"mails": tally(acked=2)})
    lines = [line.split() for line in run("mq_routes").splitlines()]
    assert ["nobody.hears", "1", "nobody", "-"] in lines
    assert ["shop.placed", "0", "audits", "audit"] in lines
    text = run("mq_routes")
    assert "Handlers that take none of these types: odds (odd.#)\n" in text
    assert "Types that no handler here takes: nobody.hears\n" in text
    assert "Handlers not called since the workers started: audits, odds\n" in text
    told = run_json("mq_routes")
    assert (told["unheard"], told["uncalled"]) == (["nobody.hears"], ["audits", "odds"])
    assert told["types"][0] == {"type": "nobody.hears", "handlers": [], "messages": 1}
    with pytest.raises(CommandError, match="name its type"):
        run("mq_routes", "--metadata", "{}")


def test_the_command_of_an_empty_project() -> None:
    with handlers.isolated():
        assert run("mq_routes") == "No handler is registered, and no message is stored.\n"
