"""broadcast_many(): receipts, chunks, all or none."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import transaction

from django_mq import (
    BulkReceipt,
    InvalidName,
    Message,
    broadcast,
    broadcast_many,
    handler,
    handlers,
    message,
)
from django_mq.messages.classes import isolated
from django_mq.models import QueuedMessage
from django_mq.outbox import chunk as chunks
from django_mq.store.insert import MAX_INSERT_ROWS
from tests.outbox.conftest import subscribe
from tests.rows import the_message
from tests.slow import slow


@pytest.mark.django_db
def test_many_are_answered_one_by_one() -> None:
    """NSQ-29."""
    subscribe("two", name="one")
    subscribe("two", name="other")
    with transaction.atomic():
        assert broadcast_many([]) == []
        receipts = broadcast_many([Message("two", 1), Message("none", 2), Message("two", 3)])
    assert [len(receipt.copies) for receipt in receipts] == [2, 1, 2]
    found = QueuedMessage.objects.in_bulk()
    assert [[found[id].payload for id in receipt.ids] for receipt in receipts] == [
        [1, 1],
        [2],
        [3, 3],
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, MAX_INSERT_ROWS, MAX_INSERT_ROWS + 1, 300])
def test_receipts_name_the_rows_however_many_there_are(count: int) -> None:
    with transaction.atomic():
        receipts = broadcast_many([Message("a", number) for number in range(count)])
    found = QueuedMessage.objects.in_bulk()
    assert [found[receipt.ids[0]].payload for receipt in receipts] == list(range(count))


@pytest.mark.django_db
@pytest.mark.parametrize("count", [2, 300])
@pytest.mark.parametrize("form", [list, tuple, iter])
def test_many_are_stored_all_or_none(
    count: int, form: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PMQ-9 as changed, NSQ-29, guarantee 10: the caller may continue."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 100)
    messages = [*(Message("a", number) for number in range(count)), Message("bad type")]
    with transaction.atomic():
        with pytest.raises(InvalidName):
            broadcast_many(form(messages))
        assert broadcast("fine")
    assert the_message().type == "fine"


@pytest.mark.django_db
def test_wrong_type_of_message_is_refused() -> None:
    with transaction.atomic(), pytest.raises(TypeError, match=r"takes Message\(...\) objects"):
        broadcast_many([{"type": "a"}])  # type: ignore[list-item]


@pytest.mark.django_db
def test_one_message_is_no_list_of_messages() -> None:
    with transaction.atomic(), pytest.raises(TypeError, match=r"\(\[message\]\)$"):
        broadcast_many(Message("a"))  # type: ignore[call-overload]


@pytest.mark.django_db
def test_an_instance_of_a_message_class_needs_a_message_around_it() -> None:
    @dataclass
    class Placed:
        order_id: int

    with isolated(), transaction.atomic():
        message("a.b")(Placed)
        with pytest.raises(TypeError, match=r"not Placed: write Message\(instance\)"):
            broadcast_many([Placed(7)])  # type: ignore[list-item]
        assert broadcast_many([Message(Placed(7))])


@pytest.mark.django_db
@pytest.mark.parametrize("by", ["rows", "size", "unique"])
def test_an_iterator_is_read_in_chunks(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays constant: stored messages are dropped before more are read."""
    monkeypatch.setattr(chunks, f"CHUNK_{by.upper()}", 100)
    payload = "x" * (8 if by == "size" else 0)  # plus the two quotes
    per_chunk = 9 if by == "size" else 100  # each row has {} as its metadata
    stored_when_read = []

    def messages() -> Iterator[Message]:
        for n in range(3 * per_chunk + 1):
            # Queries of the generator run between the COPYs, on the same connection.
            stored_when_read.append(QueuedMessage.objects.count())
            yield Message("a", payload, unique_id=str(n) if by == "unique" else None)

    with transaction.atomic():
        receipt = broadcast_many(messages())
    assert receipt == BulkReceipt(3 * per_chunk + 1)
    assert bool(receipt)
    assert sorted(set(stored_when_read)) == [0, per_chunk, 2 * per_chunk, 3 * per_chunk]
    assert QueuedMessage.objects.count() == 3 * per_chunk + 1


@pytest.mark.django_db
@pytest.mark.parametrize("form", [list, *slow(iter)], ids=["list", "iterator"])
def test_a_payload_is_held_once_for_many_subscribers(form: Callable[[Any], Any]) -> None:
    """The lines of many copies are not joined either: that would take 60 MB."""
    with handlers.isolated():
        for number in range(60):
            handler("a", name=f"h{number}")(lambda delivery: None)
        messages = form([Message("a", "x" * 1_000_000)])
        tracemalloc.start()
        try:
            with transaction.atomic():
                assert broadcast_many(messages)
            _, maximum = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert QueuedMessage.objects.count() == 60
    assert maximum < 20_000_000


@pytest.mark.django_db
def test_an_empty_iterator_is_a_success() -> None:
    """PMQ-12."""
    with transaction.atomic():
        receipt = broadcast_many(iter(()))
    assert receipt == BulkReceipt(0)
    assert not receipt


@pytest.mark.django_db
def test_an_iterator_that_raises_takes_all_back() -> None:
    def messages() -> Iterator[Message]:
        yield from [Message("a")] * 10
        1 / 0  # noqa: B018

    with transaction.atomic():
        with pytest.raises(ZeroDivisionError):
            broadcast_many(messages())
        assert broadcast("fine")
    assert the_message().type == "fine"
