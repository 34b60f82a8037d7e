"""Messages whose lease lapsed are taken over."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import permutations
from typing import Any

import psycopg
import pytest
from django.utils import timezone

from django_mq.executor.statements import ONE_PLAN
from django_mq.messages import Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store.claim_lapsed import CLAIM_LAPSED, NOTHING, forget_lapse
from tests.rows import add, beat, stored
from tests.store.conftest import lock, take_lapsed
from tests.store.plans import plan

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def test_a_lapsed_row_is_taken_over_and_its_attempt_written_down(cursor: Cursor) -> None:
    """CAR-16, guarantee 3: attempt + 1; the row becomes suspect, and runs alone next time."""
    message = add(handler="h", leased=-1, claimed_by="gone:3", attempts=2)
    (row,) = take_lapsed(cursor).taken
    assert (row.id, row.attempts, row.claimed_by, row.suspect) == (message.pk, 3, "me:8", False)
    stored(message)
    assert (message.attempts, message.claimed_by, message.suspect) == (3, "me:8", True)
    assert message.leased_until is not None
    assert message.leased_until > timezone.now() + timedelta(seconds=20)
    attempt = FailedAttempt.objects.get()
    assert (attempt.message_id, attempt.attempt, attempt.worker, attempt.handler) == (
        message.pk, 2, "gone", "h"
    )  # fmt: skip
    assert attempt.error_class == "WorkerVanished"
    QueuedMessage.objects.update(leased_until=timezone.now() - timedelta(seconds=1))
    (again,) = take_lapsed(cursor).taken
    assert again.suspect is True


def test_suspects_are_left_out_on_request(cursor: Cursor) -> None:
    suspect = add(handler="h", leased=-2, claimed_by="gone:3", attempts=2, suspect=True)
    other = add(handler="h", leased=-1, claimed_by="gone:3", attempts=1)
    assert [row.id for row in take_lapsed(cursor, suspects=False).taken] == [other.pk]
    assert [row.id for row in take_lapsed(cursor).taken] == [suspect.pk]


def test_a_row_that_did_not_start_may_lapse_once_more(cursor: Cursor) -> None:
    """It was taken over and then released: nothing tells that it was the cause."""
    message = add(handler="h", leased=-1, claimed_by="gone:3", attempts=2)
    other = add(handler="h", leased=30, claimed_by="you:1", attempts=1, suspect=True)
    (row,) = take_lapsed(cursor).taken
    fences = [Fence(row.id, row.attempts, row.claimed_by), Fence(other.pk, 1, "me:1")]
    assert forget_lapse(cursor, fences) == {message.pk}
    assert not stored(message).suspect
    assert stored(other).suspect


def test_a_row_whose_last_attempt_vanished_is_dead(cursor: Cursor) -> None:
    """Guarantee 3: dead after max_attempts, even when each attempt kills its process.

    KAF-6: so a message with one attempt is handled at most once.
    """
    message = add(leased=-1, attempts=20)
    lapsed = take_lapsed(cursor)
    assert lapsed.taken == []
    assert [row.id for row in lapsed.dead] == [message.pk]
    stored(message)
    assert (message.attempts, message.dead_reason) == (20, "exhausted")
    assert message.dead_at is not None
    assert (message.claimed_by, message.leased_until) == (None, None)
    assert FailedAttempt.objects.get().attempt == 20
    assert take_lapsed(cursor) == NOTHING


def test_lapsed_rows_come_longest_lapsed_first_and_never_too_many(cursor: Cursor) -> None:
    messages = [add(leased=-n, attempts=1) for n in (1, 3, 2)]
    add(leased=30, attempts=1)
    add("post", leased=-9, attempts=1)
    assert [row.id for row in take_lapsed(cursor, limit=2).taken] == [
        messages[1].pk, messages[2].pk
    ]  # fmt: skip
    assert [row.id for row in take_lapsed(cursor).taken] == [messages[0].pk]


def test_queues_are_taken_over_in_the_order_asked_for(cursor: Cursor) -> None:
    """Also on a connection behind a pooler, whose planner may choose any kind of join."""
    queues = ["mail", "stock", "bills", "shop"]
    for queue in queues:
        add(queue, leased=-1)
    for order in permutations(queues):
        with cursor.connection.transaction(force_rollback=True):
            (row,) = take_lapsed(cursor, *order, limit=1).taken
        assert row.queue == order[0]


def test_a_scan_resumes_behind_its_mark(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """Rows that it took, released or dead-lettered lie before the mark; so do locked ones."""
    locked = add(leased=-9, attempts=1)
    lock(other, locked.pk)
    head = add(leased=-8, attempts=1, handler="h", key="k")
    add(leased=-7, attempts=1, handler="h", key="k")
    first = take_lapsed(cursor, limit=3)
    assert ([row.id for row in first.taken], first.released) == ([head.pk], 1)
    last, later = add(leased=-6, attempts=20), add("post", leased=-9, attempts=1)
    second = take_lapsed(cursor, "mail", "post", marks=first.marks)
    assert ([row.id for row in second.taken], [row.id for row in second.dead]) == (
        [later.pk], [last.pk]
    )  # fmt: skip
    other.rollback()
    assert take_lapsed(cursor, "mail", "post", marks={**first.marks, **second.marks}) == NOTHING
    assert [row.id for row in take_lapsed(cursor, "mail", "post").taken] == [locked.pk]


def test_mark_does_not_pass_a_row_over_the_byte_limit(cursor: Cursor) -> None:
    """It does not pass the messages behind it either, including released ones of a key."""
    big = {"attempts": 1, "payload": {"text": "x" * 600}}
    head = add(leased=-9, handler="h", key="k", **big)
    second = add(leased=-8, **big)
    behind = add(leased=-7, attempts=1, handler="h", key="k")
    found = take_lapsed(cursor, max_bytes=1000)
    assert ([row.id for row in found.taken], found.released) == ([head.pk], 0)
    found = take_lapsed(cursor, max_bytes=1000, marks=found.marks)
    assert ([row.id for row in found.taken], found.released) == ([second.pk], 1)
    assert stored(behind).attempts == 0


def test_a_lapsed_row_that_is_locked_still_runs(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Its slice has locked it, however old the lease."""
    message = add(leased=-1, attempts=1)
    lock(other, message.pk)
    cursor.execute("set statement_timeout = '60s'")
    assert take_lapsed(cursor) == NOTHING
    assert FailedAttempt.objects.count() == 0
    other.rollback()
    assert len(take_lapsed(cursor).taken) == 1


def test_the_first_of_a_line_is_not_looked_for_along_the_primary_key(cursor: Cursor) -> None:
    """Statistics from when all was leased suggest that: it would pass all older rows."""
    cursor.execute(
        """
        insert into django_mq_queuedmessage
               (queue, type, payload, leased_until, claimed_by, ordered)
        select 'line', 'a', '{}', now(), 'x:1', true from generate_series(1, 20000) n
        """
    )
    cursor.execute("analyze django_mq_queuedmessage")
    params = {"queues": ["line"], "ats": [float("-inf")], "ids": [0], "limit": 100, "window": 100}
    params.update(claimer="me:1", lease=30.0, nonatomic="{}")
    cursor.execute(ONE_PLAN)
    params |= {"bytes": 4 << 20, "skip_dead": False, "admitted": False, "suspects": True}
    text = plan(cursor, CLAIM_LAPSED, **params)
    assert "using mq_lease on django_mq_queuedmessage e\n" in text
    assert "using django_mq_queuedmessage_pkey on django_mq_queuedmessage e\n" not in text


@pytest.mark.parametrize(
    ("heartbeat", "taken"),
    [
        (None, True),
        ({"seen": -31}, True),
        ({"seen": -25}, False),  # a busy machine may take seconds to ask
        ({"seen": -1, "running": []}, True),
        ({"seen": -1, "running": ["odd", 10**30, None]}, True),
        ({"seen": -1, "running": [], "ran": {"{id}": 0}}, False),
        ({"seen": -1, "running": [], "ran": {"odd": 7}}, True),
    ],
)
def test_message_that_a_live_worker_runs_is_not_taken_over(
    cursor: Cursor, heartbeat: dict[str, Any] | None, taken: bool
) -> None:
    """Guarantee 25: when its process is ended for a timeout, a sibling settles the message.

    The handler had locked the row for longer than the lease, which was not renewed.
    """
    message = add(leased=-1, attempts=1)
    if heartbeat is not None:
        given = {"running": [message.pk + 1, message.pk], **heartbeat}
        beat(**json.loads(json.dumps(given).replace("{id}", str(message.pk))))
    assert [row.id for row in take_lapsed(cursor).taken] == ([message.pk] if taken else [])


def test_lapsed_message_is_taken_over_though_a_thawed_worker_still_runs_it(cursor: Cursor) -> None:
    """Guarantee 6: the other was frozen, lost the message, and goes on with it for minutes."""
    message = add(leased=-1, attempts=2, claimed_by="gone:1")
    beat("frozen", running=[message.pk])
    assert [row.id for row in take_lapsed(cursor).taken] == [message.pk]
