"""All messages of a dead worker, and no others, are found by its id."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq.messages import Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import recover
from tests.rows import add, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def test_all_but_the_running_messages_are_released(cursor: Cursor) -> None:
    """Guarantee 3: refunded, in its place; including several claims and queues."""
    ran = add(leased=600, attempts=1, claimed_by="dead:1")
    waited = [
        add("mail", leased=600, attempts=3, claimed_by="dead:1", after=-70),
        add("post", leased=-600, attempts=1, claimed_by="dead:22"),
    ]
    others = [
        add(leased=600, attempts=1, claimed_by=name)
        for name in ("deadly:1", "dea:1", "alive:1", "dead_:1", "%:1")
    ]
    places = [m.processable_after for m in waited]
    assert recover.anything_left(cursor, worker="dead")
    freed = recover.release_all_except(cursor, worker="dead", kept=[ran.pk])
    assert freed == {m.pk for m in waited}
    for message, place, attempts in zip(waited, places, (2, 0), strict=True):
        stored(message)
        assert (message.attempts, message.claimed_by, message.leased_until) == (
            attempts, None, None
        )  # fmt: skip
        assert message.processable_after == place
    assert {m.claimed_by for m in QueuedMessage.objects.exclude(claimed_by=None)} == {
        "dead:1", *(m.claimed_by for m in others)
    }  # fmt: skip
    assert recover.anything_left(cursor, worker="dead")
    QueuedMessage.objects.filter(pk=ran.pk).delete()
    assert not recover.anything_left(cursor, worker="dead")
    assert recover.release_all_except(cursor, worker="dead", kept=[]) == set()


def test_rows_locked_by_the_dying_connection_are_released_later(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    busy, free = (add(leased=600, attempts=1, claimed_by="dead:1") for _ in range(2))
    lock(other, busy.pk)
    cursor.execute("set statement_timeout = '60s'")
    assert recover.release_all_except(cursor, worker="dead", kept=[]) == {free.pk}
    assert recover.anything_left(cursor, worker="dead")
    other.rollback()
    assert recover.release_all_except(cursor, worker="dead", kept=[]) == {busy.pk}


def test_lock_running_returns_rows_as_a_claim_does(cursor: Cursor) -> None:
    message = add(leased=600, attempts=2, claimed_by="dead:1", handler="h", suspect=True)
    (row,) = recover.lock_running(cursor, [Fence(message.pk, 2, "dead:1")])
    assert (row.id, row.attempts, row.claimed_by, row.handler, row.suspect) == (
        message.pk, 2, "dead:1", "h", True
    )  # fmt: skip


def test_only_attempts_of_the_same_transaction_are_backdated(cursor: Cursor) -> None:
    """After a reset of the sequence, an earlier message may have had the id."""
    given = {"message_id": 7, "queue": "mail", "type": "t", "attempt": 1}
    earlier = stored(FailedAttempt.objects.create(**given))
    with cursor.connection.transaction():
        cursor.execute(
            "insert into django_mq_failedattempt"
            " (message_id, queue, type, handler, attempt, worker, error_class, error_text,"
            " traceback) values (7, 'mail', 't', '', 1, '', '', '', '')"
        )
        recover.backdate(cursor, [Fence(7, 1, "dead:1")], seconds=3600.0)
    assert FailedAttempt.objects.get(pk=earlier.pk).ended_at == earlier.ended_at
    assert FailedAttempt.objects.filter(ended_at__lt=earlier.ended_at).count() == 1
