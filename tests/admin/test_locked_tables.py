"""Pages while another session, such as a migration's, holds a table."""

from __future__ import annotations

from functools import partial

import pytest
from django.apps import apps
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.db import connection

from django_mq import models, queues
from django_mq.admin import QueueStateAdmin
from tests.admin.pages import LIST, MODELS, fail, text, url
from tests.admin.test_editing import fields
from tests.admin.test_history import keep
from tests.admin.test_schedules import FORM
from tests.database import second_connection
from tests.outbox.schedules.conftest import put
from tests.rows import add, beat, decide
from tests.slow import mostly_slow

pytestmark = pytest.mark.django_db(transaction=True)

QUICK, THOROUGH = [models.QueuedMessage], pytest.mark.thorough
TABLES = [each for each in apps.get_app_config("django_mq").get_models() if each._meta.managed]


@pytest.fixture
def pages(boss):
    """The URLs of the pages that show something, with a row behind each."""
    message = add(dead=-5, attempts=1)
    attempt = fail(message)
    decide("mail")
    worker = beat()
    put("one")
    return [
        *(url(model) for model in (*MODELS, "overview")),
        url("queuedmessage", "change", message.pk),
        url("queuedmessage", "history", message.pk),
        url("queuedmessage", "edit", add(after=600).pk),
        url("failedattempt", "change", attempt.pk),
        url("failedattempt", "errors"),
        url("queuestate", "change", "mail"),
        url("queuestate", "history", "mail"),
        url("queuestate", "topology"),
        url("workerheartbeat", "change", worker.pk),
        url("queuedmessage", "broadcast"),
        url("schedule", "add"),
        url("schedule", "change", "one"),
        url("schedule", "delete", "one"),
        f"{LIST}?queue=mail",
        f"{LIST}?q={message.pk + 100}",
    ]


@pytest.fixture
def _waits_end():
    """Let a statement without a limit of its own fail the test instead of waiting for ever."""
    with connection.cursor() as cursor:
        cursor.execute("set statement_timeout = '15s'")


@pytest.mark.usefixtures("_waits_end")
def test_page_of_a_locked_table_answers_503(boss):
    beat()
    with second_connection() as other:
        other.execute("begin; lock table django_mq_workerheartbeat in access exclusive mode")
        response = boss.get(url("workerheartbeat"))
        head = boss.head(url("workerheartbeat"))
    assert (response.status_code, head.status_code) == (503, 503)
    assert "took too long to answer" in text(response)
    assert boss.get(url("workerheartbeat")).status_code == 200


@pytest.mark.usefixtures("_waits_end")
@pytest.mark.parametrize(
    ("page", "method"), mostly_slow([("change", "one"), ("changelist",)], ["get", "head"])
)
def test_also_in_a_transaction_of_the_request(boss, monkeypatch, page, method):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    put("one")
    with second_connection() as other:
        other.execute("begin; lock table django_mq_schedule in access exclusive mode")
        assert getattr(boss, method)(url("schedule", *page)).status_code == 503


@pytest.mark.usefixtures("_waits_end")
def test_a_change_in_a_transaction_of_the_request(boss, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with second_connection() as other:
        other.execute("begin; lock table django_mq_queuedmessage in access exclusive mode")
        response = boss.post(url("queuestate", "pause"), {"queue": "mail"})
        assert response.status_code == 503
        assert "the change was not completed" in text(response)
        assert f'href="{url("queuestate")}">Back to the list' in response.content.decode()
        assert "Try again" not in text(response)
    boss.post(url("queuestate", "pause"), {"queue": "mail"})
    assert models.QueueState.objects.get().paused_at is not None


@pytest.mark.thorough
@pytest.mark.usefixtures("_waits_end")
@pytest.mark.parametrize("model", TABLES, ids=lambda each: each.__name__)
def test_every_page_answers(model, pages, boss):
    with second_connection() as other:
        other.execute(f"begin; lock table {model._meta.db_table} in access exclusive mode")
        answers = {page: boss.get(page).status_code for page in pages}
    assert set(answers.values()) <= {200, 302, 503}, answers


def test_a_subclass_may_change_the_context_of_any_page(boss, rf):
    """As with the stock admin, the response of a view is not rendered yet."""
    message = add()
    decide("mail")
    for model, key in ((models.QueuedMessage, message.pk), (models.QueueState, "mail")):
        page = site.get_model_admin(model)
        for view in (page.changelist_view, partial(page.change_view, object_id=str(key))):
            request = rf.get("/")
            request.user = boss.user
            response = view(request)
            assert not response.is_rendered
            response.context_data["site_header"] = "Changed later"
            assert "Changed later" in text(response.render())


def test_write_of_a_refusing_permission_hook_is_kept(boss, monkeypatch):
    def refuse(page, request, obj=None):
        decide("recorded")
        return False

    monkeypatch.setattr(QueueStateAdmin, "has_view_permission", refuse)
    decide("mail")
    assert boss.get(url("queuestate", "change", "mail")).status_code == 403
    assert models.QueueState.objects.filter(queue="recorded").exists()


@pytest.fixture
def changes(boss):
    """The URLs of the views that change something, each with a form that it accepts."""
    message = add(handler="h", after=600)
    running = add(leased=30, attempts=1, claimed_by="worker:1")
    decide("mail", backoff_level=1, backoff=50)
    beat()
    put("one")
    keep(1)
    queues.operate("requeue", queue="mail", by="boss")
    operation = models.Operation.objects.get()
    edit = url("queuedmessage", "edit", message.pk)
    mail, one = {"queue": "mail"}, {"schedule": "one"}
    return [
        (url("queuestate", "pause"), mail),
        (url("queuestate", "resume"), mail),
        (url("queuestate", "limit"), {**mail, "max_in_flight": "3"}),
        (url("queuestate", "end_backoff"), mail),
        (url("schedule", "run"), one),
        (url("schedule", "disable"), one),
        (url("schedule", "add"), {**FORM, "name": "two"}),
        (url("schedule", "change", "one"), {**FORM, "name": "one"}),
        (url("schedule", "delete", "one"), {"post": "yes"}),
        (edit, {**fields(boss.get(edit)), "priority": "1"}),
        (url("queuedmessage", "broadcast"), {}),
        (url("queuedmessage", "broadcast"), {"type": "a.b", "payload": "{}", "priority": "0"}),
        (url("queuedmessage", "everything", "requeue"), {}),
        (url("queuedmessage", "running", running.pk, "stop"), {}),
        (url("workerheartbeat", "order", "quiet"), {"worker": "worker"}),
        (url("operation", "cancel"), {"operation": operation.pk, "id": operation.pk}),
        (url("queuedmessage", "export", "csv"), {}),
        (url("handledmessage", "export", "json"), {}),
    ]


@pytest.fixture
def _no_wait_lasts():
    """Let a wait for a lock that has no limit of its own fail the test."""
    with connection.cursor() as cursor:
        cursor.execute("set lock_timeout = '20s'")


@pytest.mark.slow
@pytest.mark.usefixtures("_no_wait_lasts")
@pytest.mark.parametrize(
    "model",
    [pytest.param(each, marks=() if each in QUICK else THOROUGH) for each in TABLES],
    ids=lambda each: each.__name__,
)
def test_every_change_gives_up_in_time(model, changes, boss):
    """S11: no change waits for the role's own limit; each answers, or leads back to a list."""
    with second_connection() as other:
        other.execute(f"begin; lock table {model._meta.db_table} in access exclusive mode")
        for page, form in changes:
            response = boss.post(page, form)
            assert response.status_code in {200, 302, 503}, page
            list(response)  # also of a file


@pytest.mark.usefixtures("_waits_end")
def test_an_export_that_cannot_begin_is_not_logged(boss):
    keep(1)
    with second_connection() as other:
        other.execute("begin; lock table django_mq_handledmessage in access exclusive mode")
        response = boss.post(url("handledmessage", "export", "csv"))
    assert response.status_code == 302
    assert not LogEntry.objects.exists()
