"""A process with slow handlers holds few messages of a line at once."""

from __future__ import annotations

import asyncio
import time

import pytest
from asgiref.sync import sync_to_async

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage
from tests.worker.conftest import PATIENCE, Start
from tests.worker.lines.conftest import empty, keyed, row

pytestmark = pytest.mark.django_db(transaction=True)

#: Seconds that a message takes, so that a claim takes at most three of a key.
SECONDS, MOST = 0.02, 3
#: The most messages that are claimed before it is known that the handler is slow.
FIRST = SLOTS = 20


def held(queue: str) -> int:
    return QueuedMessage.objects.filter(queue=queue, leased_until__isnull=False).count()


@pytest.mark.parametrize("kind", ["atomic", "non-atomic", "async"])
def test_few_messages_of_a_key_are_claimed_at_once(start: Start, kind: str) -> None:
    """Else other threads and processes may have no line to work on."""
    seen: list[int] = []
    if kind == "async":

        @handler("#", queue="mail", name="h", timeout=PATIENCE)
        async def h(delivery: Delivery) -> None:
            seen.append(await sync_to_async(held)(delivery.queue))
            await asyncio.sleep(SECONDS)
    else:

        @handler("#", queue="mail", name="h", timeout=PATIENCE, atomic=kind == "atomic")
        def h(delivery: Delivery) -> None:
            seen.append(held(delivery.queue))
            time.sleep(SECONDS)

    for _ in range(3 * FIRST):
        keyed("a")
    start(until_empty=True, threads=2, async_slots=SLOTS).join()
    assert empty()
    assert max(seen[FIRST:]) <= MOST


def test_few_messages_of_an_ordered_queue_are_claimed_at_once(start: Start) -> None:
    """While they wait, they take the room of other queues."""
    seen: list[int] = []

    @handler("#", queue="line", name="h", timeout=PATIENCE)
    def h(delivery: Delivery) -> None:
        seen.append(held(delivery.queue))
        time.sleep(SECONDS)

    for _ in range(3 * FIRST):
        row()
    start(until_empty=True, threads=2).join()
    assert empty()
    assert max(seen[FIRST:]) <= MOST
