"""The page of a message: its state, its attempts, its unique id."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_mq import queues
from django_mq.admin import message_page, texts
from django_mq.models import FailedAttempt, UniqueKey
from tests.admin.pages import LIST, fail, text, told, url
from tests.rows import add

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


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
    def test_undecodable_payload_does_not_break_the_page(self, boss, payload):
        message = add()
        with connection.cursor() as cursor:
            cursor.execute("update django_mq_queuedmessage set payload = %s::jsonb", [payload])
        page = self.page(boss, message)
        assert page.status_code == 200
        assert boss.get(LIST).status_code == 200

    def test_large_payloads_are_cut(self, boss, monkeypatch):
        monkeypatch.setattr(texts, "MAX_TEXT", 100)
        page = text(self.page(boss, add(payload={"x": "y" * 500})))
        assert "characters more" in page
        monkeypatch.setattr(texts, "MAX_JSON", 100)
        assert "too large" in text(self.page(boss, add(payload={"x": "y" * 500})))

    def test_failed_attempts_the_last_first(self, boss):
        message = add(attempts=2, after=60)
        for number in (1, 2):
            fail(message, number, error_class=f"Error{number}", worker="f00d")
        fail(add(), error_class="Other")
        page = text(self.page(boss, message))
        assert page.rindex("Error2") < page.rindex("Error1")
        assert "Traceback: 1" in page
        assert "f00d" in page
        assert "Other" not in page

    def test_many_failed_attempts_have_a_list_of_their_own(self, boss, monkeypatch):
        monkeypatch.setattr(message_page, "SHOWN_ATTEMPTS", 2)
        message = add()
        for number in range(3):
            fail(message, number)
        page = self.page(boss, message)
        assert len(page.context["attempts"]) == 2
        assert f"{url('failedattempt')}?message_id={message.pk}" in page.content.decode()

    def test_page_of_a_removed_message_says_how_it_ended(self, boss, viewer):
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
    def test_invalid_id_redirects_to_the_list(self, boss, id):
        assert boss.get(url("queuedmessage", "change", id)).url == LIST

    def test_payload_is_not_loaded_without_permission(self, viewer, django_assert_max_num_queries):
        message = add()
        with django_assert_max_num_queries(26) as found:
            self.page(viewer, message)
        assert not any('"payload"' in each["sql"] for each in found)
        assert not any('"traceback"' in each["sql"] for each in found)

    def test_page_links_to_the_head_and_the_queue(self, boss):
        first = add(key="k", dead=-5)
        page = self.page(boss, add(key="k", blocked_by=first.pk)).content.decode()
        assert url("queuedmessage", "change", first.pk) in page
        assert url("queuestate", "change", "mail") in page


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


def test_the_timeline_has_how_long_each_attempt_waited_and_ran(boss):
    message = add(attempts=2, after=60, created=-600)
    for number, started, ended in ((1, -500, -440), (2, -200, -195)):
        FailedAttempt.objects.create(
            message_id=message.pk,
            queue="mail",
            type=message.type,
            attempt=number,
            started_at=Now() + timedelta(seconds=started),
            ended_at=Now() + timedelta(seconds=ended),
            error_class="ValueError",
        )
    page = text(boss.get(url("queuedmessage", "change", message.pk)))
    part = page[page.index("Timeline") :]
    events = (
        "Broadcast",
        "waited 1 min 4",
        "ran 1 min, ValueError",
        "waited 4 min",
        "ran 5 s",
        "Due",
    )
    places = [part.find(each) for each in events]
    assert -1 not in places
    assert places == sorted(places)


def test_copyable_values_are_marked_in_the_html(boss):
    message = add(payload={"n": 1})
    page = boss.get(url("queuedmessage", "change", message.pk)).content.decode()
    assert f'data-mq-copy="id">{message.pk}<' in page
    assert 'data-mq-copy="payload"' in page
    assert "django_mq/copy.js" in page
