"""Lists of large tables: the rows that a page scans, and the start of the next page."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_mq.admin import QueuedMessageAdmin, bounds, days, windows
from django_mq.admin.filter_moments import CreatedFilter, read_moment
from django_mq.models import FailedAttempt, QueuedMessage, UniqueKey
from tests.admin.pages import LIST, confirm, fail, listed, text, url
from tests.pages_read import pages_read
from tests.rows import add, add_all, beat, decide, insert_all
from tests.slow import mostly_slow, slow

pytestmark = pytest.mark.django_db


@pytest.fixture
def small(monkeypatch):
    """Windows of three rows; conditions without an index read ten."""
    monkeypatch.setattr(bounds, "MAX_COUNT", 3)
    monkeypatch.setattr(windows, "MAX_COUNT", 3)
    monkeypatch.setattr(windows, "MAX_SCANNED_ROWS", 10)


def link(page, words):
    """Return the address of a link by its text."""
    found = re.search(rf'<a href="([^"]*)"[^>]*>{words}</a>', page.content.decode())
    return found and found[1].replace("&amp;", "&")


def walk(client, address, words):
    """Return the pages from `address` on, following the link of each page to the next."""
    pages = [client.get(address)]
    while following := link(pages[-1], words):
        pages.append(client.get(LIST + following))
    return pages


def test_next_page_starts_where_the_window_ends(boss, small):
    ids = [message.pk for message in add_all({} for _ in range(8))]
    pages = walk(boss, LIST, "Older ones")
    assert [listed(page) for page in pages] == [ids[:4:-1], ids[4:1:-1], ids[1::-1]]
    assert listed(boss.get(LIST + link(pages[-1], "Newest"))) == ids[:4:-1]


def test_the_oldest_come_first_if_asked_for(boss, small):
    ids = [message.pk for message in add_all({} for _ in range(8))]
    pages = walk(boss, LIST + "?o=1", "Newer ones")
    assert [listed(page) for page in pages] == [ids[:3], ids[3:6], ids[6:]]


def test_search_without_an_index_is_limited_and_says_so(boss, small):
    wanted = add(type="rare")
    others = add_all({} for _ in range(22))
    pages = walk(boss, LIST + "?type=rare", "Search the next rows")
    assert [listed(page) for page in pages] == [[], [], [wanted.pk]]
    assert f"Only 10 rows were searched, down to #{others[12].pk}" in text(pages[0])
    assert "were searched" not in text(pages[-1])


@pytest.mark.parametrize("state", ["held", "paused", *slow("retrying", "delayed")])
def test_a_state_without_an_index_is_looked_for_in_as_many_rows(boss, small, state):
    """Looking for the window's end among messages of one state would read the whole table."""
    decide("stopped", paused=-1)
    signs = {
        "held": {"held": -1},
        "paused": {"queue": "stopped"},
        "retrying": {"attempts": 1, "after": 60},
        "delayed": {"after": 60},
    }
    wanted = add(**signs[state])
    others = add_all({} for _ in range(22))
    pages = walk(boss, LIST + f"?state={state}", "Search the next rows")
    assert [listed(page) for page in pages] == [[], [], [wanted.pk]]
    assert f"Only 10 rows were searched, down to #{others[12].pk}" in text(pages[0])


@pytest.mark.parametrize("state", ["dead", "running", "leased", "blocked", "expired", "in_flight"])
def test_a_state_with_an_index_is_found_wherever_it_is(boss, small, state):
    signs = {
        "dead": {"dead": -1},
        "leased": {"leased": 60},
        "blocked": {"blocked_by": 1, "key": "k"},
        "expired": {"expires": -1},
    }
    wanted = add(**signs.get(state, {"leased": 60}))
    if state == "running":
        beat(running=[wanted.pk])
    insert_all({} for _ in range(22))
    page = boss.get(LIST, {"state": state})
    assert listed(page) == [wanted.pk]
    assert "were searched" not in text(page)


@pytest.mark.parametrize("term", ["order:7", "once-7", "#{}", "{}"])
def test_search_with_an_index_finds_older_messages(boss, small, term):
    wanted = add(key="order:7")
    if term.startswith("once"):
        UniqueKey.objects.create(queue="mail", type="t", unique_id="once-7", message_id=wanted.pk)
    insert_all({} for _ in range(22))
    assert listed(boss.get(LIST, {"q": term.format(wanted.pk)})) == [wanted.pk]


@pytest.mark.parametrize("column", ["key", "queue"])
def test_filters_with_an_index_see_the_whole_table(boss, small, column):
    wanted = add(**{"queue": "mail", column: "rare"})
    insert_all({"key": f"k{n}"} for n in range(22))
    page = boss.get(LIST, {column: "rare"})
    assert listed(page) == [wanted.pk]
    assert "were searched" not in text(page)


@pytest.mark.parametrize(("order", "words"), [("", "Older ones"), *slow(("&o=1", "Newer ones"))])
def test_pages_of_a_key_cover_all_its_messages(boss, small, order, words):
    """Its statements do not name them one by one: there may be a million."""
    ids = [10**12 + n for n in range(22)]  # no other number in a statement is like them
    insert_all({"id": id, "key": "k", "queue": f"q{id % 2}"} for id in ids)
    with CaptureQueriesContext(connection) as asked:
        pages = walk(boss, f"{LIST}?key=k{order}", words)
    assert [id for page in pages for id in listed(page)] == (ids if order else ids[::-1])
    named = [sum(str(id) in each["sql"] for id in ids) for each in asked]
    assert max(named) <= 5  # those of a page, the one before it, and the end of its window


def test_list_of_a_key_in_several_lines_shows_how_far_it_searched(boss, small):
    wanted = add(type="rare", key="k", queue="q1")
    others = add_all({"key": "k", "queue": f"q{n % 2}"} for n in range(22))
    pages = walk(boss, LIST + "?key=k&type=rare&queue=q1", "Search the next rows")
    assert [listed(page) for page in pages] == [[], [], [wanted.pk]]
    assert f"Only 10 rows were searched, down to #{others[12].pk}" in text(pages[0])


@pytest.mark.parametrize("order", ["", "1"])
def test_a_key_in_several_lines_is_found_beside_any_number_of_other_messages(
    boss, small, monkeypatch, order
):
    """No index has the rows of several lines in the order of the list."""
    monkeypatch.setattr(QueuedMessageAdmin, "state_counts", lambda self, request: {})
    rows = ({"key": "k" if n < 200 else f"k{n}", "queue": f"q{n % 2}"} for n in range(400))
    insert_all({} for _ in range(3000))
    insert_all(rows)
    insert_all({} for _ in range(3000))
    connection.cursor().execute("analyze django_mq_queuedmessage")
    asked = {"key": "k", "o": order} if order else {"key": "k"}
    boss.get(LIST, asked)
    with pages_read() as read:
        page = boss.get(LIST, asked)
    assert len(listed(page)) == 3
    assert read.most_rows < 2000


def test_every_kind_of_message_is_found_by_its_queue(boss):
    rows = [
        add("a"),
        add("a", leased=60),
        add("a", dead=-5),
        add("a", key="k", blocked_by=1),
        add("a", held=-5),
    ]
    add("b")
    assert listed(boss.get(LIST, {"queue": "a"})) == [row.pk for row in reversed(rows)]


def test_filters_survive_the_window(boss, small):
    insert_all({"type": "t", "queue": "a"} for _ in range(8))
    page = boss.get(LIST, {"queue": "a", "type": "t"})
    assert "queue=a" in link(page, "Older ones")
    assert "type=t" in link(page, "Older ones")
    back = boss.get(LIST + link(page, "Older ones"))
    assert "after=" not in link(back, "Newest")
    assert "queue=a" in link(back, "Newest")


def test_attempts_have_windows_too(boss, small):
    message = add()
    for number in range(1, 24):
        fail(message, number, error_class="KeyError" if number == 1 else "OSError")
    page = boss.get(url("failedattempt"), {"error_class": "KeyError"})
    assert listed(page) == []
    assert "Only 10 rows were searched" in text(page)
    page = boss.get(url("failedattempt"), {"message_id": message.pk})
    assert len(listed(page)) == 3


def test_a_page_reads_the_same_of_a_long_table(boss, small, monkeypatch):
    """A filter without an index. The counts per state have separate bounds, far above these."""
    monkeypatch.setattr(QueuedMessageAdmin, "state_counts", lambda self, request: {})
    insert_all({"created": n - 3000 * 60, "key": f"k{n}"} for n in range(30))

    def read(**data):
        boss.get(LIST, data)
        with pages_read() as read:
            assert boss.get(LIST, data).status_code == 200
        return read.most_rows

    asked = [{"type": "rare"}, {"handler": "rare"}, {"error_class": "Rare"}, {"q": "rare"}]
    before = [read(**data) for data in asked]
    insert_all({"queue": f"q{n % 3}"} for n in range(2000))
    connection.cursor().execute("analyze django_mq_queuedmessage")
    assert [read(**data) <= maximum + 60 for data, maximum in zip(asked, before, strict=True)] == [
        True
    ] * len(asked)


@pytest.mark.parametrize(
    ("term", "hits"),
    [
        ("payload.user.id:7", {"number", "text"}),
        *slow(
            ("payload.user.id:07", set()),
            ("payload.user:7", set()),
            ("payload.lines.0.sku:x y", {"lines"}),
            ("payload.paid:true", {"number"}),
        ),
        ("metadata.tenant:acme", {"text"}),
        ("payload.password:abc", set()),
        ("payload.user.:7", set()),
    ],
)
def test_search_by_path(boss, login, term, hits):
    rows = {
        "number": add(payload={"user": {"id": 7}, "paid": True}),
        "text": add(payload={"user": {"id": "7"}}, metadata={"tenant": "acme"}),
        "lines": add(payload={"lines": [{"sku": "x y"}], "password": "abc"}),
    }
    assert set(listed(boss.get(LIST, {"q": term}))) == {rows[name].pk for name in hits}
    viewer = login("view_queuedmessage", name="viewer")
    assert listed(viewer.get(LIST, {"q": term})) == []


@pytest.mark.parametrize(
    ("data", "hits"),
    [
        ({"type": "shop.orders.*"}, "ab"),
        ({"type": "shop.orders"}, ""),
        ({"type": "*"}, "abcd"),
        ({"error_class": "KeyError"}, "a"),
        *slow(
            ({"error_class": "shop.Refused"}, "b"),
            ({"error_class": "Key"}, ""),
        ),
        ({"claimed_by": "f00d"}, "c"),
        *slow(
            ({"claimed_by": "f00d:7"}, "c"),
            ({"claimed_by": "f00"}, ""),
            ({"created_at_from": "1h"}, "abc"),
            ({"created_at_to": "1h"}, "d"),
            ({"dead_at_from": "1h"}, "b"),
            ({"processable_after_from": "0m"}, "d"),
        ),
        ({"processable_after_from": "1h", "processable_after_to": "0m"}, "abc"),
        ({"created_at_from": "2020-01-01", "created_at_to": "2020-01-02T10:00"}, ""),
    ],
)
def test_filters(boss, data, hits):
    rows = {
        "a": add(type="shop.orders.placed", last_error="KeyError: 'x'"),
        "b": add(type="shop.orders.paid", last_error="shop.Refused", dead=-60),
        "c": add(type="shop.mail", leased=60, claimed_by="f00d:7"),
        "d": add(type="shop.late", created=-7200, after=600),
    }
    assert {row.pk for row in map(rows.get, hits)} == set(listed(boss.get(LIST, data)))


@pytest.mark.parametrize(
    "data",
    [
        {"error_class": "KeyError: 'x"},
        {"created_at_from": "tomorrow"},
        {"dead_at_to": "9" * 40},
        {"created_at_to": "999999d"},
        {"created_at_to": "\x00"},
        {"id": "x", "type": "t"},
    ],
)
def test_a_filter_that_means_nothing_is_no_error_page(boss, data):
    add()
    assert boss.get(LIST, data).url == LIST + "?e=1"


@pytest.mark.parametrize(
    ("zone", "column"),
    mostly_slow(
        ["UTC", "America/Los_Angeles", "Pacific/Kiritimati"],
        ["created_at", "processable_after", "dead_at"],
    ),
)
def test_a_time_that_no_row_can_have_is_no_error_page(boss, small, settings, column, zone):
    """At the ends of Python's calendar a time has no form in other zones."""
    settings.TIME_ZONE = zone
    wanted = add(dead=-60)
    insert_all({} for _ in range(22))
    for early in ("0001-01-01", "0001-01-01T00:00+14:00", "700000d"):
        page = boss.get(LIST, {f"{column}_from": early, "q": str(wanted.pk)})
        assert listed(page) == [wanted.pk]
        assert boss.get(LIST, {f"{column}_from": early}).status_code == 200
    for late in ("9999-12-31", "9999-12-31T23:59:59-14:00"):
        page = boss.get(LIST, {f"{column}_to": late, "q": str(wanted.pk)})
        assert listed(page) == [wanted.pk]
        assert boss.get(LIST, {f"{column}_to": late}).status_code == 200


def test_moments_are_of_the_current_time_zone():
    now = timezone.now()
    with timezone.override("Asia/Kolkata"):
        assert read_moment("2026-12-24T18:00", now).isoformat() == "2026-12-24T18:00:00+05:30"
        assert read_moment("2026-12-24", now).isoformat() == "2026-12-24T00:00:00+05:30"
    assert now - read_moment("30m", now) == timezone.timedelta(minutes=30)


def test_creation_is_looked_for_where_the_ids_are(boss, small):
    """In a large table ids lead to the day; rows an hour out of order are also found."""
    rows = add_all({"created": (n - 60) * 3600 + 60} for n in range(60))
    page = boss.get(LIST, {"created_at_from": "40h", "created_at_to": "38h"})
    assert listed(page) == [rows[21].pk, rows[20].pk]
    asked = {"created_at_from": ["40h"], "created_at_to": ["38h"]}
    part = CreatedFilter(None, asked, QueuedMessage, None).part_of_table("default")
    assert QueuedMessage.objects.filter(part).count() == 4


def test_an_empty_table_has_no_extent(boss, small):
    assert FailedAttempt.objects.count() == 0
    assert boss.get(LIST, {"created_at_from": "1h"}).status_code == 200


def test_depth_of_a_large_table_is_marked_as_an_estimate(boss, small, monkeypatch):
    insert_all({} for _ in range(8))
    monkeypatch.setattr("django_mq.store.table_extent.estimated_rows", lambda *_: 1_234_567)
    assert "~1,234,567 messages" in text(boss.get(LIST))
    assert "~" not in text(boss.get(LIST, {"queue": "mail"}))


def test_an_estimate_has_the_same_separators_in_every_project(boss, small, monkeypatch, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    insert_all({} for _ in range(8))
    monkeypatch.setattr("django_mq.store.table_extent.estimated_rows", lambda *_: 1_234_567)
    assert "~1,234,567 messages" in text(boss.get(LIST))


def test_days_lead_to_the_messages_of_a_day(boss):
    old = add(created=-200 * 86400)
    new = add(type="t")
    page = boss.get(LIST, {"type": "t"})
    months = link(page, f"{new.created_at:%Y-%m}")
    assert "type=t" in months
    assert listed(boss.get(LIST + months)) == [new.pk]
    day = link(boss.get(LIST + months), f"{new.created_at:%Y-%m-%d}")
    page = boss.get(LIST + day)
    assert listed(page) == [new.pk]
    assert link(page, f"&lsaquo; {new.created_at:%Y-%m}") == months
    assert link(page, "&lsaquo; any day") == "?type=t"
    assert listed(boss.get(LIST + link(boss.get(LIST), f"{old.created_at:%Y-%m}"))) == [old.pk]


@pytest.mark.parametrize(
    ("start", "end", "label"),
    [
        ("2026-01-01", "2027-01-01", "2026"),
        ("2026-02-01", "2026-03-01", "2026-02"),
        ("2026-02-28", "2026-03-01", "2026-02-28"),
        ("2026-02-01", "2026-03-02", None),
        ("9999-12-31", "9999-12-31", None),
        ("x", "2026-03-02", None),
    ],
)
def test_only_a_year_a_month_or_a_day_is_a_period(start, end, label):
    found = days.chosen({"created_at_from": start, "created_at_to": end})
    assert (found and found.label) == label


def test_the_way_back_keeps_the_filters(boss):
    """From the list to a message, through an action on it, and back."""
    row = add(dead=-5, type="t")
    filters = "type=t&state=dead"
    page = boss.get(LIST + f"{row.pk}/change/", {"_changelist_filters": filters}).content.decode()
    assert f'href="{LIST}?type=t&amp;state=dead">Back to the filtered list' in page
    assert '<input type="hidden" name="filters" value="type=t&amp;state=dead">' in page
    done = confirm(boss, "requeue", [row.pk], page=row.pk, filters=filters)
    assert parse_qs(urlsplit(done.url).query) == {"_changelist_filters": [filters]}
    done = confirm(boss, "cancel", [row.pk], page=row.pk, filters=filters)
    assert done.url == f"{LIST}?type=t&state=dead"
