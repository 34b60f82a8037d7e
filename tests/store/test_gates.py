"""The gate of a queue: one claim at a time over the fleet, up to the limit in flight."""

from __future__ import annotations

from time import time
from typing import Any

import psycopg
import pytest

from django_mq.models import QueuedMessage
from django_mq.store import claim_lapsed as lapsed
from django_mq.store import gates
from django_mq.store.claim import Lane, claim
from django_mq.store.claim_lapsed import claim_lapsed
from django_mq.store.gates import Gate
from django_mq.store.poll import poll
from tests.database import held_snapshot
from tests.rows import add, decide, insert_all, stored
from tests.store.plans import pages

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def enter(
    cursor: Cursor,
    limit: int | None = None,
    queue: str = "mail",
    lease_mark: float = float("-inf"),
) -> Gate | None:
    with cursor.connection.transaction():
        return gates.enter(cursor, queue=queue, limit=limit, lease_mark=lease_mark)


def told(gate: Gate | None) -> tuple[int, int | None, int | None]:
    """The level, the limit and the count."""
    assert gate is not None
    return gate[:3]


def entered(cursor: Cursor, lease_mark: float = float("-inf")) -> Gate:
    gate = enter(cursor, 50, lease_mark=lease_mark)
    assert gate is not None
    return gate


def take(cursor: Cursor, *, admitted: bool) -> list[int]:
    found = claim(
        cursor,
        lanes=[Lane("mail", 0)],
        claimer="me:7",
        lease=30.0,
        limit=10,
        max_bytes=1 << 20,
        admitted=admitted,
    )
    return [row.id for row in found.rows]


def take_over(cursor: Cursor, *, admitted: bool) -> list[int]:
    found = claim_lapsed(
        cursor,
        queues=["mail"],
        claimer="me:8",
        lease=30.0,
        limit=10,
        max_bytes=1 << 20,
        admitted=admitted,
    )
    return [row.id for row in found.taken]


def test_without_a_limit_there_is_any_room(cursor: Cursor) -> None:
    add(leased=30)
    assert enter(cursor) == Gate(0, None, None, None)
    assert Gate(0, None, None, None).room is None


@pytest.mark.parametrize(("limit", "room"), [(0, 0), (1, 0), (3, 0), (4, 1), (100, 97)])
def test_messages_in_flight_take_room(cursor: Cursor, limit: int, room: int) -> None:
    """NSQ-23: lapsed messages too, until taken over; waiting ones and other queues do not."""
    for seconds in (30, 30, -1):
        add(leased=seconds)
    add()
    add(dead=-1)
    add("other", leased=30)
    gate = enter(cursor, limit)
    assert gate is not None
    assert (gate.max_in_flight, gate.room) == (limit, room)


def test_decided_limit_overrides_the_settings(cursor: Cursor) -> None:
    decide(max_in_flight=0)
    decide("other", paused=-1)
    gate, other = enter(cursor, 5), enter(cursor, 5, "other")
    assert gate is not None
    assert other is not None
    assert (gate.max_in_flight, gate.room, other.max_in_flight) == (0, 0, 5)


def test_gate_has_the_backoff_level(cursor: Cursor) -> None:
    decide(backoff_level=3, backoff=60)
    assert enter(cursor) == Gate(3, None, None, None)


def test_gate_admits_one_claim_at_a_time_without_waiting(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Each queue has a separate gate, which opens at the end of the transaction."""
    assert gates.enter(other.cursor(), queue="mail", limit=5) is not None
    assert enter(cursor, 5) is None
    assert enter(cursor, 5, "other") is not None
    other.rollback()
    assert enter(cursor, 5) is not None


def test_count_is_current_when_the_claim_commits(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """The gate's count comes from a statement that began after the lock was taken."""
    add()
    theirs = other.cursor()
    assert told(gates.enter(theirs, queue="mail", limit=1)) == (0, 1, 0)
    assert len(take(theirs, admitted=True)) == 1
    other.commit()
    assert told(enter(cursor, 1)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("decided", "open_to_all", "open_to_admitted"),
    [
        ({}, True, True),
        ({"max_in_flight": 9}, False, True),
        ({"backoff_level": 1}, False, True),
        ({"paused": -1}, False, False),
        ({"paused": -9, "until": -1}, True, True),
        ({"paused": -9, "until": 60}, False, False),
        ({"paused": -1, "backoff_level": 1, "max_in_flight": 9}, False, False),
    ],
)
def test_only_admitted_claims_pass_a_gate(
    cursor: Cursor, decided: dict[str, Any], open_to_all: bool, open_to_admitted: bool
) -> None:
    """A worker that has not looked yet claims past no gate; a pause applies to all."""
    decide(**decided)
    waiting = [add().pk]
    flying = [add(leased=-1).pk]
    assert take(cursor, admitted=False) == waiting * open_to_all
    assert take_over(cursor, admitted=False) == flying * open_to_all
    assert take(cursor, admitted=True) == waiting * (open_to_admitted and not open_to_all)
    assert take_over(cursor, admitted=True) == flying * (open_to_admitted and not open_to_all)


def test_any_lapsed(cursor: Cursor) -> None:
    add()
    add(leased=30)
    add("other", leased=-1)
    assert not lapsed.any_lapsed(cursor, queue="mail")
    add(leased=-1)
    assert lapsed.any_lapsed(cursor, queue="mail")


def test_poll_returns_restricted_queues(cursor: Cursor) -> None:
    """With the limit; with the seconds to the end of a wait, or of a pause."""
    decide("a", max_in_flight=7)
    decide("b", backoff_level=2, backoff=60, max_in_flight=3)
    decide("c", backoff_level=1, backoff=-60)
    decide("d", paused=-1)
    decide("e", paused=-1, until=60, backoff_level=1, backoff=900)
    decide("f", paused=-60, until=-1)
    found = {each.queue: each for each in poll(cursor)}
    assert {queue: each.kind for queue, each in found.items()} == {
        "a": "limited",
        "b": "backing_off",
        "c": "backing_off",
        "d": "paused",
        "e": "paused",
    }
    assert found["a"].number == 7
    waits = {queue: each.next_in for queue, each in found.items()}
    assert waits["a"] is None
    assert waits["d"] is None
    assert 50 < (waits["b"] or 0) <= 60
    assert -70 < (waits["c"] or 0) <= -60
    assert 50 < (waits["e"] or 0) <= 60


def test_a_count_begins_at_the_first_lease_of_the_one_before(cursor: Cursor) -> None:
    """Dead row versions of handled messages lie before it while a snapshot is held."""
    lapsed, renewed, flying = add(leased=-20), add(leased=-10), add(leased=30)
    first = entered(cursor)
    assert first.lease_mark == stored(lapsed).leased_until.timestamp()
    lapsed.delete()
    second = entered(cursor, first.lease_mark)
    assert (second.in_flight, second.lease_mark) == (2, stored(renewed).leased_until.timestamp())
    QueuedMessage.objects.filter(pk=renewed.pk).update(leased_until=flying.leased_until)
    third = entered(cursor, second.lease_mark)
    assert third.in_flight == 2
    assert third.lease_mark is not None
    # Not the end of its first lease: a later claim may have a shorter one.
    assert third.lease_mark < stored(flying).leased_until.timestamp()


def test_count_of_zero_sets_a_mark(cursor: Cursor) -> None:
    """Each lease that follows ends later, even the shortest."""
    gate = entered(cursor)
    assert gate.in_flight == 0
    assert gate.lease_mark is not None
    add(leased=0)  # lapses at once
    assert entered(cursor, gate.lease_mark).in_flight == 1


def test_after_the_servers_clock_was_set_back_everything_is_counted(cursor: Cursor) -> None:
    """Leases end before the mark now."""
    add(leased=-1), add(leased=30)
    gate = entered(cursor, time() + 3600)
    assert gate.in_flight == 2
    assert gate.lease_mark is not None
    assert gate.lease_mark < time()


@pytest.mark.parametrize("limit", [None, 0])
def test_gate_that_counts_nothing_moves_no_mark(cursor: Cursor, limit: int | None) -> None:
    add(leased=-60)
    gate = enter(cursor, limit)
    assert gate is not None
    assert gate.lease_mark is None


def test_a_held_snapshot_makes_counts_no_slower(cursor: Cursor) -> None:
    """Pages are counted, which are the same on a busy machine."""
    mark = float("-inf")
    insert_all({"queue": "other"} for _ in range(3000))
    cursor.execute("vacuum analyze django_mq_queuedmessage")
    with held_snapshot():
        for turn in range(40):
            insert_all({"leased": turn - 100} for _ in range(100))
            mark = entered(cursor, mark).lease_mark or mark
            QueuedMessage.objects.filter(queue="mail").delete()
        insert_all({"leased": 30} for _ in range(10))
        from_mark, from_front = (
            pages(gates.READ, {"queue": "mail", "limit": 50, "lease_mark": begin})
            for begin in (mark, float("-inf"))
        )
    assert 5 * from_mark < from_front
