"""The page that broadcasts a message: recipients first, errors beside their fields, the log."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from django.contrib.admin.models import ADDITION, LogEntry

from django_mq import handler, handlers, message
from django_mq.messages import classes
from django_mq.models import QueuedMessage
from tests.admin.conftest import VIEW
from tests.admin.pages import text, told, url
from tests.database import second_connection
from tests.rows import add
from tests.slow import slow

pytestmark = pytest.mark.django_db

FORM = {
    "type": "shop.orders.placed",
    "queue": "",
    "payload": '{"order": 7}',
    "metadata": "",
    "key": "",
    "unique_id": "",
    "after": "",
    "priority": "0",
}
PAGE = "/admin/django_mq/queuedmessage/broadcast/"


@pytest.fixture(autouse=True)
def subscribers():
    with handlers.isolated(), classes.isolated():
        handler("shop.orders.*", queue="mail", name="mailer")(lambda delivery: None)
        handler("shop.orders.placed", queue="bills", name="biller")(lambda delivery: None)
        yield


def send(client, **fields):
    """Post the form, check its recipients, and confirm them; return the last response."""
    form = {**FORM, **fields}
    response = client.post(PAGE, form)
    if response.status_code == 200 and response.context["copies"]:
        assert not LogEntry.objects.filter(action_flag=ADDITION).exists()
        confirmed = {"reach": response.context["reach"], "confirmed": "yes"}
        return client.post(PAGE, {**form, **confirmed})
    return response


def errors(response):
    return {name: str(each[0]) for name, each in response.context["form"].errors.items()}


def test_recipients_are_shown_first_and_then_it_is_broadcast(boss):
    shown = boss.post(PAGE, FORM)
    assert "handler mailer in queue mail" in text(shown)
    assert "handler biller in queue bills" in text(shown)
    assert not QueuedMessage.objects.exists()
    done = send(boss, key="k", unique_id="u", after="90", priority="5", metadata='{"tier": 1}')
    assert done["Location"] == url("queuedmessage")
    rows = QueuedMessage.objects.order_by("queue")
    assert [(row.queue, row.handler) for row in rows] == [("bills", "biller"), ("mail", "mailer")]
    row = rows[0]
    assert (row.payload, row.metadata, row.key, row.unique_id, row.priority) == (
        {"order": 7}, {"tier": 1}, "k", "u", 5,
    )  # fmt: skip
    assert row.state == "delayed"
    assert f"Message {row.pk}: added, queue bills, handler biller." in told(done)
    entries = LogEntry.objects.filter(action_flag=ADDITION)
    assert {entry.object_id for entry in entries} == {str(row.pk) for row in rows}
    assert {(entry.user, entry.change_message) for entry in entries} == {(boss.user, "Broadcast.")}


def test_one_copy_leads_to_its_page(boss):
    done = send(boss, type="shop.orders.paid", queue="")
    assert done["Location"] == url("queuedmessage", "change", QueuedMessage.objects.get().pk)


def test_type_without_a_handler_is_reported(boss):
    assert "no handler is registered for it here" in text(boss.post(PAGE, {**FORM, "type": "odd"}))
    send(boss, type="odd")
    assert QueuedMessage.objects.get().handler == ""


def test_misspelt_type_is_reported_before_the_broadcast(boss, monkeypatch):
    from django_mq.admin import QueuedMessageAdmin

    misspelt = {**FORM, "type": "shop.order.placed", "queue": "mail"}
    told = "Did you mean shop.orders.placed?"
    assert told in text(boss.post(PAGE, misspelt))
    assert "Did you mean" not in text(boss.post(PAGE, {**FORM, "type": "shop.orders.placd"}))
    assert "Did you mean" not in text(boss.post(PAGE, {**FORM, "type": "odd"}))
    monkeypatch.setattr(QueuedMessageAdmin, "get_queues", lambda self, request: {"audit"})
    shown = text(boss.post(PAGE, {**misspelt, "queue": "audit"}))
    assert "no handler is registered for it here" in shown
    assert told not in shown, "its handlers are in queues that the user may not see"


def test_changed_recipients_are_shown_again(boss):
    """A handler registered in between is shown before it gets a message."""
    reach = boss.post(PAGE, FORM).context["reach"]
    handler("shop.#", queue="audit", name="auditor")(lambda delivery: None)
    again = boss.post(PAGE, {**FORM, "reach": reach, "confirmed": "yes"})
    assert "handler auditor in queue audit" in text(again)
    assert not QueuedMessage.objects.exists()


def test_a_duplicate_is_not_stored(boss):
    send(boss, unique_id="u", type="shop.orders.paid")
    shown = boss.post(PAGE, {**FORM, "unique_id": "u", "type": "shop.orders.paid"})
    assert "its unique id is taken" in text(shown)
    LogEntry.objects.all().delete()
    done = send(boss, unique_id="u", type="shop.orders.paid")
    assert told(done)[-1] == (
        "Not stored: the unique id is taken (waiting), queue mail, handler mailer."
    )
    assert QueuedMessage.objects.count() == 1
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("type", "", "required"),
        ("type", "no name", "is not a name"),
        ("type", "tasks.shop.mail", "enqueue()"),
        ("queue", "no name", "is not a name"),
        ("queue", "other", "allows only"),
        ("payload", "{", "not JSON"),
        *slow(
            ("payload", "NaN", "not JSON compliant"),
            ("payload", "[" * 100_000, "nested too deeply"),
            ("payload", "[" * 70 + "]" * 70, "deep"),
            ("payload", "9" * 5000, "an integer of more than 4,300 digits"),
            ("metadata", "[]", "dict"),
        ),
        ("metadata", '{"mq.hops": 1}', "reserved"),
        ("key", "k" * 200, "at most 128"),
        ("unique_id", "a\x01", "control"),
        ("after", "tomorrow", "valid duration"),
        *slow(
            ("after", "-1", "negative"),
            ("after", "400 00:00:00", "MAX_DELAY"),
        ),
        ("priority", "101", "less than or equal to 100"),
    ],
)
def test_errors_stand_at_their_fields(boss, field, value, words):
    found = errors(send(boss, **{field: value}))
    assert words in found.get(field, ""), found
    assert not QueuedMessage.objects.exists()


def test_a_message_class_checks_the_payload_and_gives_the_version(boss):
    @message("shop.orders.paid", version=3)
    @dataclass
    class Paid:
        order: int
        total: str

    found = errors(send(boss, type="shop.orders.paid", payload='{"order": "x", "total": "1"}'))
    assert "order" in found["payload"]
    send(boss, type="shop.orders.paid", payload='{"order": 7, "total": "1"}')
    row = QueuedMessage.objects.get()
    assert (row.schema_version, row.payload) == (3, {"order": 7, "total": "1"})


def test_known_types_and_queues_are_suggested(boss):
    add("other", type="shop.returns")
    page = boss.get(PAGE)
    assert {"shop.returns", "shop.orders.placed"} <= set(page.context["suggestions"]["type"])
    assert {"mail", "bills", "other"} <= set(page.context["suggestions"]["queue"])
    assert b'<option value="shop.returns">' in page.content


def test_it_needs_its_own_right(login):
    for rights, status in ((VIEW, 403), (("broadcast_message",), 403)):
        client = login(*rights, name=str(len(rights)))
        assert client.get(PAGE).status_code == client.post(PAGE, FORM).status_code == status
    assert PAGE not in login(*VIEW, name="v").get(url("queuedmessage")).content.decode()
    client = login(*VIEW, "broadcast_message", name="ok")
    assert PAGE in client.get(url("queuedmessage")).content.decode()
    assert send(client).status_code == 302
    assert QueuedMessage.objects.count() == 2


def test_a_copy_in_a_queue_that_the_user_may_not_see_is_refused(boss, monkeypatch):
    from django_mq.admin import QueuedMessageAdmin

    monkeypatch.setattr(QueuedMessageAdmin, "get_queues", lambda self, request: {"mail"})
    assert "may not see" in errors(send(boss))["queue"]
    assert not QueuedMessage.objects.exists()
    send(boss, type="shop.orders.paid")
    assert QueuedMessage.objects.get().queue == "mail"


@pytest.mark.django_db(transaction=True)
def test_lock_of_another_session_is_a_form_error(boss):
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage in share mode")
        assert "holds a lock" in errors(send(boss))["__all__"]
