"""The history is searched, and its messages broadcast again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import transaction

from django_mq import BroadcastBusy, NothingKept, RoutingError, broadcast, handler, handlers, queues
from django_mq.conf.local_time import local_text
from django_mq.models import HandledMessage, QueuedMessage
from django_mq.outbox import backlog
from django_mq.store.replay import find
from django_mq.testing import drain
from tests.management.conftest import run, run_json

pytestmark = pytest.mark.django_db

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
REFUSED = r"must|not a name|not the id|say which|cannot be stored"


@pytest.fixture(autouse=True)
def ran(settings: Any) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Two subscribers of one type; return the deliveries that each got."""
    settings.DJANGO_MQ = {
        "QUEUES": {"mail": {"history": 60, "history_payload": True}},
        "REQUIRE_ATOMIC": False,
    }
    backlog._counts.clear()
    ran: list[tuple[str, Any, dict[str, Any]]] = []
    with handlers.isolated():
        for name in ("h", "other"):

            @handler("t", queue="mail", name=name)
            def h(delivery: Any, name: str = name) -> None:
                ran.append((name, delivery.payload, delivery.metadata))

        @handler("else", queue="post", name="elsewhere")
        def elsewhere(delivery: Any) -> None:
            ran.append(("elsewhere", delivery.payload, delivery.metadata))

        yield ran


def keep(id: int, *, hours: float = 1, **given: Any) -> HandledMessage:
    """Keep a message that was handled `hours` ago."""
    given = {"queue": "mail", "type": "t", "handler": "h", "payload": {"n": id}, **given}
    return HandledMessage.objects.create(
        id=id, ended_at=NOW - hours * HOUR, keep_until=NOW + HOUR, **given
    )


def test_why_explains_the_end_of_a_message_in_the_history() -> None:
    """The last to end, if two messages had the id, one after a reset of the sequence."""
    keep(5, hours=2, handler="other")
    kept = keep(5, attempts=3, worker="w1")
    answer = queues.why(5)
    assert (answer.state, answer.error) == ("gone", "")
    assert answer.text == (
        f"Message 5 (t, queue mail) was acked at {local_text(kept.ended_at)}, after attempt 3, by"
        " handler h on worker w1. It is in the history."
    )
    keep(6, handler="", worker="")
    assert "after attempt 1. It is" in run("mq_why", 6)


class TestHistory:
    @pytest.fixture(autouse=True)
    def rows(self) -> None:
        keep(1, hours=4, queue="a", key="k")
        keep(2, hours=3, type="u", correlation_id="1")
        keep(3, hours=2, handler="other", correlation_id="chain/7")
        keep(4, hours=1, queue="a", correlation_id="1")

    @pytest.mark.parametrize(
        ("filters", "ids"),
        [
            ({}, [4, 3, 2, 1]),
            ({"limit": 2}, [4, 3]),
            ({"queue": "a"}, [4, 1]),
            ({"type": "u"}, [2]),
            ({"handler": "other"}, [3]),
            ({"key": "k"}, [1]),
            ({"correlation_id": "1"}, [4, 2, 1]),
            ({"correlation_id": "chain/7"}, [3]),
            ({"correlation_id": "9" * 40}, []),
            ({"correlation_id": "\0"}, []),
            ({"since": NOW - 2 * HOUR}, [4, 3]),
            ({"until": NOW - 2 * HOUR}, [2, 1]),
            ({"since": 2.5 * HOUR, "until": 5400}, [3]),
            ({"since": timedelta(days=5000 * 365)}, [4, 3, 2, 1]),
            ({"queue": "a", "type": "u"}, []),
        ],
    )
    def test_filters(self, filters: Any, ids: list[int]) -> None:
        assert [row.pk for row in queues.history(**filters)] == ids

    @pytest.mark.parametrize(
        "bad",
        [
            {"queue": "a b"}, {"type": ""}, {"key": "\n"}, {"limit": 0}, {"since": -1},
            {"until": datetime(2030, 1, 1)}, {"correlation_id": 1},
        ],
    )  # fmt: skip
    def test_bad_filters_are_refused(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=REFUSED):
            queues.history(**bad)


class TestReplay:
    def test_copies_go_to_the_handlers_of_the_originals(self, ran: Any) -> None:
        """Other subscribers of the type get nothing; only the id is new."""
        (id, _) = broadcast("t", {"a": 1.0}, metadata={"m": 1}, key="k", unique_id="u").ids
        broadcast("t", {"a": 2})
        assert drain() == 4
        ran.clear()
        done = queues.replay(ids=id)
        assert (done.ids, done.skipped) == ((id,), 0)
        copy = QueuedMessage.objects.get()
        assert (copy.queue, copy.key, copy.unique_id, copy.handler) == ("mail", "k", None, "h")
        assert drain() == 1
        assert ran == [("h", {"a": 1.0}, {"m": 1, "mq.replay_of": str(id)})]

    def test_a_replay_is_replayed(self, ran: Any) -> None:
        """It is replayed twice, then its copy: each copy names the message that it repeats."""
        keep(7)
        assert [queues.replay(ids=[7]).ids for _ in range(2)] == [(7,), (7,)]
        first, second = QueuedMessage.objects.order_by("pk").values_list("pk", flat=True)
        assert drain() == 2
        assert queues.replay(ids=[first]).ids == (first,)
        assert drain() == 1
        assert [metadata["mq.replay_of"] for _, _, metadata in ran] == ["7", "7", str(first)]
        assert HandledMessage.objects.filter(pk=second).exists()

    def test_to_another_handler_whatever_it_subscribes_to(self, ran: Any) -> None:
        """A copy that names a handler runs there, even if none of its patterns match."""
        keep(7)
        assert queues.replay(ids=7, to="elsewhere").ids == (7,)
        assert QueuedMessage.objects.get().queue == "post"
        assert drain() == 1
        assert ran == [("elsewhere", {"n": 7}, {"mq.replay_of": "7"})]

    @pytest.mark.parametrize(
        ("filters", "ids"),
        [
            ({"ids": [4, 3, 99]}, (3, 4)),
            ({"ids": [4, 3], "type": "t"}, (4,)),
            ({"queue": "post"}, (2,)),
            ({"handler": "other"}, (3,)),
            ({"since": 2.5 * HOUR}, (3, 4)),
            ({"until": NOW - 2 * HOUR}, (1, 2)),
            ({"until": NOW, "limit": 2}, (1, 2)),
        ],
    )
    def test_the_filters_select(self, filters: Any, ids: tuple[int, ...]) -> None:
        keep(1, hours=4)
        keep(2, hours=3, queue="post")
        keep(3, hours=2, handler="other", type="u")
        keep(4, hours=1)
        dry = queues.replay(**filters, dry_run=True)
        assert (dry.ids, QueuedMessage.objects.count()) == (ids, 0)
        assert queues.replay(**filters) == dry
        of = QueuedMessage.objects.order_by("pk").values_list("metadata__mq.replay_of", flat=True)
        assert list(of) == [str(id) for id in ids]
        assert dry.skipped == (len(filters["ids"]) - len(ids) if "ids" in filters else 0)

    def test_without_a_payload_nothing_is_replayed(self) -> None:
        keep(1)
        keep(2, payload=None)
        with pytest.raises(NothingKept, match=r"message 2 was handled .* history_payload"):
            queues.replay(type="t")
        assert not QueuedMessage.objects.exists()

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({}, "not registered here: say to which handler"),
            ({"to": "nobody"}, "no handler here has that name"),
            ({"to": "a b"}, "to 'a b' is not a name"),
        ],
    )
    def test_an_unknown_handler(self, given: Any, text: str) -> None:
        keep(1, handler="gone")
        for dry_run in (True, False):
            with pytest.raises((RoutingError, ValueError), match=text):
                queues.replay(ids=1, dry_run=dry_run, **given)
        assert not QueuedMessage.objects.exists()

    def test_a_full_queue_takes_none(self, settings: Any) -> None:
        settings.DJANGO_MQ = {**settings.DJANGO_MQ, "QUEUES": {"mail": {"max_backlog": 1}}}
        keep(1)
        keep(2)
        with pytest.raises(BroadcastBusy):
            queues.replay(type="t")
        assert not QueuedMessage.objects.exists()

    def test_a_rollback_takes_it_along(self) -> None:
        keep(1)
        with transaction.atomic():
            assert queues.replay(ids=1)
            transaction.set_rollback(True)
        assert not QueuedMessage.objects.exists()

    @pytest.mark.parametrize("metadata", [None, [], 7, "x", {"mq.replay_of": {}}])
    def test_odd_metadata(self, metadata: Any, ran: Any) -> None:
        keep(1, metadata=metadata)
        assert queues.replay(ids=1)
        assert drain() == 1
        assert ran == [("h", {"n": 1}, {"mq.replay_of": "1"})]

    @pytest.mark.parametrize("bad", [{}, {"to": "h"}, {"ids": [0]}, {"ids": 1, "limit": 0}])
    def test_bad_arguments_are_refused(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=REFUSED):
            queues.replay(**bad)


class TestCommand:
    def test_it_asks(self) -> None:
        """S34."""
        keep(1)
        keep(2, type="u")
        assert run("mq_replay", "--type", "t", "--dry-run") == "Would replay 1 message.\n"
        with pytest.raises(CommandError, match=r"Broadcast 1 message again\? Pass --yes"):
            run("mq_replay", "--type", "t")
        assert not QueuedMessage.objects.exists()
        assert run("mq_replay", "--id", 1, 2, "--yes") == "Replayed 2 messages.\n"
        assert run("mq_replay", "--handler", "x", "--yes") == (
            "Nothing was replayed: the history has no such message. It keeps what queues and"
            " handlers with the option history have handled.\n"
        )
        assert QueuedMessage.objects.count() == 2

    def test_dry_run_explains_why_nothing_is_replayed(self) -> None:
        told = (
            "the history has no such message. It keeps what queues and handlers with the option"
            " history have handled.\n"
        )
        assert run("mq_replay", "--type", "t", "--dry-run") == f"Would replay 0 messages: {told}"
        assert run("mq_replay", "--id", 9, "--dry-run") == (
            f"Would replay 0 messages, skipped 1 (not in the history, or not selected): {told}"
        )

    def test_ids_that_are_not_in_the_history_are_counted(self) -> None:
        keep(1)
        ids = ("mq_replay", "--id", 1, 99)
        skipped = "1 message, skipped 1 (not in the history, or not selected)"
        assert run(*ids, "--dry-run") == f"Would replay {skipped}.\n"
        assert run(*ids, "--yes") == f"Replayed {skipped}.\n"
        assert run_json(*ids, "--yes") == {"ids": [1], "skipped": 1, "dry_run": False}

    def test_json_and_to(self) -> None:
        keep(1)
        told = {"ids": [1], "skipped": 0, "dry_run": False}
        options = ("--since", "2020-01-01T00:00Z", "--to", "elsewhere", "--yes")
        assert run_json("mq_replay", *options) == told
        assert QueuedMessage.objects.get().handler == "elsewhere"

    def test_impossible_replay_is_refused(self) -> None:
        keep(1, payload=None)
        for options, text in (
            ((), "select messages"),
            (("--id", 1, "--yes"), "history_payload"),
            (("--id", 1, "--to", "x", "--yes"), "no handler here"),
        ):
            with pytest.raises(CommandError, match=text):
                run("mq_replay", *options)


def test_each_statement_of_a_replay_reads_its_own_ids_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`mq_replay` names the ids that it has counted: all of them in each chunk is quadratic."""
    monkeypatch.setattr(import_module("django_mq.queues.history"), "CHUNK", 2)
    asked = []

    def look(cursor: Any, wanted: Any, **given: Any) -> Any:
        asked.append(wanted.ids)
        return find(cursor, wanted, **given)

    monkeypatch.setattr("django_mq.store.replay.find", look)
    for id in range(1, 6):
        keep(id)
    assert queues.replay(ids=[5, 4, 3, 2, 1, 99]).ids == (1, 2, 3, 4, 5)
    assert queues.replay(ids=range(1, 6), limit=3).ids == (1, 2, 3)
    assert max(map(len, asked)) == 2


@pytest.mark.parametrize("call", [queues.history, queues.replay])
def test_a_period_that_ends_before_it_begins(call):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    assert not call(since=at, until=at)
    for since, until in ((60, 3600), (at, at - timedelta(microseconds=1))):
        with pytest.raises(ValueError, match="since must be before until"):
            call(since=since, until=until)
