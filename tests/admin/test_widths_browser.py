"""Lists at the width of a laptop, and as cards on a phone: nothing an operator needs is cut off."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.urls import reverse

from django_mq import handler, handlers
from django_mq.models import HandledMessage, Operation, Result, Schedule, UniqueKey
from tests.admin.pages import LIST, fail, url
from tests.rows import add, beat, decide, tally

# Before the import: a module that skipped itself cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    server,  # noqa: F401
    sync_api,
    visit,  # noqa: F401
)

LAPTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}}
EXCESS = "list => list.scrollWidth - list.clientWidth"
CRUMBS_OF_JAZZMIN = """() => document.querySelector("#content").insertAdjacentHTML(
    "afterbegin", `<ol class="breadcrumb"><li>${"t".repeat(128)}</li></ol>`
)"""
NAMES = {"type": "shop.customers.registered", "handler": "send_newsletter_to_customers"}


def test_the_buttons_of_a_list_leave_its_title_alone(visit):  # noqa: F811
    """Seven of them, when dead letters are filtered: they take two lines beside the title."""
    add(dead=-5)
    page = visit(LIST + "?state=dead&queue=mail", **LAPTOP)
    title = page.locator("#content h1")
    end = title.evaluate(
        "title => { const text = document.createRange(); text.selectNodeContents(title);"
        " return text.getBoundingClientRect().right; }"
    )
    tools = page.locator(".object-tools li")
    assert tools.count() == 7
    bottom = page.locator("#changelist").bounding_box()["y"]
    for tool in tools.all():
        box = tool.bounding_box()
        assert box["x"] >= end
        assert box["y"] + box["height"] <= bottom


def test_the_buttons_of_queues_are_in_sight_beside_large_numbers(visit):  # noqa: F811
    for n in range(3):
        add(f"shop.search.index{n}", key="customer/2999", dead=-7300)
        decide(f"shop.search.index{n}", paused=-5, until=7200, max_in_flight=10_000)
    page = visit(url("queuestate"), **LAPTOP)
    page.evaluate(
        "document.querySelectorAll('td.mq-count').forEach(cell => cell.textContent = '≈ 12,000')"
    )
    assert page.locator(".mq-wide").evaluate(EXCESS) <= 0


def test_the_options_of_a_queue_have_room_on_a_phone(visit):  # noqa: F811
    """The names of handlers, of 30 characters and more, were broken to a column of 60 pixels."""
    page = visit(url("queuestate", "change", "mail"), **PHONE)
    for value in page.locator(".mq-facts td").all():
        assert value.bounding_box()["width"] > 300
    page.set_viewport_size(LAPTOP["viewport"])
    name, value = page.locator(".mq-facts tr").first.locator("th, td").all()
    assert name.bounding_box()["y"] == value.bounding_box()["y"]


@pytest.mark.parametrize("count", [4, 5, 12])
def test_types_and_handlers_fit_on_a_laptop_and_a_phone(visit, count):  # noqa: F811
    """A column per handler is too wide from the fifth on."""
    address = reverse("admin:django_mq_queuestate_topology")
    names = [f"shop.billing.handlers.send_invoice_to_customer_{n}" for n in range(count)]
    with handlers.isolated():
        for n, name in enumerate(names):
            handler(
                f"shop.customers.registered{n}", "shop.#", name=name, queue=f"billing.mails{n}"
            )(lambda delivery: None)
        page = visit(address, **LAPTOP)
        for size in (LAPTOP, PHONE):
            page.set_viewport_size(size["viewport"])
            page.goto(address)
            assert page.locator("html").evaluate(EXCESS) <= 0
            for table in page.locator(".mq-wide").all():
                assert table.evaluate(EXCESS) <= 0, size
            for name in names:
                shown = page.locator("#content").get_by_text(name).locator("visible=true").first
                box = shown.bounding_box()
                assert box["x"] + box["width"] <= size["viewport"]["width"], (name, size)


@pytest.fixture
def rows():
    error = "smtplib.SMTPServerDisconnected: no"
    message = add(
        "shop.search.index",
        id=10**7,
        dead=-400_000,
        dead_reason="expired",
        last_error=error,
        **NAMES,
    )
    fail(message, error_class="smtplib.SMTPServerDisconnected", error_text="no")
    moments = dict.fromkeys(("created_at", "ended_at", "keep_until"), message.created_at)
    HandledMessage.objects.create(id=1, queue="shop.search.index", **NAMES, **moments)
    Operation.objects.create(
        action="requeue", filter={"queue": ["mail"]}, by="ada", last_id=9, matched=5500, done=5490,
        skipped=10, state="running", created_at=Now() - timedelta(hours=100),
    )  # fmt: skip
    Result.objects.create(message_id=1, handler=NAMES["handler"], error_class="KeyError")
    zone = "America/Argentina/Buenos_Aires"
    Schedule.objects.create(
        name="shop.nightly.prune", type=NAMES["type"], cron="15 10 1,15 1-3 *", tz=zone,
        last_at=Now() - timedelta(hours=20, minutes=20), last_error="full",
        next_at=Now() + timedelta(days=20, hours=20),
    )  # fmt: skip
    UniqueKey.objects.create(queue="shop.search.index", unique_id="order/1000000", **NAMES)


@pytest.mark.usefixtures("rows")
def test_lists_are_cards_on_a_phone(visit):  # noqa: F811
    """Each cell has the heading of its column, and the box that selects all rows stays."""
    page = visit(LIST, **PHONE)
    models = ("failedattempt", "handledmessage", "operation", "queuedmessage", "result")
    for model in (*models, "schedule", "uniquekey"):
        page.goto(url(model))
        assert page.locator(".results").evaluate(EXCESS) <= 0, model
        last = page.locator("#result_list tbody td[data-label]").last
        assert last.get_attribute("data-label"), model
        box = page.locator("#result_list tbody tr").bounding_box()
        assert box["x"] + box["width"] <= 390, model
    page.goto(LIST)
    says_queue = page.locator("#result_list td.field-where")
    assert says_queue.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Queue"'
    page.check("#action-toggle")
    assert page.locator("#result_list tbody .action-select").is_checked()
    page.uncheck("#result_list tbody .action-select")  # nothing lies over it


@pytest.mark.usefixtures("rows")
def test_lists_are_tables_on_a_laptop(visit):  # noqa: F811
    page = visit(LIST, **LAPTOP)
    for model in ("queuedmessage", "failedattempt", "handledmessage", "operation", "schedule"):
        page.goto(url(model))
        assert page.locator(".results").evaluate(EXCESS) <= 0, model
    sync_api.expect(page.locator("#result_list thead")).to_be_visible()


def test_the_longest_names_hide_nothing(visit):  # noqa: F811
    """A name may have 128 characters without a joint where a browser would break it."""
    longest = {"key": "k" * 128, "unique_id": "u" * 128, "handler": "h" * 128, "type": "t" * 128}
    message = add("q" * 128, dead=-5, **longest)
    beat("w" * 32, host="h" * 60, timings={"h" * 128: tally(acked=9, ran=[0.010] * 9)})
    page = visit(url("queuestate"), **LAPTOP)
    for size in (LAPTOP, PHONE):
        page.set_viewport_size(size["viewport"])
        for address in (url("queuestate"), url("workerheartbeat"), "/admin/django_mq/"):
            page.goto(address)
            for table in page.locator(".mq-wide").all():
                assert table.evaluate(EXCESS) <= 0, (address, size)
        page.goto(url("queuedmessage", "change", message.pk))
        for field in page.locator(".readonly").all():
            box = field.bounding_box()
            assert box["x"] + box["width"] <= size["viewport"]["width"], field.inner_text()
        title = page.locator("#content h1").bounding_box()
        tools = page.locator(".object-tools").bounding_box()
        apart = (
            title["x"] + title["width"] <= tools["x"] or title["y"] + title["height"] <= tools["y"]
        )
        assert apart, size
    page.evaluate(CRUMBS_OF_JAZZMIN)
    assert page.locator("html").evaluate(EXCESS) <= 0
