"""An admin from right to left: our texts, numbers and charts still read from left to right."""

from __future__ import annotations

import pytest

from django_mq.models import Schedule
from tests.admin.pages import url
from tests.rows import add

# Before the import: a module that skipped itself cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    server,  # noqa: F401
    visit,  # noqa: F401
)

#: The positions of characters in an element that holds only text.
LEFT = """(node, texts) => texts.map(text => {
    const range = document.createRange(), at = node.textContent.indexOf(text);
    range.setStart(node.firstChild, at);
    range.setEnd(node.firstChild, at + 1);
    return range.getBoundingClientRect().left;
})"""


@pytest.fixture
def arabic(settings):
    settings.LANGUAGE_CODE = "ar"


def ascends(locator, *texts):
    positions = locator.evaluate(LEFT, texts)
    return positions == sorted(positions)


@pytest.mark.usefixtures("arabic")
def test_texts_read_from_left_to_right(visit):  # noqa: F811
    message = add(payload={"id": 7, "n": 1}, dead=-5)
    Schedule.objects.create(name="nightly", type="t", cron="15 3 * * *", every=None)
    page = visit(url("queuedmessage", "change", message.pk))
    assert page.locator("html").get_attribute("dir") == "rtl"
    assert ascends(page.locator("pre.mq-text").first, '"id"', "7", ",")
    created = page.locator(".readonly:has(> time)").first
    assert ascends(created.locator("time"), "-", ":")
    assert ascends(created.locator(".mq-quiet"), "(", "ago", ")")
    page.goto(url("schedule"))
    assert ascends(page.locator("#result_list code"), "15", "3", "*")


@pytest.mark.usefixtures("arabic")
def test_time_runs_to_the_right_in_charts_and_beside_them(visit):  # noqa: F811
    page = visit(url("overview"))
    boxes = [
        each.bounding_box()["x"] for each in page.locator(".mq-times").first.locator("span").all()
    ]
    assert boxes == sorted(boxes)
