"""The page that edits a waiting message, and the messages that it must not change."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from tests.admin.conftest import VIEW
from tests.admin.pages import text, told, url
from tests.database import second_connection
from tests.rows import add, stored
from tests.slow import slow

pytestmark = pytest.mark.django_db


def page_of(row):
    return f"/admin/django_mq/queuedmessage/edit/{row.pk}/"


def fields(response):
    """Return the fields that a browser would post for the form."""
    form = response.context["form"]
    found = {}
    for tag in re.findall(r"<input[^>]*>", response.content.decode()):
        name, value = (re.search(rf'\b{each}="([^"]*)"', tag) for each in ("name", "value"))
        if name and name[1] in (*form.fields, "initial-due", "initial-priority"):
            found[name[1]] = value[1] if value else ""
    if "payload" in form.fields:
        found["payload"] = str(form["payload"].value()).replace("\n", "\r\n")
    return found


def change(client, row, **changes):
    found = fields(client.get(page_of(row)))
    return client.post(page_of(row), {**found, **changes})


def test_payload_due_time_and_priority_are_changed(boss):
    row = add(after=600, payload={"order": 7}, priority=1)
    due = timezone.localtime(row.processable_after + timedelta(hours=1)).replace(microsecond=0)
    done = change(
        boss, row, payload='{"order": 8}', due=due.strftime("%Y-%m-%dT%H:%M:%S"), priority="9"
    )
    assert done["Location"] == url("queuedmessage", "change", row.pk)
    assert told(done) == [f"Message {row.pk} has been changed."]
    stored(row)
    assert (row.payload, row.processable_after, row.priority) == ({"order": 8}, due, 9)
    entry = LogEntry.objects.get(object_id=str(row.pk))
    assert (entry.user, entry.change_message) == (boss.user, "Edited: payload, due, priority.")


def test_untouched_fields_keep_their_exact_values(boss):
    row = add(after=600, payload={"order": 7, "lines": ["a\nb"]})
    before = row.processable_after
    done = change(boss, row)
    assert told(done) == [f"Message {row.pk} is unchanged."]
    assert not LogEntry.objects.exists()
    change(boss, row, priority="3")
    assert (stored(row).processable_after, row.payload["lines"]) == (before, ["a\nb"])


@pytest.mark.parametrize("hour", [*slow(0), 1], ids=["first", "second"])
def test_a_message_that_is_due_in_a_repeated_hour_can_be_edited(boss, settings, hour):
    settings.TIME_ZONE = "Europe/Berlin"
    due = datetime(2027, 10, 31, hour, 30, 0, 7, tzinfo=UTC)  # 02:30 twice
    row = add(payload={"order": 7}, processable_after=due)
    assert change(boss, row, payload='{"order": 8}').status_code == 302
    assert (stored(row).payload, row.processable_after) == ({"order": 8}, due)
    skipped = change(boss, row, due="2027-03-28T02:30:00")
    assert "due" in skipped.context["form"].errors
    other = add(payload={})
    assert change(boss, other, due="2027-10-31T02:30:00").status_code == 302
    assert stored(other).processable_after == datetime(2027, 10, 31, 0, 30, tzinfo=UTC)


def test_a_change_in_the_meantime_is_not_overwritten(boss):
    row = add(payload={"n": 1}, after=600)
    posted = fields(boss.get(page_of(row)))
    row.payload, row.processable_after = {"n": 2}, row.processable_after + timedelta(hours=1)
    row.save()
    refused = boss.post(page_of(row), {**posted, "payload": '{"n": 3}'})
    assert "has changed: look at it again" in text(refused)
    boss.post(page_of(row), {**posted, "payload": '{"n": 2}', "priority": "4"})
    before = row.processable_after
    assert (stored(row).payload, row.priority, row.processable_after) == ({"n": 2}, 4, before)


@pytest.mark.parametrize("given", [{"leased": 60}, *slow({"leased": -60}, {"dead": -1})])
def test_only_a_message_that_waits_can_be_edited(boss, given):
    row = add()
    posted = fields(boss.get(page_of(row)))
    changed = add(**given)
    changed_page = url("queuedmessage", "change", changed.pk)
    assert boss.get(page_of(changed))["Location"] == changed_page
    assert page_of(changed) not in boss.get(changed_page).content.decode()
    assert boss.post(page_of(changed), {**posted, "priority": "7"}).status_code == 302
    assert stored(changed).priority == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("payload", "{", "not JSON"),
        ("payload", '"' + "x" * 2_000_000 + '"', "bytes of JSON"),
        ("due", "soon", "valid date/time"),
        ("due", "2999-01-01T00:00:00", "MAX_DELAY"),
        ("priority", "-101", "greater than or equal to -100"),
    ],
)
def test_errors_stand_at_their_fields(boss, name, value, words):
    row = add(payload={"n": 1})
    response = change(boss, row, **{name: value})
    assert words in str(response.context["form"].errors[name])
    assert (stored(row).payload, row.priority) == ({"n": 1}, 0)


def test_a_payload_with_hidden_values_is_not_edited(boss):
    row = add(payload={"api_token": "canary"})
    page = boss.get(page_of(row))
    assert "hidden values" in text(page)
    assert "canary" not in page.content.decode()
    change(boss, row, priority="2", payload='{"api_token": "x"}', digest="")
    assert (stored(row).payload, row.priority) == ({"api_token": "canary"}, 2)


def test_the_rights(login):
    row = add(payload={"note": "canary"})
    for rights in (VIEW, ("edit_message",)):
        client = login(*rights, name=str(len(rights)))
        assert client.get(page_of(row)).status_code == 403
        assert client.post(page_of(row), {"priority": "1"}).status_code == 403
    blind = login(*VIEW, "edit_message", name="blind")
    assert page_of(row) in blind.get(url("queuedmessage", "change", row.pk)).content.decode()
    page = blind.get(page_of(row))
    assert "canary" not in page.content.decode()
    change(blind, row, priority="5", payload=json.dumps({"note": "other"}))
    assert (stored(row).payload, row.priority) == ({"note": "canary"}, 5)


def test_a_message_of_another_queue_is_not_found(boss, monkeypatch):
    from django_mq.admin import QueuedMessageAdmin

    row = add("other")
    monkeypatch.setattr(QueuedMessageAdmin, "get_queues", lambda self, request: {"mail"})
    assert boss.get(page_of(row)).status_code == 302
    assert boss.post(page_of(row), {"priority": "1"}).status_code == 302
    assert stored(row).priority == 0


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_lock_of_another_session_is_a_form_error(boss):
    row = add()
    with second_connection() as other, other.transaction():
        other.execute("select 1 from django_mq_queuedmessage where id = %s for update", [row.pk])
        assert "Try again in a moment" in text(change(boss, row, priority="1"))
