"""The lists: states as filters, searches, and their cost with millions of rows."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.db.models import Func, TextField, Value
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_mq.admin import QueuedMessageAdmin, base, bounds
from django_mq.admin.bounds import AtLeast, CappedPaginator
from django_mq.admin.filters import INDEX_CONDITIONS
from django_mq.models import FailedAttempt, HandledMessage, QueuedMessage, Result
from django_mq.states import MessageState
from tests.admin.pages import LIST, MODELS, listed, text, told, url
from tests.rows import add, beat, decide
from tests.slow import mostly_slow, slow

pytestmark = pytest.mark.django_db


@pytest.fixture
def every():
    """Messages in every state, in each way of reaching it; by state."""
    running, lapsed = add(leased=30), add(leased=-5)
    beat(running=[running.pk, lapsed.pk])
    decide("paused", paused=-5)
    decide("backs-off", backoff=60)
    decide("was-paused", paused=-60, until=-5)
    found = {
        "dead": [add(dead=-5), add("paused", dead=-5, held=-9, after=60)],
        "running": [running, lapsed],
        "leased": [add(leased=30), add("paused", leased=30, held=-5, attempts=1)],
        "blocked": [add(blocked_by=1, key="k"), add(blocked_by=1, key="k", leased=-5, held=-5)],
        "held": [add(held=-5), add("paused", held=-5, expires=-5), add(held=-5, leased=-1)],
        "expired": [add(expires=-5), add("paused", expires=-5, after=60, attempts=1)],
        "paused": [add("paused"), add("backs-off", after=60, attempts=3)],
        "retrying": [add(after=60, attempts=1), add(after=60, attempts=2, leased=-5)],
        "delayed": [add(after=60), add(after=60, leased=-5)],
        "processable": [add(), add(leased=-5, attempts=1), add("was-paused")],
    }
    for state, messages in found.items():
        assert {message.state for message in messages} == {state}
    return found


def test_a_state_is_a_filter_of_the_same_definition(boss, every):
    for state in MessageState:
        page = boss.get(LIST, {"state": state.value})
        ids = [message.pk for message in every[state]]
        assert listed(page) == sorted(ids, reverse=True), state
        assert page.content.decode().count(f'"mq-state mq-{state.value}"') == len(ids), state


def test_the_newest_dead_letters_are_found_without_computing_states(boss):
    """The planner knows how many rows are dead, not how many have a computed state."""
    add(dead=-5)
    with CaptureQueriesContext(connection) as found:
        boss.get(LIST, {"state": "dead"})
    [keys] = [each["sql"] for each in found if f"LIMIT {bounds.MAX_COUNT + 1}" in each["sql"]]
    assert "dead_at" in keys
    assert "CASE" not in keys


def test_index_condition_keeps_every_message_of_its_state(every):
    for state, condition in INDEX_CONDITIONS.items():
        whole = set(QueuedMessage.objects.in_state(state).values_list("pk", flat=True))
        assert whole == {message.pk for message in every[state]}
        narrowed = QueuedMessage.objects.in_state(state).filter(condition)
        assert set(narrowed.values_list("pk", flat=True)) == whole
    assert INDEX_CONDITIONS.keys() == set(MessageState)


def test_in_flight_is_leased_or_running(boss, every):
    ids = {message.pk for state in ("leased", "running") for message in every[state]}
    assert set(listed(boss.get(LIST, {"state": "in_flight"}))) == ids


def test_an_unknown_state_is_no_error_page(boss):
    assert boss.get(LIST, {"state": "tired"}).url == LIST + "?e=1"


def test_row_shows_state_attempts_and_error(boss):
    """Due since or at, claimed by and until, attempts and their maximum, the last error."""
    add("mail", after=-7500, attempts=3, max_attempts=20, last_error="KeyError: 'x'")
    add("mail", leased=1000, claimed_by="f00d:7", handler="shop.send", key="k:1")
    add(after=7300)
    page = text(boss.get(LIST))
    for word in ("due 2 h 5 min ago", "3 / 20", "KeyError: 'x'", "f00d:7", "shop.send"):
        assert word in page
    assert "lease ends in 16 min" in page
    assert "due in 2 h 1 min" in page
    assert "key k:1" in page


@pytest.mark.parametrize(
    ("term", "hits"),
    [
        ("shop.orders.placed", {"a", "b"}),
        ("order:7", {"b"}),
        ("once-9", {"a"}),
        *slow(
            (" once-9 ", {"a"}),
            ("shop.orders", set()),
            ("secret", set()),
            ("a b", set()),
        ),
        ("kötbullar #2", {"c"}),
        ("%", set()),
        *slow(
            ("é", set()),
            ("9" * 60, set()),
        ),
    ],
)
def test_search_is_exact(boss, term, hits):
    rows = {
        "a": add(unique_id="once-9", payload={"note": "secret"}),
        "b": add(key="order:7", last_error="secret"),
        "c": add(key="kötbullar #2", type="shop.other"),
    }
    assert set(listed(boss.get(LIST, {"q": term}))) == {rows[name].pk for name in hits}


def test_search_by_id(boss):
    message, _ = add(), add()
    for term in (message.pk, f"#{message.pk}"):
        assert listed(boss.get(LIST, {"q": term})) == [message.pk]


@pytest.mark.parametrize("column", ["id", "queue", "type", "handler", "key", "unique_id"])
def test_public_columns_may_be_asked_for_exactly(boss, column):
    message = add("q", type="t", handler="h", key="k", unique_id="u")
    add("q2", type="t2", handler="h2", key="k2", unique_id="u2")
    assert listed(boss.get(LIST, {column: getattr(message, column)})) == [message.pk]


@pytest.mark.parametrize("data", [{"q": "\x00"}, {"queue": "\x00"}, {"type": "\x00"}, {"id": "x"}])
def test_unusable_search_values_give_no_error_page(boss, data):
    add()
    assert boss.get(LIST, data, follow=True).status_code == 200


@pytest.mark.parametrize(
    ("model", "term"), mostly_slow(MODELS, ["9" * 5000, "9" * 60, "\x00", "\u0662"])
)
def test_impossible_search_or_address_gives_no_error_page(boss, model, term):
    """Python parses no number of 5,000 digits, and PostgreSQL accepts no NUL."""
    assert boss.get(url(model), {"q": term}, follow=True).status_code == 200
    for page in ("change", "history"):
        assert boss.get(url(model, page, term)).status_code in (302, 404)


def queries(client, address, **data):
    client.get(address, data)  # content types and the like are cached
    with CaptureQueriesContext(
        connection,
    ) as found:
        assert client.get(address, data).status_code == 200
    return [each["sql"] for each in found]


@pytest.mark.parametrize("state", ["", "dead"])
def test_the_list_asks_as_much_for_one_row_as_for_many(boss, state):
    data = {"state": state} if state else {}
    add(dead=-5, queue="mail")
    one = queries(boss, LIST, **data)
    for number in range(30):
        add(dead=-5, type=f"t{number}", key=f"k{number}", last_error="x")
    many = queries(boss, LIST, **data)
    assert len(one) == len(many)
    assert len(many) <= 20


def test_no_list_reads_a_payload_or_counts_to_the_end(boss):
    for _ in range(3):
        add()
    for sql in queries(boss, LIST):
        assert '"payload"' not in sql
        assert '"metadata"' not in sql
        assert 'COUNT(*) AS "__count" FROM "django_mq' not in sql


def test_attempts_and_results_too(boss):
    attempt = FailedAttempt.objects.create(
        message_id=5, queue="mail", type="t", attempt=1, error_class="KeyError", error_text="x"
    )
    FailedAttempt.objects.create(
        message_id=6, queue="mail", type="t2", attempt=1, error_class="OSError"
    )
    Result.objects.create(message_id=5, value=[1])
    attempts = url("failedattempt")
    for data in ({"message_id": 5}, {"q": "5"}, {"q": "#5"}, {"q": "t"}, {"q": "KeyError"}):
        assert listed(boss.get(attempts, data)) == [attempt.pk]
    assert listed(boss.get(attempts, {"error_class": "KeyError"})) == [attempt.pk]
    assert "KeyError (1)" in text(boss.get(attempts))
    assert not any('"traceback"' in sql for sql in queries(boss, attempts))
    assert listed(boss.get(url("result"), {"q": "5"})) == [5]
    assert listed(boss.get(url("result"), {"q": "x"})) == []
    assert not any('"value"' in sql for sql in queries(boss, url("result")))


class TestCappedPaginator:
    def pages(self, count, per_page=2, maximum=5):
        for _ in range(count):
            add()
        return CappedPaginator(QueuedMessage.objects.order_by("-pk"), per_page)

    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch):
        monkeypatch.setattr(bounds, "MAX_COUNT", 5)

    @pytest.mark.parametrize(("rows", "count", "pages"), [(0, 0, 1), (5, 5, 3), (9, 6, 3)])
    def test_counting_stops(self, rows, count, pages):
        paginator = self.pages(rows)
        assert (paginator.count, paginator.num_pages) == (count, pages)
        assert str(paginator.count) == ("5+" if rows > 5 else str(count))

    def test_pages_hold_the_rows_that_were_counted(self):
        paginator = self.pages(9)
        found = [[row.pk for row in paginator.page(n).object_list] for n in (1, 2, 3)]
        newest = list(QueuedMessage.objects.order_by("-pk").values_list("pk", flat=True))
        assert found == [newest[0:2], newest[2:4], newest[4:5]]

    def test_count_of_a_long_list_ends_with_a_plus(self, boss, monkeypatch):
        monkeypatch.setattr(base.ReadOnlyAdmin, "list_per_page", 2)
        self.pages(9)
        page = boss.get(LIST)
        assert "5+ messages" in text(page)
        assert "Select all 5+ messages" in text(page)
        assert len(listed(page)) == 2
        fifth = QueuedMessage.objects.order_by("-pk")[4].pk
        assert listed(boss.get(LIST, {"p": 3})) == [fifth]
        assert boss.get(LIST, {"p": 4}).status_code == 302


def test_a_capped_count_is_still_a_number(settings):
    assert (str(AtLeast(10_001)), AtLeast(10_001) > 100) == ("10,000+", True)
    settings.USE_THOUSAND_SEPARATOR = True
    assert str(AtLeast(10_001)) == "10001"


def test_ids_are_shown_as_a_search_takes_them(boss, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    add(id=1234567, dead=-5)
    page = boss.get(LIST)
    assert "1234567" in text(page)
    assert "1,234,567" not in text(page)
    assert listed(boss.get(LIST, {"q": "1234567"})) == [1234567]


def test_a_search_that_takes_too_long_is_given_up(boss, monkeypatch):
    monkeypatch.setattr(bounds, "STATEMENT_SECONDS", 0.01)
    add()

    def search(self, request, queryset, term):
        sleep = Func(Value(5), function="pg_sleep", output_field=TextField())
        return queryset.annotate(sleep=sleep).filter(sleep__isnull=False), False

    monkeypatch.setattr(QueuedMessageAdmin, "get_search_results", search)
    response = boss.get(LIST, {"q": "x"})
    assert response.url == LIST
    assert "took too long" in told(response)[0]


def test_row_shows_the_messages_before_and_behind_it(boss, settings):
    """The key's first message, whatever row it was parked behind; the same in an ordered queue."""
    settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
    head = add(key="k", dead=-5)
    for _ in range(3):
        add(key="k", blocked_by=10**6)
    last = add(key="k")
    first = add("line", ordered=True, after=60)
    add("line", ordered=True)
    add(key="stranded", blocked_by=10**6)
    page = boss.get(LIST)
    assert text(page).count(f"behind #{head.pk}") == 4
    assert f'href="{url("queuedmessage", "change", head.pk)}">#{head.pk}' in page.content.decode()
    assert f"behind #{first.pk}" in text(page)
    assert f"behind #{10**6}" not in text(page)
    assert "4 behind it" in text(page)
    assert "1 behind it" in text(page)
    assert "now first of its key, freed soon" in text(page)
    assert listed(boss.get(LIST, {"state": "blocked"}))[1:] == [last.pk - n for n in (1, 2, 3)]


def test_where_messages_stand_is_asked_once(boss):
    def count():
        with CaptureQueriesContext(
            connection,
        ) as queries:
            boss.get(LIST)
        return len(queries)

    add(key="k"), add(key="k")
    few = count()
    for n in range(20):
        add(key=f"k{n % 5}", blocked_by=1)
    assert count() == few


def test_messages_are_filtered_by_priority(boss):
    wanted = add(priority=-5)
    add(priority=5)
    add()
    assert listed(boss.get(LIST, {"priority": "-5"})) == [wanted.pk]
    assert boss.get(LIST, {"priority": "high"}).status_code == 302


@pytest.mark.parametrize("model", ["queuedmessage", "handledmessage"])
def test_themes_know_which_action_is_chosen(boss, model):
    """Unfold shows the button that runs it only then; its script reads this attribute."""
    add()
    HandledMessage.objects.create(id=1, queue="mail", type="t", keep_until=Now())
    page = boss.get(url(model)).content.decode()
    [chooser] = re.findall(r'<select name="action"[^>]*>', page)
    assert 'x-model="action"' in chooser


def test_no_filter_holds_a_form(boss):
    """Themes such as jazzmin put filters into the form of the search, where another one ends it."""
    add()
    page = boss.get(LIST, {"queue": "mail"}).content.decode()
    found = re.search(r'<(nav|search)[^>]* id="changelist-filter".*?</\1>', page, re.DOTALL)
    assert found, "Django 6.1 has <search> where others have <nav>"
    filters = found[0]
    assert "mq-box" in filters
    assert "<form" not in filters
    asked = set(re.findall(r'form="([^"]+)"', filters))
    assert len(asked) > 8
    for id in asked:
        [form] = re.findall(rf'<form method="get" id="{id}" hidden>(.*?)</form>', page)
        assert ('name="queue" value="mail"' in form) is (id != "mq-filter-queue")
