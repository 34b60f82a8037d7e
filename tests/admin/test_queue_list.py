"""The list of queues, with many queues."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.db import connection

from django_mq import handlers
from django_mq.admin import queues as queue_admin
from django_mq.models import QueueState
from django_mq.queues import message_counts
from django_mq.store import estimates
from tests.admin.pages import text, url
from tests.pages_read import pages_read
from tests.rows import insert_all

pytestmark = pytest.mark.django_db


@pytest.fixture
def three_to_a_page(monkeypatch):
    """Three queues per page: only those of the test and the default one."""
    monkeypatch.setattr(queue_admin, "PER_PAGE", 3)
    with handlers.isolated():
        yield


def names(response):
    return [row.counts.queue for row in response.context["rows"]]


@pytest.mark.usefixtures("three_to_a_page")
def test_it_has_pages(boss):
    insert_all({"queue": name} for name in "abcdefgh")
    first, last = boss.get(url("queuestate")), boss.get(url("queuestate"), {"page": 3})
    assert names(first) == ["a", "b", "c"]
    assert "1 to 3 of 9 queues Next page" in text(first)
    assert names(boss.get(url("queuestate"), {"page": 2})) == ["d", "default", "e"]
    assert names(last) == ["f", "g", "h"]
    assert "Previous page 7 to 9 of 9 queues" in text(last)


@pytest.mark.usefixtures("three_to_a_page")
@pytest.mark.parametrize(("page", "first"), [("x", "a"), ("", "a"), ("-1", "d"), ("9" * 99, "d")])
def test_any_page_number_is_answered(boss, page, first):
    insert_all({"queue": name} for name in "abcd")
    assert names(boss.get(url("queuestate"), {"page": page}))[0] == first


def test_few_queues_need_no_pages(boss):
    assert "of 1 queues" not in text(boss.get(url("queuestate")))


@pytest.mark.usefixtures("three_to_a_page")
def test_the_pages_are_of_the_queues_that_the_user_may_see(boss, monkeypatch):
    """S33: the number of pages does not reveal other queues either."""
    insert_all({"queue": name} for name in "abcdefgh")
    shown = admin.site.get_model_admin(QueueState)
    monkeypatch.setattr(shown, "get_queues", lambda request: {"b", "d", "f", "h"})
    assert names(boss.get(url("queuestate"))) == ["b", "d", "f"]
    assert "1 to 3 of 4 queues" in text(boss.get(url("queuestate")))


def test_only_the_queues_of_the_page_are_counted(boss, monkeypatch):
    insert_all({"queue": f"q{n:03}"} for n in range(300))

    def cost(per_page):
        monkeypatch.setattr(queue_admin, "PER_PAGE", per_page)
        with pages_read() as read:
            boss.get(url("queuestate"))
        return read.total

    least = cost(1)  # the tables of earlier tests of the file's process cost pages, too
    assert 2 * (cost(20) - least) < cost(1000) - least


@pytest.mark.usefixtures("three_to_a_page")
def test_a_search_finds_queues_by_a_part_of_their_names(boss):
    insert_all({"queue": name} for name in ("mail.a", "mail.b", "mail.c", "Mail.d", "post"))
    first = boss.get(url("queuestate"), {"q": "MAIL."})
    assert names(first) == ["Mail.d", "mail.a", "mail.b"]
    assert "?q=MAIL.&amp;page=2" in first.content.decode()
    assert names(boss.get(url("queuestate"), {"q": "mail.", "page": 2})) == ["mail.c"]
    assert "has this in its name" in text(boss.get(url("queuestate"), {"q": "<nosuch>"}))


def test_a_page_of_many_long_queues_counts_less_far(boss, monkeypatch):
    """Short queues cost little, so they do not count."""
    monkeypatch.setattr(message_counts, "COUNT_LIMITS", (5, 8))
    monkeypatch.setattr(message_counts, "READ_BUDGET", 4 * 2 * 8)
    monkeypatch.setattr(message_counts, "MAX_COUNT", 12)
    insert_all([{"queue": "a"}] * 9 + [{"queue": f"short{n}"} for n in range(9)])

    def shown(model: str = "queuestate") -> str:
        with handlers.isolated():
            return text(boss.get(url(model)))

    alone = shown()
    insert_all([{"queue": "b"}] * 9)
    two = shown()
    assert "Counts stop at 8 per queue and state" in shown("overview")
    insert_all([{"queue": "c"}] * 9)
    three = shown()
    assert ("Counts stop at 12," in alone, " 9 " in alone, "+" in alone) == (True, True, False)
    assert ("Counts stop at 8," in two, two.count(" ≈ 9 ")) == (True, 2)
    assert ("Counts stop at 5," in three, three.count(" ≈ 9 ")) == (True, 3)


def test_a_page_of_long_queues_reads_no_more_than_one_of_shorter_ones(boss, monkeypatch):
    """Counting sixty queues of 16,000 messages took seconds."""
    monkeypatch.setattr(message_counts, "READ_BUDGET", 4 * 10 * 80)
    monkeypatch.setattr(estimates, "PAGES", 10)

    def rows() -> int:
        with connection.cursor() as cursor:
            cursor.execute("analyze django_mq_queuedmessage")
        with pages_read() as read:
            boss.get(url("queuestate"))
        return read.rows

    with handlers.isolated():
        insert_all({"queue": f"q{n % 10}"} for n in range(10 * 100))
        short = rows()
        insert_all({"queue": f"q{n % 10}"} for n in range(10 * 300))
        assert rows() < 1.5 * short
