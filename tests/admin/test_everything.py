"""Actions on all matching messages, the operations they become, and the page of errors."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from django.http import QueryDict
from django.test import RequestFactory

from django_mq import queues
from django_mq.admin import OperationAdmin, QueuedMessageAdmin, selected_ids
from django_mq.admin.message_filters import MOMENTS, OPTIONAL, filter_of
from django_mq.models import FailedAttempt, Operation, QueuedMessage
from django_mq.operations.steps import take_step
from django_mq.store import error_groups
from django_mq.store import message_filters as filters
from tests.admin.conftest import VIEW
from tests.admin.pages import LIST, act, fail, text, told, url
from tests.rows import add, stored
from tests.slow import slow

pytestmark = pytest.mark.django_db


def everything(action, query=""):
    return f"{LIST}everything/{action}/?{query}"


def run_all():
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            if take_step(cursor) is None:
                return


def test_all_that_were_selected_across_pages_become_an_operation(boss, monkeypatch):
    monkeypatch.setattr(selected_ids, "MAX_MESSAGES", 3)
    ids = [add(dead=-1).pk for _ in range(5)]
    other = add("other", dead=-1)
    query = "queue=mail&state=dead"
    response = act(boss, "discard", ids[-1:], select_across="1", query=f"?{query}")
    assert response.url == everything("discard", query)
    page = boss.get(response.url)
    assert "5 messages match" in text(page)
    assert "queue mail" in text(page)
    assert not Operation.objects.exists()
    response = boss.post(response.url, {"matched": 5})
    assert response.url == url("operation")
    made = Operation.objects.get()
    assert (made.by, made.matched, made.filter) == (
        "ada",
        5,
        {"queues": ["mail"], "state": "dead"},
    )
    listed = text(boss.get(url("operation")))
    assert "0 changed of 5" in listed
    run_all()
    assert QueuedMessage.objects.get() == other
    assert LogEntry.objects.get().user == boss.user
    assert "5 changed of 5" in text(boss.get(url("operation", "change", made.pk)))


def test_a_large_number_is_shown_with_separators(boss, monkeypatch):
    monkeypatch.setattr(filters, "count", lambda *args, **options: 13_000)
    assert "13,000 messages match" in text(boss.get(everything("requeue", "state=dead")))


@pytest.mark.parametrize(
    ("action", "right"), [("requeue", "requeue_message"), ("discard", "discard_message")]
)
def test_rights_are_checked_when_it_is_asked_and_when_it_is_confirmed(login, action, right):
    add(dead=-1)
    viewer, may = login(*VIEW, name="v"), login(*VIEW, right, name="m")
    for client, status in ((viewer, 403), (may, 200)):
        assert client.get(everything(action)).status_code == status
    assert viewer.post(everything(action)).status_code == 403
    assert not Operation.objects.exists()
    assert may.post(everything(action)).status_code == 302
    made = Operation.objects.get()
    assert viewer.post(url("operation", "cancel"), {"operation": made.pk}).status_code == 403
    button = '<span class="mq-inline"><button type="submit" class="button" name="operation"'
    for client, times in ((viewer, 0), (may, 1)):  # a theme may style no button by itself
        assert client.get(url("operation")).content.decode().count(button) == times
    response = may.post(url("operation", "cancel"), {"operation": made.pk})
    assert "is cancelled" in told(response)[-1]
    assert stored(made).state == "cancelled"
    assert LogEntry.objects.get().change_message == "Cancelled."
    assert may.post(url("operation", "cancel"), {"operation": 99999}).status_code == 404


def test_a_filter_that_cannot_be_carried_over_acts_on_nothing(boss):
    add(dead=-1)
    for query in ("future=1", "id=x", "state=gone", "created_at_from=never", "priority=high"):
        for response in (
            boss.get(everything("discard", query)),
            boss.post(everything("discard", query)),
        ):
            assert response.url == LIST
    assert not Operation.objects.exists()
    assert boss.get(LIST + "everything/drop/").status_code == 404


def test_the_list_and_the_operation_find_the_same(boss):
    mine = add(type="a.b", handler="h", key="k", priority=-7, dead=-5, last_error="ValueError: no")
    add(type="c.d", dead=-5)
    attempt = fail(mine)
    for query in (
        "type=a.b",
        "type=a.*",
        "handler=h",
        "key=k",
        "priority=-7",
        f"id={mine.pk}",
        f"id__exact={mine.pk}",
        "q=a.b",
        f"q=%23{mine.pk}",
        "error_class=ValueError",
        f"fingerprint={attempt.fingerprint}",
    ):
        query = f"state=dead&{query}"
        shown = [each.pk for each in boss.get(f"{LIST}?{query}").context["cl"].result_list]
        assert (query, shown) == (query, [mine.pk])
        assert "1 message matches" in text(boss.get(everything("requeue", query)))


ODD_KEYS = (" ", " k", "k ", "#k", "a\u00a0b", "\U0001f469\u200d\U0001f4bb")


@pytest.mark.parametrize("key", [ODD_KEYS[0], *slow(*ODD_KEYS[1:])], ids=ascii)
def test_odd_keys_are_those_of_the_list(boss, key):
    mine = add(key=key, dead=-5)
    add(key="k", dead=-5), add(dead=-5)
    for name in ("key", "q") if key.strip() == key else ("key",):
        query = urlencode({"state": "dead", name: key})
        shown = [each.pk for each in boss.get(f"{LIST}?{query}").context["cl"].result_list]
        assert (query, shown) == (query, [mine.pk])
        assert "1 message matches" in text(boss.get(everything("requeue", query)))
    assert filter_of(QueryDict(urlencode({"key": key})), None, private=False).key == key
    assert queues.operate("requeue", key=key).filter == {"key": key}


@pytest.mark.parametrize(
    "name",
    ["key", "priority", "q", *slow("type", "queue", "handler", "error_class", "fingerprint")],
)
def test_an_empty_box_is_no_filter(boss, name):
    """Its form sends the empty text, with which the list was empty and the operation was not."""
    mine = add(type="a.b", dead=-5)
    add(type="c.d", dead=-5)
    query = f"state=dead&type=a.b&{name}=" if name != "type" else f"id={mine.pk}&type="
    shown = [each.pk for each in boss.get(f"{LIST}?{query}").context["cl"].result_list]
    assert shown == [mine.pk]
    assert "1 message matches" in text(boss.get(everything("discard", query)))


@pytest.mark.parametrize(
    "query",
    [
        "unique_id=",
        "key__exact=",
        "id=",
        "key=a&key__exact=b",
        "type__exact=a.*",
        "claimed_by__exact=w",
        "state__exact=dead",
        "error_class=ValueError:%20no",
    ],
)
def test_nothing_is_done_where_the_list_shows_less(boss, query):
    """The last one would reveal whether a message has this error to users who may not see it."""
    add(type="a.b", key="b", dead=-5, last_error="ValueError: no: really")
    assert boss.get(everything("discard", f"queue=mail&{query}")).url == LIST


def test_a_hash_before_a_number_is_an_id(boss):
    other = add(key="1", dead=-5)
    for key in (f"#{other.pk}", str(other.pk)):
        add(key=key, dead=-5)
    query = f"state=dead&q=%23{other.pk}"
    shown = {each.key for each in boss.get(f"{LIST}?{query}").context["cl"].result_list}
    assert shown == {"1", f"#{other.pk}"}
    assert "2 messages match" in text(boss.get(everything("requeue", query)))


def test_a_scoped_user_acts_on_their_queues_alone():
    found = filter_of(QueryDict("queue=secret"), {"mail"}, private=False)
    assert found.queues == ()
    assert filter_of(QueryDict(""), {"mail", "b"}, private=False).queues == ("b", "mail")
    with pytest.raises(ValueError, match="'q'"):
        filter_of(QueryDict("q=payload.a:7"), None, private=False)
    found = filter_of(QueryDict("q=payload.a:7&p=2"), None, private=True)
    assert (found.path, found.at_path) == (("payload", "a"), "7")


def test_an_operation_that_runs_has_no_duration_yet(boss):
    row = Operation.objects.create(action="cancel", filter={}, last_id=0, state="running")
    page = text(boss.get(url("operation", "change", row.pk)))
    assert "Duration: -" in page
    assert "None" not in page


def test_a_scoped_user_sees_operations_on_their_queues_alone(boss):
    class Scoped(OperationAdmin):
        def get_queues(self, request):
            return {"mail", "b"}

    mine = queues.operate("cancel", queue="mail")
    queues.operate("cancel", queue="other"), queues.operate("cancel", everything=True)
    request = RequestFactory().get("/")
    request.user = boss.user
    assert list(Scoped(Operation, admin.site).get_queryset(request)) == [mine]
    assert isinstance(admin.site.get_model_admin(QueuedMessage), QueuedMessageAdmin)


def test_values_of_a_filter_need_permission_to_view_payloads(login):
    add(payload={"card": "4111"}, dead=-1)
    may = login(*VIEW, "requeue_message", "view_payload", "view_operation", name="m")
    may_not = login(*VIEW, "requeue_message", "view_operation", name="n")
    may.post(everything("requeue", "state=dead&q=payload.card:4111"))
    queues.operate("requeue", metadata={"card": "4111"})
    made = Operation.objects.earliest("pk")
    for page in (url("operation"), url("operation", "change", made.pk)):
        assert "at path 4111" in text(may.get(page))
        assert "path payload.card" in text(may_not.get(page))
        assert "4111" not in text(may_not.get(page))


def test_the_heads_of_all_that_wait_become_an_operation(boss, login, monkeypatch):
    """By selecting all matching messages, and by the link in the list of blocked messages."""
    monkeypatch.setattr(selected_ids, "MAX_MESSAGES", 3)
    lines = [add(dead=-1, key=f"k{n}") for n in range(5)]
    behind = [add(key=head.key, blocked_by=head.pk).pk for head in lines]
    other = add("other", dead=-1, key="k")
    add("other", key="k", blocked_by=other.pk)
    query = "queue=mail&state=blocked"
    address = act(boss, "requeue_heads", behind[:1], select_across="1", query=f"?{query}").url
    assert address == everything("requeue", f"{query}&heads=1")
    assert f'href="{address}"'.replace("&", "&amp;") in boss.get(f"{LIST}?{query}").content.decode()
    page = boss.get(address)
    assert "5 messages match" in text(page)
    assert "applies to the first message in the line of each" in text(page)
    assert page.context["back"] == f"{LIST}?{query}"
    boss.post(address, {"matched": 5})
    made = Operation.objects.get()
    assert made.filter == {"queues": ["mail"], "state": "blocked", "heads": True}
    assert made.matched is None
    assert "the first message of the line of each" in text(boss.get(url("operation")))
    run_all()
    assert (stored(made).state, made.done, made.skipped) == ("done", 5, 0)
    assert QueuedMessage.objects.dead().get() == other
    assert boss.get(everything("cancel", f"{query}&heads=1")).status_code == 404
    viewer = login(*VIEW, name="no rights")
    assert "heads=1" not in viewer.get(f"{LIST}?{query}").content.decode()


def test_errors_in_groups_with_a_sample_and_actions(boss, viewer):
    dead, waiting = add(dead=-1), add(after=60)
    made = fail(dead, error_text="no <order>", place="shop.mail:send", handler="h")
    fail(waiting, error_class="KeyError", error_text="secret")
    page = boss.get(url("failedattempt", "errors"))
    said = text(page)
    for words in ("ValueError", "no <order>", "shop.mail:send", "1 failed attempt", "1 of its"):
        assert words in said
    assert f"fingerprint={made.fingerprint}" in page.content.decode()
    response = boss.get(everything("requeue", f"fingerprint={made.fingerprint}"))
    assert "1 message matches" in text(response)
    assert "error ValueError in handler h, at shop.mail:send" in text(response)
    shown = text(viewer.get(url("failedattempt", "errors")))
    assert "ValueError" in shown
    assert "secret" not in shown
    assert "Traceback" not in shown
    assert "Requeue" not in shown
    attempts = boss.get(url("failedattempt"), {"fingerprint": made.fingerprint})
    assert [each.pk for each in attempts.context["cl"].result_list] == [made.pk]
    assert "No failed attempts" not in text(
        boss.get(url("failedattempt", "errors") + "?since=hour")
    )


def test_errors_after_the_repair_offer_nothing(boss, monkeypatch):
    dead = add(dead=-1)
    for n in range(1, 10):
        fail(dead, attempt=n)
    assert "1 of its messages dead, 0 waiting" in text(boss.get(url("failedattempt", "errors")))
    dead.delete()
    page = text(boss.get(url("failedattempt", "errors")))
    assert "none of its messages is dead or waiting" in page
    assert "…" not in page  # as in "Requeue…"
    monkeypatch.setattr(error_groups, "MAX_EXAMINED_PER_PAIR", 6)
    page = text(boss.get(url("failedattempt", "errors")))
    assert "none of the messages of its newest attempts is dead or waiting" in page
    assert "Requeue…" in page


def test_errors_have_pages(boss):
    for n in range(120):
        FailedAttempt.objects.create(
            message_id=1, queue="mail", type="t", attempt=1, error_class=f"Error{n}"
        )
    page, seen = boss.get(url("failedattempt", "errors") + "?since=hour"), []
    while True:
        seen.append([row["error"] for row in page.context["rows"]])
        if not page.context["older"]:
            break
        page = boss.get(url("failedattempt", "errors") + page.context["older"])
    assert [len(each) for each in seen] == [50, 50, 20]
    assert {name for each in seen for name in each} == {f"Error{n}" for n in range(120)}
    for odd in ("0", "x", "9" * 30):
        assert boss.get(url("failedattempt", "errors") + f"?page={odd}").status_code == 200


def test_errors_are_linked_from_the_overview_and_the_index(boss, login):
    blind = login("view_queuestate", name="blind")
    for address in (url("overview"), "/admin/django_mq/"):
        assert url("failedattempt", "errors") in boss.get(address).content.decode()
        assert url("failedattempt", "errors") not in blind.get(address).content.decode()


def test_errors_need_the_right_to_see_attempts(login):
    client = login("view_queuedmessage")
    assert client.get(url("failedattempt", "errors")).status_code == 403


def test_the_list_and_an_operation_ignore_the_same_empty_boxes() -> None:
    boxes = {
        each.parameter_name
        for each in QueuedMessageAdmin.list_filter
        if getattr(each, "ignores_empty", False)
    }
    assert {*boxes, *MOMENTS, "q"} == OPTIONAL
