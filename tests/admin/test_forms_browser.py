"""Forms in a real browser, on a phone too: broadcast, edit, pause."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from django_mq import handler, handlers
from django_mq.models import QueuedMessage, QueueState
from tests.admin.pages import LIST, url
from tests.admin.test_browser import (
    WIDTHS,
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    says,
    server,  # noqa: F401
    visit,  # noqa: F401
)
from tests.rows import add, stored


@WIDTHS
def test_a_message_is_broadcast_and_edited(visit, width):  # noqa: F811
    with handlers.isolated():
        handler("shop.orders.*", queue="mail", name="mailer")(lambda delivery: None)
        page = visit(LIST, viewport={"width": width, "height": 800})
        page.get_by_role("link", name="Broadcast…").click()
        page.get_by_label("Type").fill("shop.orders.placed")
        page.get_by_label("Payload").fill('{"order": ')
        page.get_by_role("button", name="Show recipients").click()
        says(page, ".form-row.errors", "This is not JSON")
        page.get_by_label("Payload").fill('{"order": 7}')
        page.get_by_label("Delay").fill("600")
        page.get_by_role("button", name="Show recipients").click()
        says(page, ".mq-why", "handler mailer in queue mail")
        page.get_by_role("button", name="Broadcast", exact=True).click()
        says(page, ".messagelist", "added, queue mail, handler mailer.")
    page.get_by_role("link", name="Edit…").click()
    page.get_by_label("Payload").fill('{"order": 8}')
    page.get_by_label("Priority").fill("5")
    page.get_by_role("button", name="Save").click()
    says(page, ".messagelist", "has been changed.")
    row = QueuedMessage.objects.get()
    assert (row.payload, row.priority, row.state) == ({"order": 8}, 5, "delayed")


def test_a_queue_is_paused_on_a_phone_without_scrolling_sideways(visit):  # noqa: F811
    add("a.rather.long.name.of.a.queue"), add(blocked_by=add(dead=-1, key="k").pk, key="k")
    page = visit(url("queuestate"), viewport={"width": 390, "height": 800})
    for button in page.get_by_role("button", name="Pause").all():
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    page.get_by_role("button", name="Pause").first.click()
    says(page, ".messagelist", "is paused")
    assert QueueState.objects.get(paused_at__isnull=False)


def test_the_message_was_claimed_first(visit):  # noqa: F811
    row = add(payload={"n": 1})
    page = visit(url("queuedmessage", "edit", row.pk))
    QueuedMessage.objects.filter(pk=row.pk).update(
        leased_until=row.created_at, claimed_by="worker:1", attempts=1
    )
    page.get_by_label("Priority").fill("5")
    page.get_by_role("button", name="Save").click()
    says(page, ".messagelist", "does not wait, so it cannot be edited")
    assert stored(row).priority == 0


def test_the_search_box_offers_paths(visit):  # noqa: F811
    add(payload={"user": {"id": 7}}), add(payload={"order": 1})
    page = visit(LIST)
    assert page.locator("#mq-paths option").count() == 0
    page.focus("#searchbar")
    page.wait_for_selector("#mq-paths option", state="attached")
    offered = page.locator("#mq-paths option").evaluate_all("all => all.map(each => each.value)")
    assert offered == ["payload.order:", "payload.user.id:"]
    page.fill("#searchbar", "payload.user.id:7")
    page.keyboard.press("Enter")
    says(page, ".paginator, .mq-extent", "1 message")
