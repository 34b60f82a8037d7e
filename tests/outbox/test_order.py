"""Order at the producer: keys, rows of ordered queues, ids in the order of commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_mq import BroadcastBusy, Message, broadcast, broadcast_many, handler, handlers
from django_mq.models import QueuedMessage
from django_mq.store.insert import MAX_INSERT_ROWS
from tests.database import until_any_blocked

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def registry(settings: Any) -> Iterator[None]:
    settings.DJANGO_MQ = {
        "QUEUES": {
            "line": {"ordered": True},
            "keys": {"key_order": "commit"},
            "both": {"ordered": True, "key_order": "commit"},
        }
    }
    with handlers.isolated():
        yield


def one(messages: list[Message]) -> None:
    for each in messages:
        broadcast(each.type, queue=each.queue, key=each.key, unique_id=each.unique_id)


WAYS: dict[str, Callable[[list[Message]], object]] = {
    "one": one,
    "list": broadcast_many,
    "stream": lambda messages: broadcast_many(iter(messages)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("count", [1, 2, MAX_INSERT_ROWS + 1])
def test_keys_and_lines_are_stored_in_every_way(
    way: Callable[[list[Message]], object], count: int
) -> None:
    messages = [
        Message("a.b", queue=queue, key=key, unique_id=unique)
        for n in range(count)
        for queue, key, unique in [
            ("line", None, None),
            ("line", "k", f"a{n}"),
            ("mail", "order/1", None),
            ("keys", "k", f"b{n}"),
        ]
    ]
    with transaction.atomic():
        way(messages)
    rows = QueuedMessage.objects.order_by("id").values_list("queue", "key", "unique_id", "ordered")
    assert list(rows) == [(m.queue, m.key, m.unique_id, m.queue == "line") for m in messages]


class Producer:
    """Another producer whose transaction stays open until it is told to end."""

    def __init__(self, pool: ThreadPoolExecutor, *calls: Callable[[], Any]) -> None:
        self._end = threading.Event()
        self._wrote = threading.Event()
        self.ids = pool.submit(self._run, calls)

    def wrote(self) -> Producer:
        assert self._wrote.wait(PATIENCE)
        return self

    def _run(self, calls: tuple[Callable[[], Any], ...]) -> list[int]:
        try:
            with transaction.atomic():
                ids = [id for call in calls for id in call().ids]
                self._wrote.set()
                assert self._end.wait(PATIENCE)
            return ids
        finally:
            connections.close_all()

    def end(self) -> list[int]:
        self._end.set()
        return self.ids.result(PATIENCE)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def send(queue: str, key: str | None = None, **options: Any) -> Callable[[], Any]:
    return lambda: broadcast("a.b", queue=queue, key=key, **options)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (send("keys", "k"), send("keys", "k")),
        (send("keys", "k"), send("keys", "k", unique_id="u")),
        (send("keys", "k", unique_id="u"), send("keys", "k")),
        (send("both"), send("both", "k")),
        (send("both"), send("both")),
        (send("both", "k"), send("both", "other")),
    ],
    ids=["key", "unique-second", "unique-first", "ordered", "same-route", "ordered-keys"],
)
def test_ids_rise_in_the_order_of_commits(
    pool: ThreadPoolExecutor, first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    """Guarantee 8: the second producer waits before its id is drawn."""
    early = Producer(pool, first).wrote()
    late = Producer(pool, send("mail"), second)
    until_any_blocked(event="advisory")
    [one] = early.end()
    assert late.wrote().end()[1] > one


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (send("keys", "k"), send("keys", "other")),
        (send("keys"), send("keys")),
        (send("keys", "k"), send("mail", "k")),
        (send("line"), send("line")),
    ],
    ids=["other-key", "no-key", "other-queue", "ordered-alone"],
)
def test_other_producers_do_not_wait(
    pool: ThreadPoolExecutor, first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    early = Producer(pool, first).wrote()
    Producer(pool, second).wrote().end()
    early.end()


def test_handlers_have_lines_of_their_own(pool: ThreadPoolExecutor) -> None:
    for type in ("a.one", "a.two"):

        @handler(type, name=type, queue="keys")
        def function(delivery: Any) -> None: ...

    early = Producer(pool, lambda: broadcast("a.one", key="k")).wrote()
    Producer(pool, lambda: broadcast("a.two", key="k")).wrote().end()
    early.end()


def test_calls_wait_for_keys_in_one_order(pool: ThreadPoolExecutor) -> None:
    """In opposite orders, repeatedly: no deadlock."""
    keys = [f"k{n}" for n in range(20)]
    start = threading.Barrier(4)

    def produce(order: list[str]) -> None:
        try:
            start.wait(PATIENCE)
            for _ in range(10):
                with transaction.atomic():
                    broadcast_many([Message("a.b", queue="keys", key=key) for key in order])
        finally:
            connections.close_all()

    calls = [pool.submit(produce, order) for order in (keys, keys[::-1], keys, keys[::-1])]
    for call in calls:
        call.result(PATIENCE)
    assert QueuedMessage.objects.count() == 800


@pytest.mark.parametrize("options", [{}, {"unique_id": "u"}], ids=["plain", "unique"])
def test_without_a_block_the_line_is_kept_until_the_row_is_there(
    settings: Any, options: dict[str, Any]
) -> None:
    """REQUIRE_ATOMIC off: a lock that ended with its own statement would make no producer wait."""
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "REQUIRE_ATOMIC": False}
    kept: list[int] = []

    def look(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "insert into django_mq_queuedmessage" in sql:
            driver = context["connection"].connection
            found = driver.execute(
                "select 1 from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
            )
            kept.append(len(found.fetchall()))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(look):
        broadcast("a.b", queue="keys", key="k", **options)
    assert kept == [1]


@pytest.mark.parametrize("limit", ["lock_timeout", "statement_timeout"])
@pytest.mark.parametrize("options", [{}, {"unique_id": "u"}], ids=["plain", "unique"])
def test_a_timeout_that_ends_the_wait_leaves_the_transaction_usable(
    pool: ThreadPoolExecutor, limit: str, options: dict[str, Any]
) -> None:
    """Guarantee 10."""
    first = Producer(pool, send("keys", "k")).wrote()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set local {limit} = '200ms'")
        with pytest.raises(BroadcastBusy, match="Try again"):
            broadcast("a.b", queue="keys", key="k", **options)
        with connection.cursor() as cursor:
            cursor.execute(f"set local {limit} = 0")  # this machine may be slow
        other = broadcast("a.b", queue="keys", key="another")
    assert {*first.end(), *other.ids} == set(QueuedMessage.objects.values_list("id", flat=True))
