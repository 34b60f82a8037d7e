"""The pages of queues: contents, blocked lines and backoff."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mq import handlers, queues
from django_mq.admin import queues as queues_page
from django_mq.models import QueuedMessage, QueueState, Result, UniqueKey
from tests.admin.pages import LIST, text, told, url
from tests.rows import add, beat, decide, tally

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

LATER = datetime(2999, 1, 1, tzinfo=UTC)


class TestQueues:
    def cell(self, page, queue, name):
        (row,) = (each for each in page.context["rows"] if each.counts.queue == queue)
        return next(cell for cell in row.cells if cell.name == name)

    def test_all_that_are_known_have_a_line(self, boss, settings):
        """Queues with rows, decisions, or settings; the turn of the chores is no queue."""
        settings.DJANGO_MQ = {"QUEUES": {"listed": {}}}
        add("used")
        decide("decided", paused=-5)
        decide(":", chores_ran_at=None)
        decide("chores", chores_ran_at="2026-01-01T00:00Z")
        page = boss.get(url("queuestate"))
        names = [line.counts.queue for line in page.context["rows"]]
        assert {"used", "decided", "listed", "default"} <= set(names)
        assert ":" not in names

    def test_counts_lead_to_the_messages(self, boss):
        add(dead=-5), add(dead=-5), add(leased=60), add(after=60), add("other", dead=-5)
        page = boss.get(url("queuestate"))
        for name, count in {"dead": 2, "in_flight": 1, "delayed": 1, "held": 0}.items():
            cell = self.cell(page, "mail", name)
            assert cell.text == str(count)
            assert bool(cell.url) == bool(count)
            if count:
                assert cell.url in page.content.decode().replace("&amp;", "&")
                assert boss.get(cell.url).context["cl"].result_count == count

    @pytest.mark.parametrize("decision", [{"paused": -5}, {"backoff": 60, "backoff_level": 2}])
    def test_counts_of_a_stopped_queue_lead_to_its_paused_messages(self, boss, decision):
        decide("mail", **decision)
        add()
        cell = self.cell(boss.get(url("queuestate")), "mail", "processable")
        assert boss.get(cell.url).context["cl"].result_count == 1

    def test_without_the_right_to_see_messages_nothing_is_linked(self, login):
        add(dead=-5)
        client = login("view_queuestate")
        assert self.cell(client.get(url("queuestate")), "mail", "dead").url == ""
        assert LIST not in client.get(url("queuestate", "change", "mail")).content.decode()

    @pytest.mark.parametrize(
        ("decision", "words"),
        [
            ({}, "no worker"),
            ({"paused": -5}, "until resumed"),
            ({"paused": -5, "until": 600}, "paused"),
            ({"backoff": 60, "backoff_level": 3}, "level 3"),
            ({"backoff": -5, "backoff_level": 3}, "level 3, probe due"),
            (
                {"backoff": -5, "backoff_level": 3, "probe_by": "w:1", "probe_until": LATER},
                "level 3, probing",
            ),
            ({"max_in_flight": 0}, "held back its limit is 0"),
            ({"paused": -60, "until": -5}, "no worker"),
        ],
    )
    def test_reason_that_stops_a_queue_is_shown(self, boss, decision, words):
        add()
        if decision:
            decide("mail", **decision)
        assert words in text(boss.get(url("queuestate")))
        assert words in text(boss.get(url("queuestate", "change", "mail")))

    def test_the_page_of_a_queue_needs_no_row(self, boss, settings):
        settings.DJANGO_MQ = {"QUEUES": {"a/b:c_2F": {"max_in_flight": 3, "ordered": True}}}
        beat(queues=["a/b:*"], host="box")

        @handlers.handler("shop.#", queue="a/b:c_2F", name="shop.watch")
        def watch(delivery): ...

        page = text(boss.get(url("queuestate", "change", "a/b:c_2F")))
        for words in ("a/b:c_2F", "Max in flight 3", "one message at a time", "shop.watch"):
            assert words in page
        assert boss.get(url("queuestate", "history", "a/b:c_2F")).status_code == 200

    def test_limit_is_shown_beside_the_settings(self, boss, settings):
        """NSQ-23: a limit of zero is a limit."""
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 1200}, "post": {}}}
        address = url("queuestate", "change", "mail")
        assert "Max in flight 1200 Max backlog" in text(boss.get(address))
        decide("mail", max_in_flight=0)
        page = text(boss.get(address))
        assert "Max in flight 0 set by an operator; in the settings: 1200" in page
        assert "raise or lift the limit" in page
        assert "Max in flight no limit" in text(boss.get(url("queuestate", "change", "post")))
        page = boss.get(url("queuestate"))
        assert self.cell(page, "mail", "in_flight").limit == "0"
        assert self.cell(page, "post", "in_flight").limit == ""

    def test_the_largest_backlog_is_shown(self, boss, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_backlog": 1200}, "post": {}}}
        page = text(boss.get(url("queuestate", "change", "mail")))
        assert "Max backlog 1200 : broadcast() refuses more" in page
        assert "Max backlog no limit" in text(boss.get(url("queuestate", "change", "post")))

    def test_owners_and_probes(self, boss, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True, "backoff": {}}}}
        address = url("queuestate", "change", "mail")
        assert "owned by no worker" in text(boss.get(address))
        beat("w", host="box", pid=41)
        state = decide("mail", owner="w", owned_until=LATER, backoff_level=2, backoff=-1)
        state.probe_by, state.probe_until = "w:7", LATER
        state.save()
        page = text(boss.get(address))
        assert "owned by box, process 41 until" in page
        assert "on, level 2 , worker box, process 41 runs a probe" in page.replace("2, ", "2 , ")
        assert "owned by box, process 41" in text(boss.get(url("queuestate")))
        QueueState.objects.update(owner="gone", owned_until=LATER, backoff_until=LATER)
        page = text(boss.get(address))
        assert "owned by gone until" in page
        assert "no claims until" in page

    @pytest.mark.parametrize("backoff", [60, -5])
    def test_why_it_backs_off(self, boss, backoff):
        """A handler that snoozes with `backoff=True` has not failed."""
        decide("mail", backoff=backoff, backoff_level=3)
        page = text(boss.get(url("queuestate", "change", "mail")))
        assert "Its handlers failed or snoozed, so" in page

    def test_figures_of_its_handlers_are_shown(self, boss):
        """CAR-42."""
        with handlers.isolated():
            for name, queue in (("mine", "mail"), ("theirs", "post")):
                handlers.handler("a", name=name, queue=queue)(lambda delivery: None)
            beat("a1", timings={"mine": tally(acked=12), "theirs": tally(acked=34)})
            page = text(boss.get(url("queuestate", "change", "mail")))
            assert "mine 12 0 0 0 0" in page
            assert "theirs" not in page
            assert "theirs 34" in text(boss.get(url("queuestate", "change", "post")))

    def test_an_unknown_queue_is_not_found(self, boss):
        response = boss.get(url("queuestate", "change", "nowhere"))
        assert response.url == url("queuestate")
        assert "nowhere" in told(response)[0]

    def test_the_number_of_queries_does_not_grow_with_queues(self, boss):
        def count():
            with CaptureQueriesContext(connection) as found:
                boss.get(url("queuestate"))
            return len(found)

        add()
        count()
        one = count()
        for number in range(9):
            add(f"q{number}", dead=-5)
        assert count() == one


class TestLines:
    """Blocked lines, unique ids and requests."""

    def fields(self, client, message):
        page = client.get(url("queuedmessage", "change", message.pk))
        return text(page), page.content.decode()

    def test_head_shows_its_followers(self, boss):
        head = add(key="k", handler="h", dead=-5)
        add(key="k", handler="h", blocked_by=head.pk)
        last = add(key="k", handler="h", blocked_by=head.pk)
        words, html = self.fields(boss, head)
        assert "Waiting behind: 2 of its key" in words
        assert "Waits behind" not in words
        assert f"{LIST}?queue=mail&amp;handler=h&amp;key=k" in html
        words, html = self.fields(boss, last)
        assert f"Waits behind: #{head.pk} the first of 2" in words
        assert f"It waits behind dead #{head.pk}" in words
        assert "Waiting behind" not in words

    def test_one_of_an_ordered_queue(self, boss, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
        head, message = add(ordered=True, dead=-5), add(ordered=True)
        words, html = self.fields(boss, head)
        assert "Waiting behind: 1 of its queue" in words
        assert f'href="{LIST}?queue=mail"' in html
        assert f"Waits behind: #{head.pk}" in self.fields(boss, message)[0]

    def test_a_unique_id(self, boss):
        message = add(unique_id="once", unique_for=timedelta(minutes=5))
        taken = UniqueKey.objects.create(
            queue="mail", type=message.type, unique_id="once", message_id=message.pk
        )
        words, html = self.fields(boss, message)
        assert "once stays taken for 5 min after a success" in words
        assert url("uniquekey", "change", taken.pk) in html
        taken.delete()
        assert "no longer held by this message" in self.fields(boss, message)[0]

    def test_its_result(self, boss):
        message = add(wants_result=True)
        assert "not stored yet" in self.fields(boss, message)[0]
        Result.objects.create(message_id=message.pk, handler="h", value=1)
        assert url("result", "change", message.pk) in self.fields(boss, message)[1]


class TestBlockedQueues:
    def test_the_key_that_is_blocked_longest(self, boss):
        head = add(key="order/7", dead=-5)
        add(key="order/7", blocked_by=head.pk)
        page = boss.get(url("queuestate"))
        assert "1 order/7" in text(page)
        assert url("queuedmessage", "change", head.pk) in page.content.decode()
        page = boss.get(url("queuestate", "change", "mail"))
        assert f"#{head.pk} shop.orders.placed dead" in text(page)

    def test_no_more_than_fifty(self, boss, monkeypatch):
        monkeypatch.setattr(queues_page, "MAX_HEADS", 2)
        for n in range(3):
            head = add(key=f"k{n}", dead=-5)
            add(key=f"k{n}", blocked_by=head.pk)
        page = boss.get(url("queuestate", "change", "mail"))
        assert len(page.context["heads"]) == 2
        assert "There are more" in text(page)

    def test_an_ordered_queue_that_stands(self, boss, settings):
        """PMQ-44"""
        settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
        head = add("line", ordered=True, dead=-5)
        add("line", ordered=True)
        words = text(boss.get(url("queuestate")))
        assert f"line ordered, owned by no worker blocked behind dead #{head.pk}" in words
        words = text(boss.get(url("queuestate", "change", "line")))
        assert f"all its messages wait for message {head.pk}" in words
        assert "the whole queue" in words
        queues.pause("line")
        assert f"#{head.pk}" not in text(boss.get(url("queuestate")))
        queues.resume("line")
        QueuedMessage.objects.filter(pk=head.pk).update(dead_at=None, processable_after=LATER)
        assert f"blocked behind #{head.pk}" in text(boss.get(url("queuestate")))

    def test_a_queue_of_held_messages_is_held(self, boss):
        beat()
        add(held=-9, after=60)
        assert "mail held 1 worker" in text(boss.get(url("queuestate")))
        add(after=60)
        assert "mail active 1 worker" in text(boss.get(url("queuestate")))

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (None, "blocked behind dead"),
            ({}, "partly blocked behind dead"),
            ({"after": 60}, "partly blocked behind dead"),
        ],
        ids=["nothing", "due", "delayed"],
    )
    def test_a_key_behind_a_dead_message_is_a_warning(self, boss, other, words):
        """The key does not resume by itself, whatever else the queue contains."""
        beat()
        head = add(key="k", dead=-5)
        add(key="k", blocked_by=head.pk)
        if other is not None:
            add(key="other", **other)
        address = url("queuestate", "change", "mail")
        for page in (boss.get(url("queuestate")), boss.get(address)):
            assert f"{words} #{head.pk}" in text(page)
            link = f'href="{url("queuedmessage", "change", head.pk)}">behind dead #{head.pk}'
            assert link in page.content.decode()
        assert "Requeue or discard the dead message" in text(boss.get(address))

    def test_key_behind_a_delayed_message_is_not_blocked(self, boss):
        beat()
        head = add(key="k", after=60)
        add(key="k", blocked_by=head.pk)
        assert "active 1 worker" in text(boss.get(url("queuestate")))
        page = text(boss.get(url("queuestate", "change", "mail")))
        assert "active 1 worker" in page
        assert "requeued or discarded" not in page

    def test_reason_for_the_whole_queue_is_shown_first(self, boss):
        head = add(key="k", dead=-5)
        add(key="k", blocked_by=head.pk)
        add()
        assert "no worker start mq_worker" in text(boss.get(url("queuestate")))
        queues.pause("mail")
        page = text(boss.get(url("queuestate")))
        assert "paused until resumed" in page
        assert "behind dead" not in page

    def test_a_dead_message_that_the_user_may_not_see_is_not_linked(self, login):
        head = add(key="k", dead=-5)
        add(key="k", blocked_by=head.pk)
        page = login("view_queuestate").get(url("queuestate"))
        assert f"blocked behind dead #{head.pk}" in text(page)
        assert url("queuedmessage", "change", head.pk) not in page.content.decode()
