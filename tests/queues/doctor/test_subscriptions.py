"""Findings about messages that wait in vain: D013 to D015, D020, D024 and D034."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from django_mq import handler, queues
from django_mq.conf.local_time import local_text
from django_mq.queues.doctor import examine
from tests.outbox.schedules.conftest import put
from tests.queues.doctor.examined import found, run_doctor
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


class TestQueuesAndTypes:
    def test_d013_a_queue_without_a_worker(self) -> None:
        beat(queues=["shop.*"])
        add("shop.eu")
        add("mail")
        add("later", after=60)
        add("later", after=60)
        add("paused")
        decide("paused", paused=-1)
        levels = {each.text.partition(",")[0]: each.level for each in examine()}
        assert levels == {
            "1 message waits in the queue mail": "error",
            "2 messages wait in the queue later": "warning",
        }

    def test_d013_one_that_is_quiet_can_be_resumed_unless_it_drains(self) -> None:
        beat("other", queues=["other"])
        beat("leaving", queues=["mail"], quiet=True, draining=True)
        add("mail")
        (text,) = found("D013")
        assert "no live worker serves it. Start one" in text
        beat("resting", queues=["mail"], quiet=True)
        (text,) = found("D013")
        assert "no live worker serves it that is not quiet. Resume one" in text

    def test_d013_names_the_worker_that_is_gone(self) -> None:
        """It may be frozen, or its host is away: another one is not what is missing."""
        beat("other", queues=["other"])
        gone = beat("frozen", queues=["mail"], seen=-90, host="h", pid=9)
        add("mail")
        (text,) = found("D013")
        assert (
            "no live worker serves it. The last one was worker frozen (host h, process 9), whose"
            f" last heartbeat came at {local_text(gone.last_seen)}." in text
        )

    def test_d014_type_without_a_handler(self) -> None:
        beat()
        add(held=-9, type="shop.orders.lost")
        (finding,) = [each for each in examine() if each.id == "D014"]
        assert "1 message of type shop.orders.lost is held" in finding.text
        command = finding.hint.rpartition("manage.py ")[2].removesuffix(".")
        assert command == "mq_purge --type shop.orders.lost --waiting"
        call_command(*command.split(), "--yes", stdout=StringIO())
        assert found("D014") == []

    def test_d014_a_misspelt_type(self) -> None:
        handler("shop.orders.placed", name="h")(print)
        beat()
        add("default", held=-9, type="shop.order.placed")
        (text,) = found("D014")
        assert "Did you mean shop.orders.placed?" in text

    def test_d014_a_handler_that_may_not_take_from_the_queue(self) -> None:
        """The reason is not that nobody hears the type: the hint names a message that says it."""
        handler("shop.orders.placed", queue="mail", name="send")(print)
        beat()
        held = {"handler": "send", "held": -9, "type": "shop.orders.placed"}
        first = add("mail", **held).pk
        add("ledger", **held)
        (finding,) = [each for each in examine() if each.id == "D014"]
        assert "2 messages of type shop.orders.placed are held: no worker" in finding.text
        assert "by name, type, schema version and queue" in finding.text
        assert f"manage.py mq_why {first}" in finding.hint

    def test_d014_a_renamed_handler(self) -> None:
        """To drop the messages is not the first thing to do: they run under an alias."""
        handler("shop.orders.placed", queue="mail", name="send_mail")(print)
        beat()
        add("mail", handler="send", held=-9, type="shop.orders.placed")
        (text,) = found("D014")
        assert "is held: no worker has a handler that takes it, by name" in text
        assert "give a renamed one its former name in aliases=" in text

    def test_d014_a_renamed_task(self) -> None:
        """Tasks have no aliases: a task at the old path calls the new one."""
        beat()
        add(handler="shop.tasks.old", held=-9, type="tasks.shop.tasks.old")
        (text,) = found("D014")
        assert "if it was renamed, leave a task at its old path that calls the new one" in text
        assert "aliases" not in text
        assert "where" not in text

    def test_d014_counts_each_message_once_and_names_the_first(self) -> None:
        """Where few are due, the ones due for longest are also those due last."""
        beat()
        first = add(type="one.lost", held=-9, after=-60).pk
        add(type="one.lost", held=-9, after=-900)
        add(type="two.lost", held=-9, after=60)
        add()
        one, two = [each for each in examine() if each.id == "D014"]
        assert one.text.startswith("2 messages of type one.lost are held")
        assert f"mq_why {first} " in one.hint
        assert two.text.startswith("1 message of type two.lost is held")

    def test_d014_in_the_middle_of_a_backlog(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rows that are read are bounded, so the doctor says what it has not seen."""
        monkeypatch.setattr(import_module("django_mq.queues.topology"), "HELD_PER_LANE", 1)
        beat()
        for after in (-90, -10):
            add(after=after)
        add(type="shop.lost", held=-9, after=-60)
        (text,) = found("D014")
        assert text.startswith("1 message in the queue mail is held: no worker has a handler")
        add(type="shop.found", held=-9, after=-900)
        (text,) = found("D014")
        assert text.startswith("1+ messages of type shop.found are held: no worker has a handler")

    def test_d034_delayed_messages_of_a_removed_handler(self) -> None:
        """Nothing holds them before they are due, which may be long after the deploy."""
        handler("shop.orders.placed", queue="mail", name="send_mail")(print)
        beat()
        lost = {"handler": "send", "type": "shop.orders.placed"}
        first = add("mail", **lost, after=86_400)
        add("mail", **lost, after=99_999, attempts=1)
        add("mail", type="shop.orders.lost", after=60)
        named, unrouted = [each for each in examine() if each.id == "D034"]
        assert named.level == "warning"
        assert named.text == (
            "2 messages of type shop.orders.placed for the handler send wait in the queue mail: no"
            " handler here takes them, so a worker with this code will hold them."
        )
        assert f"manage.py mq_why {first.pk} gives the reason: deploy the handler" in named.hint
        assert unrouted.text.startswith(
            "1 message of type shop.orders.lost waits in the queue mail:"
        )
        command = named.hint.rpartition("manage.py ")[2].removesuffix(".")
        call_command(*command.split(), "--yes", stdout=StringIO())
        assert [text[:34] for text in found("D034")] == ["1 message of type shop.orders.lost"]

    def test_d034_a_misspelt_type_that_is_not_due(self) -> None:
        """It waits in the default queue, which need not be that of any handler."""
        beat()
        add("default", type="shop.order.placed", after=60)
        assert found("D034") == []  # this code has no handlers: it may only produce
        handler("shop.orders.placed", queue="mail", name="h")(print)
        (text,) = found("D034")
        assert text.startswith("1 message of type shop.order.placed waits in the queue default: no")
        assert "Did you mean shop.orders.placed?" in text

    def test_d034_not_what_a_handler_takes_or_a_worker_holds(self) -> None:
        """Nor messages in queues of other code, which has handlers that are unknown here."""
        handler("shop.#", queue="mail", name="send", where={"tier": "gold"})(print)
        beat()
        add("mail", handler="send", type="shop.orders.placed", after=60)
        add("mail", type="shop.orders.placed")  # a worker routes it by its metadata
        add("mail", handler="gone", type="shop.orders.placed", held=-9)
        add("mail", handler="gone", type="shop.orders.placed", dead=-9)
        add("mail", handler="gone", type="shop.orders.placed", leased=60, attempts=1)
        add("ledger", handler="books", type="bank.moved")
        assert found("D034") == []

    def test_d034_marks_that_there_may_be_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(import_module("django_mq.queues.topology"), "HELD_PER_LANE", 2)
        handler("a.b", queue="mail", name="h")(print)
        beat()
        for after in (60, 70, 80):
            add("mail", handler="gone", type="a.b", after=after)
        (text,) = found("D034")
        assert text.startswith("2+ messages of type a.b for the handler gone wait in the queue")

    def test_d015_handlers_without_a_worker(self) -> None:
        handler("a.b", queue="reports", name="sums")(print)
        assert found("D015") == []  # no worker runs at all, so no handler is known to be missing
        beat("resting", queues=["mail"], quiet=True)
        assert found("D015") == []  # nor if all rest
        beat(queues=["mail", "default"])
        (text,) = found("D015")
        assert "reports has handlers (sums)" in text

    @pytest.mark.parametrize(
        ("queue", "given"), [("reports", {"queue": "reports"}), ("default", {})]
    )
    def test_d015_names_first_the_handlers_whose_queue_it_is(
        self, queue: str, given: dict[str, str]
    ) -> None:
        """Each task may run in each queue of TASKS, so others would come first."""
        handler("a.b", name="z", **given)(print)  # type: ignore[call-overload]
        for name in "abcd":
            handler("c.d", queue="mail", queues=(queue,), name=name)(print)
        beat(queues=["mail"])
        [text] = [each for each in found("D015") if f"queue {queue} " in each]
        assert f"{queue} has handlers (z, a, b)" in text

    def test_d024_messages_behind_a_dead_letter(self) -> None:
        beat()
        first = add(key="k", handler="h", dead=-5)
        add(key="other", handler="h", dead=-5)  # nothing waits behind it
        late = add(key="late", handler="h", after=60)
        add(key="late", handler="h", blocked_by=late.pk)
        add(key="k", handler="h", blocked_by=first.pk)
        (finding,) = [each for each in examine() if each.id == "D024"]
        assert finding.level == "warning"
        assert finding.text.startswith("1 message waits in the queue mail behind a dead letter of")
        assert f"mq_why {first.pk} explains" in finding.hint
        assert "--heads" not in finding.hint
        second = add(key="m", handler="h", dead=-5)
        add(key="m", handler="h", blocked_by=second.pk)
        (text,) = found("D024")
        assert "2 messages wait in the queue mail behind 2 dead letters of their key" in text
        (several,) = [each for each in examine() if each.id == "D024"]
        assert "manage.py mq_peek mail --heads lists them" in several.hint
        command = finding.hint.partition("manage.py ")[2].split("manage.py ")[1].split(" runs")[0]
        call_command(*command.split(), stdout=StringIO())
        (text,) = found("D024")
        assert text.startswith("1 message waits in the queue mail behind a dead letter of its key")

    def test_d024_marks_that_there_may_be_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(import_module("django_mq.queues.doctor.subscriptions"), "MAX_LINES", 2)
        beat()
        for key in "abc":
            first = add(key=key, handler="h", dead=-5)
            add(key=key, handler="h", blocked_by=first.pk)
        (text,) = found("D024")
        assert text.startswith("2+ messages wait in the queue mail behind 2+ dead letters of")

    def test_d024_not_where_the_queue_skips_dead_heads(self, settings: Any) -> None:
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
        beat()
        first = add(key="k", handler="h", dead=-5)
        add(key="k", handler="h", blocked_by=first.pk)
        assert found("D024") == []


class TestWithoutAWorker:
    #: A month, and a delay that reads the same for half an hour of testing.
    MONTH = timedelta(days=30)

    LATE = -timedelta(days=2, hours=3, minutes=30).total_seconds()

    def told(self) -> list[tuple[str, str, str]]:
        ids = ("D018", "D019", "D020")
        return [(each.id, each.level, each.text) for each in examine() if each.id in ids]

    def test_d020_schedules_and_no_worker(self) -> None:
        assert self.told() == []
        beat(seen=-60)
        put("off", enabled=False, due=None)
        assert run_doctor()[0] == 0
        put("later", due=600)
        assert self.told() == [
            ("D020", "warning", "No worker is alive, and 1 schedule is enabled.")
        ]
        put("report", every=self.MONTH, due=self.LATE)
        assert self.told() == [
            ("D020", "error", "No worker is alive, and 2 schedules are enabled."),
            ("D018", "warning", "The schedule report is 2 d 3 h overdue."),
        ]
        (text,) = found("D018")
        assert "Start a worker" in text

    def test_d020_operations_and_no_worker(self) -> None:
        queues.operate("requeue", queue="mail")
        assert self.told() == [("D020", "error", "No worker is alive, and 1 operation waits.")]
        add("mail")
        put("later", due=600)
        text = "No worker is alive, 1 message waits, 1 operation waits, and 1 schedule is enabled."
        assert self.told() == [("D020", "error", text)]

    def test_d020_messages_and_no_worker(self) -> None:
        """One finding for the fleet, instead of one for each queue."""
        add("paused")
        decide("paused", paused=-1)
        assert self.told() == []
        add("later", after=60)
        assert self.told() == [("D020", "warning", "No worker is alive, and 1 message waits.")]
        add("mail")
        put("later", due=600)
        assert self.told() == [
            ("D020", "error", "No worker is alive, 2 messages wait, and 1 schedule is enabled.")
        ]
        assert found("D013") == []
        beat(quiet=True)
        assert self.told() == []
        assert len(found("D013")) == 2
