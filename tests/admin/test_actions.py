"""S11, guarantee 13: actions wait for no lock, skip messages in flight, and report the outcome."""

from __future__ import annotations

import time

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry

from django_mq import queues
from django_mq.admin import selected_ids
from django_mq.models import QueuedMessage, QueueState
from tests.admin.pages import LIST, act, confirm, text, told, url
from tests.rows import add, beat, decide
from tests.slow import slow

pytestmark = pytest.mark.django_db

EVERY = {
    "processable": {},
    "delayed": {"after": 60},
    "retrying": {"after": 60, "attempts": 2},
    "held": {"held": -5},
    "blocked": {"blocked_by": 1, "key": "k"},
    "expired": {"expires": -1},
    "leased": {"leased": 60},
    "lapsed": {"leased": -1},
    "dead": {"dead": -1, "dead_reason": "exhausted", "attempts": 20},
}
WAITING = ("processable", "delayed", "retrying", "held", "blocked", "expired")
CHANGED = {
    "requeue": ("dead",),
    "run_now": ("processable", "delayed", "retrying", "held"),
    "cancel": WAITING,
    "discard": ("dead",),
}


@pytest.mark.parametrize("action", CHANGED)
def test_action_changes_eligible_messages_and_reports_the_rest(boss, action):
    ids = {name: add(**columns).pk for name, columns in EVERY.items()}
    in_flight = QueuedMessage.objects.filter(leased_until__isnull=False).order_by("pk")
    before = list(in_flight.values())
    response = confirm(boss, action, ids.values())
    done, skipped = len(CHANGED[action]), len(EVERY) - len(CHANGED[action])
    found = told(response)
    assert f"{done} message" in found[0]
    assert f"{skipped} message" in found[1]
    assert list(in_flight.values()) == before
    entries = LogEntry.objects.order_by("pk")
    assert {int(each.object_id) for each in entries} == {ids[name] for name in CHANGED[action]}
    assert {each.user for each in entries} == {boss.user}
    flag = DELETION if action in ("cancel", "discard") else CHANGE
    assert {each.action_flag for each in entries} == {flag}
    among = f", one of {done} messages" if done > 1 else ""
    assert all(each.change_message.endswith(f"{among}; {skipped} skipped.") for each in entries)
    assert all((", one of" in each.change_message) is (done > 1) for each in entries)
    left = QueuedMessage.objects.count()
    assert left == len(EVERY) - (done if flag == DELETION else 0)


@pytest.mark.parametrize("action", ["cancel", "discard"])
def test_irreversible_actions_ask_for_confirmation(boss, action):
    ids = [add("mail", **columns).pk for columns in EVERY.values()]
    page = act(boss, action, ids, query="?queue=mail")
    assert page.status_code == 200
    assert QueuedMessage.objects.count() == len(ids)
    assert page.context["count"] == len(CHANGED[action])
    assert page.context["skipped"] == len(ids) - len(CHANGED[action])
    assert "in flight" in text(page)
    data = {name: page.context[name] for name in ("ids", "filters")}
    response = boss.post(page.context["url"], {**data, "confirmed": "yes"})
    assert response.url == LIST + "?queue=mail"
    assert QueuedMessage.objects.count() == len(ids) - len(CHANGED[action])


@pytest.mark.parametrize("action", ["requeue", "run_now"])
def test_the_rest_is_done_at_once_from_the_list(boss, action):
    message = add(**EVERY[CHANGED[action][-1]])
    response = act(boss, action, [message.pk], query="?queue=mail")
    assert response.url == LIST + "?queue=mail"
    assert QueuedMessage.objects.get().state == "processable"
    assert QueuedMessage.objects.count() == 1


def test_the_page_of_a_message_comes_back(boss):
    message = add(**EVERY["dead"])
    response = boss.post(
        url("queuedmessage", "action", "requeue"), {"ids": message.pk, "page": message.pk}
    )
    assert response.url == url("queuedmessage", "change", message.pk)
    assert boss.get(url("queuedmessage", "action", "requeue")).url == LIST


@pytest.mark.parametrize(
    "ids", ["", "x", "1;drop", "-1", "0", "9" * 19, "1" * 30, "\u0661", "1,,2"]
)
def test_invalid_ids_are_refused(boss, ids):
    address = url("queuedmessage", "action", "requeue")
    assert boss.post(address, {"ids": ids}).status_code == 400


def test_ids_of_the_list_are_checked_too(boss):
    assert act(boss, "requeue", ["x"]).status_code == 400


def test_an_unknown_operation_is_not_found(boss):
    assert boss.post("/admin/django_mq/queuedmessage/actions/drop/", {"ids": 1}).status_code == 404


def test_redirect_stays_on_the_list(boss):
    message = add(**EVERY["dead"])
    response = confirm(boss, "discard", [message.pk], filters="//evil.example/?a=b")
    assert response.url.startswith(LIST + "?")


def test_more_than_a_page_can_hold_is_refused(boss, monkeypatch):
    """S11: selecting everything that matches starts an operation, which has no cap."""
    monkeypatch.setattr(selected_ids, "MAX_MESSAGES", 3)
    ids = [add(dead=-1).pk for _ in range(5)]
    assert act(boss, "requeue_heads", ids).status_code == 400
    assert confirm(boss, "requeue", ids).status_code == 400
    assert QueuedMessage.objects.dead().count() == 5


def test_a_message_that_is_gone_is_skipped(boss):
    response = confirm(boss, "discard", [7, 8])
    assert "2 messages were skipped" in told(response)[0]
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("action", ["requeue", "requeue_heads"])
def test_rows_that_left_the_list_meanwhile_are_reported(boss, action):
    """Another tab was faster: one message is gone, another no longer matches the filter."""
    gone, requeued, dead = (add(**EVERY["dead"]).pk for _ in range(3))
    QueuedMessage.objects.filter(pk=gone).delete()
    assert queues.requeue([requeued])
    form = {"action": action, "_selected_action": [gone, requeued, dead]}
    first, second = told(boss.post(LIST + "?state=dead", form))
    assert first == "Requeue: 1 message."
    assert second.startswith("Requeue: 2 messages were skipped: in flight, locked, gone")
    page = boss.post(LIST, {"action": "discard", "_selected_action": [gone]})
    assert page.context["others"] == [("gone", 1)]


def test_a_list_of_the_largest_number_of_ids_can_be_confirmed(boss, settings):
    """A single field holds all ids: Django refuses a form of more than a thousand fields."""
    ids = range(1, selected_ids.MAX_MESSAGES + 1)
    page = boss.post(url("queuedmessage", "action", "discard"), {"ids": ",".join(map(str, ids))})
    assert page.context["others"] == [("gone", selected_ids.MAX_MESSAGES)]
    assert confirm(boss, "discard", ids).status_code == 302


def test_the_deed_and_its_log_entry_are_one(boss, monkeypatch):
    """Guarantee 14: no row is deleted without a trace."""
    message = add(**EVERY["dead"])

    def fail(*args, **kwargs):
        raise RuntimeError("the log is full")

    monkeypatch.setattr(type(LogEntry.objects), "log_actions", fail)
    with pytest.raises(RuntimeError):
        confirm(boss, "discard", [message.pk])
    assert QueuedMessage.objects.filter(pk=message.pk).exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("action", CHANGED)
def test_a_locked_message_is_skipped_at_once(boss, lock, action):
    """Guarantee 13: a worker holds the row in a transaction that does not end."""
    held, free = (add(**EVERY[CHANGED[action][0]]) for _ in range(2))
    lock(held)
    response = confirm(boss, action, [held.pk, free.pk])  # it ends: the lock stays held
    assert ["1 message" in each for each in told(response)] == [True, True]
    assert [int(each.object_id) for each in LogEntry.objects.all()] == [free.pk]
    assert QueuedMessage.objects.filter(pk=held.pk).exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("mode", ["access exclusive", *slow("share")])
def test_a_locked_table_is_waited_for_a_second(boss, other, mode):
    """Guarantee 13, while another session changes the table itself."""
    message = add(**EVERY["dead"])
    other.execute(f"lock table django_mq_queuedmessage in {mode} mode")
    start = time.monotonic()
    response = confirm(boss, "discard", [message.pk])  # it ends: the lock stays held
    assert time.monotonic() - start >= 1
    assert "Another session holds a lock. " in told(response)[0]
    response = act(boss, "requeue", [message.pk], query="?queue=mail")
    assert "mq_doctor names a session that has locked a table" in told(response)[-1]
    assert not LogEntry.objects.exists()
    other.execute("rollback")
    assert QueuedMessage.objects.dead().filter(pk=message.pk).exists()


@pytest.mark.django_db(transaction=True)
def test_queue_locked_by_another_session_is_not_waited_for(boss, other):
    decide("mail")
    other.execute("select 1 from django_mq_queuestate where queue = 'mail' for update")
    response = boss.post(url("queuestate", "pause"), {"queue": "mail"})
    assert "Another session is changing" in told(response)[0]
    assert QueueState.objects.get().paused_at is None
    assert not LogEntry.objects.exists()


def test_queues_are_paused_and_resumed_with_a_log(boss):
    add("mail")
    response = boss.post(url("queuestate", "pause"), {"queue": "mail", "seconds": "900"})
    assert response.url == url("queuestate")
    assert QueueState.objects.get().paused_until is not None
    assert boss.post(url("queuestate", "pause"), {"queue": "mail", "page": "1"}).url == url(
        "queuestate", "change", "mail"
    )
    assert QueueState.objects.get().paused_until is None
    boss.post(url("queuestate", "resume"), {"queue": "mail"})
    assert QueueState.objects.get().paused_at is None
    boss.post(url("queuestate", "resume"), {"queue": "mail"})
    entries = LogEntry.objects.order_by("pk").values_list("object_repr", "change_message")
    assert [name for name, _ in entries] == ["mail"] * 3
    assert [note.split()[0] for _, note in entries] == ["Paused", "Paused", "Resumed."]
    assert "Resumed." in text(boss.get(url("queuestate", "history", "mail")))


def test_queues_are_limited_with_a_log(boss):
    add("mail")
    address = url("queuestate", "limit")
    response = boss.post(address, {"queue": "mail", "max_in_flight": "5", "page": "1"})
    assert response.url == url("queuestate", "change", "mail")
    assert "limited" in told(response)[0]
    assert QueueState.objects.get().max_in_flight == 5
    boss.post(address, {"queue": "mail", "max_in_flight": "0"})
    assert QueueState.objects.get().max_in_flight == 0
    response = boss.post(address, {"queue": "mail", "max_in_flight": ""})
    assert "of the settings" in told(response)[-1]
    assert QueueState.objects.get().max_in_flight is None
    notes = LogEntry.objects.order_by("pk").values_list("change_message", flat=True)
    assert list(notes) == ["Limited to 5 in flight.", "Limited to 0 in flight.", "Limit lifted."]
    assert boss.get(address).url == url("queuestate")


@pytest.mark.parametrize("maximum", ["x", "-1", "1.5", "\u0661", "9" * 10, "1" * 30, "1;drop"])
def test_invalid_limits_are_refused(boss, maximum):
    add("mail")
    data = {"queue": "mail", "max_in_flight": maximum}
    assert boss.post(url("queuestate", "limit"), data).status_code == 400
    assert not QueueState.objects.exists()


def test_a_backoff_is_ended_with_a_log(boss):
    decide("mail", backoff_level=3, backoff=60, paused=-5)
    address = url("queuestate", "end_backoff")
    response = boss.post(address, {"queue": "mail"})
    assert "is no longer backing off" in told(response)[0]
    state = QueueState.objects.get()
    assert (state.backoff_level, state.backoff_until) == (0, None)
    assert state.paused_at is not None
    boss.post(address, {"queue": "mail"})
    assert LogEntry.objects.get().change_message == "Backoff ended."
    assert boss.get(address).url == url("queuestate")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ({"queue": "no name"}, 404),
        ({"queue": "no name", "confirmed": "yes"}, 404),
        ({}, 404),
        ({"queue": "mail", "seconds": "7"}, 400),
        ({"queue": "nowhere", "seconds": "7"}, 400),
    ],
)
def test_only_queues_are_paused_and_only_for_offered_times(boss, data, status):
    add("mail")
    assert boss.post(url("queuestate", "pause"), data).status_code == status
    assert not QueueState.objects.exists()


@pytest.mark.parametrize(
    ("page", "data", "label", "row"),
    [
        ("pause", {"seconds": "900", "page": "1"}, "Pause", True),
        ("limit", {"max_in_flight": "5"}, "Limit", True),
        ("resume", {}, "Resume", False),
        ("end_backoff", {}, "End the backoff", False),
    ],
)
def test_unknown_queue_is_changed_after_a_confirmation(boss, page, data, label, row):
    add("invoices")
    data = {"queue": "invioces", **data}
    asked = boss.post(url("queuestate", page), data)
    words = text(asked)
    assert "Queue invioces is not known" in words
    assert "Did you mean invoices ?" in words
    assert f"{label} invioces anyway" in words
    assert url("queuestate", "change", "invoices") in asked.content.decode()
    assert not QueueState.objects.exists()
    assert not LogEntry.objects.exists()
    assert dict(asked.context["fields"]) == data
    done = boss.post(asked.context["url"], {**data, "confirmed": "yes"})
    assert done.status_code == 302
    assert "invioces" in told(done)[0]
    assert QueueState.objects.filter(queue="invioces").exists() is row
    assert LogEntry.objects.filter(object_repr="invioces").exists() is row


def test_a_search_without_a_queue_offers_to_pause_it(boss, viewer):
    for client, name, offered in ((boss, "later", 1), (boss, "no name", 0), (viewer, "later", 0)):
        page = client.get(url("queuestate"), {"q": name})
        assert text(page).count("Pause a queue of this name") == offered


def test_running_message_has_no_actions(boss):
    message = add(leased=60)
    beat(running=[message.pk])
    page = boss.get(url("queuedmessage", "change", message.pk))
    assert page.context["actions"] == []
    assert "runs now" in text(page)


class TestHeads:
    """The heads of blocked messages are requeued or skipped, and logged like any other action."""

    @pytest.fixture
    def lines(self):
        """Two keys with a dead head each, one with a retrying head; by key."""
        found = {}
        for key, columns in {"a": EVERY["dead"], "b": EVERY["dead"], "c": {"after": 60}}.items():
            head = add(key=key, **columns)
            found[key] = [head, *(add(key=key, blocked_by=head.pk) for _ in range(2))]
        return found

    def test_requeued_from_the_list(self, boss, lines):
        blocked = QueuedMessage.objects.filter(blocked_by__isnull=False)
        ids = [each.pk for each in blocked]
        response = act(boss, "requeue_heads", ids, query="?state=blocked")
        assert response.url == LIST + "?state=blocked"
        assert ["2 messages" in told(response)[0], "1 message " in told(response)[1]] == [True] * 2
        assert QueuedMessage.objects.count() == 9
        states = {key: line[0].pk for key, line in lines.items()}
        assert {k: QueuedMessage.objects.get(pk=pk).state for k, pk in states.items()} == {
            "a": "processable",
            "b": "processable",
            "c": "delayed",
        }
        logged = {int(each.object_id) for each in LogEntry.objects.all()}
        assert logged == {lines["a"][0].pk, lines["b"][0].pk}

    def test_discarded_after_a_question(self, boss, lines):
        head, second, third = lines["a"]
        page = act(boss, "discard_heads", [second.pk, third.pk])
        assert (page.context["count"], page.context["behind"]) == (1, "2")
        assert "wait behind the selected ones: 2 . They" in text(page)
        assert QueuedMessage.objects.filter(pk=head.pk).exists()
        boss.post(page.context["url"], {"ids": page.context["ids"], "confirmed": "yes"})
        assert not QueuedMessage.objects.filter(pk=head.pk).exists()
        second.refresh_from_db()
        assert second.state == "processable"
        entry = LogEntry.objects.get()
        assert (int(entry.object_id), entry.action_flag) == (head.pk, DELETION)

    def test_followers_of_skipped_heads_are_not_counted(self, boss, lines):
        page = act(boss, "discard_heads", [line[1].pk for line in lines.values()])
        assert (page.context["count"], page.context["behind"]) == (2, "4")
        assert page.context["others"] == [("delayed", 1)]

    def test_unblocked_message_is_its_own_head(self, boss, lines):
        act(boss, "requeue_heads", [lines["a"][0].pk, add(dead=-1).pk])
        assert QueuedMessage.objects.dead().get().key == "b"

    def test_from_the_page_of_a_follower_and_back(self, boss, lines):
        head, second, _ = lines["a"]
        page = boss.get(url("queuedmessage", "change", second.pk))
        assert page.context["head"]["row"] == head
        assert f'href="{url("queuedmessage", "change", head.pk)}"' in page.content.decode()
        address = url("queuedmessage", "action", "discard")
        asked = boss.post(address, {"ids": head.pk, "page": second.pk})
        here = url("queuedmessage", "change", second.pk)
        assert asked.context["back"] == here
        assert f'name="page" value="{second.pk}"' in asked.content.decode()
        assert confirm(boss, "discard", [head.pk], page=second.pk).url == here

    def test_cancelled_head_makes_its_follower_the_head(self, boss, lines):
        head, second, third = lines["c"]
        page = boss.get(url("queuedmessage", "change", third.pk))
        assert [each.name for each, _ in page.context["head"]["actions"]] == [
            "run_now",
            "cancel",
        ]
        confirm(boss, "cancel", [head.pk], page=third.pk)
        page = boss.get(url("queuedmessage", "change", third.pk))
        assert page.context["head"]["row"] == second

    def test_from_the_page_of_the_queue_and_back(self, boss, lines):
        here = url("queuestate", "change", "mail")
        page = boss.get(here)
        assert [each["head"].id for each in page.context["heads"]] == [
            line[0].pk for line in lines.values()
        ]
        head = lines["b"][0].pk
        address = url("queuedmessage", "action", "requeue")
        assert boss.post(address, {"ids": head, "queue": "mail"}).url == here
        asked = boss.post(url("queuedmessage", "action", "cancel"), {"ids": head, "queue": "a b"})
        assert asked.context["back"] == url("queuestate", "change", "a b")
        assert boss.get(asked.context["back"]).status_code == 302

    @pytest.mark.parametrize("page", ["x", "-1", "1,2", "0"])
    def test_invalid_page_to_return_to_is_refused(self, boss, lines, page):
        data = {"ids": lines["a"][0].pk, "page": page}
        address = url("queuedmessage", "action", "discard")
        assert boss.post(address, data).status_code == 400
        assert QueuedMessage.objects.count() == 9

    def test_head_in_flight_has_no_actions(self, boss):
        head = add(key="k", leased=60)
        message = add(key="k", blocked_by=head.pk)
        page = boss.get(url("queuedmessage", "change", message.pk))
        assert page.context["head"]["actions"] == []
