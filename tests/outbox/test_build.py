"""The row builder caches routes, never payloads."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from django_mq import (
    Delivery,
    InvalidOption,
    RetryPolicy,
    broadcast,
    broadcast_many,
    handler,
    handlers,
)
from django_mq.messages import Message
from django_mq.models import QueuedMessage
from django_mq.outbox.build import MAX_CACHED, RowBuilder
from django_mq.store.rows import Rows

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_stream_of_many_types_is_not_remembered() -> None:
    builder = RowBuilder("default")
    for n in range(MAX_CACHED + 10):
        builder.add(Rows(), Message(f"t.{n}", {"large": "x" * 100}))
    assert len(builder._cached_templates) <= MAX_CACHED
    assert "x" * 100 not in repr(builder._cached_templates)


def test_the_same_address_with_another_payload() -> None:
    with transaction.atomic():
        broadcast_many([Message("t", {"n": n}) for n in range(3)])
    assert [row.payload for row in QueuedMessage.objects.order_by("id")] == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
    ]


def test_the_same_type_with_other_metadata_is_another_route() -> None:
    """A handler's `where` decides anew, also for metadata that was routed before."""
    with handlers.isolated():

        @handler("t", where={"tier": "gold"}, name="gold")
        def gold(delivery: Delivery) -> None: ...

        tiers = ["gold", "silver", "gold", "silver"]
        with transaction.atomic():
            receipts = broadcast_many([Message("t", metadata={"tier": tier}) for tier in tiers])
    assert [each.copies[0].handler for each in receipts] == ["gold", "", "gold", ""]
    stored = QueuedMessage.objects.order_by("id").values_list("metadata__tier", flat=True)
    assert list(stored) == tiers


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"after": 60}, "processable_after"),
    ({"expires": 60}, "expires_at"),
    ({"retry": RetryPolicy(max_attempts=3)}, "max_attempts"),
    ({"key": "k"}, "key"),
    ({"unique_id": "u"}, "unique_id"),
    ({"priority": 1}, "priority"),
    ({"schema_version": 2}, "schema_version"),
    ({"queue": "mail"}, "queue"),
]


@pytest.mark.parametrize(("options", "column"), OPTIONS, ids=[column for _, column in OPTIONS])
def test_the_same_type_with_an_option_is_another_row(options: dict[str, Any], column: str) -> None:
    with transaction.atomic():
        broadcast_many([Message("t"), Message("t"), Message("t", **options)])
    first, second, third = QueuedMessage.objects.order_by("id").values_list(column, flat=True)
    assert first == second != third


@pytest.mark.parametrize("options", [{"priority": False}, {"schema_version": True}])
def test_a_route_that_is_known_does_not_excuse_a_bad_option(options: Any) -> None:
    with transaction.atomic():
        broadcast("t")
        with pytest.raises(InvalidOption):
            broadcast("t", **options)


def test_other_settings_are_other_routes(settings: Any) -> None:
    for queue in ("first", "second"):
        settings.DJANGO_MQ = {"DEFAULT_QUEUE": queue}
        with transaction.atomic():
            assert broadcast("t").copies[0].queue == queue
