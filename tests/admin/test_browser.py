"""The admin in a real browser: buttons, selections, themes, widths, a strict security policy."""

from __future__ import annotations

import json
import shutil

import pytest
from django.contrib.staticfiles.testing import StaticLiveServerTestCase

from django_mq.models import Operation, QueuedMessage, QueueState
from tests.admin.pages import LIST, fail, url
from tests.rows import add, beat, decide

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")

# A page on a busy machine may take longer than the 5 s that playwright waits.
sync_api.expect.set_options(timeout=30_000)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

THOROUGH = pytest.mark.thorough
# A plain run has the phone, where most goes wrong; the laptop is in many other tests.
WIDTHS = pytest.mark.parametrize("width", [pytest.param(1280, marks=THOROUGH), 390])
LOOKS = pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        pytest.param(390, "light", marks=THOROUGH),
        pytest.param(1280, "dark", marks=THOROUGH),
        pytest.param(1280, "light", marks=THOROUGH),
    ],
)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'"
)


def strict(get_response):
    """Let no inline code run."""

    def middleware(request):
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return middleware


@pytest.fixture(scope="module")
def browser():
    # Playwright's loop runs in this thread, so Django takes it for an asynchronous caller.
    with pytest.MonkeyPatch.context() as patch, sync_api.sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def server(transactional_db, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.strict"]
    StaticLiveServerTestCase.setUpClass()
    yield StaticLiveServerTestCase.live_server_url
    StaticLiveServerTestCase.tearDownClass()


@pytest.fixture
def visit(browser, server, boss):
    """Open an address as the superuser, or as the user of a client; no page may log an error."""
    contexts, errors = [], []

    def hear(said):
        if said.type == "error" and not said.location["url"].endswith("/favicon.ico"):
            errors.append(said.text)

    def visit(address, user=None, **options):
        context = browser.new_context(base_url=server, **options)
        contexts.append(context)
        session = (user or boss).cookies["sessionid"].value
        context.add_cookies([{"name": "sessionid", "value": session, "url": server}])
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", hear)
        page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert errors == []


def says(page, selector, words):
    """Wait until the element that `selector` finds contains `words`."""
    sync_api.expect(page.locator(selector)).to_contain_text(words)


def test_a_dead_letter_is_found_and_requeued(visit):
    add(), add(dead=-5, last_error="KeyError: 'order'")
    page = visit(LIST)
    page.get_by_role("link", name="Dead letters").click()
    sync_api.expect(page.locator("#result_list tbody tr")).to_have_count(1)
    page.click("#result_list tbody .mq-type")
    says(page, ".mq-why", "has been dead since")
    page.get_by_role("button", name="Requeue").click()
    says(page, ".messagelist", "Requeue: 1 message.")
    says(page, ".mq-why", "has been due since")
    assert not QueuedMessage.objects.dead().exists()


@WIDTHS
def test_the_number_of_messages_per_state_is_shown(visit, width):
    for _ in range(3):
        add(dead=-5)
    add()
    page = visit(LIST, viewport={"width": width, "height": 844})
    summary = page.locator(".mq-filters > summary")
    for state, count in (("dead", 3), ("processable", 1)):
        link = page.locator("#changelist-filter").get_by_role("link", name=f"{state} {count}")
        if width < 1024:  # A narrow window folds the filters, once the whole page is there.
            sync_api.expect(link).to_be_hidden()
            summary.click()
        link.click()
        sync_api.expect(page.locator("#result_list tbody tr")).to_have_count(count)
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(width) <= 0


def test_a_selection_is_discarded_after_a_question(visit):
    for _ in range(3):
        add(dead=-5)
    filtered = LIST + "?state=dead&queue=mail"
    page = visit(filtered)
    for answer in ("No, take me back", "Discard"):
        page.check("#action-toggle")
        page.select_option("select[name=action]", "discard")
        page.click("button[name=index]")
        says(page, "#content-main", "3 dead letters")
        page.locator(".mq-confirm .button", has_text=answer).click()
        page.wait_for_url(f"**{filtered}")
    says(page, ".messagelist", "Discard: 3 messages.")
    assert not QueuedMessage.objects.exists()


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_one_message_is_cancelled_from_its_page(visit, scripts):
    message = add(after=600)
    page = visit(url("queuedmessage", "change", message.pk), java_script_enabled=scripts)
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel", exact=True).click()
    says(page, ".messagelist", "Cancel: 1 message.")
    assert not QueuedMessage.objects.exists()


@WIDTHS
def test_unknown_queue_is_paused_after_a_confirmation(visit, width):
    add()
    page = visit(url("queuestate"), viewport={"width": width, "height": 800})
    page.get_by_label("Part of a queue's name").fill("mail.archive")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("button", name="Pause a queue of this name…").click()
    says(page, "#content-main", "Queue mail.archive is not known")
    assert not QueueState.objects.exists()
    page.get_by_role("button", name="Pause mail.archive anyway").click()
    says(page, ".messagelist", "Queue mail.archive is paused.")
    says(page, "#mq-live", "mail.archive")
    assert QueueState.objects.get().queue == "mail.archive"


def test_a_queue_is_paused_and_resumed(visit):
    add()
    page = visit(url("queuestate"))
    row = page.locator("tr", has=page.get_by_role("link", name="mail", exact=True))
    row.get_by_role("button", name="Pause").click()
    sync_api.expect(row).to_contain_text("until resumed")
    assert QueueState.objects.get().paused_at is not None
    row.get_by_role("link", name="mail", exact=True).click()
    page.get_by_role("button", name="Resume").click()
    says(page, ".messagelist", "is no longer paused")
    page.select_option("select[name=seconds]", "3600")
    page.get_by_role("button", name="Pause").click()
    says(page, ".messagelist", "is paused")
    assert QueueState.objects.get().paused_until is not None


def test_a_queue_is_limited_and_its_backoff_ended(visit):
    add()
    decide("mail", backoff_level=2, backoff=60)
    page = visit(url("queuestate", "change", "mail"))
    page.fill("input[name=max_in_flight]", "5")
    page.get_by_role("button", name="Limit", exact=True).click()
    says(page, ".messagelist", "is limited")
    says(page, ".mq-facts", "set by an operator")
    page.get_by_role("button", name="Lift the limit").click()
    says(page, ".messagelist", "has the limit of the settings")
    says(page, ".mq-why", "backing off")
    page.get_by_role("button", name="End the backoff").click()
    says(page, ".messagelist", "is no longer backing off")
    sync_api.expect(page.get_by_role("button", name="End the backoff")).to_have_count(0)
    state = QueueState.objects.get()
    assert (state.max_in_flight, state.backoff_level) == (None, 0)


def test_discarding_a_dead_head_frees_its_followers(visit):
    head = add(key="k", dead=-5)
    message = add(key="k", blocked_by=head.pk)
    page = visit(url("queuedmessage", "change", message.pk))
    says(page, ".mq-why", f"waits behind message {head.pk} of its key k")
    page.get_by_role("button", name=f"Discard #{head.pk}").click()
    says(page, "#content-main", "wait behind the selected ones: 1")
    page.get_by_role("button", name="Discard", exact=True).click()
    says(page, ".messagelist", "Discard: 1 message.")
    says(page, ".mq-why", "has been due since")
    assert QueuedMessage.objects.get() == message


def test_a_dead_head_is_requeued_from_the_page_of_its_queue(visit):
    head = add(key="k", dead=-5)
    add(key="k", blocked_by=head.pk)
    page = visit(url("queuestate", "change", "mail"))
    page.get_by_role("button", name=f"Requeue #{head.pk}").click()
    says(page, ".messagelist", "Requeue: 1 message.")
    says(page, ".mq-heads", "processable")
    assert not QueuedMessage.objects.dead().exists()


def test_the_list_of_messages_needs_no_scrolling_at_1280(visit):
    """Handler names, types and keys are broken into lines."""
    names = {"type": "shop.orders.invoices.reminder.third.sent", "key": "tenant/" + "x" * 100}
    names["handler"] = "shop.billing.handlers.send_invoice_to_customer_by_mail_and_post"
    head = add(dead=-5, last_error="smtplib.SMTPServerDisconnected: no", attempts=20, **names)
    add(blocked_by=head.pk, **names), add(leased=60, **names)
    page = visit(LIST, viewport={"width": 1280, "height": 800})
    excess = page.evaluate(
        "(list => list.scrollWidth - list.clientWidth)(document.querySelector('.results'))"
    )
    assert excess <= 0


def test_page_of_queues_refreshes_itself(visit):
    add()
    page = visit(url("queuestate"))
    page.clock.install()
    page.reload()
    page.select_option("[data-mq-refresh]", "5")
    add("appeared")
    page.clock.run_for(6000)
    page.wait_for_selector("text=appeared")


@WIDTHS
def test_pages_of_operations_refresh_themselves(visit, width):
    """The cells of a list on a phone keep their labels after a refresh."""
    row = Operation.objects.create(
        action="cancel", filter={}, last_id=9, matched=9, state="running"
    )
    for address in (url("operation"), url("operation", "change", row.pk)):
        page = visit(address, viewport={"width": width, "height": 844})
        page.clock.install()
        page.reload()
        page.select_option("[data-mq-refresh]", "5")
        Operation.objects.update(done=row.done + 1)
        row.refresh_from_db()
        page.clock.run_for(6000)
        says(page, "#mq-live", f"{row.done} changed of 9")
        if address == url("operation"):
            sync_api.expect(page.locator("#mq-live td[data-label=Progress]")).to_have_count(1)
            sync_api.expect(page.locator("#result_list.mq-cards")).to_have_count(1)


@pytest.mark.parametrize("model", ["handledmessage", "operation", "schedule"])
def test_filters_of_every_list_fold_on_a_phone(visit, model):
    page = visit(url(model), viewport={"width": 390, "height": 800})
    sync_api.expect(page.locator("#changelist-filter")).to_be_hidden()
    page.locator(".mq-filters > summary").click()
    sync_api.expect(page.locator("#changelist-filter")).to_be_visible()


@WIDTHS
def test_the_page_of_a_message_copies_and_has_a_timeline(visit, width):
    message = add(payload={"user": {"id": 7}}, attempts=1, after=60)
    fail(message)
    page = visit(
        url("queuedmessage", "change", message.pk), viewport={"width": width, "height": 900}
    )
    page.get_by_role("button", name="Copy payload").click()
    says(page, ".mq-document", "Copied")
    says(page, ".mq-timeline", "Attempt 1 failed")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_message_is_found_by_a_box_and_a_search_on_a_phone(visit):
    """Filters are folded, open by keyboard, and survive a visit to a message."""
    wanted = add("mail", type="shop.mails.sent", payload={"user": {"id": 7}})
    add("post", type="shop.mails.sent")
    page = visit(LIST, viewport={"width": 390, "height": 800})
    sync_api.expect(page.locator("#changelist-filter")).to_be_hidden()
    page.locator(".mq-filters > summary").focus()
    page.keyboard.press("Enter")
    page.get_by_role("textbox", name="Type").fill("shop.mails.*")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#result_list tbody tr")).to_have_count(2)
    page.fill("#searchbar", "payload.user.id:7")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#result_list tbody tr")).to_have_count(1)
    page.click("#result_list tbody .mq-type")
    page.get_by_role("link", name="Back to the filtered list").click()
    says(page, "#result_list", f"{wanted.pk}")
    sync_api.expect(page.locator("#searchbar")).to_have_value("payload.user.id:7")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSON: all messages that match").click()
    [row] = json.loads(download.value.path().read_text())
    assert (row["id"], row["payload"]) == (wanted.pk, {"user": {"id": 7}})


@LOOKS
def test_pages_fit_and_can_be_read(visit, width, scheme):
    """No content makes a page scroll sideways, and states have enough contrast in both themes."""
    message = add(dead=-5, payload={"text": "x" * 3000}, last_error="E" * 400, type="t" * 128)
    names = {"key": "k" * 128, "handler": "h" * 128, "type": "t" * 128}
    head = add(dead=-5, **names)
    blocked = add(blocked_by=head.pk, unique_id="u" * 128, **names)
    decide("paused", paused=-5)
    decide("failing", backoff_level=3, backoff=600, max_in_flight=25)
    beat(running=[message.pk])
    for address in (
        LIST,
        url("queuedmessage", "change", message.pk),
        url("queuedmessage", "change", blocked.pk),
        url("uniquekey"),
        url("queuestate"),
        url("queuestate", "change", "mail"),
        url("queuestate", "change", "failing"),
        url("workerheartbeat"),
        url("workerheartbeat", "change", "worker"),
    ):
        page = visit(address, color_scheme=scheme, viewport={"width": width, "height": 800})
        overflow = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, address
        for contrast in page.evaluate(CONTRASTS):
            assert contrast >= 4.5, address


CONTRASTS = """() => [...document.querySelectorAll(".mq-state")].map((badge) => {
    const luminance = (color) => {
        const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((channel) => {
            const part = channel / 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = getComputedStyle(badge);
    const [dark, light] = [style.color, style.backgroundColor].map(luminance).sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
})"""
