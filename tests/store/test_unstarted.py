"""Handlers outside transactions begin with a statement: a lost host charges what it started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db.models.functions import Now

from django_mq.messages import ClaimedRow, Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import claim, claim_keyed, leases, ordered_queues
from django_mq.store.claim import Lane
from django_mq.store.claim_lapsed import claim_lapsed
from tests.rows import add, stored

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
Take = Callable[[Cursor], Iterable[ClaimedRow]]

ASKED: dict[str, Any] = {
    "claimer": "me:1", "lease": 30.0, "limit": 100, "max_bytes": 1 << 20, "nonatomic": ["null", "n"]
}  # fmt: skip


def take_plain(cursor: Cursor) -> list[ClaimedRow]:
    return claim.claim(cursor, lanes=[Lane("mail", 0)], **ASKED).rows


def take_keyed(cursor: Cursor) -> list[ClaimedRow]:
    with cursor.connection.transaction():
        return claim_keyed.claim(cursor, lanes=[Lane("mail", 0)], skip_dead=False, **ASKED).rows


def take_line(cursor: Cursor) -> list[ClaimedRow]:
    QueuedMessage.objects.update(ordered=True)
    ordered_queues.own(cursor, queue="mail", worker="me", lease=6.0)
    with cursor.connection.transaction():
        return ordered_queues.claim(
            cursor, queue="mail", worker="me", skip_dead=False, **ASKED
        ).rows


def take_over(cursor: Cursor) -> list[ClaimedRow]:
    lapse(claimed_by="gone:1")
    return claim_lapsed(cursor, queues=["mail"], **ASKED).taken


def lapse(**given: Any) -> None:
    QueuedMessage.objects.update(leased_until=Now() - timedelta(seconds=1), **given)


@pytest.mark.parametrize("take", [take_plain, take_keyed, take_line, take_over])
def test_a_claim_records_what_it_has_not_started(cursor: Cursor, take: Take) -> None:
    """Only of handlers that begin with a statement: the others may run before one is sent."""
    for handler, metadata in (
        *(("n", {}), ("null", {}), ("a", {}), ("", {})),
        ("n", {"mq.task": {"atomic": True}}),
        ("n", {"mq.task": {"atomic": False, "timeout": 5}}),
    ):
        add(handler=handler, metadata=metadata, unstarted_claim="old:1")
    assert len(list(take(cursor))) == 6
    found = list(QueuedMessage.objects.order_by("pk").values_list("unstarted_claim", flat=True))
    assert found == ["me:1", "me:1", None, None, None, "me:1"]


@pytest.mark.parametrize("take", [take_plain, take_keyed])
def test_what_did_not_start_is_released_when_its_lease_lapses(cursor: Cursor, take: Take) -> None:
    """Guarantee 3: also a message with one attempt runs again; none of them is a suspect."""
    started, renewed, waits = (add(handler="n", max_attempts=1) for _ in range(3))
    fences = [Fence(row.id, row.attempts, row.claimed_by) for row in take(cursor)]
    leases.start(cursor, fences[:1], lease=30.0)
    leases.renew(cursor, fences, lease=60.0)
    lapse()
    found = claim_lapsed(cursor, queues=["mail"], **ASKED)
    assert ([row.id for row in found.dead], found.taken, found.released) == ([started.pk], [], 2)
    assert stored(started).dead_reason == "exhausted"
    for each in (renewed, waits):
        stored(each)
        assert (each.attempts, each.leased_until, each.claimed_by) == (0, None, None)
        assert (each.suspect, each.last_error, each.dead_at) == (False, "", None)
    assert list(FailedAttempt.objects.values_list("message_id", flat=True)) == [started.pk]
    assert [row.id for row in take(cursor)] == [renewed.pk, waits.pk]


def test_a_line_whose_first_message_did_not_start_is_released(cursor: Cursor) -> None:
    """Nothing behind it has started either."""
    head, behind = (add(handler="n", key="k", max_attempts=1) for _ in range(2))
    assert len(take_keyed(cursor)) == 2
    lapse()
    found = claim_lapsed(cursor, queues=["mail"], **ASKED)
    assert (found.dead, found.taken, found.released) == ([], [], 2)
    assert [row.id for row in take_keyed(cursor)] == [head.pk, behind.pk]


def test_what_another_claim_had_not_started_counts_as_started(cursor: Cursor) -> None:
    """A worker of an earlier version has claimed it since, and does not know the column."""
    message = add(leased=-1, claimed_by="old:2", handler="n", attempts=1, unstarted_claim="me:1")
    found = claim_lapsed(cursor, queues=["mail"], **ASKED)
    assert [row.id for row in found.taken] == [message.pk]
    assert FailedAttempt.objects.get().attempt == 1


def test_a_large_backlog_of_unstarted_messages_is_released_in_steps(cursor: Cursor) -> None:
    for _ in range(5):
        add(leased=-1, handler="n", attempts=1, claimed_by="gone:1", unstarted_claim="gone:1")
    marks: dict[str, Any] = {}
    released = []
    for _ in range(4):
        found = claim_lapsed(cursor, queues=["mail"], marks=marks, **{**ASKED, "limit": 2})
        marks.update(found.marks)
        released.append(found.released)
    assert released == [2, 2, 1, 0]
