"""A message whose chain is as long as MAX_HOPS allows: no later attempt could broadcast."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from django_mq import RetryPolicy, broadcast, fixed, handler, queues
from django_mq.models import QueuedMessage
from tests.rows import add
from tests.worker.conftest import Start

pytestmark = pytest.mark.django_db(transaction=True)

SOON = RetryPolicy(backoff=fixed(0))
AT_ITS_END = {"mq.hops": 3}


def rebroadcast(_: Any) -> None:
    with transaction.atomic():
        broadcast("out")


async def rebroadcast_in_thread(delivery: Any) -> None:
    await sync_to_async(rebroadcast)(delivery)


@pytest.mark.parametrize("kind", ["atomic", "atomic=False", "async"])
def test_it_is_dead_at_once(
    start: Start, kind: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_MQ = {"MAX_HOPS": 3, "QUEUES": {"mail": {"backoff": {}}}}
    function = rebroadcast_in_thread if kind == "async" else rebroadcast
    handler("a", queue="mail", name="h", retry=SOON, atomic=kind == "atomic")(function)
    added = add(type="a", handler="h", metadata=AT_ITS_END)
    assert start(until_empty=True).join()
    message = QueuedMessage.objects.get()
    reason = f"TooManyHops: message {added.pk} in queue mail ends a chain of 3 broadcasts"
    assert message.dead_reason.startswith(reason)
    assert message.attempts == 1
    assert "is dead: TooManyHops (django_mq.exceptions.TooManyHops)" in caplog.text
    text = ": its chain of broadcasts by handlers is too long (MAX_HOPS) (1 of 20 attempts used)"
    assert text in queues.why(added.pk).text
    assert not any(each.backoff_level for each in queues.counts().values())


def test_others_of_its_list_run_again(start: Start, settings: Any) -> None:
    """The error of a list is that of its first message, which the others share."""
    settings.DJANGO_MQ = {"MAX_HOPS": 3}
    ran: list[int] = []

    @handler("a", queue="mail", name="h", batch=True, atomic=False, retry=SOON)
    def h(deliveries: list[Any]) -> None:
        ran.append(len(deliveries))
        rebroadcast(deliveries)

    first = add(type="a", handler="h", metadata=AT_ITS_END)
    add(type="a", handler="h")
    assert start(until_empty=True, threads=1, queues=["mail"]).join()
    assert QueuedMessage.objects.get(queue="mail").pk == first.pk
    assert ran == [2, 1]
