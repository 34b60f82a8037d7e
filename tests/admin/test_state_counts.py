"""The number of messages in each state, beside the filter of the list."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.contrib import admin
from django.db import connection
from django.test import RequestFactory

from django_mq.admin import QueuedMessageAdmin, state_counts
from django_mq.models import QueuedMessage
from django_mq.queues import message_counts
from django_mq.states import MessageState
from tests.admin.pages import LIST, listed
from tests.rows import add, beat, decide, insert_all
from tests.slow import slow

pytestmark = pytest.mark.django_db

STATES = (*(state.value for state in MessageState), "in_flight")


def counts(client, query=""):
    """Return the text beside each state of the filter."""
    page = client.get(LIST + query).content.decode()
    pattern = (
        r'href="([^"]*state=(\w+)[^"]*)">[\w ]+ <span class="mq-number mq-quiet">([^<]+)</span>'
    )
    return {name: unescape(text) for _address, name, text in re.findall(pattern, page)}


@pytest.fixture
def rows():
    """Messages in each state, of an ordinary queue and of stopped ones."""
    decide("paused", paused=-1), decide("backs-off", backoff=60, backoff_level=1)
    decide("was-paused", paused=-60, until=-1)
    every = ({}, {"after": 60}, {"after": 60, "attempts": 1}, {"held": -1}, {"expires": -1})
    for queue in ("mail", "paused", "backs-off", "was-paused"):
        insert_all({"queue": queue, **columns} for columns in every)
        insert_all({"queue": queue, "dead": -5} for _ in range(3))
        head = add(queue, key="k", leased=60)
        add(queue, key="k", blocked_by=head.pk)
        add(queue, leased=-60)
        beat(f"w-{queue}", running=[add(queue, leased=60).pk])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "query", ["?", "?queue=paused&", *slow("?queue=mail&", "?queue__exact=mail&")]
)
def test_count_of_a_state_equals_the_rows_of_its_list(boss, query):
    shown = counts(boss, query)
    assert set(shown) == set(STATES)
    assert set(shown.values()) != {"0"}
    for state, text in shown.items():
        found = listed(boss.get(f"{LIST}{query}state={state}"))
        assert (state, text) == (state, f"{len(found)}")


@pytest.mark.usefixtures("rows")
def test_the_counts_stay_whatever_the_other_filters(boss):
    assert counts(boss, "?state=dead") == counts(boss)
    assert counts(boss, "?type=none&created_at_from=1h") == counts(boss)


def test_long_queues_are_estimated(boss, monkeypatch):
    monkeypatch.setattr(message_counts, "MAX_COUNT", 20)
    monkeypatch.setattr(message_counts, "COUNT_LIMITS", (20,))
    insert_all({} for _ in range(300))
    insert_all({"dead": -1} for _ in range(20))
    shown = counts(boss)
    assert (shown["processable"], shown["dead"], shown["held"]) == ("≈ 300", "20", "0+")


def test_list_counts_a_fifth_of_the_rows_of_the_overview(boss, monkeypatch):
    """The rows of the list have their own cost, and the counts stand beside a filter only."""
    monkeypatch.setattr(message_counts, "COUNT_LIMITS", (5, 20, 80))
    monkeypatch.setattr(message_counts, "READ_BUDGET", 5 * 4 * 20)
    insert_all({} for _ in range(50))
    insert_all({"dead": -1} for _ in range(20))
    with connection.cursor() as cursor:
        found, maximum = message_counts.read_many_counts(cursor, ["mail"])
        assert (maximum, found["mail"].shown("processable")) == (80, "50")
    for query in ("", "?queue=mail"):
        shown = counts(boss, query)
        assert (shown["processable"], shown["dead"]) == ("≈ 50", "20")


def test_beyond_the_queues_that_are_counted_there_may_be_more(boss, monkeypatch):
    monkeypatch.setattr(state_counts, "MAX_QUEUES", 1)
    add("a"), add("b", dead=-1)
    assert counts(boss)["processable"].endswith("1+")
    assert counts(boss, "?queue=b")["dead"] == "1"


def test_a_user_of_some_queues_sees_the_counts_of_these(boss):
    class Scoped(QueuedMessageAdmin):
        def get_queues(self, request):
            return {"mail"}

    add(), add("theirs"), add("theirs", dead=-1)
    shown = Scoped(QueuedMessage, admin.site)
    for query, expected in (("", "1"), ("?queue=theirs", "0")):
        request = RequestFactory().get(LIST + query)
        request.user = boss.user
        found = shown.get_changelist_instance(request).state_counts
        assert (found["processable"], found["dead"]) == (expected, "0")


def test_a_list_without_counts_in_time_is_shown_all_the_same(boss, monkeypatch):
    message = add()

    def cancelled(cursor, names, **limits):
        cursor.execute("set local statement_timeout = 1")
        cursor.execute("select pg_sleep(60)")

    monkeypatch.setattr(state_counts, "read_many_counts", cancelled)
    page = boss.get(LIST)
    assert listed(page) == [message.pk]
    assert counts(boss) == {}
