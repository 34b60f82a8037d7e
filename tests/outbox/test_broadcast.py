"""broadcast() and its kin."""

import inspect
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connection, transaction
from django.test import TestCase

import django_mq
from django_mq import (
    BroadcastError,
    BulkReceipt,
    CopyReceipt,
    Delivery,
    InvalidName,
    InvalidOption,
    InvalidPayload,
    Message,
    NotInTransaction,
    PayloadTooLarge,
    Receipt,
    RetryPolicy,
    RoutingError,
    TooManyHops,
    abroadcast,
    broadcast,
    broadcast_many,
    cancel,
    exponential,
    fixed,
    handler,
    handlers,
)
from django_mq.messages import ClaimedRow, current_delivery
from django_mq.models import QueuedMessage
from django_mq.outbox import notify as bell
from django_mq.outbox import stream as streaming
from django_mq.store import notify as doorbell
from django_mq.store.insert import FEW
from tests.database import listening, second_connection


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with handlers.isolated():
        yield


@pytest.fixture(autouse=True)
def quiet_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell, "_last", {})


def subscribe(*patterns: str, **options: Any) -> None:
    def function(delivery: Delivery) -> None: ...

    handler(*patterns, **options)(function)


def the_message() -> QueuedMessage:
    return QueuedMessage.objects.get()


def now() -> datetime:
    return datetime.now(UTC)


# Transactions


@pytest.mark.django_db
def test_the_block_of_a_test_case_does_not_count() -> None:
    """Guarantee 12."""
    assert connection.in_atomic_block
    with pytest.raises(NotInTransaction):
        broadcast("a.b")
    with transaction.atomic():
        assert broadcast("a.b")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "store",
    [
        lambda: broadcast("a.b"),
        lambda: broadcast_many([Message("a.b")]),
        lambda: broadcast_many([]),
        lambda: broadcast_many(iter([Message("a.b")])),
    ],
    ids=["broadcast", "list", "empty", "iterator"],
)
def test_without_a_block_it_raises_and_stores_nothing(
    store: Callable[[], object], django_assert_num_queries: Any
) -> None:
    """PMQ-6, guarantee 12."""
    with django_assert_num_queries(0), pytest.raises(NotInTransaction) as caught:
        store()
    assert "with transaction.atomic(using='default'):" in str(caught.value)
    assert "post_save" in str(caught.value)
    assert "ATOMIC_REQUESTS" in str(caught.value)
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_autocommit_that_is_off_is_no_block() -> None:
    transaction.set_autocommit(False)
    try:
        with pytest.raises(NotInTransaction):
            broadcast("a.b")
        with transaction.atomic():
            broadcast("a.b")
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("autocommit", [True, False])
def test_the_check_can_be_turned_off(settings: Any, autocommit: bool) -> None:
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}
    transaction.set_autocommit(autocommit)
    try:
        broadcast("a.b")
        broadcast_many([Message("a.b")] * (FEW + 1))
        transaction.get_connection().commit()
    finally:
        transaction.set_autocommit(True)
    assert QueuedMessage.objects.count() == FEW + 2


COUNT = "select count(*) from django_mq_queuedmessage"


@pytest.mark.django_db(transaction=True)
def test_it_is_seen_when_the_caller_has_committed_and_not_before() -> None:
    """PMQ-7."""
    with second_connection() as other:
        with transaction.atomic():
            broadcast("a.b")
            assert other.execute(COUNT).fetchone() == (0,)
        assert other.execute(COUNT).fetchone() == (1,)


@pytest.mark.django_db(transaction=True)
def test_a_rollback_takes_it_along() -> None:
    """PMQ-7, PMQ-10."""
    with transaction.atomic():
        broadcast("a.b")
        broadcast_many([Message("a.b")] * (FEW + 1))
        transaction.set_rollback(True)
    assert not QueuedMessage.objects.exists()


# What is stored


@pytest.mark.django_db
def test_defaults() -> None:
    """PMQ-1."""
    with transaction.atomic():
        receipt = broadcast("shop.orders.placed")
    message = the_message()
    assert receipt == Receipt((CopyReceipt("", "default", message.pk, "added", ""),))
    assert (receipt.ids, receipt.outcome, bool(receipt)) == ((message.pk,), "added", True)
    assert (message.type, message.queue, message.handler) == ("shop.orders.placed", "default", "")
    assert (message.payload, message.metadata, message.schema_version) == ({}, {}, 1)
    assert (message.priority, message.max_attempts, message.retry) == (0, 20, None)
    assert (message.attempts, message.leased_until, message.expires_at) == (0, None, None)
    assert message.processable_after == message.created_at
    assert message.wants_result is False


@pytest.mark.django_db
def test_options_are_stored() -> None:
    with transaction.atomic():
        broadcast(
            "shop.orders.placed",
            {"order_id": 5, "at": datetime(2026, 1, 1, tzinfo=UTC)},
            queue="mail",
            metadata={"tier": "gold", "n": 1},
            schema_version=3,
            after=timedelta(minutes=1),
            expires=3600,
            priority=100,
            retry=RetryPolicy(max_attempts=3, backoff=fixed(5)),
        )
    message = the_message()
    assert (message.queue, message.schema_version, message.priority) == ("mail", 3, 100)
    assert message.payload == {"order_id": 5, "at": "2026-01-01T00:00:00Z"}
    assert message.metadata == {"tier": "gold", "n": 1}
    assert message.processable_after - message.created_at == timedelta(minutes=1)
    assert message.expires_at is not None
    assert message.expires_at - message.created_at == timedelta(hours=1)
    assert message.max_attempts == 3
    assert RetryPolicy.from_data(message.retry) == RetryPolicy(3, fixed(5))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "payload", [0, False, "", [], [1], "text", 1.5, {"a": None}, {"ключ": "Zoë"}], ids=repr
)
def test_a_payload_is_any_json_value(payload: object) -> None:
    with transaction.atomic():
        broadcast("a.b", payload)
    assert the_message().payload == payload


@pytest.mark.django_db
@pytest.mark.parametrize("form", ["moment", "past"])
def test_a_moment_is_stored_as_it_is(form: str) -> None:
    """PMQ-8, PMQ-25: it may lie in the past."""
    at = now() + timedelta(days=1 if form == "moment" else -1)
    with transaction.atomic():
        broadcast("a.b", after=at, expires=now() + timedelta(days=2))
    assert the_message().processable_after == at


@pytest.mark.django_db
def test_a_message_and_broadcast_have_the_same_options() -> None:
    options = {field.name for field in fields(Message)}
    for function in (broadcast, abroadcast):
        assert set(inspect.signature(function).parameters) - {"using"} == options
    with transaction.atomic():
        (one,) = broadcast_many([Message("a.b", [1], queue="q", priority=5)])
        two = broadcast("a.b", [1], queue="q", priority=5)
    assert [copy.queue for copy in (*one.copies, *two.copies)] == ["q", "q"]
    assert QueuedMessage.objects.filter(payload=[1], priority=5).count() == 2


# Refusals: by one class for each cause, before any SQL, and the transaction lives on


class Unencodable:
    pass


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
    "on-duplicate": (InvalidOption, {"unique_id": "u", "on_duplicate": "replace"}),
    "on-duplicate-of-nothing": (TypeError, {"on_duplicate": "update"}),
    "on-duplicate-skip-of-nothing": (TypeError, {"on_duplicate": "skip"}),
    "on-duplicate-none": (InvalidOption, {"unique_id": "u", "on_duplicate": ""}),
    "unique-for-nothing": (TypeError, {"unique_for": 5}),
    "unique-for-zero": (InvalidOption, {"unique_id": "u", "unique_for": 0}),
    "unique-for-long": (InvalidOption, {"unique_id": "u", "unique_for": timedelta(days=367)}),
    "unique-for-text": (InvalidOption, {"unique_id": "u", "unique_for": "5"}),
    "unique-for-moment": (InvalidOption, {"unique_id": "u", "unique_for": datetime.now(UTC)}),
    "unique-id-blank": (InvalidName, {"unique_id": ""}),
    "unique-id-spaces": (InvalidName, {"unique_id": "order 1"}),
    "unique-id-number": (InvalidName, {"unique_id": 1}),
    "key-blank": (InvalidName, {"key": ""}),
    "key-long": (InvalidName, {"key": "k" * 129}),
    "key-number": (InvalidName, {"key": 1}),
    "unknown-option": (TypeError, {"delay": 5}),
}


@pytest.mark.django_db
@pytest.mark.parametrize(("error", "options"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_leaves_the_transaction_usable(
    error: type[Exception], options: dict[str, Any], django_assert_num_queries: Any
) -> None:
    """Guarantee 10, S04, S16, S17, PMQ-5, PMQ-10, NSQ-31, RMQ-3."""
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(error) as caught:
            broadcast(**{"type": "a.b", "payload": {}, **options})
        assert type(caught.value) is error
        assert issubclass(error, BroadcastError | TypeError)
        assert broadcast("fine")
    assert the_message().type == "fine"


@pytest.mark.django_db
def test_limits_follow_the_settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "MAX_PAYLOAD_BYTES": 20,
        "MAX_DEPTH": 2,
        "MAX_METADATA_BYTES": 10,
        "MAX_DELAY": 60,
        "ENCODER": "json.JSONEncoder",
    }
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (PayloadTooLarge, {"payload": "x" * 19}),
        (InvalidPayload, {"payload": [[[]]]}),
        (PayloadTooLarge, {"metadata": {"a": "xxxx"}}),
        (InvalidOption, {"after": 61}),
        (InvalidPayload, {"payload": now()}),
    ]
    with transaction.atomic():
        for error, options in refused:
            with pytest.raises(error):
                broadcast("a.b", **options)
        assert broadcast("a.b", "x" * 18, metadata={"a": "xx"}, after=60)
        assert broadcast("a.b", [[]])


@pytest.mark.django_db
def test_a_payload_that_cannot_be_shown_does_not_break_the_error() -> None:
    with transaction.atomic(), pytest.raises(InvalidPayload) as caught:
        broadcast("a.b", {"x": {"\ud800": 1}})
    str(caught.value).encode()


def test_another_database_than_postgresql_is_refused(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "vendor", "sqlite")
    with pytest.raises(ImproperlyConfigured, match="'default' is PostgreSQL: set DJANGO_MQ"):
        broadcast("a.b")


@pytest.mark.django_db(transaction=True)
def test_what_the_database_itself_refuses_is_djangos_error() -> None:
    """Also from COPY, which Django does not wrap by itself."""
    with second_connection() as other:
        other.execute(
            "alter table django_mq_queuedmessage add constraint no_evil check (type <> 'evil')"
        )
        try:
            for count in (1, 2, FEW + 1):
                with pytest.raises(DatabaseError), transaction.atomic():
                    broadcast_many([Message("evil")] * count)
        finally:
            other.execute("alter table django_mq_queuedmessage drop constraint no_evil")


# Routing


@pytest.mark.django_db
def test_each_subscriber_has_its_own_copy() -> None:
    """NSQ-30, RMQ-12, PMQ-30: once each, even when two of its patterns match."""
    subscribe("shop.orders.*", name="mailer", queue="mail", retry=RetryPolicy(max_attempts=3))
    subscribe("shop.#", "shop.orders.placed", name="statistics", queue="numbers")
    subscribe("shop.orders.cancelled", name="other", queue="mail")
    subscribe("#", name="all")
    with transaction.atomic():
        receipt = broadcast("shop.orders.placed", {"n": 1})
    assert [(copy.handler, copy.queue) for copy in receipt.copies] == [
        ("mailer", "mail"),
        ("statistics", "numbers"),
        ("all", "default"),
    ]
    stored = {message.pk: message for message in QueuedMessage.objects.all()}
    assert tuple(sorted(stored)) == receipt.ids
    for copy in receipt.copies:
        assert copy.id is not None
        message = stored[copy.id]
        assert (message.handler, message.queue) == (copy.handler, copy.queue)
        assert message.payload == {"n": 1}
    assert [stored[id].max_attempts for id in receipt.ids] == [3, 20, 20]


@pytest.mark.django_db
def test_metadata_is_matched_as_a_worker_will_read_it() -> None:
    subscribe("a", name="date", where={"day": "2026-01-02"})
    subscribe("a", name="gold", where={"tier": "gold"})
    with transaction.atomic():
        receipt = broadcast("a", metadata={"day": datetime(2026, 1, 2, tzinfo=UTC).date()})
    assert [copy.handler for copy in receipt.copies] == ["date"]


@pytest.mark.django_db
def test_without_a_subscriber_it_is_stored_all_the_same() -> None:
    """RMQ-6 as changed: nothing is to be declared before; a row is durable."""
    subscribe("other", name="other")
    with transaction.atomic():
        broadcast("a.b")
        broadcast("a.b", queue="somewhere")
    assert list(QueuedMessage.objects.order_by("id").values_list("handler", "queue")) == [
        ("", "default"),
        ("", "somewhere"),
    ]


@pytest.mark.django_db
def test_the_default_queue_follows_the_settings(settings: Any) -> None:
    """PMQ-11: one queue for whatever names none; called as one likes."""
    settings.DJANGO_MQ = {"DEFAULT_QUEUE": "main"}
    subscribe("a", name="a")
    with transaction.atomic():
        assert broadcast("a").copies[0].queue == "main"
        assert broadcast("unknown").copies[0].queue == "main"
        assert broadcast("a", queue="main").copies[0].handler == "a"


@pytest.mark.django_db
def test_a_queue_moves_it_where_the_handlers_allow(django_assert_num_queries: Any) -> None:
    """PMQ-4 as changed: the handlers say where. S32."""
    subscribe("a", name="mailer", queue="mail", queues=("slow",))
    subscribe("b", name="strict", queue="mail")
    subscribe("b", name="lenient", queue="mail", queues=("slow",))
    with transaction.atomic():
        assert broadcast("a", queue="slow").copies[0].queue == "slow"
        assert broadcast("a", queue="mail").copies[0].queue == "mail"
        with django_assert_num_queries(0):
            with pytest.raises(RoutingError, match=r"mailer allows only mail, slow; .*queues="):
                broadcast("a", queue="other")
            with pytest.raises(RoutingError, match="strict"):
                broadcast("b", queue="slow")


@pytest.mark.django_db
def test_attempts_come_from_message_handler_queue_or_settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "RETRY": RetryPolicy(max_attempts=2),
        "QUEUES": {"mail": {"retry": RetryPolicy(max_attempts=3)}},
    }
    subscribe("a", name="own", queue="mail", retry=RetryPolicy(4, backoff=lambda attempt: 1))
    subscribe("a", name="none", queue="mail")
    subscribe("a", name="default")
    with transaction.atomic():
        broadcast("a")
        broadcast("unknown", queue="mail")
        broadcast("a", retry=RetryPolicy(5, exponential(base=2)))
    found = QueuedMessage.objects.order_by("id").values_list("max_attempts", flat=True)
    assert list(found) == [4, 3, 2, 3, 5, 5, 5]
    assert QueuedMessage.objects.filter(retry__isnull=False).count() == 3


# Many


@pytest.mark.django_db
def test_many_are_answered_one_by_one() -> None:
    """NSQ-29."""
    subscribe("two", name="one")
    subscribe("two", name="other")
    with transaction.atomic():
        assert broadcast_many([]) == []
        receipts = broadcast_many([Message("two", 1), Message("none", 2), Message("two", 3)])
    assert [len(receipt.copies) for receipt in receipts] == [2, 1, 2]
    found = QueuedMessage.objects.in_bulk()
    assert [[found[id].payload for id in receipt.ids] for receipt in receipts] == [
        [1, 1],
        [2],
        [3, 3],
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 300])
def test_receipts_name_the_rows_however_many_there_are(count: int) -> None:
    with transaction.atomic():
        receipts = broadcast_many([Message("a", number) for number in range(count)])
    found = QueuedMessage.objects.in_bulk()
    assert [found[receipt.ids[0]].payload for receipt in receipts] == list(range(count))


@pytest.mark.django_db
@pytest.mark.parametrize("count", [2, 300])
@pytest.mark.parametrize("form", [list, tuple, iter])
def test_many_are_stored_all_or_none(
    count: int, form: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PMQ-9 as changed, NSQ-29, guarantee 10: the caller may go on."""
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 100)
    messages = [*(Message("a", number) for number in range(count)), Message("bad type")]
    with transaction.atomic():
        with pytest.raises(InvalidName):
            broadcast_many(form(messages))
        assert broadcast("fine")
    assert the_message().type == "fine"


@pytest.mark.django_db
def test_what_is_no_message_is_refused() -> None:
    with transaction.atomic(), pytest.raises(TypeError, match=r"takes Message\(...\) objects"):
        broadcast_many([{"type": "a"}])  # type: ignore[list-item]


@pytest.mark.django_db
@pytest.mark.parametrize("by", ["rows", "size"])
def test_an_iterator_is_read_in_chunks(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant memory: what is stored already is no longer held when more is read."""
    monkeypatch.setattr(streaming, "CHUNK_ROWS" if by == "rows" else "CHUNK_SIZE", 100)
    payload = "x" * (0 if by == "rows" else 8)  # and the two quotes
    per_chunk = 100 if by == "rows" else 9  # each row has {} as metadata
    stored_when_read = []

    def messages() -> Iterator[Message]:
        for _ in range(3 * per_chunk + 1):
            # Queries of the generator run between the COPYs, on the same connection.
            stored_when_read.append(QueuedMessage.objects.count())
            yield Message("a", payload)

    with transaction.atomic():
        receipt = broadcast_many(messages())
    assert receipt == BulkReceipt(3 * per_chunk + 1)
    assert bool(receipt)
    assert sorted(set(stored_when_read)) == [0, per_chunk, 2 * per_chunk, 3 * per_chunk]
    assert QueuedMessage.objects.count() == 3 * per_chunk + 1


@pytest.mark.django_db
@pytest.mark.parametrize("form", [list, iter], ids=["list", "iterator"])
def test_a_payload_is_held_once_for_many_subscribers(form: Callable[[Any], Any]) -> None:
    """Nor are the lines of many copies put together: that would be 60 MB."""
    with handlers.isolated():
        for number in range(60):
            handler("a", name=f"h{number}")(lambda delivery: None)
        messages = form([Message("a", "x" * 1_000_000)])
        tracemalloc.start()
        try:
            with transaction.atomic():
                assert broadcast_many(messages)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert QueuedMessage.objects.count() == 60
    assert most < 20_000_000


@pytest.mark.django_db
def test_an_empty_iterator_is_a_success() -> None:
    """PMQ-12."""
    with transaction.atomic():
        receipt = broadcast_many(iter(()))
    assert receipt == BulkReceipt(0)
    assert not receipt


@pytest.mark.django_db
def test_an_iterator_that_raises_takes_all_back() -> None:
    def messages() -> Iterator[Message]:
        yield from [Message("a")] * 10
        1 / 0  # noqa: B018

    with transaction.atomic():
        with pytest.raises(ZeroDivisionError):
            broadcast_many(messages())
        assert broadcast("fine")
    assert the_message().type == "fine"


# Statements


@pytest.mark.django_db(transaction=True)
def test_one_broadcast_is_one_statement_and_one_ring(django_assert_num_queries: Any) -> None:
    subscribe("a", name="one")
    subscribe("a", name="two")
    with django_assert_num_queries(4) as captured, transaction.atomic():
        broadcast("a")
    begin, store, commit, ring = (each["sql"].lower() for each in captured.captured_queries)
    assert (begin, commit) == ("begin", "commit")
    assert "insert into django_mq_queuedmessage" in store
    assert "pg_notify" in ring


@pytest.mark.django_db
def test_statements_pass_execute_wrappers(django_assert_num_queries: Any) -> None:
    seen = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        return execute(sql, params, many, context)

    with transaction.atomic(), connection.execute_wrapper(wrapper):
        broadcast("a")
    assert len(seen) == 1


# The doorbell


@pytest.mark.django_db(transaction=True)
def test_it_rings_once_after_the_commit_with_nothing_to_read() -> None:
    """PMQ-3, S06."""
    with listening() as listener:
        with transaction.atomic():
            for _ in range(3):
                broadcast("a")
            broadcast_many([Message("a")] * (FEW + 1))
            assert len(connection.run_on_commit) == 1
            assert listener.heard() == []
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_a_rollback_rings_nothing() -> None:
    with listening() as listener:
        with transaction.atomic():
            broadcast("a")
            transaction.set_rollback(True)
        assert listener.heard() == []


@pytest.mark.django_db(transaction=True)
def test_a_savepoint_that_is_rolled_back_does_not_take_the_ring_of_others() -> None:
    with listening() as listener:
        with transaction.atomic():
            with transaction.atomic():
                broadcast("undone")
                transaction.set_rollback(True)
            assert connection.run_on_commit == []
            broadcast("kept")
        assert listener.heard() == [""]
        bell._last.clear()
        with transaction.atomic():
            with transaction.atomic():
                broadcast("inner")
            broadcast("outer")
            assert len(connection.run_on_commit) == 1
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_it_does_not_ring_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(bell, "monotonic", lambda: clock[0])
    heard = []
    with listening() as listener:
        for step in (0, bell.PAUSE * 0.5, bell.PAUSE * 0.4, bell.PAUSE * 0.2):
            clock[0] += step
            with transaction.atomic():
                broadcast("a")
            heard.append(len(listener.heard()))
    assert heard == [1, 0, 0, 1]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("changed", "options", "rings"),
    [
        pytest.param({}, {"after": 0.5}, 1, id="soon"),
        pytest.param({}, {"after": 1.5}, 0, id="a-poll-comes-first"),
        pytest.param({"POLL_INTERVAL": 2}, {"after": 1.5}, 1, id="a-poll-comes-later"),
        pytest.param({}, {"after": datetime.now(UTC) + timedelta(days=1)}, 1, id="moment"),
        pytest.param({"WAKEUP": "poll"}, {}, 0, id="poll"),
        pytest.param({"REQUIRE_ATOMIC": False}, {}, 1, id="no-block"),
    ],
)
def test_it_rings_for_what_a_poll_would_meet_late(
    settings: Any, changed: dict[str, Any], options: dict[str, Any], rings: int
) -> None:
    settings.DJANGO_MQ = changed
    block: Any = transaction.atomic() if changed != {"REQUIRE_ATOMIC": False} else nullcontext()
    with listening() as listener:
        with block:
            broadcast("a", **options)
        assert len(listener.heard()) == rings


@pytest.mark.django_db(transaction=True)
def test_a_ring_that_fails_harms_nobody_and_the_next_one_rings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 7; PMQ-40."""
    after = []
    with listening() as listener:
        with monkeypatch.context() as patch, caplog.at_level("DEBUG", "django_mq"):
            patch.setattr(doorbell, "RING", "select no_such_function()")
            with transaction.atomic():
                broadcast("a")
                transaction.on_commit(lambda: after.append(QueuedMessage.objects.count()))
        assert after == [1]
        assert [record.levelname for record in caplog.records if record.name == "django_mq"] == [
            "DEBUG"
        ]
        with transaction.atomic():
            broadcast("a")
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_a_ring_does_not_change_how_the_session_commits() -> None:
    with transaction.atomic():
        broadcast("a")
    with connection.cursor() as cursor:
        cursor.execute("show synchronous_commit")
        assert cursor.fetchone() == ("on",)


# Where it came from


def delivery(**changed: Any) -> Delivery:
    values: dict[str, Any] = {
        "id": 77, "queue": "q", "type": "t", "handler": "h", "schema_version": 1,
        "payload": "{}", "metadata": "{}", "priority": 0, "key": None, "attempts": 1,
        "max_attempts": 20, "retry": None, "claimed_by": "w", "wants_result": False,
        "suspect": False, "held_for": None, "created": now().timestamp(),
        "claimed": now().timestamp(), **changed,
    }  # fmt: skip
    return Delivery(ClaimedRow(**values))


@pytest.fixture
def handling() -> Iterator[Callable[..., None]]:
    """Play the worker: `handling(**columns)` says which delivery runs here."""
    token = current_delivery.set(None)
    yield lambda **columns: current_delivery.set(delivery(**columns)) and None
    current_delivery.reset(token)


@pytest.mark.django_db
@pytest.mark.parametrize("size", [1, 3, FEW + 1])
def test_a_handlers_messages_say_where_they_come_from(
    handling: Callable[..., None], size: int
) -> None:
    handling(id=77)
    with transaction.atomic():
        broadcast_many([Message("a", metadata={"tier": "gold"})] * size)
    for metadata in QueuedMessage.objects.values_list("metadata", flat=True):
        assert metadata == {
            "tier": "gold",
            "mq.correlation_id": "77",
            "mq.causation_id": "77",
            "mq.hops": 1,
        }


@pytest.mark.django_db
def test_a_chain_keeps_its_correlation_and_counts_its_hops(handling: Callable[..., None]) -> None:
    handling(id=77)
    for expected in (1, 2, 3):
        with transaction.atomic():
            (id,) = broadcast("a").ids
        metadata = QueuedMessage.objects.get(pk=id).metadata
        assert (metadata["mq.correlation_id"], metadata["mq.hops"]) == ("77", expected)
        handling(id=id, metadata=json.dumps(metadata))
        assert broadcast_in_block("next").metadata["mq.causation_id"] == str(id)


def broadcast_in_block(type: str) -> QueuedMessage:
    with transaction.atomic():
        return QueuedMessage.objects.get(pk=broadcast(type).ids[0])


@pytest.mark.django_db
def test_a_chain_without_end_is_stopped(
    handling: Callable[..., None], settings: Any, django_assert_num_queries: Any
) -> None:
    """S17."""
    settings.DJANGO_MQ = {"MAX_HOPS": 3}
    handling(metadata='{"mq.hops": 2}')
    assert broadcast_in_block("a").metadata["mq.hops"] == 3
    handling(id=78, metadata='{"mq.hops": 3}')
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(TooManyHops, match=r"message 78 in queue"):
            broadcast("a")
        QueuedMessage.objects.count()


@pytest.mark.django_db
@pytest.mark.parametrize(
    "metadata",
    [
        "[]",
        '"text"',
        "{not json",
        '{"mq.hops": "9", "mq.correlation_id": 5}',
        '{"mq.hops": -5, "mq.correlation_id": ""}',
        '{"mq.hops": true, "mq.correlation_id": "%s"}' % ("x" * 129),
    ],
)
def test_metadata_that_others_wrote_breaks_nothing(
    handling: Callable[..., None], metadata: str
) -> None:
    handling(id=77, metadata=metadata)
    assert broadcast_in_block("a").metadata == {
        "mq.correlation_id": "77",
        "mq.causation_id": "77",
        "mq.hops": 1,
    }


# Async


@pytest.mark.django_db(transaction=True)
def test_abroadcast_has_committed_when_it_returns() -> None:
    async def produce() -> Receipt:
        return await abroadcast("a.b", {"n": 1}, queue="q", using="default")

    with listening() as listener, second_connection() as other:
        receipt = async_to_sync(produce)()
        found = other.execute("select id, queue, payload from django_mq_queuedmessage").fetchall()
        assert found == [(receipt.ids[0], "q", {"n": 1})]
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_abroadcast_refuses_to_pretend_inside_a_block() -> None:
    with transaction.atomic():
        with pytest.raises(RuntimeError, match="a transaction of its own"):
            async_to_sync(abroadcast)("a.b")
        assert not QueuedMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_abroadcast_refuses_what_broadcast_refuses() -> None:
    with pytest.raises(InvalidPayload):
        async_to_sync(abroadcast)("a.b", float("nan"))
    with pytest.raises(TypeError):
        async_to_sync(abroadcast)("a.b", delay=5)  # type: ignore[call-arg]
    assert not QueuedMessage.objects.exists()


class TestInATestCase(TestCase):
    async def test_abroadcast_works(self) -> None:
        assert await abroadcast("a.b")

    async def test_broadcast_in_async_code_says_what_to_do(self) -> None:
        with pytest.raises(NotInTransaction, match="abroadcast"):
            broadcast("a.b")


# Cancelling


@pytest.mark.django_db
def test_cancel_removes_what_waits_and_meets_all_that_is_given() -> None:
    with transaction.atomic():
        first, delayed, other = broadcast_many([Message("a"), Message("a", after=60), Message("b")])
    assert not cancel(id=first.ids[0], type="b")
    assert cancel(id=first.ids[0], type="a").ids == first.ids
    cancelled = cancel(type="a")
    assert (cancelled.ids, cancelled.in_flight, bool(cancelled)) == (delayed.ids, 0, True)
    assert list(QueuedMessage.objects.values_list("id", flat=True)) == list(other.ids)


@pytest.mark.django_db
def test_cancel_never_touches_what_a_worker_holds() -> None:
    with transaction.atomic():
        receipts = broadcast_many([Message("a")] * 4)
    waiting, leased, lapsed, dead = (receipt.ids[0] for receipt in receipts)
    update = QueuedMessage.objects.filter
    update(pk=leased).update(leased_until=now() + timedelta(hours=1), claimed_by="w")
    update(pk=lapsed).update(leased_until=now() - timedelta(hours=1), claimed_by="w")
    update(pk=dead).update(dead_at=now(), dead_reason="attempts")
    cancelled = cancel(type="a")
    assert (cancelled.ids, cancelled.in_flight) == ((waiting,), 2)
    assert cancel(id=leased).in_flight == 1
    assert set(QueuedMessage.objects.values_list("id", flat=True)) == {leased, lapsed, dead}


@pytest.mark.django_db(transaction=True)
def test_cancel_does_not_wait_for_what_is_being_claimed() -> None:
    with transaction.atomic():
        free, locked = (each.ids[0] for each in broadcast_many([Message("a")] * 2))
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", (locked,))
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("set local lock_timeout to '60s'")  # fails rather than hangs
            cancelled = cancel(type="a")
    assert (cancelled.ids, cancelled.in_flight) == ((free,), 1)


@pytest.mark.django_db(transaction=True)
def test_cancel_takes_part_in_the_callers_transaction() -> None:
    with transaction.atomic():
        broadcast("a")
    with transaction.atomic():
        assert cancel(type="a")
        transaction.set_rollback(True)
    assert QueuedMessage.objects.count() == 1


@pytest.mark.django_db
def test_cancel_finds_an_id_by_its_index() -> None:
    from django_mq.store.cancel import CANCEL

    with connection.cursor() as cursor:
        cursor.execute("set local enable_seqscan = off")
        cursor.execute("explain " + CANCEL, {"id": 5, "type": None, "unique_id": None})
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Index Cond: (id = 5)" in plan


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {}),
        (InvalidOption, {"id": "5"}),
        (InvalidOption, {"id": True}),
        (InvalidOption, {"id": 2**63}),
        (InvalidName, {"type": "bad type"}),
        (InvalidName, {"unique_id": ""}),
        (TypeError, {"queue": "q"}),
    ],
    ids=repr,
)
def test_cancel_refuses_what_names_nothing(error: type[Exception], options: Any) -> None:
    with pytest.raises(error):
        cancel(**options)


# The package


def test_public_names_are_there() -> None:
    assert sorted(django_mq.__all__) == list(django_mq.__all__)
    for name in django_mq.__all__:
        assert getattr(django_mq, name) is not None


def test_importing_touches_no_model_and_needs_no_settings() -> None:
    code = """
import sys
import django_mq
from django_mq import broadcast, handler
assert "django_mq.models" not in sys.modules
@handler("a.b")
def it(delivery): ...
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "."}, timeout=60)
