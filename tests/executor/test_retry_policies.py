"""Retry policies at work: on a message, on a handler, and crashing ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_mq import (
    Delivery,
    Message,
    RetryPolicy,
    broadcast,
    broadcast_many,
    exponential,
    fixed,
    handler,
    intervals,
)
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import drain, due

pytestmark = pytest.mark.django_db

#: Seconds of tolerance for a wait: the time of the statements and of Python in between.
MARGIN = 5.0


def subscribe(**options: Any) -> list[int]:
    """Subscribe a handler that always fails; return the list of its attempts."""
    attempts: list[int] = []

    def fail(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        raise ValueError("no")

    handler("a.b", **{"name": "h", "queue": "mail", **options})(fail)
    return attempts


def send(retry: RetryPolicy | None = None, **options: Any) -> None:
    with transaction.atomic():
        broadcast("a.b", retry=retry, **options)


def wait() -> float:
    """Return the seconds that the only message waits after its last failure."""
    last = FailedAttempt.objects.order_by("-attempt")[0]
    return (QueuedMessage.objects.get().processable_after - last.ended_at).total_seconds()


def waits() -> list[float]:
    """Run the only message until it is dead; return its waits in whole seconds."""
    found = []
    while True:
        drain(errors="keep")
        if QueuedMessage.objects.get().dead_at is not None:
            return found
        found.append(round(wait()))
        due()


#: Without a known handler the worker routes the message, which keeps its own policy.
ROUTED = pytest.mark.parametrize("routed", [True, False], ids=["routed", "unrouted"])


def carried(retry: RetryPolicy, routed: bool) -> tuple[list[int], list[float]]:
    """Return the attempts and waits of a message that carries `retry`."""
    options: dict[str, Any] = {"retry": RetryPolicy(9, fixed(1000))}
    if routed:
        attempts = subscribe(**options)
        send(retry)
    else:
        send(retry, queue="mail")
        attempts = subscribe(**options)
    return attempts, waits()


@ROUTED
def test_a_message_that_is_not_repeated(routed: bool) -> None:
    """RMQ-15: never."""
    assert carried(RetryPolicy.never(), routed) == ([1], [])
    assert QueuedMessage.objects.get().dead_reason == "exhausted"


@ROUTED
def test_a_message_with_a_limit(routed: bool) -> None:
    """RMQ-16: repeated up to the limit, by its own count."""
    assert carried(RetryPolicy(5, fixed(7)), routed) == ([1, 2, 3, 4, 5], [7, 7, 7, 7])


@ROUTED
def test_a_message_with_a_list_of_intervals(routed: bool) -> None:
    """RMQ-17: one for each attempt; the last repeats."""
    policy = RetryPolicy(7, intervals(15, 30, 60, 300, 86400))
    attempts, found = carried(policy, routed)
    assert attempts == [1, 2, 3, 4, 5, 6, 7]
    assert found == [15, 30, 60, 300, 86400, 86400]


def test_a_policy_reaches_every_copy() -> None:
    """RMQ-15."""
    subscribe(name="one")
    subscribe(name="two")
    send(RetryPolicy.never())
    drain(errors="keep")
    assert QueuedMessage.objects.filter(dead_at__isnull=False).count() == 2


def test_message_before_handler_before_queue_before_default(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "RETRY": RetryPolicy(2),
        "QUEUES": {"own": {"retry": RetryPolicy(3)}},
    }
    found = []
    for queue, on_handler, on_message in [
        ("mail", None, None),
        ("own", None, None),
        ("own", RetryPolicy(4), None),
        ("own", RetryPolicy(4), RetryPolicy(5)),
    ]:
        name = f"h{len(found)}"
        handler(name, name=name, queue=queue, retry=on_handler)(lambda delivery: None)
        with transaction.atomic():
            broadcast(name, retry=on_message)
        found.append(QueuedMessage.objects.get(handler=name).max_attempts)
    assert found == [2, 3, 4, 5]


def test_a_callable_on_a_handler() -> None:
    """PMQ-45, PMQ-68: from the failed attempt, starting at 1, to seconds."""
    attempts = subscribe(retry=RetryPolicy(4, lambda attempt: 5 * 2 ** (attempt - 1)))
    send()
    assert (waits(), attempts) == ([5, 10, 20], [1, 2, 3, 4])


def crashing(attempt: int) -> float:
    raise LookupError(f"no wait for attempt {attempt}")


@pytest.mark.parametrize(
    "backoff",
    [crashing, lambda attempt: "soon", lambda attempt: -1, lambda attempt: None],
    ids=["raises", "text", "negative", "nothing"],
)
def test_a_policy_that_crashes_counts_as_one_second(
    backoff: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """PMQ-54: each time it fails, and it is logged."""
    attempts = subscribe(retry=RetryPolicy(4, backoff))
    send()
    with caplog.at_level(logging.WARNING, "django_mq"):
        assert waits() == [1, 1, 1]
    assert attempts == [1, 2, 3, 4]
    crashes = [record for record in caplog.records if "backoff" in record.getMessage()]
    assert len(crashes) >= 3


def test_a_policy_that_crashes_concerns_its_message_alone() -> None:
    """PMQ-55, PMQ-56 as changed: its neighbours of the batch are handled, each once."""
    done: list[Any] = []

    @handler("a.b", name="h", queue="mail", retry=RetryPolicy(3, crashing))
    def one_fails(delivery: Delivery) -> None:
        if delivery.payload == 1:
            raise ValueError("no")
        done.append(delivery.payload)

    with transaction.atomic():
        broadcast_many([Message("a.b", n) for n in range(4)])
    drain(errors="keep")
    assert done == [0, 2, 3]
    assert QueuedMessage.objects.get().payload == 1
    assert abs(wait() - 1) < MARGIN


def test_jitter_stays_within_its_bounds() -> None:
    """S15: above zero, with a cap."""
    subscribe(retry=RetryPolicy(6, exponential(base=100, cap=400)))
    send()
    found = waits()
    assert len(found) == 5
    for seconds, maximum in zip(found, [100, 200, 400, 400, 400], strict=True):
        assert maximum / 2 <= seconds <= maximum
