"""Rows for tests: written like other programs may, with times by the database's clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from itertools import groupby
from time import time
from typing import Any, TypeVar

from django.db import connection
from django.db.models import Model
from django.db.models.functions import Now

from django_mq.messages import ClaimedRow, Delivery
from django_mq.models import QueuedMessage, QueueState, WorkerHeartbeat
from django_mq.policy.handler_totals import HandlerTotals

M = TypeVar("M", bound=Model)

#: Arguments in seconds from now, and the columns they set.
MOMENTS = {
    "after": "processable_after",
    "leased": "leased_until",
    "expires": "expires_at",
    "held": "held_since",
    "dead": "dead_at",
    "created": "created_at",
    "paused": "paused_at",
    "until": "paused_until",
    "backoff": "backoff_until",
    "seen": "last_seen",
}


def columns(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with seconds from now replaced by times of the database."""
    return {
        MOMENTS.get(name, name): Now() + timedelta(seconds=value) if name in MOMENTS else value
        for name, value in given.items()
    }


def stored(row: M) -> M:
    """Return `row` as the database has it, with times for expressions."""
    row.refresh_from_db()
    return row


def add(queue: str = "mail", **given: Any) -> QueuedMessage:
    """Insert a message and return it as stored; `leased=30` also claims it for `worker:1`."""
    message = _message(queue, **given)
    message.save(force_insert=True)
    return stored(message)


def add_all(each: Iterable[dict[str, Any]]) -> list[QueuedMessage]:
    """Insert many messages at once, each like `add()`, and return them as stored, in order."""
    return list(QueuedMessage.objects.filter(pk__in=insert_all(each)).order_by("pk"))


def insert_all(each: Iterable[dict[str, Any]]) -> list[int]:
    """Insert many messages, each like `add()`, and return their ids, in order.

    One statement for neighbours with the same columns takes a tenth of the CPU of `bulk_create()`.
    """
    ids: list[int] = []
    with connection.cursor() as cursor:
        for names, rows in groupby(({"queue": "mail"} | _given(**row) for row in each), tuple):
            cursor.execute(_insert_of(names), [json.dumps(list(rows))])
            ids += sorted(id for (id,) in cursor.fetchall())
    return ids


@cache
def _insert_of(names: tuple[str, ...]) -> str:
    """Return the statement that inserts messages with the arguments `names` from a document."""
    columns, values, types = [], [], []
    for name in names:
        field = QueuedMessage._meta.get_field(MOMENTS.get(name, name))
        is_moment = name in MOMENTS
        columns.append(field.column)
        types.append(f"{name} {'float8' if is_moment else field.db_type(connection)}")
        moment = f"statement_timestamp() + row.{name} * interval '1 second'"
        values.append(moment if is_moment else f"row.{name}")
    return (
        f"insert into {QueuedMessage._meta.db_table} ({', '.join(columns)})"
        f" select {', '.join(values)}"
        f" from jsonb_to_recordset(%s::jsonb) as row ({', '.join(types)}) returning id"
    )


def _message(queue: str, **given: Any) -> QueuedMessage:
    return QueuedMessage(queue=queue, **columns(_given(**given)))


def _given(**given: Any) -> dict[str, Any]:
    """Return the arguments of `add()` with their defaults."""
    if "leased" in given:
        given.setdefault("claimed_by", "worker:1")
    return {"type": "shop.orders.placed", "payload": {}, "after": -60, **given}


def pks(*messages: QueuedMessage) -> list[int]:
    """Return the ids of messages."""
    return [message.pk for message in messages]


def the_message() -> QueuedMessage:
    """Return the only message."""
    return QueuedMessage.objects.get()


def decide(queue: str = "mail", **given: Any) -> QueueState:
    """Insert a decision about a queue."""
    return stored(QueueState.objects.create(queue=queue, **columns(given)))


def beat(id: str = "worker", **given: Any) -> WorkerHeartbeat:
    """Insert the heartbeat of a worker process, as of now."""
    given = {
        "queues": [],
        "host": "host",
        "pid": 7,
        "version": "0",
        "wakeup": "notify",
        "running": [],
        **given,
    }
    return stored(WorkerHeartbeat.objects.create(id=id, **columns(given)))


def tally(
    *, waited: Sequence[float] = (), ran: Sequence[float] = (), **given: Any
) -> dict[str, Any]:
    """Return the part of a heartbeat about one handler."""
    tally = HandlerTotals(**given)
    tally.waited.add(waited)
    tally.ran.add(ran)
    return tally.as_json()


def delivery(**changed: Any) -> Delivery:
    """Return a delivery as a worker makes it, of a row with these columns."""
    values: dict[str, Any] = {
        "id": 77, "queue": "q", "type": "t", "handler": "h", "schema_version": 1,
        "payload": "{}", "metadata": "{}", "priority": 0, "key": None, "attempts": 1,
        "max_attempts": 20, "retry": None, "claimed_by": "w", "wants_result": False,
        "suspect": False, "held_for": None, "created": time(),
        "claimed": time(), **changed,
    }  # fmt: skip
    return Delivery(ClaimedRow(**values))
