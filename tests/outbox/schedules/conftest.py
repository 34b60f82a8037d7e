"""Only the schedules of the test exist, and turns need no worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import handlers
from django_mq.models import QueuedMessage, Schedule
from django_mq.outbox.schedules.firing import fire_due
from django_mq.store import schedules

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def registry() -> Iterator[handlers.Registry]:
    """Only the handlers and schedules of the test exist."""
    with handlers.isolated() as registry:
        yield registry


def put(name: str = "hourly", *, due: float | None = -1, **given: Any) -> Schedule:
    """Insert an enabled schedule that is due in `due` seconds, by default one second ago."""
    if "cron" not in given:
        given.setdefault("every", HOUR)
    next_at = None if due is None else Now() + timedelta(seconds=due)
    made = Schedule(**{"name": name, "type": "shop.ping", "next_at": next_at, **given})
    made.save(force_insert=True)
    made.refresh_from_db()
    return made


@contextmanager
def block() -> Iterator[Any]:
    with transaction.atomic(), connection.cursor() as cursor:
        yield cursor


def turn() -> int:
    """Broadcast due schedules, like a worker's turn; return the number of broadcasts."""
    position: schedules.Position | None = schedules.FIRST
    broadcasts = 0
    while position is not None:
        with block() as cursor:
            fired = fire_due(cursor, "default", after=position)
        broadcasts += fired.broadcasts
        position = fired.after
    return broadcasts


def messages(name: str = "hourly") -> list[QueuedMessage]:
    """Return the broadcasts of a schedule, in order."""
    return list(QueuedMessage.objects.filter(**{"metadata__mq.schedule": name}).order_by("pk"))


def times(name: str = "hourly") -> list[str]:
    """Return the times that a schedule has broadcast."""
    return [each.metadata["mq.scheduled_for"] for each in messages(name)]
