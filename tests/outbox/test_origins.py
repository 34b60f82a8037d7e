"""The origin of a message: causes, correlation and hops."""

import json
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
from django.db import connections, transaction

from django_mq import Message, TooManyHops, broadcast, broadcast_many
from django_mq.messages import current_delivery, set_current
from django_mq.models import QueuedMessage
from django_mq.outbox import origin
from django_mq.store.insert import MAX_INSERT_ROWS
from tests.rows import delivery


@pytest.fixture
def handling() -> Iterator[Callable[..., None]]:
    """Act as the worker: `handling(**columns)` sets the delivery that runs here."""
    token = current_delivery.set(None)
    yield lambda **columns: current_delivery.set(delivery(**columns)) and None
    current_delivery.reset(token)


@pytest.mark.django_db
@pytest.mark.parametrize("size", [1, 3, MAX_INSERT_ROWS + 1])
def test_messages_of_a_handler_name_their_cause(handling: Callable[..., None], size: int) -> None:
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


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("chain", "host", "expected"),
    [
        (None, "elsewhere", ("there:77", "there:77")),
        ("5", "elsewhere", ("there:5", "there:77")),
        ("default:5", "elsewhere", ("5", "there:77")),  # it began here
        ("5", None, ("5", "77")),  # another alias of the same database
    ],
)
def test_ids_of_another_database_are_named_with_it(
    monkeypatch: pytest.MonkeyPatch, chain: str | None, host: str | None, expected: tuple[str, str]
) -> None:
    """Each database counts from 1: message 77 of this one is no cause."""
    there = {**connections["default"].settings_dict, **({"HOST": host} if host else {})}
    monkeypatch.setitem(connections.settings, "there", there)
    metadata = json.dumps({"mq.correlation_id": chain, "mq.hops": 3} if chain else {})

    def handle() -> dict[str, Any]:
        set_current(delivery(id=77, metadata=metadata), "there")
        found: dict[str, Any] = broadcast_in_block("a").metadata
        return found

    found = copy_context().run(handle)
    assert (found["mq.correlation_id"], found["mq.causation_id"]) == expected
    assert found["mq.hops"] == (4 if chain else 1)


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


@pytest.mark.django_db
def test_sources_add_no_more_than_workers_expect(
    monkeypatch: pytest.MonkeyPatch, handling: Callable[..., None], settings: Any
) -> None:
    settings.DJANGO_MQ = {"MAX_METADATA_BYTES": 1024}
    sources = [lambda: {"small": "x", "large": "y" * 1200}, lambda: {"last": "z"}]
    monkeypatch.setattr(origin, "metadata_sources", sources)
    handling(id=77)
    own = {"mq.correlation_id": "77", "mq.causation_id": "77", "mq.hops": 1}
    added = {"small": "x", "large": "y" * 1200, "last": "z"}
    for size, expected in ((600, added), (900, {"small": "x", "last": "z"})):
        with transaction.atomic():
            (id,) = broadcast("a", metadata={"ä": "x" * size}).ids
        assert QueuedMessage.objects.get(pk=id).metadata == {"ä": "x" * size, **own, **expected}
