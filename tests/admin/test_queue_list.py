"""The list of queues, where there are many."""

from __future__ import annotations

import pytest
from django.contrib import admin

from django_mq import handlers
from django_mq.admin import queues as queue_admin
from django_mq.models import QueueState
from tests.admin.pages import text, url
from tests.pages_read import pages_read
from tests.rows import add_all

pytestmark = pytest.mark.django_db


@pytest.fixture
def three_to_a_page(monkeypatch):
    """Three queues to a page, and none but those of the test and the default one."""
    monkeypatch.setattr(queue_admin, "PER_PAGE", 3)
    with handlers.isolated():
        yield


def names(response):
    return [row.counts.queue for row in response.context["rows"]]


@pytest.mark.usefixtures("three_to_a_page")
def test_it_has_pages(boss):
    add_all({"queue": name} for name in "abcdefgh")
    first, last = boss.get(url("queuestate")), boss.get(url("queuestate"), {"page": 3})
    assert names(first) == ["a", "b", "c"]
    assert "1 to 3 of 9 queues Next page" in text(first)
    assert names(boss.get(url("queuestate"), {"page": 2})) == ["d", "default", "e"]
    assert names(last) == ["f", "g", "h"]
    assert "Previous page 7 to 9 of 9 queues" in text(last)


@pytest.mark.usefixtures("three_to_a_page")
@pytest.mark.parametrize(("page", "first"), [("x", "a"), ("", "a"), ("-1", "d"), ("9" * 99, "d")])
def test_any_page_number_is_answered(boss, page, first):
    add_all({"queue": name} for name in "abcd")
    assert names(boss.get(url("queuestate"), {"page": page}))[0] == first


def test_few_queues_need_no_pages(boss):
    assert "of 1 queues" not in text(boss.get(url("queuestate")))


@pytest.mark.usefixtures("three_to_a_page")
def test_the_pages_are_of_the_queues_that_the_user_may_see(boss, monkeypatch):
    """S33: nor does their number tell of the others."""
    add_all({"queue": name} for name in "abcdefgh")
    shown = admin.site.get_model_admin(QueueState)
    monkeypatch.setattr(shown, "get_queues", lambda request: {"b", "d", "f", "h"})
    assert names(boss.get(url("queuestate"))) == ["b", "d", "f"]
    assert "1 to 3 of 4 queues" in text(boss.get(url("queuestate")))


def test_only_the_queues_of_the_page_are_counted(boss, monkeypatch):
    add_all({"queue": f"q{n:03}"} for n in range(300))

    def cost(per_page):
        monkeypatch.setattr(queue_admin, "PER_PAGE", per_page)
        with pages_read() as read:
            boss.get(url("queuestate"))
        return read.total

    assert 2 * cost(20) < cost(1000)
