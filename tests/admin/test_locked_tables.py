"""Pages while another session, such as a migration's, holds a table."""

from __future__ import annotations

import pytest
from django.db import connection

from django_mq import models
from tests.admin.pages import LIST, MODELS, fail, text, url
from tests.database import second_connection
from tests.rows import add, beat, decide

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = [each for each in vars(models).values() if getattr(each, "__name__", "").lower() in MODELS]


@pytest.fixture
def pages(boss):
    """The URLs of the pages that show something, with a row behind each."""
    message = add(dead=-5, attempts=1)
    attempt = fail(message)
    decide("mail")
    worker = beat()
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
        f"{LIST}?queue=mail",
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
    assert response.status_code == 503
    assert "took too long to answer" in text(response)
    assert boss.get(url("workerheartbeat")).status_code == 200


@pytest.mark.thorough
@pytest.mark.usefixtures("_waits_end")
@pytest.mark.parametrize("model", TABLES, ids=lambda each: each.__name__)
def test_every_page_answers(model, pages, boss):
    with second_connection() as other:
        other.execute(f"begin; lock table {model._meta.db_table} in access exclusive mode")
        answers = {page: boss.get(page).status_code for page in pages}
    assert set(answers.values()) <= {200, 302, 503}, answers
