"""S08, S09, S10: permissions to see and act, page by page and action by action."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now
from django.test import Client

from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    Operation,
    QueuedMessage,
    QueueState,
    Result,
    Schedule,
    UniqueKey,
)
from tests.admin.conftest import VIEW
from tests.admin.pages import LIST, MODELS, act, confirm, url
from tests.rows import add, beat
from tests.slow import slow

pytestmark = pytest.mark.django_db

CANARY = "canary-7f3a"
RIGHTS = {
    "requeue": "requeue_message",
    "run_now": "run_message",
    "cancel": "cancel_message",
    "discard": "discard_message",
}
#: The decisions about a queue.
DECISIONS = ("pause", "resume", "limit", "end_backoff")
#: The state that an action applies to, and whether the message is deleted by it.
SUBJECTS = {
    "requeue": ({"dead": -5, "attempts": 20}, False),
    "run_now": ({"after": 600}, False),
    "cancel": ({"after": 600}, True),
    "discard": ({"dead": -5}, True),
}


@pytest.fixture
def rows():
    """One row of each kind, whose private columns all hold the canary."""
    message = add(
        payload={"note": CANARY},
        metadata={"tenant": CANARY},
        last_error=CANARY,
        dead=-5,
        dead_reason=CANARY,
        attempts=1,
    )
    attempt = FailedAttempt.objects.create(
        message_id=message.pk,
        queue="mail",
        type=message.type,
        attempt=1,
        error_class="ValueError",
        error_text=CANARY,
        traceback=CANARY,
    )
    value = Result.objects.create(message_id=message.pk, value={"answer": CANARY})
    failed = Result.objects.create(
        message_id=message.pk + 1, error_class="KeyError", error_text=CANARY
    )
    aside = UniqueKey.objects.create(
        queue="mail", type="t", unique_id="u", put_aside={"payload": {"note": CANARY}}
    )
    schedule = Schedule.objects.create(
        name="daily",
        type="t",
        every=timedelta(days=1),
        payload={"note": CANARY},
        metadata={"tenant": CANARY},
        last_error=CANARY,
        source="code",
    )
    handled = HandledMessage.objects.create(
        id=message.pk,
        queue="mail",
        type="t",
        payload={"note": CANARY},
        metadata={"tenant": CANARY},
        keep_until=Now(),
    )
    beat()
    operation = Operation.objects.create(action="cancel", filter={}, last_id=0)
    return {
        "queuedmessage": [message.pk],
        "failedattempt": [attempt.pk],
        "handledmessage": [handled.pk],
        "operation": [operation.pk],
        "queuestate": ["mail"],
        "result": [value.pk, failed.pk],
        "schedule": [schedule.pk],
        "uniquekey": [aside.pk],
        "workerheartbeat": ["worker"],
    }


def addresses(rows):
    """All readable addresses: lists, filtered lists, pages, histories, overview."""
    yield "/admin/"
    yield "/admin/django_mq/"
    yield LIST + "?state=dead"
    yield LIST + "?q=mail"
    for model in MODELS:
        yield url(model)
        for key in rows[model]:
            yield url(model, "change", key)
            yield url(model, "history", key)


def of_models(rows):
    return [each for each in addresses(rows) if each.startswith("/admin/django_mq/")]


def test_anonymous_users_are_sent_to_the_login(rows):
    for address in addresses(rows):
        response = Client().get(address)
        assert response.status_code == 302, address
        assert response.url.startswith("/admin/login/"), address


def test_staff_without_rights_see_nothing(rows, login):
    client = login()
    for address in of_models(rows):
        assert client.get(address).status_code in (403, 404), address


def test_view_shows_no_payload_anywhere(rows, viewer):
    """S08: this includes metadata, error texts, tracebacks, results."""
    for address in addresses(rows):
        response = viewer.get(address)
        assert response.status_code == 200, address
        assert CANARY not in response.content.decode(), address


@pytest.mark.parametrize("role", ["reader", *slow("superuser")])
def test_view_payload_shows_it_on_pages(rows, login, role):
    client = login(boss=True) if role == "superuser" else login(*VIEW, "view_payload")
    for model in ("queuedmessage", "failedattempt", "result", "schedule", "uniquekey"):
        for key in rows[model]:
            assert CANARY in client.get(url(model, "change", key)).content.decode()
    for address in addresses(rows):
        assert client.get(address).status_code == 200, address


def test_view_payload_alone_opens_no_page(rows, login):
    client = login("view_payload")
    for address in of_models(rows):
        assert client.get(address).status_code in (403, 404), address


#: The models whose pages a plain run tries: others have the same base.
PLAIN = ("queuedmessage", "queuestate", "schedule")


@pytest.mark.parametrize("model", [each if each in PLAIN else slow(each)[0] for each in MODELS])
def test_one_right_opens_one_model(rows, login, model):
    client = login(f"view_{model}")
    for each in MODELS:
        status = 200 if each == model else 403
        assert client.get(url(each)).status_code == status
        assert client.get(url(each, "change", rows[each][0])).status_code == status


def test_lists_never_show_payloads(rows, boss):
    QueuedMessage.objects.update(last_error="", dead_reason="")
    FailedAttempt.objects.update(error_text="")
    for model in MODELS:
        assert CANARY not in boss.get(url(model)).content.decode()


@pytest.mark.parametrize(
    ("page", "model"),
    [
        each if each[1] in PLAIN else slow(each)[0]
        for each in product(("add", "change", "delete"), MODELS)
        if each != ("add", "schedule")
    ],
)
def test_nothing_is_added_changed_or_deleted(rows, boss, model, page):
    """S09: all pages are read-only for every user and every POST; only schedules may be added."""
    address = url(model, page, *([] if page == "add" else rows[model][:1]))
    before = list(QueuedMessage.objects.values())
    data = {"payload": "{}", "queue": "x", "type": "x", "attempts": 0, "post": "yes"}
    assert boss.post(address, data).status_code == 403
    if page != "change":
        assert boss.get(address).status_code == 403
    assert list(QueuedMessage.objects.values()) == before


def test_the_stock_delete_is_no_action(rows, boss):
    act(boss, "delete_selected", rows["queuedmessage"], post="yes")
    assert QueuedMessage.objects.count() == 1
    page = boss.get(LIST).content.decode()
    assert "delete_selected" not in page


@pytest.mark.parametrize("action", RIGHTS)
def test_actions_are_hidden_and_refused_without_their_own_right(login, action):
    """S10: rights to all the other actions do not suffice."""
    columns, _ = SUBJECTS[action]
    message = add(**columns)
    before = QueuedMessage.objects.values().get()
    client = login(*VIEW, *(right for right in RIGHTS.values() if right != RIGHTS[action]))
    assert f'value="{action}"' not in client.get(LIST).content.decode()
    page = client.get(url("queuedmessage", "change", message.pk)).content.decode()
    assert url("queuedmessage", "action", action) not in page
    assert act(client, action, [message.pk]).status_code == 403
    assert confirm(client, action, [message.pk]).status_code == 403
    assert QueuedMessage.objects.values().get() == before
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("action", RIGHTS)
def test_actions_are_offered_and_done_with_their_right(login, action):
    columns, goes = SUBJECTS[action]
    message = add(**columns)
    client = login("view_queuedmessage", RIGHTS[action])
    assert f'value="{action}"' in client.get(LIST).content.decode()
    page = client.get(url("queuedmessage", "change", message.pk)).content.decode()
    assert url("queuedmessage", "action", action) in page
    assert confirm(client, action, [message.pk]).status_code == 302
    if goes:
        assert not QueuedMessage.objects.exists()
    else:
        assert QueuedMessage.objects.get().state == "processable"
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("action", ["requeue", *slow("discard")])
def test_action_on_heads_needs_the_same_permission(login, action):
    """S10: on the list, on the page of a follower, on the page of the queue."""
    head = add(key="k", dead=-5)
    message = add(key="k", blocked_by=head.pk)
    address = url("queuedmessage", "action", action)
    pages = (url("queuedmessage", "change", message.pk), url("queuestate", "change", "mail"))
    others = (right for right in RIGHTS.values() if right != RIGHTS[action])
    client = login(*VIEW, *others)
    assert f'value="{action}_heads"' not in client.get(LIST).content.decode()
    for page in pages:
        assert address not in client.get(page).content.decode()
    assert act(client, f"{action}_heads", [message.pk]).status_code == 403
    assert QueuedMessage.objects.dead().count() == 1
    client = login("view_queuedmessage", "view_queuestate", RIGHTS[action], name="may")
    assert f'value="{action}_heads"' in client.get(LIST).content.decode()
    for page in pages:
        assert address in client.get(page).content.decode()
    blind = login("view_queuestate", RIGHTS[action], name="blind").get(pages[1])
    assert address not in blind.content.decode()
    assert url("queuedmessage", "change", head.pk) not in blind.content.decode()


@pytest.mark.parametrize("action", RIGHTS)
def test_actions_take_the_right_to_view_too(login, action):
    message = add(**SUBJECTS[action][0])
    client = login(RIGHTS[action])
    assert act(client, action, [message.pk]).status_code == 403
    assert confirm(client, action, [message.pk]).status_code == 403


@pytest.mark.parametrize("action", RIGHTS)
def test_actions_take_a_token(boss, action):
    """S11: POST with CSRF."""
    message = add(**SUBJECTS[action][0])
    client = Client(enforce_csrf_checks=True)
    client.force_login(boss.user)
    assert act(client, action, [message.pk]).status_code == 403
    assert confirm(client, action, [message.pk]).status_code == 403
    for page in DECISIONS:
        assert client.post(url("queuestate", page), {"queue": "mail"}).status_code == 403
    assert client.get(url("queuedmessage", "action", action)).status_code == 302
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("page", DECISIONS)
def test_queues_are_changed_only_with_permission(rows, login, viewer, page):
    for client in (viewer, login("change_queue", name="blind")):
        data = {"queue": "mail", "max_in_flight": "5"}
        assert client.post(url("queuestate", page), data).status_code == 403
    assert "Pause" not in viewer.get(url("queuestate")).content.decode().replace("aused", "")
    assert "<form" not in viewer.get(url("queuestate", "change", "mail")).content.decode().replace(
        '<form id="logout-form"', ""
    )
    assert not QueueState.objects.exists()
    keeper = login("view_queuestate", "change_queue", name="keeper")
    assert keeper.post(url("queuestate", page), {"queue": "mail"}).status_code == 302


@pytest.mark.parametrize(
    ("model", "lookup"),
    [
        ("queuedmessage", "payload__note__startswith=c"),
        ("queuedmessage", "payload__icontains=c"),
        ("queuedmessage", "metadata__tenant=x"),
        ("queuedmessage", "last_error__startswith=c"),
        ("queuedmessage", "dead_reason__startswith=c"),
        ("failedattempt", "error_text__contains=c"),
        ("failedattempt", "traceback__contains=c"),
        ("result", "value__answer__startswith=c"),
        ("result", "error_text__contains=c"),
        ("uniquekey", "put_aside__payload__note__startswith=c"),
    ],
)
def test_private_columns_cannot_be_asked_for_letter_by_letter(rows, viewer, model, lookup):
    """S08: the stock admin filters by any column named in the address."""
    assert viewer.get(f"{url(model)}?{lookup}").status_code == 400


def test_a_search_does_not_look_into_payloads(rows, boss):
    assert boss.get(LIST, {"q": CANARY}).context["cl"].result_count == 0


def test_names_of_rows_and_the_log_hold_no_payload(rows, boss):
    """S08: str(), breadcrumbs, log entries, history."""
    message = QueuedMessage.objects.get()
    assert CANARY not in str(message)
    confirm(boss, "requeue", [message.pk])
    confirm(boss, "cancel", [message.pk])
    entries = LogEntry.objects.all()
    assert len(entries) == 2
    assert not any(CANARY in f"{each.object_repr} {each.change_message}" for each in entries)
    assert CANARY not in boss.get("/admin/").content.decode()
