"""The pages of the history: the list, a message, its chain, and the replay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry

from django_mq import handler, handlers
from django_mq.admin import HandledMessageAdmin
from django_mq.models import HandledMessage, QueuedMessage
from tests.admin.conftest import VIEW
from tests.admin.pages import listed, text, told, url
from tests.rows import add
from tests.slow import slow

pytestmark = pytest.mark.django_db

NOW = datetime.now(UTC)
LIST = url("handledmessage")


@pytest.fixture(autouse=True)
def _handlers():
    with handlers.isolated():
        handler("t", queue="mail", name="h")(lambda delivery: None)
        handler("u", queue="post", name="other")(lambda delivery: None)
        yield


def keep(id, *, hours=1, **given):
    ended = NOW - timedelta(hours=hours)
    given = {"queue": "mail", "type": "t", "handler": "h", "payload": {"n": id}, **given}
    given.setdefault("started_at", ended - timedelta(milliseconds=250))
    return HandledMessage.objects.create(
        id=id, ended_at=ended, keep_until=NOW + timedelta(days=1), **given
    )


@pytest.mark.parametrize("hours", [(1, 2), (2, 1)])
def test_of_two_messages_with_one_id_the_page_shows_one(login, hours):
    """After a reset of the sequence. The content of the other may be of a queue not to be seen."""
    for each in hours:
        keep(7, hours=each, payload={"ended": f"{each} h ago"}, type=f"t{each}")
    page = text(
        login(*VIEW, "view_handledmessage", "view_payload").get(url("handledmessage", "change", 7))
    )
    assert "t1" in page
    assert "1 h ago" in page
    assert "2 h ago" not in page


def replay(client, ids, **more):
    data = {"ids": ",".join(map(str, ids)), "confirmed": "yes", **more}
    return client.post(url("handledmessage", "replay"), data)


def test_the_list_is_filtered_and_searched(viewer):
    keep(1, hours=50, key="order 7")
    keep(2, hours=3, queue="post", handler="other", correlation_id="chain")
    keep(3, hours=0.1, type="u")
    for query, ids in {
        "": [3, 2, 1],
        "?ended_at_from=1h": [3],
        "?ended_at_from=24h": [3, 2],
        "?queue=post": [2],
        "?handler=h": [3, 1],
        "?q=order 7": [1],
        "?q=chain": [2],
        "?q=%233": [3],
        "?type=u": [3],
        "?type=t&queue=mail": [1],
    }.items():
        assert listed(viewer.get(LIST + query)) == ids, query
    assert "250 ms" in text(viewer.get(LIST))
    assert viewer.get(f"{LIST}?payload__n=1").status_code == 400
    assert viewer.get(f"{LIST}?ended_at_from=x").status_code == 302


def test_the_list_takes_few_queries(viewer, django_assert_max_num_queries):
    for id in range(1, 60):
        keep(id)
    viewer.get(LIST)
    with django_assert_max_num_queries(16):
        viewer.get(LIST)


def test_content_needs_permission_to_view_payloads(viewer, boss):
    keep(1, payload={"order": 77, "password": "hunter2"}, metadata={"m": 1})
    address = url("handledmessage", "change", 1)
    assert "77" not in text(viewer.get(address))
    page = text(boss.get(address))
    assert '"order": 77' in page
    assert "hunter2" not in page
    keep(2, payload=None)
    assert "Not kept" in text(boss.get(url("handledmessage", "change", 2)))


def test_a_message_that_is_gone_leads_to_its_history(viewer, login):
    keep(7)
    response = viewer.get(url("queuedmessage", "change", 7))
    assert (response.status_code, response.url) == (302, url("handledmessage", "change", 7))
    assert told(response) == ["Message 7 was acked: this is its page in the history."]
    blind = login("view_queuedmessage", name="blind")
    assert blind.get(url("queuedmessage", "change", 7)).url == url("queuedmessage")


@pytest.mark.parametrize("term", ["7", *slow("%237", "+7+")])
def test_a_search_for_a_message_that_is_gone_points_to_its_history(viewer, login, term):
    keep(7)
    search = f"{url('queuedmessage')}?q={term}"
    page = viewer.get(search)
    assert "Message 7 was acked: see its page in the history" in text(page)
    assert f'href="{url("handledmessage", "change", 7)}"' in page.content.decode()
    blind = login("view_queuedmessage", name="blind")
    assert "in the history" not in text(blind.get(search))
    add(id=7)  # after a reset of the sequence
    page = viewer.get(search)
    assert listed(page) == [7]
    assert "in the history" not in text(page)


def test_a_page_shows_the_chain(viewer, login):
    """The page of a stored message and that of a handled one link to the other messages."""
    keep(1)
    keep(2, causation_id=1, correlation_id="1", type="second")
    waits = add(id=3, metadata={"mq.causation_id": "2", "mq.correlation_id": "1"}, type="third")
    for model, id in (("handledmessage", 1), ("handledmessage", 2), ("queuedmessage", waits.pk)):
        response = viewer.get(url(model, "change", id))
        rows = response.context["chain"]
        assert [(row["id"], len(row["indent"]), row["is_current"]) for row in rows] == [
            (1, 0, id == 1),
            (2, 1, id == 2),
            (3, 2, id == 3),
        ]
        links = [row["url"] for row in rows if row["id"] != id]
        assert all(link in response.content.decode() for link in links)
        assert "Causes and effects" in text(response)
    alone = add(id=100)
    assert "Caused by" not in text(viewer.get(url("queuedmessage", "change", alone.pk)))
    blind = login("view_queuedmessage", name="blind")
    rows = blind.get(url("queuedmessage", "change", waits.pk)).context["chain"]
    assert [row["url"] for row in rows] == ["", "", ""]


def test_replay_asks_does_and_logs(boss):
    keep(1)
    keep(2)
    data = {"action": "replay", "_selected_action": [1, 2], "index": "0"}
    asked = boss.post(f"{LIST}?queue=mail", data)
    assert "Copies of 2 handled messages" in text(asked)
    assert not QueuedMessage.objects.exists()
    done = replay(boss, [1, 2], filters=asked.context["filters"])
    assert done.url == f"{LIST}?queue=mail"
    assert told(done) == ["2 messages replayed."]
    of = QueuedMessage.objects.order_by("pk").values_list("metadata__mq.replay_of", "handler")
    assert list(of) == [("1", "h"), ("2", "h")]
    notes = LogEntry.objects.values_list("object_id", "change_message").order_by("object_id")
    assert list(notes) == [
        (id, "Replayed to its own handler, one of 2 messages.") for id in ("1", "2")
    ]


def test_replay_to_another_handler(boss):
    keep(1)
    asked = boss.post(url("handledmessage", "replay"), {"ids": "1"})
    assert asked.context["recipients"] == ["h", "other"]
    replay(boss, [1], to="other")
    assert QueuedMessage.objects.get().handler == "other"
    assert replay(boss, [1], to="nobody").status_code == 403


def test_message_without_payload_is_not_replayed(boss):
    keep(1, payload=None)
    keep(2)
    page = boss.post(url("handledmessage", "replay"), {"ids": "1,2,3"})
    assert "payload of 1 selected message was not kept" in text(page)
    assert "1 selected message is no longer in the history" in text(page)
    (notice,) = told(replay(boss, [1, 2]))
    assert "without keeping its payload" in notice
    assert not QueuedMessage.objects.exists()
    assert not LogEntry.objects.exists()


def test_replay_reports_skipped_messages(boss):
    """Guarantee 13: messages that have left the history since the page was shown."""
    keep(1)
    assert told(replay(boss, [1, 98, 99])) == [
        "1 message replayed.",
        "2 messages skipped: no longer in the history.",
    ]


def test_replay_needs_its_permission(viewer, login):
    keep(1)
    assert replay(viewer, [1]).status_code == 403
    data = {"action": "replay", "_selected_action": [1], "index": "0"}
    assert viewer.post(LIST, data).status_code == 403
    assert "Replay" not in text(viewer.get(url("handledmessage", "change", 1)))
    assert not QueuedMessage.objects.exists()
    allowed = login(*VIEW, "replay_message", name="allowed")
    assert "Replay…" in text(allowed.get(url("handledmessage", "change", 1)))
    assert told(replay(allowed, [1])) == ["1 message replayed."]
    assert allowed.get(url("handledmessage", "replay")).url == LIST
    for ids in ("x", "1,", ",".join(map(str, range(1, 1002)))):
        assert allowed.post(url("handledmessage", "replay"), {"ids": ids}).status_code == 400


def test_a_user_of_one_queue_sees_and_replays_that_queue(boss, monkeypatch):
    """S33."""
    keep(1)
    keep(2, queue="post", handler="other", correlation_id="1", causation_id=1)
    monkeypatch.setattr(HandledMessageAdmin, "get_queues", lambda self, request: {"mail"})
    assert listed(boss.get(LIST)) == [1]
    assert boss.get(url("handledmessage", "change", 2)).status_code == 302
    assert not boss.get(url("handledmessage", "change", 1)).context["chain"]
    assert replay(boss, [1], to="other").status_code == 403
    assert told(replay(boss, [2])) == ["1 message skipped: no longer in the history."]
    assert not QueuedMessage.objects.exists()
