"""The test helpers stand in for a worker: causes and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import broadcast, handler
from django_mq.handlers import isolated
from django_mq.models import QueuedMessage
from django_mq.testing import deliver, drain

pytestmark = pytest.mark.django_db(transaction=True)


def test_deliver_is_the_cause_of_the_handlers_broadcasts() -> None:
    with isolated():

        @handler("first", name="first")
        def first(delivery: Any) -> None:
            broadcast("second")

        deliver(first, metadata={"mq.hops": 4, "mq.correlation_id": "c"})
    metadata = QueuedMessage.objects.get().metadata
    assert (metadata["mq.hops"], metadata["mq.correlation_id"]) == (5, "c")


def test_drain_refuses_an_invalid_queue() -> None:
    with pytest.raises(ValueError, match="queue"):
        drain("no such name!")
