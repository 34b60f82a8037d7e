"""A claim, or the end of a message, comes between a broadcast's look and its update."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connection

from django_mq import Delivery, broadcast, handler
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.testing import drain
from tests.database import listening, second_connection, until_any_blocked
from tests.outbox.races.conftest import (
    CLAIM,
    PATIENCE,
    Holder,
    claimed,
    send,
    uncommitted,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_update_loses_against_a_claim_that_is_not_committed(
    together: Callable[..., Future[Any]],
) -> None:
    """The row's lock gives the answer without a wait; after the commit the row is in flight."""
    send(1)
    with second_connection() as other:
        with other.transaction():
            other.execute(CLAIM)
            update = together(send, 2, "update")
            looked_twice(update)
        assert update.result(PATIENCE).copies[0].reason == "in_flight"
    assert QueuedMessage.objects.get().payload == 1


def test_an_update_wins_against_a_claim_that_is_rolled_back(
    together: Callable[..., Future[Any]],
) -> None:
    send(1)
    with second_connection() as other:
        with other.transaction(force_rollback=True):
            other.execute(CLAIM)
            update = together(send, 2, "update")
            looked_twice(update)
        assert update.result(PATIENCE).outcome == "updated"


def looked_twice(future: Future[Any]) -> None:
    """Return once a producer has met the locked row and drawn no conclusion from it."""
    with pytest.raises(TimeoutError):
        future.result(0.1)


def test_a_worker_that_ends_a_message_waits_for_no_producer(
    together: Callable[..., Future[Any]],
) -> None:
    """A message put aside in an open transaction comes forward after that transaction's commit."""
    done = handled()
    send(1)
    message = claimed()
    producer = Holder(together, uncommitted(2, "requeue"))
    end_message(message)
    assert not QueuedMessage.objects.exists()
    with listening() as listener:
        assert producer.end().outcome == "requeued"
        assert listener.heard()
    assert QueuedMessage.objects.get().payload == 2
    assert UniqueKey.objects.get().message_id == QueuedMessage.objects.get().pk
    drain()
    assert done == [2]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_message_put_aside_during_the_settle_is_promoted(
    together: Callable[..., Future[Any]], level: str
) -> None:
    """The producer commits first, but the worker has already looked: the hook waits for it."""
    send(1)
    message = claimed()

    def requeue() -> Any:
        receipt = broadcast("a.b", 2, unique_id="u", on_duplicate="requeue")
        with connection.cursor() as cursor:
            cursor.execute(f"set default_transaction_isolation = '{level}'")
        return receipt

    producer = Holder(together, requeue)
    with second_connection() as worker, worker.transaction():
        end_message(message, worker.cursor())
        producer._end.set()
        until_any_blocked()
    assert producer.future.result(PATIENCE).outcome == "requeued"
    assert QueuedMessage.objects.get().payload == 2


def end_message(message: QueuedMessage, cursor: Any = None) -> None:
    from django_mq.store import free_unique_ids
    from django_mq.store.free_unique_ids import EndedMessage
    from django_mq.store.unique_ids import UniqueId

    with connection.cursor() as own:
        cursor = cursor or own
        cursor.execute("delete from django_mq_queuedmessage where id = %s", [message.pk])
        id = UniqueId(message.queue, message.handler, message.type, message.unique_id or "")
        free_unique_ids.end(cursor, [EndedMessage(message.pk, id, True)])


def handled() -> list[Any]:
    """Subscribe a handler; return the list of payloads that it receives."""
    done: list[Any] = []

    @handler("a.b", name="a_b", queue="default")
    def function(delivery: Delivery) -> None:
        done.append(delivery.payload)

    return done
