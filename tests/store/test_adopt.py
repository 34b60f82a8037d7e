"""Adopt: rows that wait outside the line of an ordered queue are moved into it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq.models import QueuedMessage
from django_mq.store import adopt
from tests.rows import add, pks, stored
from tests.store.conftest import lock
from tests.store.ordered import Cursor, own, row, take

pytestmark = pytest.mark.django_db(transaction=True)


def adopt_all(cursor: Cursor, *, limit: int) -> int:
    """Walk over the queue `line`, `limit` rows at a time; return the number of adopted rows."""
    adopted = adopt.adopt(cursor, queue="line", limit=limit)
    rows = adopted.rows
    while adopted.resume is not None:
        adopted = adopt.adopt(cursor, queue="line", limit=limit, after=adopted.resume)
        rows += adopted.rows
    return rows


def test_each_that_waits_beside_the_line_is_met(cursor: Cursor) -> None:
    """Regardless of priority, due time and key: a walk skips none, and ends."""
    for n in range(60):
        add(
            "line",
            priority=n % 3 - 1,
            after=n // 20,
            key="k" if n % 5 == 0 else None,
            handler="hi"[n % 2],
            ordered=n % 4 == 0,
            blocked_by=1 if n % 10 == 0 else None,
        )
    assert adopt_all(cursor, limit=7) == 45
    assert not QueuedMessage.objects.filter(ordered=False).exists()


def test_rows_outside_the_line_are_adopted(cursor: Cursor) -> None:
    """From SQL, from unaware workers, from before: by its id among the others."""
    first = row()
    strange = [add("line"), add("line", after=60), add("line", key="k")]
    last = row()
    add("mail")
    assert adopt_all(cursor, limit=2) == 3
    assert adopt_all(cursor, limit=2) == 0
    assert all(stored(message).ordered for message in strange)
    assert QueuedMessage.objects.filter(queue="mail", ordered=True).count() == 0
    own(cursor)
    assert take(cursor) == pks(first, strange[0])
    assert stored(last).leased_until is None


def test_rows_parked_by_their_key_are_adopted(cursor: Cursor) -> None:
    """The queue had keys before it was ordered: now it has a single line."""
    head = add("line", key="k", handler="h", after=60)
    parked = add("line", key="k", handler="h", blocked_by=head.pk)
    late = row()
    assert adopt.adopt(cursor, queue="line", limit=10).rows == 2
    assert (stored(parked).ordered, stored(parked).blocked_by) == (True, None)
    head.delete()
    own(cursor)
    assert take(cursor) == pks(parked, late)


#: A message in flight, and a dead one.
GONE = ({"leased": 30}, {"dead": -1})


def test_rows_in_flight_dead_or_locked_are_not_adopted(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    messages = [add("line", key=key, **given) for key in (None, "k") for given in GONE]
    lock(other, add("line").pk)
    cursor.execute("set statement_timeout = '60s'")
    assert adopt.adopt(cursor, queue="line", limit=10).rows == 0
    assert not any(stored(message).ordered for message in messages)
