"""Each page sends few statements to the database, whatever it shows."""

from __future__ import annotations

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mq.queues import message_counts
from tests.admin.pages import LIST, MODELS, fail, text, url
from tests.rows import add, beat, decide, insert_all

pytestmark = pytest.mark.django_db

#: The most statements of a list, and of any other page; BEGIN, savepoints and COMMIT count.
MOST, MOST_OF_A_PAGE = 20, 28


@pytest.fixture
def rows():
    """A message in each state, a key with two followers behind its head, and a failed attempt."""
    head = add(key="k", leased=60, claimed_by="worker:1")
    waiting = [add(key="k", blocked_by=head.pk), add(key="k", blocked_by=head.pk)]
    insert_all({} for _ in range(20))
    insert_all([{"after": 60}, {"after": 60, "attempts": 1}, {"held": -1}, {"expires": -1}, {}])
    dead = add(dead=-1)
    beat(running=[head.pk])
    decide("mail", paused=-1)
    for message in (*waiting, dead, head):
        fail(message)
    ContentType.objects.clear_cache()
    return {"head": head, "waiting": waiting[1], "dead": dead}


def queries(client, address, **data):
    """Return the number of statements of a page, after a first request has filled the caches."""
    client.get(address, data)
    with CaptureQueriesContext(connection) as found:
        assert client.get(address, data).status_code == 200
    return len(found)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("model", [*MODELS, "overview"])
def test_a_list(boss, model):
    assert queries(boss, url(model)) <= MOST


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("model", ["queuedmessage", "queuestate"])
def test_a_list_with_estimates(boss, viewer, monkeypatch, model):
    """Counts are repeated with a lower limit, then estimated."""
    monkeypatch.setattr(message_counts, "MAX_COUNT", 2)
    monkeypatch.setattr(message_counts, "COUNT_LIMITS", (1,))
    assert "≈" in text(boss.get(url(model)))
    for client in (boss, viewer):
        assert queries(client, url(model)) <= MOST


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "data",
    [
        {"state": "blocked", "queue": "mail"},
        {"q": "k", "state": "blocked"},
        {"created_at_from": "1h", "created_at_to": "0m", "type": "shop.*", "queue": "mail"},
        {"fingerprint": "0" * 16, "error_class": "ValueError", "claimed_by": "worker"},
    ],
)
def test_a_list_with_filters(boss, data):
    assert queries(boss, LIST, **data) <= MOST


@pytest.mark.parametrize("name", ["head", "waiting", "dead"])
def test_the_page_of_a_message(boss, rows, name):
    assert queries(boss, url("queuedmessage", "change", rows[name].pk)) <= MOST_OF_A_PAGE


@pytest.mark.django_db(transaction=True)  # in a test's transaction, the end of a read is two
def test_the_page_of_a_message_behind_a_due_one(boss):
    """The head is explained too, down to its place in the queue; both are in a chain."""
    beat(queues=["mail"])
    head = add(key="k", metadata={"mq.correlation_id": "1"})
    chain = {"mq.correlation_id": "1", "mq.causation_id": str(head.pk)}
    message = add(key="k", blocked_by=head.pk, metadata=chain)
    fail(message)
    assert queries(boss, url("queuedmessage", "change", message.pk)) <= MOST_OF_A_PAGE


@pytest.mark.usefixtures("rows")
def test_other_pages(boss):
    for page in (
        url("queuestate", "change", "mail"),
        url("queuestate", "topology"),
        url("failedattempt", "errors"),
        "/admin/django_mq/",
    ):
        assert queries(boss, page) <= MOST_OF_A_PAGE, page
