"""The deliveries of a handler: their attributes, and the remains of a late success."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from tests.rows import add
from tests.worker.conftest import PATIENCE, Running, Said, attempts_of

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "not atomic"])
def test_delivery_has_the_fields_of_its_message(start: Start, options: dict[str, Any]) -> None:
    """CAR-21: queue, id, message, attempt; age, priority and key."""
    seen: list[dict[str, Any]] = []

    @handler("#", queue="mail", name="h", **options)
    def h(delivery: Delivery) -> None:
        names = ("id", "queue", "type", "payload", "metadata", "handler", "attempt")
        more = ("max_attempts", "schema_version", "priority", "key", "created_at", "age")
        seen.append({name: getattr(delivery, name) for name in (*names, *more)})

    message = add(
        handler="h", payload={"a": [1]}, metadata={"tier": "gold"}, priority=3, key="k",
        attempts=1, max_attempts=7, created=-90,
    )  # fmt: skip
    assert start(until_empty=True).join()
    [told] = seen
    age = told.pop("age")
    assert timedelta(seconds=90) <= age < timedelta(seconds=90 + PATIENCE)
    assert told == {
        "id": message.pk,
        "queue": "mail",
        "type": "shop.orders.placed",
        "payload": {"a": [1]},
        "metadata": {"tier": "gold"},
        "handler": "h",
        "attempt": 2,
        "max_attempts": 7,
        "schema_version": 1,
        "priority": 3,
        "key": "k",
        "created_at": message.created_at,
    }


def test_without_backoff_it_is_tried_again_at_once_as_the_same_row(
    start: Start, said: Said
) -> None:
    """PMQ-52; PMQ-51, PMQ-53 as changed: its id and the record of its failures stay.

    The first retry is at once; the next waits RETRY_FLOOR.
    """

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        if delivery.attempt < 3:
            raise KeyError(delivery.attempt)

    message = add(handler="h", after=-60)
    while QueuedMessage.objects.exists():  # a waiting message does not prevent the end of a run
        assert start(until_empty=True).join()
    assert [subject.id for _, subject, _ in said.all if hasattr(subject, "payload")] == [
        message.pk
    ] * 6  # three starts, two retries, one ack
    assert [data["after"] for name, _, data in said.all if name == "message_retried"] == [0, 0.1]
    assert not QueuedMessage.objects.exists()
    assert attempts_of(message) == ["KeyError", "KeyError"]
    texts = FailedAttempt.objects.order_by("attempt").values_list("error_text", flat=True)
    assert list(texts) == ["1", "2"]
