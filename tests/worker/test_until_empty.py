"""`run(until_empty=True)` ends when the queue is empty, and not before."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.errors import DeadlockDetected

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.worker import Worker
from django_mq.worker import claims as claiming
from tests.rows import add

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("kind", ["plain", "keyed", "ordered"])
def test_as_many_attempts_as_can_be_do_not_stop_the_queue(settings: Any, kind: str) -> None:
    """S17."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": kind == "ordered"}}}
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    options = {"key": "k"} if kind == "keyed" else {"ordered": kind == "ordered"}
    many = add(handler="h", attempts=2**31 - 2, **options)
    one = add(handler="h", **options)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert ran == [many.pk, one.pk]


def test_claims_that_fail_leave_a_queue_that_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is empty means that: however many claims in a row failed."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    for _ in range(5):
        add(handler="h")
    real, left = claiming.claim.claim, [6]

    def claim(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise DeadlockDetected("again and again")
        return real(*args, **options)

    monkeypatch.setattr(claiming.claim, "claim", claim)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert len(ran) == 5
