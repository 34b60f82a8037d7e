"""A handler that runs again on the same attempt gets the content as it was stored."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from tests.executor.breaking import driver_rollback
from tests.rows import add
from tests.worker.conftest import Bench, add_many, effect, waiting

pytestmark = pytest.mark.django_db(transaction=True)

STORED = {"payload": {"id": 1}, "metadata": {"tier": "gold"}}


def take(delivery: Delivery) -> tuple[Any, Any]:
    """Read the content, and change it, as a handler may do with its own objects."""
    return delivery.payload.pop("id"), delivery.metadata.pop("tier")


def test_victim_of_a_conflict_reads_the_stored_content(bench: Bench) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(take(delivery))
        if len(seen) == 1:
            raise psycopg.errors.DeadlockDetected

    add(handler="h", **STORED)
    bench.run_all(bench.claim())
    assert seen == [(1, "gold")] * 2


def test_messages_of_a_failed_batch_read_the_stored_content(bench: Bench) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        seen.extend(map(take, deliveries))
        if len(deliveries) > 1:
            raise ValueError

    add_many(2, handler="h", **STORED)
    bench.run_all(bench.claim())
    assert seen == [(1, "gold")] * 4
    assert FailedAttempt.objects.count() == 0


def test_neighbours_of_a_rollback_read_the_stored_content(bench: Bench) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        seen.append(take(delivery))
        if len(seen) == 2:
            driver_rollback(delivery)

    _, second = add_many(2, handler="h", **STORED)
    bench.run_all(bench.claim())
    assert seen == [(1, "gold")] * 3
    assert waiting() == {second.pk}
