"""Accessibility that only a browser shows: colours, focus, print, announcements."""

from __future__ import annotations

import pytest
from django.db.models.functions import Now, Trunc

from django_mq.models import MinuteFigures
from tests.admin.pages import LIST, fail, url
from tests.rows import add, beat

# Before the import: a module that skipped itself cannot be imported.
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

OVERVIEW = "/admin/django_mq/overview/"
STYLE = "(e, name) => getComputedStyle(e)[name]"
#: The contrast of an element's colour, of the property `name`, with the page behind it.
CONTRAST = """(e, name) => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (parts) => parts.slice(0, 3).map((each) => {
        const part = each / 255;
        return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    }).reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
    let behind = e, opacity = 1;
    for (let each = e; each; each = each.parentElement) {
        opacity *= getComputedStyle(each).opacity;
    }
    while (!(channels(getComputedStyle(behind).backgroundColor)[3] ?? 1)) {
        behind = behind.parentElement;
    }
    const ground = channels(getComputedStyle(behind).backgroundColor);
    const own = channels(getComputedStyle(e)[name]);
    const seen = own.slice(0, 3).map((part, n) => part * opacity + ground[n] * (1 - opacity));
    const [dark, light] = [seen, ground].map(luminance).sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
}"""


@pytest.fixture
def figures():
    MinuteFigures.objects.create(
        minute=Trunc(Now(), "minute"), worker="w", queue="mail", handler="h",
        acked=5, retried=2, dead=1, broadcast=3, waited={"90": 4}, ran={"40": 5, "60": 1},
    )  # fmt: skip


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=THOROUGH)])
def test_zeros_and_charts_have_enough_contrast(visit, scheme):  # noqa: F811
    """4.5 for text, 3 for shapes (WCAG 1.4.3, 1.4.11)."""
    add(), beat()
    page = visit(OVERVIEW, color_scheme=scheme)
    for kind, name in ((".mq-bar", "fill"), (".mq-line", "stroke")):
        shapes = page.locator(kind).all()
        assert shapes, kind
        for shape in shapes:
            assert shape.evaluate(CONTRAST, name) >= 3, shape.get_attribute("class")
    page.goto(url("queuestate"))
    assert page.locator(".mq-zero").first.evaluate(CONTRAST, "color") >= 4.5


@pytest.mark.usefixtures("figures")
def test_the_legend_shows_how_a_line_is_drawn(visit):  # noqa: F811
    """Not only its colour."""
    page = visit(OVERVIEW)
    kinds = {
        name: page.locator(f".mq-swatch.mq-c-{name}").first.evaluate(STYLE, "borderTopStyle")
        for name in ("acked", "broadcast", "p50", "p95", "p99")
    }
    assert kinds == {
        "acked": "none", "broadcast": "solid", "p50": "solid", "p95": "dashed", "p99": "dotted",
    }  # fmt: skip


@pytest.mark.usefixtures("figures")
def test_forced_colours_keep_the_legend_and_the_edges_of_buttons(visit):  # noqa: F811
    message = add(dead=-5)
    page = visit(OVERVIEW, forced_colors="active")
    for name, side in (("acked", "backgroundColor"), ("p95", "borderTopColor")):
        swatch = page.locator(f".mq-swatch.mq-c-{name}").first.evaluate(STYLE, side)
        assert swatch not in ("rgb(255, 255, 255)", "rgb(0, 0, 0)", "rgba(0, 0, 0, 0)")
    page.goto(url("queuedmessage", "change", message.pk))
    buttons = page.locator(".mq-why .button").all()
    assert buttons
    for button in buttons:
        assert button.evaluate(STYLE, "borderTopWidth") == "1px"


def test_links_in_sentences_are_underlined(visit):  # noqa: F811
    """Not only coloured (WCAG 1.4.1)."""
    head = add(dead=-5, key="k", metadata={"mq.causation_id": "1"})
    message = add(key="k", blocked_by=head.pk)
    fail(head)
    beat(running=[message.pk])
    page = visit(OVERVIEW)
    for address, link in (
        (OVERVIEW, ".mq-facts-line a"),
        (url("failedattempt"), ".field-what .mq-type a"),
        (url("failedattempt", "errors"), ".mq-attempts .mq-quiet a"),
        (url("queuedmessage", "change", message.pk), ".mq-head a:not(.button)"),
        (url("queuestate", "change", "mail"), ".mq-heads th a"),
        (url("workerheartbeat"), "td[data-label=Running] a"),
        (url("workerheartbeat", "change", "worker"), ".readonly a"),
    ):
        page.goto(address)
        line = page.locator(f"#content {link}").first.evaluate(STYLE, "textDecorationLine")
        assert line == "underline", (address, link)


def test_long_texts_are_printed_in_full(visit):  # noqa: F811
    message = add(dead=-5, payload={"lines": list(range(200))})
    page = visit(url("queuedmessage", "change", message.pk))
    hidden = "e => e.scrollHeight - e.clientHeight"
    assert page.locator(".mq-document pre").first.evaluate(hidden) > 0
    page.emulate_media(media="print")
    assert page.locator(".mq-document pre").first.evaluate(hidden) <= 0


def test_the_focus_reaches_folded_filters_where_they_are_seen(visit):  # noqa: F811
    """Above the rows, not after them, on a narrow screen or at 400 % (WCAG 2.4.3)."""
    add(dead=-5)
    page = visit(LIST, viewport={"width": 320, "height": 640})
    summary = page.locator(".mq-filters > summary")
    row = page.locator("#result_list tbody a").first
    assert summary.bounding_box()["y"] < row.bounding_box()["y"]
    precedes = "(a, b) => !!(a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING)"
    assert page.evaluate(f"([a, b]) => ({precedes})(a, b)", [
        summary.element_handle(), row.element_handle(),
    ])  # fmt: skip


def test_a_screen_reader_hears_that_a_text_was_copied(visit):  # noqa: F811
    message = add(payload={"n": 1})
    page = visit(url("queuedmessage", "change", message.pk))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.get_by_role("button", name="Copy payload")
    status = page.get_by_role("status").last
    sync_api.expect(status).to_have_text("")
    page.clock.install()
    button.click()
    sync_api.expect(status).to_have_text("Copied")
    page.clock.run_for(2500)
    sync_api.expect(status).to_have_text("")


def test_a_focused_part_that_scrolls_is_not_replaced(visit):  # noqa: F811
    """The keyboard scrolls the part that has the focus; a refresh would take both away."""
    beat(), add()
    page = visit(url("queuestate"))
    page.clock.install()
    page.reload()
    with page.expect_response(url("queuestate")):
        page.select_option("[data-mq-refresh]", "5")
    page.evaluate("const e = document.querySelector('#mq-live'); e.tabIndex = 0; e.focus()")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    add("appeared")
    page.clock.run_for(20_000)
    assert requests == []
    page.evaluate("document.activeElement.blur()")
    page.clock.run_for(6000)
    says(page, "#mq-live", "appeared")
