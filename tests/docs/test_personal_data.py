"""docs/guides/personal-data.md: what `erase()` leaves of a person, and what it says stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import RetryPolicy, broadcast, fixed, handler, queues, request
from django_mq.models import FailedAttempt, HandledMessage, QueuedMessage, Result
from django_mq.operations import steps
from django_mq.testing import drain
from tests.docs.pages import story
from tests.outbox.deduplicate.conftest import handled

pytestmark = pytest.mark.django_db

CANARY = "ada@example.com"


@pytest.fixture
def page() -> Any:
    with story("guides/personal-data.md") as module:
        yield module


def send(type: str, key: str, **options: Any) -> None:
    with transaction.atomic():
        broadcast(type, {"who": CANARY}, key=key, **options)


def ask(key: str) -> None:
    with transaction.atomic():
        request("shop.asked", {"who": CANARY}, key=key)
    drain(errors="keep")


def lease() -> None:
    """Claim every message, as a worker."""
    until = Now() + timedelta(minutes=1)
    QueuedMessage.objects.update(leased_until=until, claimed_by="worker:1", attempts=1)


def carry_out_operations() -> None:
    """As a worker does."""
    step: object = True
    while step is not None:
        with transaction.atomic(), connection.cursor() as cursor:
            step = steps.take_step(cursor)


def traces() -> set[str]:
    """Return the tables of django_mq that have the canary anywhere."""
    found = set()
    with connection.cursor() as cursor:
        for model in apps.get_app_config("django_mq").get_models():
            table = model._meta.db_table
            cursor.execute(f"select count(*) from {table} t where t::text like %s", [f"%{CANARY}%"])
            if cursor.fetchone() != (0,):
                found.add(model.__name__)
    return found


def subscribe(**options: Any) -> None:
    """Subscribe a handler that fails at its first attempt, with the payload in its error."""

    @handler("shop.asked", retry=RetryPolicy(backoff=fixed(0), max_attempts=2), **options)
    def answer(delivery: Any) -> Any:
        if delivery.attempt == 1:
            raise ValueError(delivery.payload)
        return delivery.payload


def test_nothing_is_left_of_a_key(page: Any) -> None:
    subscribe(history=3600, history_payload=True)
    ask("customer/7")
    handler("shop.failed", name="f", retry=RetryPolicy(max_attempts=1))(lambda delivery: 1 / 0)
    send("shop.failed", "customer/7")
    drain(errors="keep")
    send("shop.later", "customer/7", after=3600, unique_id=CANARY)
    assert traces() >= {"QueuedMessage", "FailedAttempt", "HandledMessage", "Result", "UniqueKey"}
    assert [each.payload for each in queues.history(key="customer/7")] == [{"who": CANARY}]
    assert page.erase(key="customer/7") is False
    assert traces() == set()


def test_later_call_erases_messages_in_flight_or_put_aside(page: Any) -> None:
    send("shop.now", "customer/7", unique_id="u")
    lease()
    send("shop.now", "customer/7", unique_id="u", on_duplicate="requeue")
    assert page.erase(key="customer/7") is True
    assert traces() == {"QueuedMessage", "UniqueKey"}
    handled(QueuedMessage.objects.get())
    assert page.erase(key="customer/7") is False
    assert traces() == set()


def test_put_aside_message_is_erased_by_a_second_call(page: Any) -> None:
    """The worker that had it gave it back, as after a failed attempt."""
    send("shop.now", "customer/7", unique_id="u")
    lease()
    send("shop.now", "customer/7", unique_id="u", on_duplicate="requeue")
    QueuedMessage.objects.update(leased_until=None, claimed_by=None)
    assert page.erase(key="customer/7") is True
    assert page.erase(key="customer/7") is False
    assert traces() == set()


def test_a_message_that_ends_meanwhile_is_erased_from_the_history(page: Any) -> None:
    """It is in flight while the first call deletes, and handled before that call returns."""
    subscribe(history=3600, history_payload=True)
    send("shop.asked", "customer/7")
    lease()

    @contextmanager
    def then_handled() -> Iterator[None]:
        with transaction.atomic():
            yield
        QueuedMessage.objects.update(leased_until=None, claimed_by=None)
        drain(errors="keep")

    page.transaction = SimpleNamespace(atomic=then_handled)
    assert page.erase(key="customer/7") is True
    assert page.erase(key="customer/7") is False
    assert not HandledMessage.objects.exists()


def test_nothing_is_left_of_a_person_in_metadata(page: Any) -> None:
    subscribe(history=3600, history_payload=True)
    for customer in (7, 8):
        with transaction.atomic():
            request("shop.asked", {"who": CANARY}, metadata={"customer": customer})
        drain(errors="keep")
        with transaction.atomic():
            broadcast("shop.later", {"who": CANARY}, after=3600, metadata={"customer": customer})
    assert page.erase(metadata__customer=7) is False
    tables = (QueuedMessage, HandledMessage, FailedAttempt, Result)
    assert [each.objects.count() for each in tables] == [1, 1, 1, 1]
    assert page.erase(metadata__customer=8) is False
    assert traces() == set()


def test_other_keys_stay(page: Any) -> None:
    subscribe(history=3600)
    ask("customer/77")
    send("shop.later", "customer/77", after=3600)
    assert page.erase(key="customer/7") is False
    counts = [each.objects.count() for each in (QueuedMessage, FailedAttempt, HandledMessage)]
    assert counts == [1, 1, 1]


@pytest.mark.parametrize("dead", [True, False])
def test_by_metadata_where_no_order_is_wanted(page: Any, dead: bool) -> None:
    for customer in (7, 8):
        with transaction.atomic():
            broadcast("shop.later", {}, metadata={"customer": customer}, after=3600)
    if dead:
        QueuedMessage.objects.update(dead_at=Now(), dead_reason="rejected")
    queues.operate("cancel", metadata={"customer": 7})
    queues.operate("discard", metadata={"customer": 7})
    carry_out_operations()
    [left] = QueuedMessage.objects.all()
    assert left.metadata == {"customer": 8}


def test_results_failures_and_unique_keys_stay(page: Any) -> None:
    """Without a history nothing leads to the failed attempts of a success, nor to its result."""
    subscribe()
    ask("customer/7")
    send("shop.asked", "customer/7", unique_id=CANARY, unique_for=3600)
    drain(errors="keep")
    assert not queues.history(key="customer/7")
    assert page.erase(key="customer/7") is False
    assert traces() == {"FailedAttempt", "Result", "UniqueKey"}
