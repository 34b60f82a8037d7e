"""Copies: one message per handler that a broadcast reaches, with its queue and attempts."""

from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import transaction

from django_mq import RetryPolicy, RoutingError, broadcast, exponential
from django_mq.models import QueuedMessage
from tests.outbox.conftest import subscribe


@pytest.mark.django_db
def test_each_subscriber_has_its_own_copy() -> None:
    """NSQ-30, RMQ-12, PMQ-30: one copy, even when two of its patterns match."""
    subscribe("shop.orders.*", name="mailer", queue="mail", retry=RetryPolicy(max_attempts=3))
    subscribe("shop.#", "shop.orders.placed", name="statistics", queue="numbers")
    subscribe("shop.orders.cancelled", name="other", queue="mail")
    subscribe("#", name="all")
    with transaction.atomic():
        receipt = broadcast("shop.orders.placed", {"n": 1})
    assert [(copy.handler, copy.queue) for copy in receipt.copies] == [
        ("mailer", "mail"),
        ("statistics", "numbers"),
        ("all", "default"),
    ]
    stored = {message.pk: message for message in QueuedMessage.objects.all()}
    assert tuple(sorted(stored)) == receipt.ids
    for copy in receipt.copies:
        assert copy.id is not None
        message = stored[copy.id]
        assert (message.handler, message.queue) == (copy.handler, copy.queue)
        assert message.payload == {"n": 1}
    assert [stored[id].max_attempts for id in receipt.ids] == [3, 20, 20]


@pytest.mark.django_db
def test_metadata_is_matched_as_a_worker_will_read_it() -> None:
    subscribe("a", name="date", where={"day": "2026-01-02"})
    subscribe("a", name="gold", where={"tier": "gold"})
    with transaction.atomic():
        receipt = broadcast("a", metadata={"day": datetime(2026, 1, 2, tzinfo=UTC).date()})
    assert [copy.handler for copy in receipt.copies] == ["date"]


@pytest.mark.django_db
def test_without_a_subscriber_it_is_stored_all_the_same() -> None:
    """RMQ-6 as changed: nothing needs declaring first; a row is durable."""
    subscribe("other", name="other")
    with transaction.atomic():
        broadcast("a.b")
        broadcast("a.b", queue="somewhere")
    assert list(QueuedMessage.objects.order_by("id").values_list("handler", "queue")) == [
        ("", "default"),
        ("", "somewhere"),
    ]


@pytest.mark.django_db
def test_the_default_queue_follows_the_settings(settings: Any) -> None:
    """PMQ-11: one queue for all messages that name none; any name will do."""
    settings.DJANGO_MQ = {"DEFAULT_QUEUE": "main"}
    subscribe("a", name="a")
    with transaction.atomic():
        assert broadcast("a").copies[0].queue == "main"
        assert broadcast("unknown").copies[0].queue == "main"
        assert broadcast("a", queue="main").copies[0].handler == "a"


@pytest.mark.django_db
def test_a_queue_moves_it_where_the_handlers_allow(django_assert_num_queries: Any) -> None:
    """PMQ-4 as changed: the handlers declare the allowed queues. S32."""
    subscribe("a", name="mailer", queue="mail", queues=("slow",))
    subscribe("b", name="strict", queue="mail")
    subscribe("b", name="lenient", queue="mail", queues=("slow",))
    with transaction.atomic():
        assert broadcast("a", queue="slow").copies[0].queue == "slow"
        assert broadcast("a", queue="mail").copies[0].queue == "mail"
        with django_assert_num_queries(0):
            with pytest.raises(RoutingError, match=r"mailer allows only mail, slow; .*queues="):
                broadcast("a", queue="other")
            with pytest.raises(RoutingError, match=r"slow \(did you mean mail\?\); else allow"):
                broadcast("a", queue="mial")
            with pytest.raises(RoutingError, match="strict"):
                broadcast("b", queue="slow")


@pytest.mark.django_db
def test_attempts_come_from_message_handler_queue_or_settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "RETRY": RetryPolicy(max_attempts=2),
        "QUEUES": {"mail": {"retry": RetryPolicy(max_attempts=3)}},
    }
    subscribe("a", name="own", queue="mail", retry=RetryPolicy(4, backoff=lambda attempt: 1))
    subscribe("a", name="none", queue="mail")
    subscribe("a", name="default")
    with transaction.atomic():
        broadcast("a")
        broadcast("unknown", queue="mail")
        broadcast("a", retry=RetryPolicy(5, exponential(base=2)))
    found = QueuedMessage.objects.order_by("id").values_list("max_attempts", flat=True)
    assert list(found) == [4, 3, 2, 3, 5, 5, 5]
    assert QueuedMessage.objects.filter(retry__isnull=False).count() == 3
