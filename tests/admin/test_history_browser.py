"""The history in a real browser: searched, viewed and replayed, also on a phone."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.urls import reverse

from django_mq import handler, handlers
from django_mq.models import HandledMessage, QueuedMessage
from tests.admin.pages import url
from tests.rows import add, beat

# Before the import: a module that is skipped cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    THOROUGH,
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    says,
    server,  # noqa: F401
    sync_api,
    visit,  # noqa: F401
)

PHONE = {"viewport": {"width": 390, "height": 844}}
DESK_AND_PHONE = pytest.mark.parametrize(
    "options", [pytest.param({}, marks=THOROUGH), PHONE], ids=["desk", "phone"]
)
TOPOLOGY = "admin:django_mq_queuestate_topology"


@pytest.fixture(autouse=True)
def rows():
    """A chain of three: two were handled, and one waits; its id is far from those drawn."""
    now = datetime.now(UTC)
    with handlers.isolated():
        for name, pattern in (("mails", "shop.orders.placed"), ("audits", "shop.#")):
            handler(pattern, queue="mail", name=name)(lambda delivery: None)
        for id, cause in ((1, None), (2, 1)):
            HandledMessage.objects.create(
                id=id,
                queue="mail",
                type="shop.orders.placed",
                handler="mails",
                key="customer 7",
                attempts=id,
                causation_id=cause,
                correlation_id=cause and str(cause),
                payload={"order_id": id},
                ended_at=now,
                started_at=now - timedelta(seconds=2),
                keep_until=now + timedelta(days=1),
            )
        chain = {"mq.causation_id": "2", "mq.correlation_id": "1"}
        add(id=10**9, type="nobody.hears", metadata=chain)
        beat()
        yield


@DESK_AND_PHONE
def test_a_handled_message_is_found_and_replayed(visit, options):  # noqa: F811
    page = visit(url("handledmessage"), **options)
    page.fill("#searchbar", "customer 7")
    page.keyboard.press("Enter")
    page.locator("#result_list tbody .mq-type").last.click()
    says(page, ".mq-chain", "#1000000000 nobody.hears")
    page.get_by_role("button", name="Replay…").click()
    says(page, "#content-main", "A copy of 1 handled message will be broadcast.")
    page.select_option("#mq-to", "audits")
    page.get_by_role("button", name="Replay", exact=True).click()
    says(page, ".messagelist", "1 message replayed.")
    assert QueuedMessage.objects.get(handler="audits").metadata == {"mq.replay_of": "1"}


@DESK_AND_PHONE
def test_the_history_is_exported(visit, options):  # noqa: F811
    page = visit(f"{url('handledmessage')}?key=customer+7", **options)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSON: all handled messages that match").click()
    assert download.value.suggested_filename.startswith("handled-messages-")
    found = json.loads(download.value.path().read_text())
    assert [(row["id"], row["payload"]) for row in found] == [
        (2, {"order_id": 2}),
        (1, {"order_id": 1}),
    ]


def test_a_chain_is_indented(visit):  # noqa: F811
    """The last rules of the style sheet apply: a missing brace would disable them."""
    page = visit(url("handledmessage", "change", 1))
    lefts = [
        page.locator(".mq-chain li").nth(n).locator(".mq-state").bounding_box()["x"]
        for n in range(3)
    ]
    assert lefts[0] < lefts[1] < lefts[2]
    weight = page.locator(".mq-chain li[aria-current]").evaluate(
        "e => getComputedStyle(e).fontWeight"
    )
    assert weight == "600"


@pytest.mark.parametrize("theme", [pytest.param("light", marks=THOROUGH), "dark"])
def test_no_page_is_wider_than_a_phone(visit, theme):  # noqa: F811
    page = visit(url("handledmessage"), color_scheme=theme, **PHONE)
    for address in (
        url("handledmessage"),
        url("handledmessage", "change", 2),
        url("queuedmessage", "change", 10**9),
        reverse(TOPOLOGY),
    ):
        page.goto(address)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, address


def test_names_of_handlers_are_shown_as_they_are_written(visit):  # noqa: F811
    page = visit(reverse(TOPOLOGY))
    head = page.locator(".mq-matrix thead th", has_text="audits")
    assert head.locator(".mq-name").inner_text() == "audits"  # as it would be copied
    assert head.locator(".mq-under").inner_text() == "queue mail"
    sync_api.expect(page.locator(".mq-routes")).to_be_hidden()


def test_types_are_a_list_on_a_phone(visit):  # noqa: F811
    """Of a table with a column per handler, only the first column would be in sight."""
    page = visit(reverse(TOPOLOGY), viewport={"width": 390, "height": 844})
    sync_api.expect(page.locator(".mq-matrix")).to_be_hidden()
    route = page.locator(".mq-routes > li", has_text="shop.orders.placed")
    for line in route.locator("li").all():
        assert line.bounding_box()["width"] > 250
    assert route.locator("li").all_inner_texts() == ["audits\nqueue mail", "mails\nqueue mail"]
    handler("bank.#", queue="mail", name="books")(lambda delivery: None)
    page.reload()
    idle = page.locator(".mq-routes > li", has_text="Handlers that take none of these types")
    assert idle.locator("li").all_inner_texts() == ["books\nqueue mail"]
