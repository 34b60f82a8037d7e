"""Order keys and unique ids are any text without control characters, whatever way they go."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_mq import (
    InvalidName,
    InvalidOption,
    InvalidPayload,
    Message,
    PayloadTooLarge,
    RetryPolicy,
    broadcast,
    broadcast_many,
    cancel,
    handler,
    queues,
)
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
REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "type-empty": (InvalidName, {"type": ""}),
    "type-space": (InvalidName, {"type": "shop orders"}),
    "type-newline": (InvalidName, {"type": "shop\n"}),
    "type-none": (InvalidName, {"type": None}),
    "type-letters": (InvalidName, {"type": "zoë"}),
    "type-long": (InvalidName, {"type": "x" * 129}),
    "queue-empty": (InvalidName, {"queue": ""}),
    "queue-blank": (InvalidName, {"queue": "  "}),
    "queue-number": (InvalidName, {"queue": 5}),
    "queue-sql": (InvalidName, {"queue": "q'; drop table x; --"}),
    "priority-high": (InvalidOption, {"priority": 101}),
    "priority-low": (InvalidOption, {"priority": -101}),
    "priority-bool": (InvalidOption, {"priority": True}),
    "priority-float": (InvalidOption, {"priority": 1.0}),
    "priority-none": (InvalidOption, {"priority": None}),
    "version-0": (InvalidOption, {"schema_version": 0}),
    "version-bool": (InvalidOption, {"schema_version": True}),
    "version-text": (InvalidOption, {"schema_version": "1"}),
    "version-beyond-the-column": (InvalidOption, {"schema_version": 2**31}),
    "metadata-list": (InvalidOption, {"metadata": ["tier"]}),
    "metadata-text": (InvalidOption, {"metadata": "tier"}),
    "metadata-key": (InvalidOption, {"metadata": {1: "x"}}),
    "metadata-reserved": (InvalidOption, {"metadata": {"mq.hops": 0}}),
    "metadata-nan": (InvalidPayload, {"metadata": {"x": float("nan")}}),
    "metadata-large": (PayloadTooLarge, {"metadata": {"x": "y" * 16 * 1024}}),
    "payload-nan": (InvalidPayload, {"payload": {"x": float("nan")}}),
    "payload-nul": (InvalidPayload, {"payload": {"x": "\0"}}),
    "payload-surrogate": (InvalidPayload, {"payload": {"x": "\ud800"}}),
    "payload-object": (InvalidPayload, {"payload": {"x": Unencodable()}}),
    "payload-keys": (InvalidPayload, {"payload": {1: "x", "1": "y"}}),
    "payload-digits": (InvalidPayload, {"payload": 10**5000}),
    "payload-large": (PayloadTooLarge, {"payload": "x" * 2**20}),
    "after-naive": (InvalidOption, {"after": datetime(2030, 1, 1)}),
    "after-negative": (InvalidOption, {"after": -1}),
    "after-nan": (InvalidOption, {"after": float("nan")}),
    "after-bool": (InvalidOption, {"after": True}),
    "after-text": (InvalidOption, {"after": "5"}),
    "after-pair": (InvalidOption, {"after": (5, "minutes")}),
    "after-far": (InvalidOption, {"after": timedelta(days=367)}),
    "after-very-far": (InvalidOption, {"after": 1e300}),
    "after-year-9999": (InvalidOption, {"after": datetime(9999, 12, 31, tzinfo=UTC)}),
    "after-before-time": (
        InvalidOption,
        {"after": datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))},
    ),
    "expires-naive": (InvalidOption, {"expires": datetime(2030, 1, 1)}),
    "expires-zero": (InvalidOption, {"expires": 0}),
    "expires-past": (InvalidOption, {"expires": datetime(2020, 1, 1, tzinfo=UTC)}),
    "expires-far": (InvalidOption, {"expires": timedelta(days=367)}),
    "expires-with-after": (InvalidOption, {"after": 60, "expires": 60}),
    "expires-before-after": (InvalidOption, {"after": timedelta(days=1), "expires": 60}),
    "expires-before-moment": (
        InvalidOption,
        {"after": datetime.now(UTC) + timedelta(days=2), "expires": timedelta(days=1)},
    ),
    "retry-number": (InvalidOption, {"retry": 5}),
    "retry-callable": (InvalidOption, {"retry": RetryPolicy(backoff=lambda attempt: 5)}),
    "on-duplicate": (InvalidOption, {"unique_id": "u", "on_duplicate": "never"}),
    "on-duplicate-of-nothing": (TypeError, {"on_duplicate": "update"}),
    "on-duplicate-skip-of-nothing": (TypeError, {"on_duplicate": "skip"}),
    "on-duplicate-none": (InvalidOption, {"unique_id": "u", "on_duplicate": ""}),
    "unique-for-nothing": (TypeError, {"unique_for": 5}),
    "unique-for-zero": (InvalidOption, {"unique_id": "u", "unique_for": 0}),
    "unique-for-long": (InvalidOption, {"unique_id": "u", "unique_for": timedelta(days=367)}),
    "unique-for-text": (InvalidOption, {"unique_id": "u", "unique_for": "5"}),
    "unique-for-moment": (InvalidOption, {"unique_id": "u", "unique_for": datetime.now(UTC)}),
    "unique-id-blank": (InvalidName, {"unique_id": ""}),
    "unique-id-control": (InvalidName, {"unique_id": "order\n1"}),
    "unique-id-number": (InvalidName, {"unique_id": 1}),
    "key-blank": (InvalidName, {"key": ""}),
    "key-long": (InvalidName, {"key": "k" * 129}),
    "key-number": (InvalidName, {"key": 1}),
    "unknown-option": (TypeError, {"delay": 5}),
}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    from django_mq import handlers

    with handlers.isolated():
        yield


@pytest.mark.parametrize("key", KEYS, ids=ascii)
@pytest.mark.parametrize("count", [1, 3, 60])
def test_every_way_into_the_table_keeps_a_key(key: str, count: int) -> None:
    """One row, a few, and COPY."""
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
def test_what_is_no_key_is_refused_before_sql(key: Any, django_assert_num_queries: Any) -> None:
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
