"""Claims from ordered queues."""

from __future__ import annotations

from typing import Any

import psycopg

from django_mq.models import QueuedMessage
from django_mq.store import ordered_queues
from django_mq.store.ordered_queues import OwnedQueue
from tests.rows import add

Cursor = psycopg.Cursor[Any]


def own(cursor: Cursor, worker: str = "me", lease: float = 6.0) -> OwnedQueue | None:
    return ordered_queues.own(cursor, queue="line", worker=worker, lease=lease)


def row(**given: Any) -> QueuedMessage:
    return add("line", **{"ordered": True, **given})
