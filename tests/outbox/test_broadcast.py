"""broadcast(): transactions, what is stored, how many statements, and the package's names."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test import modify_settings

import django_mq
from django_mq import (
    CopyReceipt,
    Message,
    NotInTransaction,
    Receipt,
    RetryPolicy,
    abroadcast,
    broadcast,
    broadcast_many,
    fixed,
)
from django_mq.models import QueuedMessage
from django_mq.store.insert import MAX_INSERT_ROWS
from tests.database import second_connection
from tests.outbox.conftest import now, subscribe
from tests.rows import the_message

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
def test_in_an_on_commit_hook_the_block_is_over() -> None:
    """Projects that come from a broker send there."""
    says = r"on_commit\(\) hook runs after the commit"
    with pytest.raises(NotInTransaction, match=says), transaction.atomic():
        transaction.on_commit(lambda: broadcast("a.b"))


@pytest.mark.django_db
def test_app_missing_in_installed_apps_is_reported() -> None:
    without = modify_settings(INSTALLED_APPS={"remove": "django_mq"})
    with without, pytest.raises(ImproperlyConfigured, match='add "django_mq" to INSTALLED_APPS'):
        broadcast("a.b")


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
        broadcast_many([Message("a.b")] * (MAX_INSERT_ROWS + 1))
        transaction.get_connection().commit()
    finally:
        transaction.set_autocommit(True)
    assert QueuedMessage.objects.count() == MAX_INSERT_ROWS + 2


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
        broadcast_many([Message("a.b")] * (MAX_INSERT_ROWS + 1))
        transaction.set_rollback(True)
    assert not QueuedMessage.objects.exists()


# The stored row


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
@pytest.mark.parametrize("seconds", [Decimal("1.5"), Fraction(3, 2), 1.5], ids=repr)
def test_every_duration_may_be_any_real_number(seconds: Any) -> None:
    with transaction.atomic():
        broadcast("a.b", after=seconds, expires=seconds * 2, unique_id="u", unique_for=seconds)
    message = the_message()
    assert message.processable_after - message.created_at == timedelta(seconds=1.5)
    assert message.expires_at - message.created_at == timedelta(seconds=3)
    assert message.unique_for == timedelta(seconds=1.5)


@pytest.mark.django_db
@pytest.mark.parametrize("form", ["moment", "past"])
def test_a_moment_is_stored_as_it_is(form: str) -> None:
    """PMQ-8, PMQ-25: it may lie in the past."""
    at = now() + timedelta(days=1 if form == "moment" else -1)
    with transaction.atomic():
        broadcast("a.b", after=at, expires=now() + timedelta(days=2))
    assert the_message().processable_after == at


@pytest.mark.django_db
def test_the_databases_clock_decides_whether_two_moments_have_passed() -> None:
    """Guarantee 9: that of this process may be wrong by days. The message is dead-lettered."""
    with transaction.atomic():
        broadcast("a.b", after=now() - timedelta(days=2), expires=now() - timedelta(days=1))
    assert QueuedMessage.objects.with_state().get().state == "expired"


@pytest.mark.django_db
def test_every_default_can_be_given() -> None:
    given = {
        name: each.default
        for name, each in inspect.signature(broadcast).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert given["on_duplicate"] == "skip"
    assert given == {**given, **{each.name: each.default for each in fields(Message)[2:]}}
    with transaction.atomic():
        assert broadcast("a.b", None, **given)


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
    assert "notify django_mq" in ring


@pytest.mark.django_db
def test_statements_pass_execute_wrappers(django_assert_num_queries: Any) -> None:
    seen = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        return execute(sql, params, many, context)

    with transaction.atomic(), connection.execute_wrapper(wrapper):
        broadcast("a")
    assert len(seen) == 1


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
