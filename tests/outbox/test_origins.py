"""The origin of a message: causes, correlation and hops."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction

from django_mq import Delivery, Message, TooManyHops, broadcast, broadcast_many
from django_mq.messages import ClaimedRow, current_delivery
from django_mq.models import QueuedMessage
from django_mq.store.insert import MAX_INSERT_ROWS
from tests.outbox.conftest import now


def delivery(**changed: Any) -> Delivery:
    values: dict[str, Any] = {
        "id": 77, "queue": "q", "type": "t", "handler": "h", "schema_version": 1,
        "payload": "{}", "metadata": "{}", "priority": 0, "key": None, "attempts": 1,
        "max_attempts": 20, "retry": None, "claimed_by": "w", "wants_result": False,
        "suspect": False, "held_for": None, "created": now().timestamp(),
        "claimed": now().timestamp(), **changed,
    }  # fmt: skip
    return Delivery(ClaimedRow(**values))


@pytest.fixture
def handling() -> Iterator[Callable[..., None]]:
    """Act as the worker: `handling(**columns)` sets the delivery that runs here."""
    token = current_delivery.set(None)
    yield lambda **columns: current_delivery.set(delivery(**columns)) and None
    current_delivery.reset(token)


@pytest.mark.django_db
@pytest.mark.parametrize("size", [1, 3, MAX_INSERT_ROWS + 1])
def test_a_handlers_messages_say_where_they_come_from(
    handling: Callable[..., None], size: int
) -> None:
    handling(id=77)
    with transaction.atomic():
        broadcast_many([Message("a", metadata={"tier": "gold"})] * size)
    for metadata in QueuedMessage.objects.values_list("metadata", flat=True):
        assert metadata == {
            "tier": "gold",
            "mq.correlation_id": "77",
            "mq.causation_id": "77",
            "mq.hops": 1,
        }


@pytest.mark.django_db
def test_a_chain_keeps_its_correlation_and_counts_its_hops(handling: Callable[..., None]) -> None:
    handling(id=77)
    for expected in (1, 2, 3):
        with transaction.atomic():
            (id,) = broadcast("a").ids
        metadata = QueuedMessage.objects.get(pk=id).metadata
        assert (metadata["mq.correlation_id"], metadata["mq.hops"]) == ("77", expected)
        handling(id=id, metadata=json.dumps(metadata))
        assert broadcast_in_block("next").metadata["mq.causation_id"] == str(id)


def broadcast_in_block(type: str) -> QueuedMessage:
    with transaction.atomic():
        return QueuedMessage.objects.get(pk=broadcast(type).ids[0])


@pytest.mark.django_db
def test_a_chain_without_end_is_stopped(
    handling: Callable[..., None], settings: Any, django_assert_num_queries: Any
) -> None:
    """S17."""
    settings.DJANGO_MQ = {"MAX_HOPS": 3}
    handling(metadata='{"mq.hops": 2}')
    assert broadcast_in_block("a").metadata["mq.hops"] == 3
    handling(id=78, metadata='{"mq.hops": 3}')
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(TooManyHops, match=r"message 78 in queue"):
            broadcast("a")
        QueuedMessage.objects.count()


@pytest.mark.django_db
@pytest.mark.parametrize(
    "metadata",
    [
        "[]",
        '"text"',
        "{not json",
        '{"mq.hops": "9", "mq.correlation_id": 5}',
        '{"mq.hops": -5, "mq.correlation_id": ""}',
        '{"mq.hops": true, "mq.correlation_id": "%s"}' % ("x" * 129),
    ],
)
def test_metadata_that_others_wrote_breaks_nothing(
    handling: Callable[..., None], metadata: str
) -> None:
    handling(id=77, metadata=metadata)
    assert broadcast_in_block("a").metadata == {
        "mq.correlation_id": "77",
        "mq.causation_id": "77",
        "mq.hops": 1,
    }
