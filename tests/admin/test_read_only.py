"""Pages of a database that is read only, as a standby is."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection

from django_mq.models import QueuedMessage
from tests.admin.pages import LIST, act, text, told, url
from tests.admin.test_locked_tables import changes, pages  # noqa: F401  (fixtures)
from tests.rows import add
from tests.slow import mostly_slow

pytestmark = pytest.mark.django_db(transaction=True)

TOLD = "The database is read-only, so nothing was changed"
#: Raises the error of a standby whose replay cancels a query.
CONFLICT = """
do $$ begin
    raise serialization_failure using message = 'canceling statement due to conflict with recovery';
end $$
"""


@pytest.fixture
def read_only(db):
    """Return a function that makes the database read only for the rest of the test."""

    def switch(word="on"):
        with connection.cursor() as cursor:
            cursor.execute(f"set default_transaction_read_only = {word}")

    yield switch
    switch("off")


def test_every_page_is_shown(pages, boss, read_only):  # noqa: F811
    read_only()
    assert {page: boss.get(page).status_code for page in pages} == dict.fromkeys(pages, 200)


def test_every_change_reports_the_read_only_database(changes, boss, read_only):  # noqa: F811
    read_only()
    lacking = (url("queuedmessage", "broadcast"), {})
    for page, form in [each for each in changes if each != lacking]:
        response = boss.post(page, {**form, "confirmed": "yes"})
        assert response.status_code == 503, page
        assert TOLD in text(response), page
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("in_request", "across"), mostly_slow([False, True], [{}, {"select_across": "1"}])
)
def test_list_action_reports_the_read_only_database(
    boss, read_only, monkeypatch, in_request, across
):
    message = add(dead=-5, attempts=1)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", in_request)
    read_only()
    response = act(boss, "requeue", [message.pk], **across)
    assert response.status_code == 503
    assert TOLD in text(response)
    assert f'href="{LIST}">Back to the list' in response.content.decode()
    read_only("off")
    assert list(QueuedMessage.objects.dead()) == [message]


@pytest.fixture
def _conflict():
    """Let the server cancel each query of a table of messages."""

    def cancel(execute, sql, params, many, context):
        return execute(*((CONFLICT, None) if "django_mq" in sql else (sql, params)), many, context)

    with connection.execute_wrapper(cancel):
        yield


@pytest.mark.usefixtures("_conflict")
def test_pages_whose_queries_a_standby_cancels(boss):
    for page in (LIST, url("queuedmessage", "change", 1), url("workerheartbeat")):
        response = boss.get(page)
        assert response.status_code == 503, page
        assert "a standby that cancels queries" in text(response), page
    assert "cancelled the query" in text(boss.get(url("overview")))
    filtered = boss.get(LIST, {"queue": "mail"})
    assert filtered.url == LIST
    assert "a standby that cancels queries" in told(filtered)[0]
