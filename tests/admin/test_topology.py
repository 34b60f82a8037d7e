"""The page of types and handlers."""

from __future__ import annotations

import pytest
from django.urls import reverse

from django_mq import handler, handlers
from django_mq.admin import QueueStateAdmin
from tests.admin.pages import text, url
from tests.rows import add, beat

pytestmark = pytest.mark.django_db

PAGE = reverse("admin:django_mq_queuestate_topology")


@pytest.fixture(autouse=True)
def _handlers():
    with handlers.isolated():
        handler("shop.placed", queue="mail", name="mails")(lambda delivery: None)
        handler("shop.#", queue="audit", name="audits")(lambda delivery: None)
        yield


def test_page_shows_types_and_their_handlers(viewer):
    add(type="nobody.hears")
    add(type="shop.placed")
    assert PAGE in viewer.get(url("queuestate")).content.decode()
    page = text(viewer.get(PAGE))
    assert "No handler registered here subscribes to: nobody.hears" in page
    assert "No worker is alive" in page
    assert "shop.placed 1 ● yes ● yes" in page
    beat()
    page = text(viewer.get(PAGE))
    assert "No call counted in the last 7 days: audits , mails" in page


def test_it_takes_few_queries(viewer, django_assert_max_num_queries):
    with django_assert_max_num_queries(18):
        viewer.get(PAGE)


def test_it_needs_the_right_to_see_queues(login):
    assert login("view_queuedmessage").get(PAGE).status_code == 403


def test_a_user_of_one_queue_sees_its_handlers(boss, monkeypatch):
    """S33."""
    add(type="secret", queue="audit")
    monkeypatch.setattr(QueueStateAdmin, "get_queues", lambda self, request: {"mail"})
    page = text(boss.get(PAGE))
    assert "mails" in page
    assert "audits" not in page
    assert "secret" not in page
