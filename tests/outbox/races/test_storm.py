"""Many producers and workers use the same unique ids at once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from django.db import transaction

from django_mq import BroadcastBusy, Message, broadcast_many
from django_mq.models import UniqueKey
from tests.database import second_connection
from tests.outbox.races.conftest import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)


def _left() -> list[object]:
    """Return the remaining messages, for the failure report."""
    with second_connection() as other:
        return [
            other.execute(f"select to_jsonb(t) from {table} t").fetchall()
            for table in ("django_mq_queuedmessage", "django_mq_uniquekey")
        ]


# The server computes the array once. It may run a subselect in FROM once per row, and lock another
# message each time, if the statistics say that the table has one row.
CLAIM = """
update django_mq_queuedmessage m
   set attempts = attempts + 1, claimed_by = 'w:1', leased_until = now() + interval '1 minute'
 where id = any(array(
    select id from django_mq_queuedmessage
     where leased_until is null and dead_at is null and processable_after <= now()
     limit 1
       for no key update skip locked))
returning m.id, m.queue, m.handler, m.type, m.unique_id, (m.payload->>'n')::int
"""


class Settler(threading.Thread):
    """Claims messages one at a time, and acks or fails them: a worker's statements."""

    def __init__(self, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.stop = stop
        self.handled: list[int] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            with second_connection() as own:
                while not self.stop.is_set() or self.left(own):
                    self.step(own)
        except BaseException as error:
            self.errors.append(error)

    def left(self, own: psycopg.Connection[Any]) -> bool:
        [found] = own.execute(
            "select exists (select from django_mq_queuedmessage"
            " where type = 'a.b' and dead_at is null)"
            " or exists (select from django_mq_uniquekey"
            " where type = 'a.b' and put_aside is not null)"
        ).fetchone() or [False]
        return bool(found)

    def step(self, own: psycopg.Connection[Any]) -> None:
        from django_mq.store import free_unique_ids, promotion
        from django_mq.store import put_aside as aside
        from django_mq.store.free_unique_ids import EndedMessage
        from django_mq.store.unique_ids import UniqueId

        claimed = own.execute(CLAIM).fetchall()
        if not claimed:
            if self.stop.is_set():  # like the chores: the last producer to put it aside rolled back
                promotion.promote_put_aside(
                    own.cursor(), aside.free_put_aside(own.cursor(), limit=10).ids
                )
            own.execute("select pg_sleep(0.002)")
            return
        [(id, *unique, n)] = claimed
        with own.transaction(), own.cursor() as cursor:
            cursor.execute(
                "select from django_mq_queuedmessage where id = %s for no key update", [id]
            )
            end = self.random.choice(["ack", "ack", "die", "retry"])
            if end == "retry":
                cursor.execute(
                    "update django_mq_queuedmessage set leased_until = null, claimed_by = null"
                    " where id = %s",
                    [id],
                )
                return
            if end == "die":
                cursor.execute(
                    "update django_mq_queuedmessage set leased_until = null, claimed_by = null,"
                    " dead_at = now(), dead_reason = 'exhausted' where id = %s",
                    [id],
                )
            else:
                cursor.execute("delete from django_mq_queuedmessage where id = %s", [id])
            free_unique_ids.end(cursor, [EndedMessage(id, UniqueId._make(unique), end == "ack")])
        self.handled.append(n)


LIVE = """
select count(*) from (
    select from django_mq_queuedmessage where dead_at is null
     group by queue, handler, type, unique_id having count(*) > 1) twice
"""


@pytest.mark.slow
def test_many_producers_of_the_same_ids(together: Callable[..., Future[Any]]) -> None:
    """Two live rows never share an id, nothing deadlocks, and each message is handled once.

    An update or a second requeue replaces the message accepted before it. So each id is
    handled once per message that was added, or was the first put aside; no number is handled twice.
    """
    producers, calls, ids = 8, 25, ["a", "b", "c", "d"]
    stop, watching = threading.Event(), threading.Event()
    twice: list[int] = []

    def watch() -> None:
        with second_connection() as other:
            while not watching.is_set():
                twice.append((other.execute(LIVE).fetchone() or [0])[0])

    def produce(seed: int) -> list[tuple[int, str]]:
        chosen = random.Random(seed)
        told = []
        for call in range(calls):
            some = [chosen.choice(ids) for _ in range(chosen.randint(1, 4))]
            numbers = [(seed * calls + call) * 10 + place for place in range(len(some))]
            messages = [
                Message(
                    "a.b",
                    {"n": number},
                    unique_id=id,
                    on_duplicate=chosen.choice(
                        ["skip", "update", "debounce", "replace", "requeue", "rerun"]
                    ),
                    unique_for=chosen.choice([None, 0.001]),
                )
                for number, id in zip(numbers, some, strict=True)
            ]
            undone = chosen.random() < 0.2
            try:
                with transaction.atomic():
                    receipts = broadcast_many(messages)
                    transaction.set_rollback(undone)
            except BroadcastBusy:  # on a busy machine: the call stored nothing
                continue
            if undone:
                continue
            told += list(zip(numbers, (each.outcome for each in receipts), strict=True))
        return told

    settlers = [Settler(seed, stop) for seed in range(3)]
    for settler in settlers:
        settler.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    futures = [together(produce, seed) for seed in range(producers)]
    told = dict(pair for future in futures for pair in future.result(PATIENCE))
    stop.set()
    for settler in settlers:
        settler.join(PATIENCE)
        assert not settler.is_alive(), (_left(), [each.errors for each in settlers])
    watching.set()
    watcher.join(PATIENCE)
    assert [settler.errors for settler in settlers] == [[], [], []]
    assert twice
    assert not any(twice)
    counts = Counter(n for settler in settlers for n in settler.handled)
    assert set(counts.values()) == {1}
    accepted = {number for number, outcome in told.items() if outcome != "duplicate"}
    assert set(counts) <= accepted
    added = sum(outcome == "added" for outcome in told.values())
    asides = sum(outcome == "requeued" for outcome in told.values())
    assert added <= len(counts) <= added + asides
    assert not UniqueKey.objects.filter(message_id__isnull=False).exists()
    assert not UniqueKey.objects.filter(put_aside__isnull=False).exists()
