"""The overview in a real browser: live refresh, widths, themes, the keyboard."""

from __future__ import annotations

import pytest
from django.db.models.functions import Now, Trunc

from django_mq.models import MinuteFigures
from tests.rows import add, beat, decide

# Before the import: a module that is skipped cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    CONTRASTS,
    LOOKS,
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    says,
    server,  # noqa: F401
    visit,  # noqa: F401
)

PAGE = "/admin/django_mq/overview/"
INDEX = "/admin/django_mq/"
HIDE = """hidden => {
    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def fill():
    message = add(dead=-5, type="t" * 128, queue="q" * 128, handler="h" * 128)
    add("waiting", after=-4000)
    decide("paused", paused=-5)
    beat(running=[message.pk], host="host" * 20)
    MinuteFigures.objects.create(
        minute=Trunc(Now(), "minute"), worker="w", queue="q" * 128, handler="h" * 128,
        acked=12345, failed=3, retried=2, dead=1, broadcast=999, waited={"90": 4}, ran={"40": 5},
    )  # fmt: skip


def asked(page):
    """Count the requests for the live part from now on."""
    found = []

    def hear(request):
        if "part=live" in request.url:
            found.append(request.url)

    page.on("request", hear)
    return found


@pytest.mark.parametrize("address", [INDEX, PAGE])
def test_page_refreshes_while_its_tab_is_visible(visit, address):  # noqa: F811
    """At the chosen interval, and not while the tab is hidden; the choice is kept."""
    page = visit(address)
    page.clock.install()
    page.goto(f"{address}?span=day")
    assert page.input_value("[data-mq-refresh]") == "15"
    page.click("#mq-steps summary")
    page.evaluate("document.activeElement.blur()")
    requests = asked(page)
    add("appeared")
    page.clock.run_for(15_500)
    says(page, "#mq-live", "appeared")
    assert "span=day" in requests[0]
    assert page.get_attribute("#mq-steps", "open") is not None
    page.evaluate(HIDE, True)
    count = len(requests)
    page.clock.run_for(120_000)
    assert len(requests) == count
    add("returned")
    page.evaluate(HIDE, False)
    says(page, "#mq-live", "returned")
    page.select_option("[data-mq-refresh]", "0")
    page.evaluate("document.activeElement.blur()")
    count = len(requests)
    page.clock.run_for(120_000)
    assert len(requests) == count
    page.reload()
    assert page.input_value("[data-mq-refresh]") == "0"


def test_it_needs_no_scripts(visit):  # noqa: F811
    fill()
    page = visit(PAGE, java_script_enabled=False)
    page.get_by_role("link", name="Week").click()
    says(page, "#mq-live", "per 3 hours")
    page.click("#mq-steps summary")
    says(page, "#mq-steps", "12,345")
    assert not page.is_visible("[data-mq-refresh]")


def test_the_keyboard_reaches_everything(visit):  # noqa: F811
    """Queues, spans and the table; while an element has the focus, nothing is replaced."""
    fill()
    page = visit(PAGE)
    page.clock.install()
    page.reload()
    requests = asked(page)
    reached = set()
    page.focus("[data-mq-refresh]")
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
        if "The charts as a table" in reached:
            break
    assert {"waiting", "paused", "Hour", "Day", "Week", "The charts as a table"} <= reached
    page.clock.run_for(60_000)
    assert requests == []
    page.keyboard.press("Enter")
    says(page, "#mq-steps", "12,345")


@LOOKS
def test_it_fits_and_can_be_read(visit, width, scheme):  # noqa: F811
    fill()
    for address in (PAGE, INDEX):
        page = visit(address, color_scheme=scheme, viewport={"width": width, "height": 800})
        overflow = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, address
        page.click("#mq-steps summary")
        tables = page.evaluate(
            "[...document.querySelectorAll('.mq-wide')].map(e => e.scrollWidth - e.clientWidth)"
        )
        assert max(tables) <= 0, address
        assert min(page.evaluate(CONTRASTS)) >= 4.5, address
        box = page.locator(".mq-chart svg").first.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 80
