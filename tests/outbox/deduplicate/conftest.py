"""Broadcasts with unique ids: outcomes, receipts, and what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import CopyReceipt, broadcast
from django_mq.models import QueuedMessage
from django_mq.store import free_unique_ids
from django_mq.store.free_unique_ids import EndedMessage
from django_mq.store.unique_ids import UniqueId
from tests.rows import the_message


@pytest.fixture(autouse=True)
def block() -> Iterator[None]:
    """Run the whole test in one block: the statements see their own writes."""
    with transaction.atomic():
        yield


def send(n: int = 0, **options: Any) -> CopyReceipt:
    """Broadcast number `n` under the id `u`; return the receipt of its only copy."""
    [copy] = broadcast("a.b", {"n": n}, **{"unique_id": "u", **options}).copies
    return copy


def told(copy: CopyReceipt) -> tuple[str, str]:
    return copy.outcome, copy.reason


def lease(**given: Any) -> QueuedMessage:
    """Claim the only message."""
    until = given.pop("until", Now() + timedelta(minutes=1))
    QueuedMessage.objects.filter(dead_at=None).update(
        leased_until=until, claimed_by="worker:1", attempts=1
    )
    return the_message()


def handled(message: QueuedMessage, *, success: bool = True) -> list[int]:
    """End a message like a worker: the row is deleted or dead, and the id follows."""
    id = message.pk
    if success:
        QueuedMessage.objects.filter(pk=id).delete()
    else:
        QueuedMessage.objects.filter(pk=id).update(
            leased_until=None, claimed_by=None, dead_at=Now(), dead_reason="exhausted"
        )
    unique = UniqueId(message.queue, message.handler, message.type, message.unique_id or "")
    with connection.cursor() as cursor:
        return free_unique_ids.end(cursor, [EndedMessage(id, unique, success)])
