"""How `cancel()` finds its messages: by an index, or window by window."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mq import Message, broadcast, broadcast_many, cancel
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.store import cancel as cancel_store
from tests.pages_read import pages_read
from tests.rows import add, insert_all

pytestmark = pytest.mark.django_db


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_store, "WINDOW", 3)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_a_type_is_found_in_every_window(n: int) -> None:
    with transaction.atomic():
        receipts = broadcast_many([Message(type) for _ in range(n) for type in ("a", "b", "b")])
    add(type="a", leased=60)
    add(type="a", dead=-1)
    cancelled = cancel(type="a")
    assert cancelled.ids == tuple(receipt.ids[0] for receipt in receipts[::3])
    assert cancelled.in_flight == 1
    assert QueuedMessage.objects.filter(type="b").count() == 2 * n


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("id", [-(2**63) + 1, -5, 0, 2**63 - 1])
def test_any_id_is_met_on_the_way(id: int) -> None:
    add(type="a", id=id)
    add(type="b")
    assert cancel(type="a").ids == (id,)


def test_of_an_empty_table_nothing_is_cancelled() -> None:
    assert cancel(type="a").ids == ()


def test_one_statement_looks_at_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of messages, no statement exceeds the statement_timeout of a web request."""
    monkeypatch.setattr(cancel_store, "WINDOW", 100)
    insert_all({"type": "a" if n % 50 == 0 else "b"} for n in range(2000))
    with connection.cursor() as cursor:
        cursor.execute("analyze django_mq_queuedmessage")
    with pages_read() as read:
        assert len(cancel(type="a").ids) == 40
    assert read.most_rows < 1000


def test_a_unique_id_is_cancelled_in_every_queue_and_type() -> None:
    with transaction.atomic():
        first = broadcast("a", unique_id="u")
        broadcast("a", unique_id="v")
        second = broadcast("b", queue="mail", unique_id="u")
    assert not cancel(unique_id="u", type="c")
    assert cancel(unique_id="u", id=first.ids[0], type="b").ids == ()
    assert cancel(unique_id="u", type="b").ids == second.ids
    assert cancel(unique_id="u").ids == first.ids
    assert list(UniqueKey.objects.values_list("unique_id", flat=True)) == ["v"]


def test_a_unique_id_that_is_quiet_or_of_a_dead_message_holds_none() -> None:
    with transaction.atomic():
        dead = broadcast("a", unique_id="u")
    QueuedMessage.objects.filter(pk=dead.ids[0]).update(dead_at="2026-01-01T00:00Z")
    UniqueKey.objects.create(queue="q", type="t", unique_id="u", quiet_until="2030-01-01T00:00Z")
    cancelled = cancel(unique_id="u")
    assert (cancelled.ids, cancelled.in_flight) == ((), 0)
