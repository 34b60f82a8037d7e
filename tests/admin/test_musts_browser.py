"""The features that people expect of a dashboard for queues, each shown in a browser.

| an operator can | shown by |
|---|---|
| watch a page refresh, choose how often, and have it pause in a hidden tab | `test_overview_browser.test_page_refreshes_while_its_tab_is_visible` |
| see the number of messages per state | `test_browser.test_the_number_of_messages_per_state_is_shown`, `test_states_are_counted_on_tiles` |
| filter by queue, handler, metadata, worker, priority | `test_filters_add_up`, `test_browser.test_a_message_is_found_by_a_box_and_a_search_on_a_phone` |
| act on a selection, and on everything that matches, in batches | `test_browser.test_a_selection_is_discarded_after_a_question`, `test_everything_browser.test_the_messages_of_an_error_are_requeued` |
| confirm before rows are removed, and see later whose decision it was | `test_browser.test_one_message_is_cancelled_from_its_page`, `test_the_history_of_a_message_names_the_user` |
| read the timeline of a message, every attempt with worker, error and traceback, and copy | `test_attempts_are_shown_in_full`, `test_browser.test_the_page_of_a_message_copies_and_has_a_timeline` |
| retry, run now, run at, cancel, discard, stop | `test_browser.test_a_dead_letter_is_found_and_requeued`, `test_a_delayed_message_runs_now`, `test_forms_browser.test_a_message_is_broadcast_and_edited`, `test_browser.test_one_message_is_cancelled_from_its_page`, `test_browser.test_a_selection_is_discarded_after_a_question`, `test_a_running_message_is_stopped` |
| see queues, the oldest due message first, with depth and rates; pause and limit them | `test_queues_are_listed_by_age`, `test_browser.test_a_queue_is_paused_and_resumed`, `test_browser.test_a_queue_is_limited_and_its_backoff_ended` |
| see workers with host, process, version, current messages and last beat; quiet and stop them | `test_worker_with_its_running_message`, `test_worker_orders_browser.test_the_way_of_a_worker` |
| see the next and the last time of schedules; run, disable and enable them; see who did | `test_a_schedule_is_run_disabled_and_enabled` |
| see errors in groups, and retry a group | `test_everything_browser.test_the_messages_of_an_error_are_requeued` |
| see charts of throughput and of latency | `test_overview_browser.test_it_fits_and_can_be_read` |
| see which handler takes which type, and types that none takes | `test_types_without_a_handler_are_named` |
| be limited to looking, or to single actions, and not see payloads | `test_a_viewer_neither_acts_nor_reads_payloads`, `test_secrets_are_masked` |
| use a dark theme, share the address of a list, export it | `test_browser.test_pages_fit_and_can_be_read`, `test_filters_add_up`, `test_history_browser.test_the_history_is_exported` |
| page through large tables | `test_large_list_is_split_into_windows` |

Two more are not pages: `/metrics` is tested in `acceptance/test_metrics.py`, `mq_status --json` in
`management/`. There are no relays yet, so no page shows their lag.
"""  # noqa: E501  (a table)

from __future__ import annotations

import re
from datetime import timedelta
from importlib import import_module

import pytest
from django.db.models.functions import Now
from django.urls import reverse

from django_mq import handler, handlers
from django_mq.admin import bounds, windows
from django_mq.models import QueuedMessage, Schedule, WorkerCommand
from tests.admin.pages import LIST, fail, url
from tests.rows import add, add_all, beat

# Before the import: a module that skipped itself cannot be imported.
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tests.admin.test_browser import (
    browser,  # noqa: F401
    pytestmark,  # noqa: F401
    says,
    server,  # noqa: F401
    sync_api,
    visit,  # noqa: F401
)

ROWS = "#result_list tbody tr"


def moments(**seconds):
    """Return moments of the database, given in seconds from now."""
    return {name: Now() + timedelta(seconds=value) for name, value in seconds.items()}


def test_the_table_names_tests_that_exist():
    named = re.findall(r"`(?:(test_\w+)\.)?(test_\w+)`", __doc__)
    assert len(named) > 20
    for module, name in named:
        found = import_module(f"tests.admin.{module}") if module else None
        assert hasattr(found, name) if found else name in globals(), name


def test_states_are_counted_on_tiles(visit):  # noqa: F811
    add(), add(), add(dead=-5)
    page = visit("/admin/django_mq/overview/")
    says(page, ".mq-tile.mq-edge-processable", "2")
    page.locator(".mq-tile.mq-edge-dead a").click()
    sync_api.expect(page.locator(ROWS)).to_have_count(1)


def test_filters_add_up(visit):  # noqa: F811
    """Each narrows the list further, and the address of the list is all that another needs."""
    wanted = add("mail", handler="mailer", priority=5, leased=60, claimed_by="w1:1")
    wanted_columns = {"handler": "mailer", "priority": 5, "leased": 60, "claimed_by": "w1:1"}
    for name, value in (("handler", "other"), ("priority", 0), ("claimed_by", "w2:1")):
        add("mail", **{**wanted_columns, name: value})
    add("post", **wanted_columns)
    page = visit(LIST)
    left = 5
    for label, text in (("Queue", "mail"), ("Handler", "mailer"), ("Priority", "5")):
        page.get_by_role("textbox", name=label, exact=True).fill(text)
        page.keyboard.press("Enter")
        left -= 1
        sync_api.expect(page.locator(ROWS)).to_have_count(left)
    page.get_by_role("textbox", name="Worker", exact=True).fill("w1")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(ROWS)).to_have_count(1)
    again = visit(page.url)
    says(again, "#result_list", str(wanted.pk))


def test_the_history_of_a_message_names_the_user(visit):  # noqa: F811
    message = add(dead=-5)
    page = visit(url("queuedmessage", "change", message.pk))
    page.get_by_role("button", name="Requeue").click()
    says(page, ".messagelist", "Requeue: 1 message.")
    page.get_by_role("link", name="History").click()
    says(page, "#change-history", "ada")
    says(page, "#change-history", "Requeue")


def test_attempts_are_shown_in_full(visit):  # noqa: F811
    message = add(dead=-5, attempts=2, created=-60)
    for attempt in (1, 2):
        start = message.created_at + timedelta(seconds=20 * attempt)
        times = {"started_at": start, "ended_at": start + timedelta(seconds=3)}
        fail(
            message, attempt, worker=f"w{attempt}:1", error_text="no order",
            traceback=f"in send, attempt {attempt}", **times,
        )  # fmt: skip
    page = visit(url("queuedmessage", "change", message.pk))
    says(page, ".mq-timeline", "ran 3 s")
    says(page, ".mq-timeline", "waited 17 s")
    first, second = page.locator(".mq-attempts article").all()
    for article, attempt in ((first, 2), (second, 1)):
        sync_api.expect(article).to_contain_text("ValueError")
        sync_api.expect(article).to_contain_text(f"worker w{attempt}:1")
        sync_api.expect(article).to_contain_text("no order")
    second.locator("summary").click()
    sync_api.expect(second.get_by_text("in send, attempt 1")).to_be_visible()


def test_a_delayed_message_runs_now(visit):  # noqa: F811
    message = add(after=600)
    page = visit(url("queuedmessage", "change", message.pk))
    page.get_by_role("button", name="Run now").click()
    says(page, ".messagelist", "Run now: 1 message.")
    assert QueuedMessage.objects.get().state == "processable"


def test_a_running_message_is_stopped(visit):  # noqa: F811
    message = add(leased=60, claimed_by="w:1", attempts=1)
    beat("w", running=[message.pk])
    page = visit(url("queuedmessage", "change", message.pk))
    page.get_by_role("button", name="Stop…").click()
    says(page, "#content-main", "will be stopped")
    page.get_by_role("button", name="Stop", exact=True).click()
    says(page, ".messagelist", "The worker was asked")
    assert WorkerCommand.objects.get().message_id == message.pk


def test_queues_are_listed_by_age(visit):  # noqa: F811
    add("young", after=-60), add("young", after=-50), add("old", after=-7200)
    page = visit("/admin/django_mq/overview/")
    rows = page.locator("#mq-live table").first.locator("tbody tr")
    sync_api.expect(rows.nth(0)).to_contain_text("old")
    sync_api.expect(rows.nth(0)).to_contain_text("2 h")
    sync_api.expect(rows.nth(1)).to_contain_text("young")
    for label in ("Oldest due", "Depth", "In", "Out"):
        says(page, "#mq-live table >> nth=0 >> thead", label)


def test_worker_with_its_running_message(visit):  # noqa: F811
    message = add(leased=60, claimed_by="w:1", type="shop.orders.placed")
    beat("w", host="mail-1", pid=4711, version="1.2.3", running=[message.pk])
    page = visit(url("workerheartbeat"))
    row = page.locator("#mq-live tbody tr").first
    for words in ("mail-1", "process 4711", "1.2.3", "shop.orders.placed", "ago"):
        sync_api.expect(row).to_contain_text(words)
    row.get_by_role("link", name=f"#{message.pk}").click()
    says(page, ".mq-why", "runs now")


def test_a_schedule_is_run_disabled_and_enabled(visit):  # noqa: F811
    with handlers.isolated():
        handler("shop.#", queue="mail", name="mailer")(lambda delivery: None)
        times = moments(last_at=-60 * 3600 - 1800, next_at=36 * 3600 + 1800)
        Schedule.objects.create(name="nightly", type="shop.reports.due", cron="0 6 * * *", **times)
        page = visit(url("schedule"))
        says(page, "#result_list", "2 d 12 h ago")
        says(page, "#result_list", "in 1 d 12 h")
        page.get_by_role("link", name="nightly").click()
        page.get_by_role("button", name="Run now").click()
        says(page, ".messagelist", "nightly")
        assert QueuedMessage.objects.get().type == "shop.reports.due"
        page.goto(url("schedule", "change", "nightly"))
        page.get_by_role("button", name="Disable").click()
        says(page, ".messagelist", "nightly")
        assert not Schedule.objects.get().enabled
        page.goto(url("schedule", "change", "nightly"))
        page.get_by_role("button", name="Enable").click()
        says(page, ".messagelist", "nightly")
        assert Schedule.objects.get().next_at is not None
        page.goto(url("schedule", "history", "nightly"))
        sync_api.expect(page.locator("#change-history tbody tr")).to_have_count(3)
        says(page, "#change-history", "ada")


def test_types_without_a_handler_are_named(visit):  # noqa: F811
    with handlers.isolated():
        handler("shop.orders.*", queue="mail", name="mailer")(lambda delivery: None)
        add(type="shop.orders.placed"), add(type="nobody.hears")
        page = visit(reverse("admin:django_mq_queuestate_topology"))
        says(page, ".mq-edge-held", "nobody.hears")
        taken = page.locator(".mq-matrix tbody tr", has_text="orders")
        sync_api.expect(taken.locator(".mq-mark")).to_contain_text("yes")


def test_a_viewer_neither_acts_nor_reads_payloads(visit, viewer):  # noqa: F811
    message = add(dead=-5, payload={"iban": "DE02"}, last_error="no such iban: DE02")
    page = visit(LIST, viewer)
    sync_api.expect(page.locator(ROWS)).to_have_count(1)
    sync_api.expect(page.locator("select[name=action]")).to_have_count(0)
    page.click("#result_list tbody .mq-type")
    says(page, ".mq-why", "has been dead since")
    sync_api.expect(page.locator("#content button:not(.mq-copy)")).to_have_count(0)
    sync_api.expect(page.locator("#content")).not_to_contain_text("DE02")
    assert QueuedMessage.objects.get() == message


def test_secrets_are_masked(visit):  # noqa: F811
    message = add(payload={"order": 7, "api_key": "s3cr3t"})
    page = visit(url("queuedmessage", "change", message.pk))
    says(page, ".mq-document", "order")
    sync_api.expect(page.locator("#content")).not_to_contain_text("s3cr3t")


def test_large_list_is_split_into_windows(visit, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bounds, "MAX_COUNT", 100)
    monkeypatch.setattr(windows, "MAX_COUNT", 100)
    messages = add_all([{}] * 101)
    page = visit(LIST)
    sync_api.expect(page.locator(ROWS)).to_have_count(100)
    page.get_by_role("link", name="Older ones").click()
    sync_api.expect(page.locator(ROWS)).to_have_count(1)
    says(page, "#result_list", str(messages[0].pk))
    page.get_by_role("link", name="Newest").click()
    sync_api.expect(page.locator(ROWS)).to_have_count(100)
