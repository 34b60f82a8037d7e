"""Order keys and unique ids may be any text without control characters, on every path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_mq import InvalidName, Message, broadcast, broadcast_many, cancel, handler, queues
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.testing import drain
from tests.rows import add

pytestmark = pytest.mark.django_db

KEYS = (
    "user:ä+b@example.com",
    "a b",
    " ",
    "\\",
    "\\N",
    "\\.",
    "'\"; -- $1 %s %(x)s {0}",
    '{"a": [null]}',
    "null",
    "\u2028\u202e\u00a0",
    "é" * 128,
    "\U0001f600" * 128,
)
REFUSED = ("", "x" * 129, "a\n", "\t", "\x00", "\x1b[2J", "\x7f", "\x85", "\x9f", "\ud800", 7, b"k")


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    from django_mq import handlers

    with handlers.isolated():
        yield


@pytest.mark.parametrize("key", KEYS, ids=ascii)
@pytest.mark.parametrize("count", [1, 3, 60])
def test_every_way_into_the_table_keeps_a_key(key: str, count: int) -> None:
    """A single row, a few rows, and COPY."""
    messages = [Message("a.b", key=key, unique_id=None) for _ in range(count)]
    with transaction.atomic():
        broadcast_many(messages)
        broadcast_many(iter(messages))
        broadcast("a.b", key=key, unique_id=key)
    assert set(QueuedMessage.objects.values_list("key", flat=True)) == {key}
    assert UniqueKey.objects.get().unique_id == key


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_messages_with_any_key_run_in_order(key: str) -> None:
    ran = []

    @handler("a.b", name="h")
    def h(delivery: Any) -> None:
        ran.append((delivery.key, delivery.payload))

    with transaction.atomic():
        for n in range(3):
            broadcast("a.b", n, key=key)
    assert drain() == 3
    assert ran == [(key, n) for n in range(3)]


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_any_unique_id_is_taken_put_aside_and_free_again(key: str) -> None:
    runs = []

    @handler("a.b", name="h")
    def h(delivery: Any) -> None:
        runs.append(delivery.payload)
        if len(runs) == 1:
            with transaction.atomic():
                again = broadcast("a.b", 2, unique_id=key, key=key, on_duplicate="rerun")
            assert again.outcome == "requeued"

    with transaction.atomic():
        assert broadcast("a.b", 1, unique_id=key).outcome == "added"
        assert broadcast("a.b", 1, unique_id=key).outcome == "duplicate"
    assert drain() == 2
    assert runs == [1, 2]
    assert not UniqueKey.objects.exists()


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_operators_find_them(key: str) -> None:
    kept = add(key="other", unique_id="other", dead=-1)
    add(key=key, dead=-1)
    call_command("mq_requeue", f"--key={key}", "--yes", verbosity=0)
    requeued = QueuedMessage.objects.get(key=key)
    assert requeued.dead_at is None
    assert queues.why(requeued.pk)
    assert queues.purge(key=key, waiting=True).ids == (requeued.pk,)
    with transaction.atomic():
        [id] = broadcast("a.b", unique_id=key).ids
        assert cancel(unique_id=key).ids == (id,)
    assert QueuedMessage.objects.get() == kept


@pytest.mark.parametrize("key", REFUSED, ids=ascii)
def test_invalid_key_is_refused_before_sql(key: Any, django_assert_num_queries: Any) -> None:
    with transaction.atomic():
        calls = [
            lambda: broadcast("a.b", key=key),
            lambda: broadcast("a.b", unique_id=key),
            lambda: broadcast_many([Message("a.b", key=key)]),
            lambda: cancel(unique_id=key),
            lambda: queues.purge(key=key),
        ]
        for call in calls:
            with (
                django_assert_num_queries(0),
                pytest.raises(InvalidName, match=r"^(key|unique id) "),
            ):
                call()


def test_keys_are_compared_by_bytes() -> None:
    """An update of the server's locales must not change an index."""
    query = """
        select c.table_name, c.column_name from information_schema.columns c
         where c.collation_name = 'C' and c.table_name like 'django\\_mq\\_%' order by 1, 2
    """
    with connection.cursor() as cursor:
        cursor.execute(query)
        found = set(cursor.fetchall())
    assert {
        ("django_mq_queuedmessage", "key"),
        ("django_mq_queuedmessage", "unique_id"),
        ("django_mq_uniquekey", "unique_id"),
    } <= found


def test_a_key_and_its_decomposed_form_are_two() -> None:
    with transaction.atomic():
        outcomes = [broadcast("a.b", unique_id=id).outcome for id in ("\u00e4", "a\u0308")]
    assert outcomes == ["added", "added"]
