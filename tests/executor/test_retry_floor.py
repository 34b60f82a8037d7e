"""RETRY_FLOOR: from the second retry on, every message waits before it is tried again."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from django_mq import Retry, RetryPolicy, Snooze, fixed, handler, intervals
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueueState
from django_mq.testing import drain
from tests.rows import add, stored
from tests.slow import mostly_slow
from tests.worker.conftest import Running, Said

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]
FLOOR = 0.3


def pauses(said: Said) -> list[float]:
    """Return the seconds from the end of each attempt to the start of the next.

    By the database's clock: an attempt starts after its message was claimed.
    """
    attempts = list(FailedAttempt.objects.order_by("attempt"))
    starts = [subject._row.claimed_at for name, subject, _ in said.all if name == "message_started"]
    return [
        (start - attempt.ended_at).total_seconds()
        for attempt, start in zip(attempts, starts[1:], strict=False)
    ]


SOURCES: dict[str, tuple[Any, Exception]] = {
    "fixed": (fixed(0), ValueError("no")),
    "intervals": (intervals(0, 0), ValueError("no")),
    "callable": (lambda attempt: 0, ValueError("no")),
    "asked": (fixed(60), Retry(0)),
    "a moment that is over": (fixed(60), Retry(datetime(2001, 1, 1, tzinfo=UTC))),
}


@pytest.mark.parametrize(("source", "atomic"), mostly_slow([*SOURCES], [True, False]))
def test_from_the_second_retry_on_there_is_a_wait(
    start: Start, said: Said, settings: Any, source: str, atomic: bool
) -> None:
    """PMQ-68: for any source of a zero wait, and any kind of handler."""
    settings.DJANGO_MQ = {"RETRY_FLOOR": FLOOR, "LEASE": 300, "POLL_INTERVAL": 600}
    policy, error = SOURCES[source]

    @handler("#", queue="mail", name="h", atomic=atomic, retry=RetryPolicy(backoff=policy))
    def h(delivery: Delivery) -> None:
        raise error

    message = add(handler="h", max_attempts=4)
    running = start()
    said.wait("message_dead")
    assert running.stop()
    assert stored(message).dead_reason == "exhausted"
    _, *others = pauses(said)
    assert len(others) == 2
    assert min(others) >= FLOOR


def test_the_floor_can_be_taken_away(start: Start, said: Said, settings: Any) -> None:
    settings.DJANGO_MQ = {"RETRY_FLOOR": 0, "LEASE": 300}

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        raise ValueError

    add(handler="h", max_attempts=4)
    assert start(until_empty=True).join()
    assert [data["after"] for name, _, data in said.all if name == "message_retried"] == [0, 0, 0]


def test_a_drain_of_a_test_has_no_floor(settings: Any) -> None:
    """One drain reaches the last attempt of a policy without waits."""
    settings.DJANGO_MQ = {"RETRY_FLOOR": 3600}

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        raise ValueError

    message = add(handler="h", max_attempts=5)
    assert len(drain(errors="keep")) == 5
    assert stored(message).dead_reason == "exhausted"


@pytest.mark.parametrize("listed", [False, True])
def test_a_snooze_may_signal_queue_backoff(
    start: Start, said: Said, settings: Any, listed: bool
) -> None:
    """Snooze(backoff=True): no attempt is used, and the fleet eases off."""
    backoff = {"multiplier": 1000, "maximum": 1000, "jitter": 0}
    settings.DJANGO_MQ = {"LEASE": 300, "QUEUES": {"mail": {"backoff": backoff}}}

    if listed:

        @handler("#", queue="mail", name="h", batch=True, atomic=False)
        def together(deliveries: list[Delivery]) -> None:
            deliveries[0].snooze(3600, backoff=True)

    else:

        @handler("#", queue="mail", name="h")
        def h(delivery: Delivery) -> None:
            raise Snooze(3600, backoff=True)

    message = add(handler="h")
    running = start()
    said.wait("backoff_started")
    assert running.stop()
    assert stored(message).attempts == 0
    assert QueueState.objects.get(queue="mail").backoff_level == 1
