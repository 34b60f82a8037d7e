"""Unique ids: several in one call, cancelled, and captured in tests."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_mq import DuplicateMessage, Message, broadcast, broadcast_many, cancel
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.policy.uniqueness import OnDuplicate
from django_mq.store.change_waiting import ROWS_PER_STATEMENT
from django_mq.testing import assert_broadcast, capture_broadcasts
from tests.outbox.deduplicate.conftest import handled, lease, send, told
from tests.rows import stored, the_message

pytestmark = pytest.mark.django_db

WHILE = timedelta(minutes=50)


# Several at once


def test_the_later_sees_the_earlier() -> None:
    receipts = broadcast_many(
        [
            Message("a.b", 1, unique_id="u", after=60),
            Message("a.b", 2),
            Message("a.b", 3, unique_id="u"),
            Message("a.b", 4, unique_id="u", on_duplicate="update"),
            Message("a.b", 5, unique_id="v"),
        ]
    )
    assert [receipt.outcome for receipt in receipts] == [
        "added",
        "added",
        "duplicate",
        "updated",
        "added",
    ]
    rows = QueuedMessage.objects.order_by("id")
    assert [row.payload for row in rows] == [4, 2, 5]  # ids rise in the order of the messages
    assert [receipt.copies[0].id for receipt in receipts] == [
        rows[0].pk,
        rows[1].pk,
        rows[0].pk,
        rows[0].pk,
        rows[2].pk,
    ]
    assert rows[0].processable_after > rows[1].processable_after


def test_ids_rise_in_the_order_of_the_messages_that_are_stored() -> None:
    """In a quiet time the first message of an id may store nothing, and a later one its row."""
    send(1, unique_for=60)
    handled(lease())
    receipts = broadcast_many(
        [
            Message("a.b", 1, key="k", unique_id="u"),
            Message("a.b", 2, key="k"),
            Message("a.b", 3, key="k", unique_id="u", on_duplicate="requeue"),
            Message("a.b", 4, key="k", unique_id="u"),
        ]
    )
    outcomes = [receipt.outcome for receipt in receipts]
    assert outcomes == ["duplicate", "added", "requeued", "duplicate"]
    rows = QueuedMessage.objects.order_by("id")
    assert [row.payload for row in rows] == [2, 3]  # otherwise 3, which is delayed, blocks 2
    ids = [receipt.copies[0].id for receipt in receipts]
    assert ids == [None, rows[0].pk, rows[1].pk, rows[1].pk]


@pytest.mark.parametrize("on_duplicate", ["update", "replace", "debounce"])
def test_more_than_one_statement_changes(on_duplicate: OnDuplicate) -> None:
    """The ids of the messages that wait are in the opposite order."""
    numbers = range(2 * ROWS_PER_STATEMENT + 1)
    broadcast_many([Message("a.b", n, unique_id=str(n), after=60) for n in reversed(numbers)])
    receipts = broadcast_many(
        [
            Message("a.b", -n, unique_id=str(n), after=6000, on_duplicate=on_duplicate)
            for n in numbers
        ]
    )
    changes = on_duplicate != "debounce"
    assert {each.outcome for each in receipts} == {"updated" if changes else "debounced"}
    rows = {int(row.unique_id): row for row in QueuedMessage.objects.all()}
    assert {n: row.payload for n, row in rows.items()} == {n: -n if changes else n for n in numbers}
    moved = [row for row in rows.values() if row.processable_after > timezone.now() + WHILE]
    assert len(moved) == (len(rows) if on_duplicate != "update" else 0)


def test_all_or_none() -> None:
    send(1)
    with pytest.raises(DuplicateMessage):
        broadcast_many(
            [
                Message("plain"),
                Message("a.b", unique_id="new"),
                Message("a.b", unique_id="u", on_duplicate="raise"),
            ]
        )
    assert QueuedMessage.objects.count() == UniqueKey.objects.count() == 1


def test_a_call_needs_as_many_statements_for_many_as_for_one(
    django_assert_num_queries: Any,
) -> None:
    """Look, open a savepoint, limit, draw, add, restore, release."""
    for count in (1, 200):
        with django_assert_num_queries(7):
            broadcast_many([Message("a.b", unique_id=f"{count}/{n}") for n in range(count)])


def test_stream_counts_stored_and_changed_messages() -> None:
    send(0, unique_id="0")
    messages = (
        Message("a.b", n, unique_id=str(n % 4), on_duplicate="update" if n == 5 else "skip")
        for n in range(8)
    )
    assert broadcast_many(messages).count == 4
    assert sorted(row.payload for row in QueuedMessage.objects.exclude(unique_id="0")) == [2, 3, 5]


def test_a_stream_may_mix_both_kinds() -> None:
    kinds = (Message("a.b", n, unique_id=str(n) if n % 2 else None) for n in range(100))
    assert broadcast_many(kinds).count == 100
    rows = QueuedMessage.objects.order_by("id")
    assert [row.payload for row in rows] == list(range(100))


# Cancelling


def test_cancel_frees_the_id() -> None:
    id = send(1).id
    send(2, unique_id="other")
    assert cancel(unique_id="u").ids == (id,)
    assert told(send(3)) == ("added", "")


def test_cancel_removes_the_put_aside_message_too() -> None:
    send(1)
    message = lease()
    send(2, on_duplicate="requeue")
    cancelled = cancel(unique_id="u")
    assert (cancelled.ids, cancelled.in_flight, cancelled.put_aside) == ((), 1, 1)
    assert cancelled
    assert handled(message) == []


def test_cancelling_one_message_promotes_the_put_aside_one() -> None:
    send(1)
    message = lease()
    send(2, on_duplicate="requeue")
    QueuedMessage.objects.update(leased_until=None, claimed_by=None)
    assert cancel(id=message.pk).ids == (message.pk,)
    assert the_message().payload == {"n": 2}


def test_cancel_frees_those_behind_its_key() -> None:
    [first] = broadcast("a.b", key="k").ids
    [behind] = broadcast("b.b", key="k").ids
    QueuedMessage.objects.filter(pk=behind).update(blocked_by=first)
    cancel(type="a.b")
    assert stored(the_message()).blocked_by is None


# For tests


def test_a_duplicate_is_not_captured() -> None:
    with capture_broadcasts() as broadcasts:
        send(1, key="k")
        send(2)
        send(3, on_duplicate="update")
        broadcast_many(Message("c.d", n, unique_id="x") for n in range(2))
    assert [(each.type, each.payload, each.unique_id, each.key) for each in broadcasts] == [
        ("a.b", {"n": 1}, "u", "k"),
        ("a.b", {"n": 3}, "u", None),
        ("c.d", 0, "x", None),
    ]
    assert_broadcast("a.b", times=1)
