"""The pages of workers and results, and a rule for every page: it shows text as text."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_mq.models import HandledMessage, Operation, QueuedMessage, Result, Schedule, UniqueKey
from tests.admin.pages import LIST, MODELS, fail, text, url
from tests.rows import add, beat, tally

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7|add:7 }}"


def test_a_worker_whose_row_is_odd_is_shown_as_such(boss):
    """Guarantee 24."""
    beat("odd", queues=[7, "mail"], running=["x"])
    for page in (
        boss.get(url("workerheartbeat")),
        boss.get(url("workerheartbeat", "change", "odd")),
    ):
        assert "unreadable" in text(page)
        assert "mail (others are unreadable)" in text(page)


class TestOnlyText:
    """S30: everything from a row is escaped, cut and shown as text."""

    @pytest.fixture
    def rows(self):
        message = add(
            payload={EVIL: [EVIL]},
            metadata={EVIL: EVIL},
            last_error=EVIL,
            dead=-5,
            dead_reason=EVIL,
            retry={EVIL: EVIL},
        )
        attempt = fail(message, error_class=EVIL, error_text=EVIL, traceback=EVIL)
        result = Result.objects.create(message_id=1, value={EVIL: EVIL})
        failed = Result.objects.create(message_id=2, error_class=EVIL, error_text=EVIL)
        worker = beat(
            "w", host=EVIL, queues=[EVIL], version="<v>", wakeup="<p>", running=[message.pk]
        )
        leased = add(leased=30, claimed_by="<c>:1")
        unique = UniqueKey.objects.create(
            queue="mail", type="t", unique_id="u", put_aside={EVIL: EVIL}
        )
        handled = HandledMessage.objects.create(
            id=leased.pk + 1,
            queue="mail",
            type="t",
            key=EVIL,
            correlation_id=EVIL,
            causation_id=message.pk,
            worker="<w>",
            payload={EVIL: EVIL},
            metadata={EVIL: EVIL},
            keep_until=Now(),
        )
        schedule, made = (
            Schedule.objects.create(
                name=source,
                type="t",
                cron="<c>",
                tz="<b>",
                payload={EVIL: [EVIL]},
                metadata={EVIL: EVIL},
                last_error=EVIL,
                source=source,
            )
            for source in ("code", "admin")
        )
        operation = Operation.objects.create(
            action="cancel", filter={EVIL: [EVIL]}, by=EVIL, error=EVIL, last_id=0
        )
        return {
            "queuedmessage": [message.pk, leased.pk],
            "failedattempt": [attempt.pk],
            "handledmessage": [handled.pk],
            "operation": [operation.pk],
            "queuestate": ["mail"],
            "result": [result.pk, failed.pk],
            "schedule": [schedule.pk, made.pk],
            "uniquekey": [unique.pk],
            "workerheartbeat": [worker.pk],
        }

    def test_no_page_holds_markup_of_a_row(self, boss, rows):
        addresses = [url(model) for model in MODELS]
        addresses += [url(model, "change", key) for model in MODELS for key in rows[model]]
        addresses += [url(model, "history", key) for model in MODELS for key in rows[model]]
        addresses += [LIST + "?queue=%3Cscript%3Ealert(1)", LIST + "?q=%3Cscript%3Ealert(1)"]
        for address in addresses:
            page = boss.get(address).content.decode()
            for part in ("<script>alert", "<img src=x", "<b>", "<i>", "<w>", "<v>", "<p>:", "<c>"):
                assert part not in page, (address, part)

    def test_notices_are_escaped(self, boss):
        page = boss.get(url("queuestate", "change", EVIL), follow=True).content.decode()
        assert "<script>alert" not in page
        page = boss.get(url("queuedmessage", "change", EVIL), follow=True).content.decode()
        assert "<script>alert" not in page

    def test_unseen_characters_are_made_visible(self, boss):
        message = add(payload={"file": "x\u202efdp.exe\x7f"}, dead=-5)
        fail(message, error_text="\x1b[2Jgone\u202e", traceback="\x1b[31m")
        page = boss.get(url("queuedmessage", "change", message.pk)).content.decode()
        assert not {"\u202e", "\x1b", "\x7f"} & set(page)
        assert "x\\u202efdp.exe\\u007f" in page

    def test_the_pages_run_no_inline_code(self, boss, rows):
        """A strict Content-Security-Policy allows neither inline scripts nor styles."""
        for model in MODELS:
            for address in (url(model), url(model, "change", rows[model][0])):
                page = boss.get(address).content.decode()
                assert " style=" not in page, address
                assert " onclick=" not in page, address
                assert "<script>" not in page, address


class TestWorkers:
    def test_handler_figures_are_shown(self, boss):
        """CAR-42: the fleet on the list, one worker on its page."""
        assert "Handler" not in text(boss.get(url("workerheartbeat")))
        timings = {"h": tally(acked=1200, failed=3, ran=[0.5]), "<b>": tally(dead=1)}
        beat("a1", timings=timings, seen=-1)
        beat("a2", timings={"h": tally(acked=34, waited=[2.0] * 9)})
        page = boss.get(url("workerheartbeat"))
        assert "h 1,234 3 0 0 0 2 s p99 2 s 500 ms p99 500 ms" in text(page)
        numbers = "last 500 ms, from 500 ms to 500 ms, mean 500 ms, deviation 0 ms"
        assert numbers in page.content.decode()
        page = boss.get(url("workerheartbeat", "change", "a1"))
        assert "h 1,200 3 0 0 0 \N{EN DASH} 500 ms" in text(page)
        assert "<b>" not in page.content.decode()
        assert "&lt;b&gt;" in page.content.decode()

    def test_current_work_is_shown(self, boss):
        message = add(type="shop.orders.placed", leased=30)
        beat("a1", host="box-1", pid=4711, running=[message.pk, 10**6], queues=["mail", "x.*"])
        page = boss.get(url("workerheartbeat"))
        for words in ("box-1", "process 4711", "mail, x.*", "working", "shop.orders.placed"):
            assert words in text(page)
        assert url("queuedmessage", "change", message.pk) in page.content.decode()
        page = text(boss.get(url("workerheartbeat", "change", "a1")))
        for words in ("box-1", "working", f"#{message.pk} shop.orders.placed"):
            assert words in page

    @pytest.mark.parametrize(
        ("columns", "words"),
        [
            ({}, "waiting"),
            ({"draining": True}, "draining"),
            ({"quiet": True}, "quiet"),
            ({"quiet": True, "draining": True}, "draining"),
            ({"seen": -95}, "gone"),
            ({"wakeup": "degraded"}, "degraded"),
        ],
    )
    def test_how_they_are(self, boss, columns, words):
        beat(**columns)
        assert words in text(boss.get(url("workerheartbeat")))

    def test_how_busy_they_are(self, boss):
        beat("a1", threads=4, threads_used=3.48, slots=2000, slots_used=1234.5)
        page = boss.get(url("workerheartbeat")).content.decode()
        assert "87%</span>" in page
        in_use = (
            "3.48 of 4 threads and 1,234 of 2,000 slots, on average between its last two heartbeats"
        )
        assert f'title="{in_use}"' in page
        assert f"In use: {in_use}" in text(boss.get(url("workerheartbeat", "change", "a1")))
        beat("old")
        assert "In use: None" in text(boss.get(url("workerheartbeat", "change", "old")))

    def test_when_it_started_and_was_last_seen(self, boss):
        """The page needs the database's time to compare with the two moments."""
        beat("a1", started_at=Now() - timedelta(hours=2), seen=-5)
        page = text(boss.get(url("workerheartbeat", "change", "a1")))
        assert re.search(r"Started: [-0-9]{10} [:0-9]{8} \(2 h ago\)", page)
        assert re.search(r"Last seen: [-0-9]{10} [:0-9]{8} \([5-9] s ago\)", page)

    def test_many_running_messages_are_cut(self, boss):
        beat(running=list(range(1, 101)))
        assert "and 80 more" in text(boss.get(url("workerheartbeat")))

    def test_list_without_workers_names_mq_worker(self, boss):
        assert "mq_worker" in text(boss.get(url("workerheartbeat")))


def test_results(boss):
    Result.objects.create(message_id=1, handler="shop.price", value={"api_key": "s3cr3t", "n": 2})
    Result.objects.create(message_id=2, handler="shop.price", error_class="KeyError")
    page = text(boss.get(url("result")))
    assert "returned" in page
    assert "KeyError" in page
    page = text(boss.get(url("result", "change", 1)))
    assert '"n": 2' in page
    assert "s3cr3t" not in page


def test_ids_are_shown_without_thousands_separators(boss, settings):
    """People copy them: into a search, or after `kill`."""
    settings.USE_THOUSAND_SEPARATOR = True
    Result.objects.create(message_id=1234567, value=1)
    beat("a1", pid=1234567)
    for model, key in (("result", 1234567), ("workerheartbeat", "a1")):
        page = text(boss.get(url(model, "change", key)))
        assert ": 1234567 " in page
        assert "1,234,567" not in page


def test_times_follow_the_clock_of_the_database(boss, monkeypatch):
    """The web server's clock may be wrong by days."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    message = add(after=600)
    assert "due in 10 min" in text(boss.get(LIST)) or "due in 9 min" in text(boss.get(LIST))
    assert QueuedMessage.objects.get() == message
