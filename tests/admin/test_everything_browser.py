"""The whole way in a browser: from a group of errors to a finished operation, at both widths."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mq.models import QueuedMessage
from django_mq.operations.steps import take_step
from tests.admin.pages import fail, url
from tests.rows import add

# Before the import: a module that is skipped cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    WIDTHS,
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    says,
    server,  # noqa: F401
    sync_api,
    visit,  # noqa: F401
)


@WIDTHS
def test_the_messages_of_an_error_are_requeued(visit, width):  # noqa: F811
    for n in range(3):
        fail(add(dead=-1), place="shop.mail:send", handler="h", error_text=f"no order {n}")
    other = add(dead=-1)
    page = visit(url("failedattempt", "errors"), viewport={"width": width, "height": 800})
    says(page, ".mq-attempts article", "3 failed attempts")
    fits(page)
    page.get_by_role("link", name="Requeue").click()
    says(page, "#content-main", "3 messages match")
    fits(page)
    page.get_by_role("button", name="Requeue", exact=True).click()
    says(page, ".messagelist", "a worker carries it out")
    says(page, "#result_list", "0 changed of 3")
    fits(page)
    with transaction.atomic(), connection.cursor() as cursor:
        take_step(cursor)
    page.reload()
    says(page, "#result_list", "3 changed of 3")
    sync_api.expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    assert QueuedMessage.objects.dead().get() == other


def fits(page):
    """No content makes the page scroll sideways."""
    overflow = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
