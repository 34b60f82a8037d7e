"""Quieting, resuming and stopping a worker in a real browser, also on a phone."""

from __future__ import annotations

import pytest

from django_mq.models import WorkerCommand, WorkerHeartbeat
from tests.admin.pages import url
from tests.rows import beat

# Before the import: a module that is skipped cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    WIDTHS,
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    says,
    server,  # noqa: F401
    visit,  # noqa: F401
)


@WIDTHS
def test_the_way_of_a_worker(visit, width):  # noqa: F811
    beat("w", host="mail-1")
    page = visit(url("workerheartbeat"), viewport={"width": width, "height": 844})
    page.get_by_role("button", name="Quiet… mail-1, process 7").click()
    says(page, "#content-main", "will claim nothing more")
    page.get_by_role("button", name="Quiet", exact=True).click()
    says(page, ".messagelist", "The worker was told.")
    WorkerHeartbeat.objects.update(quiet=True)
    page.get_by_role("link", name="mail-1").click()
    says(page, ".field-condition", "quiet")
    says(page, ".field-recent_orders", "Quiet by ada")
    page.get_by_role("button", name="Resume").click()
    says(page, ".messagelist", "The worker was told.")
    page.get_by_role("button", name="Stop…").click()
    says(page, "#content-main", "will drain and end")
    page.get_by_role("link", name="No, take me back").click()
    page.get_by_role("button", name="Stop…").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    says(page, ".field-recent_orders", "Stop by ada")
    actions = WorkerCommand.objects.order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["quiet", "resume", "leave"]
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0
