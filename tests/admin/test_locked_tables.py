"""Pages while another session, such as a migration's, holds a table."""

from __future__ import annotations

from functools import partial

import pytest
from django.apps import apps
from django.contrib.admin import site
from django.db import connection

from django_mq import models
from django_mq.admin import QueueStateAdmin
from tests.admin.pages import LIST, MODELS, fail, text, url
from tests.database import second_connection
from tests.rows import add, beat, decide
from tests.schedules.conftest import put

pytestmark = pytest.mark.django_db(transaction=True)

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
def test_a_page_without_its_rows_says_so(boss):
    beat()
    with second_connection() as other:
        other.execute("begin; lock table django_mq_workerheartbeat in access exclusive mode")
        response = boss.get(url("workerheartbeat"))
        head = boss.head(url("workerheartbeat"))
    assert (response.status_code, head.status_code) == (503, 503)
    assert "took too long to answer" in text(response)
    assert boss.get(url("workerheartbeat")).status_code == 200


@pytest.mark.usefixtures("_waits_end")
@pytest.mark.parametrize("method", ["get", "head"])
@pytest.mark.parametrize("page", [("change", "one"), ("changelist",)], ids="-".join)
def test_also_in_a_transaction_of_the_request(boss, monkeypatch, page, method):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    put("one")
    with second_connection() as other:
        other.execute("begin; lock table django_mq_schedule in access exclusive mode")
        assert getattr(boss, method)(url("schedule", *page)).status_code == 503


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


def test_what_a_hook_records_of_a_refusal_stays(boss, monkeypatch):
    def refuse(page, request, obj=None):
        decide("recorded")
        return False

    monkeypatch.setattr(QueueStateAdmin, "has_view_permission", refuse)
    decide("mail")
    assert boss.get(url("queuestate", "change", "mail")).status_code == 403
    assert models.QueueState.objects.filter(queue="recorded").exists()
