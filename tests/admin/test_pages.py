"""The pages of messages, queues, workers, results: what they say, and that it is only text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_mq import handlers, queues
from django_mq.admin import message_page, texts
from django_mq.admin import queues as queues_page
from django_mq.models import FailedAttempt, QueuedMessage, QueueState, Result, UniqueKey
from tests.admin.pages import LIST, MODELS, text, told, url
from tests.rows import add, beat, decide, tally

pytestmark = pytest.mark.django_db

LATER = datetime(2999, 1, 1, tzinfo=UTC)

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7|add:7 }}"


def fail(message, attempt=1, **more):
    more = {"error_class": "ValueError", "error_text": "no", "traceback": "Traceback: 1\n", **more}
    return FailedAttempt.objects.create(
        message_id=message.pk, queue=message.queue, type=message.type, attempt=attempt, **more
    )


@pytest.fixture(autouse=True)
def _no_handlers():
    with handlers.isolated():
        yield


class TestMessage:
    def page(self, client, message):
        return client.get(url("queuedmessage", "change", message.pk))

    @pytest.mark.parametrize(
        "columns",
        [
            {},
            {"after": 60},
            {"after": 60, "attempts": 2, "last_error": "OSError: gone"},
            {"dead": -5, "dead_reason": "exhausted", "last_error": "OSError: gone"},
            {"dead": -5, "dead_reason": "no such order"},
            {"leased": 30},
            {"leased": -5},
            {"held": -5},
            {"blocked_by": 7, "key": "k"},
            {"expires": -5},
        ],
    )
    def test_it_gives_the_answer_of_why(self, boss, columns):
        message = add(**columns)
        why = queues.why(message.pk)
        page = text(self.page(boss, message))
        assert why.text in page
        assert why.error in page

    def test_payload_and_metadata_are_pretty_and_redacted(self, boss):
        """S12: secrets are covered at any depth."""
        message = add(
            payload={"order": {"id": 7, "cards": [{"api_token": "s3cr3t", "name": "Zoë"}]}},
            metadata={"tenant": "gold", "PASSWORD": "s3cr3t"},
        )
        page = self.page(boss, message)
        assert "s3cr3t" not in page.content.decode()
        assert '"name": "Zoë"' in text(page)
        assert '  "order": {\n    "id": 7' in page.content.decode().replace("&quot;", '"')
        assert '"tenant": "gold"' in text(page)

    @pytest.mark.parametrize(
        "payload", ["1" * 5000, "[" * 5000 + "]" * 5000], ids=["digits", "depth"]
    )
    def test_what_cannot_be_decoded_does_not_break_the_page(self, boss, payload):
        message = add()
        with connection.cursor() as cursor:
            cursor.execute("update django_mq_queuedmessage set payload = %s::jsonb", [payload])
        page = self.page(boss, message)
        assert page.status_code == 200
        assert boss.get(LIST).status_code == 200

    def test_large_payloads_are_cut(self, boss, monkeypatch):
        monkeypatch.setattr(texts, "LONGEST", 100)
        page = text(self.page(boss, add(payload={"x": "y" * 500})))
        assert "characters more" in page
        monkeypatch.setattr(texts, "LONGEST_JSON", 100)
        assert "too large" in text(self.page(boss, add(payload={"x": "y" * 500})))

    def test_failed_attempts_the_last_first(self, boss):
        message = add(attempts=2, after=60)
        for number in (1, 2):
            fail(message, number, error_class=f"Error{number}", worker="f00d")
        fail(add(), error_class="Other")
        page = text(self.page(boss, message))
        assert page.index("Error2") < page.index("Error1")
        assert "Traceback: 1" in page
        assert "f00d" in page
        assert "Other" not in page

    def test_many_failed_attempts_have_a_list_of_their_own(self, boss, monkeypatch):
        monkeypatch.setattr(message_page, "RECENT", 2)
        message = add()
        for number in range(3):
            fail(message, number)
        page = self.page(boss, message)
        assert len(page.context["attempts"]) == 2
        assert f"{url('failedattempt')}?message_id={message.pk}" in page.content.decode()

    def test_a_message_that_is_gone_says_what_became_of_it(self, boss, viewer):
        gone = url("queuedmessage", "change", 77)
        response = boss.get(gone)
        assert response.url == LIST
        assert told(response) == [str(queues.why(77))]
        FailedAttempt.objects.create(
            message_id=77, queue="mail", type="t", attempt=3, error_class="E", error_text="private"
        )
        response = viewer.get(gone)
        assert response.url == url("failedattempt") + "?message_id=77"
        assert "number 3" in told(response)[-1]
        assert "private" not in told(response)[-1]
        assert "private" in told(boss.get(gone))[-1]

    @pytest.mark.parametrize("id", ["x", "0", "9" * 40, "<b>"])
    def test_what_is_no_id_is_not_found(self, boss, id):
        assert boss.get(url("queuedmessage", "change", id)).url == LIST

    def test_it_loads_no_payload_for_those_who_may_not_see_it(
        self, viewer, django_assert_max_num_queries
    ):
        message = add()
        with django_assert_max_num_queries(25) as found:
            self.page(viewer, message)
        assert not any('"payload"' in each["sql"] for each in found)
        assert not any('"traceback"' in each["sql"] for each in found)

    def test_it_links_to_what_belongs_to_it(self, boss):
        first = add(key="k", dead=-5)
        page = self.page(boss, add(key="k", blocked_by=first.pk)).content.decode()
        assert url("queuedmessage", "change", first.pk) in page
        assert url("queuestate", "change", "mail") in page


def test_a_worker_whose_row_is_odd_is_shown_as_such(boss):
    """Guarantee 24."""
    beat("odd", queues=[7, "mail"], running=["x"])
    for page in (
        boss.get(url("workerheartbeat")),
        boss.get(url("workerheartbeat", "change", "odd")),
    ):
        assert "unreadable" in text(page)
        assert "mail (the rest is unreadable)" in text(page)


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
        attempt = fail(
            message, error_class=EVIL, error_text=EVIL, traceback=EVIL, worker="<b>", handler="<i>"
        )
        result = Result.objects.create(message_id=1, handler="<i>", value={EVIL: EVIL})
        failed = Result.objects.create(message_id=2, error_class=EVIL, error_text=EVIL)
        worker = beat(
            "<w>", host=EVIL, queues=[EVIL], version="<v>", wakeup="<p>", running=[message.pk]
        )
        leased = add(leased=30, claimed_by="<c>:1")
        unique = UniqueKey.objects.create(
            queue="mail", type="t", unique_id="u", put_aside={EVIL: EVIL}
        )
        return {
            "queuedmessage": [message.pk, leased.pk],
            "failedattempt": [attempt.pk],
            "queuestate": ["mail"],
            "result": [result.pk, failed.pk],
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


class TestQueues:
    def cell(self, page, queue, name):
        (row,) = (each for each in page.context["rows"] if each.counts.queue == queue)
        return next(cell for cell in row.cells if cell.name == name)

    def test_all_that_are_known_have_a_line(self, boss, settings):
        """With rows, decided about, from the settings; the turn of the chores is none."""
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
    def test_it_says_what_stops_a_queue(self, boss, decision, words):
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
        for words in ("a/b:c_2F", "In flight at most 3", "one message at a time", "shop.watch"):
            assert words in page
        assert boss.get(url("queuestate", "history", "a/b:c_2F")).status_code == 200

    def test_limits_and_what_the_settings_say(self, boss, settings):
        """NSQ-23: a limit of zero is a limit."""
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 1200}, "post": {}}}
        address = url("queuestate", "change", "mail")
        assert "In flight at most 1200 Ordered" in text(boss.get(address))
        decide("mail", max_in_flight=0)
        page = text(boss.get(address))
        assert "In flight at most 0 set by an operator; in the settings: 1200" in page
        assert "raise or lift the limit" in page
        assert "In flight at most no limit" in text(boss.get(url("queuestate", "change", "post")))
        page = boss.get(url("queuestate"))
        assert self.cell(page, "mail", "in_flight").most == "0"
        assert self.cell(page, "post", "in_flight").most == ""

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

    def test_what_its_handlers_did(self, boss):
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


class TestWorkers:
    def test_what_their_handlers_did(self, boss):
        """CAR-42: the fleet on the list, one worker on its page."""
        assert "Handler" not in text(boss.get(url("workerheartbeat")))
        timings = {"h": tally(acked=1200, failed=3, ran=[0.5]), "<b>": tally(dead=1)}
        beat("a1", timings=timings, seen=-1)
        beat("a2", timings={"h": tally(acked=34, waited=[2.0] * 9)})
        page = boss.get(url("workerheartbeat"))
        assert "h 1,234 3 0 0 0 2s p99 2s 500ms p99 500ms" in text(page)
        numbers = "last 500ms, from 500ms to 500ms, mean 500ms, deviation 0ms"
        assert numbers in page.content.decode()
        page = boss.get(url("workerheartbeat", "change", "a1"))
        assert "h 1,200 3 0 0 0 \N{EN DASH} 500ms" in text(page)
        assert "<b>" not in page.content.decode()
        assert "&lt;b&gt;" in page.content.decode()

    def test_what_they_do(self, boss):
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
            ({"seen": -95}, "gone"),
            ({"wakeup": "degraded"}, "degraded"),
        ],
    )
    def test_how_they_are(self, boss, columns, words):
        beat(**columns)
        assert words in text(boss.get(url("workerheartbeat")))

    def test_many_running_messages_are_cut(self, boss):
        beat(running=list(range(1, 101)))
        assert "and 80 more" in text(boss.get(url("workerheartbeat")))

    def test_there_is_none(self, boss):
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


def test_times_are_told_by_the_clock_of_the_database(boss, monkeypatch):
    """The clock of the web server may be wrong by days."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    message = add(after=600)
    assert "due in 10 min" in text(boss.get(LIST)) or "due in 9 min" in text(boss.get(LIST))
    assert QueuedMessage.objects.get() == message


class TestLines:
    """What waits behind what, and what came of unique ids and questions."""

    def fields(self, client, message):
        page = client.get(url("queuedmessage", "change", message.pk))
        return text(page), page.content.decode()

    def test_a_head_says_who_waits_behind_it(self, boss):
        head = add(key="k", handler="h", dead=-5)
        add(key="k", handler="h", blocked_by=head.pk)
        last = add(key="k", handler="h", blocked_by=head.pk)
        words, html = self.fields(boss, head)
        assert "Behind it: 2 of its key" in words
        assert "Waits behind" not in words
        assert f"{LIST}?queue=mail&amp;handler=h&amp;key=k" in html
        words, html = self.fields(boss, last)
        assert f"Waits behind: #{head.pk} the first of 2" in words
        assert f"It waits behind dead #{head.pk}" in words
        assert "Behind it" not in words

    def test_one_of_an_ordered_queue(self, boss, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
        head, message = add(ordered=True, dead=-5), add(ordered=True)
        words, html = self.fields(boss, head)
        assert "Behind it: 1 of its queue" in words
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


class TestUniqueIds:
    def rows(self):
        given = {"queue": "mail", "type": "t", "handler": "h"}
        ends = {
            "now": Now() + timedelta(minutes=5, seconds=30),
            "then": Now() - timedelta(minutes=5),
        }
        return {
            "taken": UniqueKey.objects.create(unique_id="taken", message_id=7, **given),
            "quiet": UniqueKey.objects.create(
                unique_id="quiet",
                quiet_until=ends["now"],
                unique_for=timedelta(minutes=9),
                **given,
            ),
            "free": UniqueKey.objects.create(unique_id="free", quiet_until=ends["then"], **given),
            "aside": UniqueKey.objects.create(
                unique_id="taken", put_aside={"payload": {"api_token": "s3cr3t", "n": 1}}, **given
            ),
        }

    def test_the_list(self, boss):
        self.rows()
        words = text(boss.get(url("uniquekey")))
        for part in ("taken #7", "quiet in 5 min", "free 5 min", "put aside"):
            assert part in words
        for term, count in {"taken": 2, "t": 4, "7": 1, "#7": 1, "x y": 0, "none": 0}.items():
            found = boss.get(url("uniquekey"), {"q": term}).context["cl"].result_count
            assert found == count, term

    def test_the_pages(self, boss, viewer):
        """S08, S12: what is put aside is as private as any payload."""
        rows = self.rows()
        pages = {name: text(boss.get(url("uniquekey", "change", r.pk))) for name, r in rows.items()}
        assert "taken by message #7" in pages["taken"]
        assert "quiet until" in pages["quiet"]
        assert "9 min" in pages["quiet"]
        assert "free since" in pages["free"]
        assert '"n": 1' in pages["aside"]
        assert "s3cr3t" not in pages["aside"]
        assert '"n": 1' not in text(viewer.get(url("uniquekey", "change", rows["aside"].pk)))


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
        monkeypatch.setattr(queues_page, "MOST_HEADS", 2)
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
        """It does not go on by itself, whatever else there is in the queue."""
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

    def test_a_key_behind_a_message_that_goes_on_by_itself_is_none(self, boss):
        beat()
        head = add(key="k", after=60)
        add(key="k", blocked_by=head.pk)
        assert "active 1 worker" in text(boss.get(url("queuestate")))
        page = text(boss.get(url("queuestate", "change", "mail")))
        assert "active 1 worker" in page
        assert "requeued or discarded" not in page

    def test_what_stops_the_whole_queue_is_said_first(self, boss):
        head = add(key="k", dead=-5)
        add(key="k", blocked_by=head.pk)
        add()
        assert "no worker 0 workers" in text(boss.get(url("queuestate")))
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
