"""A row that names a handler runs only if that handler is subscribed to its type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from django_mq import Delivery, handler, handlers, queues
from django_mq.handlers.registry import PATTERNS_IN_ERROR
from django_mq.models import QueuedMessage
from django_mq.testing import drain, due
from tests.rows import add, stored

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def ran() -> Iterator[list[str]]:
    """Return the types that `billing` received; its pattern was `#` before the last deploy."""
    ran: list[str] = []
    with handlers.isolated():

        @handler(
            "billing.*.paid", "billing.refunds", name="billing", aliases=("old",), queue="mail"
        )
        def billing(delivery: Delivery) -> None:
            ran.append(delivery.type)

        yield ran


@pytest.mark.parametrize("name", ["billing", "old"])
@pytest.mark.parametrize("type", ["billing.invoice.paid", "billing.refunds"])
def test_a_type_that_matches_runs(ran: list[str], type: str, name: str) -> None:
    add(type=type, handler=name)
    assert drain() == 1
    assert ran == [type]


@pytest.mark.parametrize("metadata", [{}, {"tier": "mq.replay_of"}, {"mq.hops": 1}])
def test_message_of_another_type_is_held(ran: list[str], metadata: Any) -> None:
    """Guarantee 14, S32: no attempt is used; the pattern may come back with the next deploy."""
    message = add(type="shop.orders.placed", handler="billing", metadata=metadata)
    assert drain() == 0
    stored(message)
    assert (message.attempts, message.dead_at, ran) == (0, None, [])
    reason = (
        "its type shop.orders.placed matches no pattern of handler billing"
        " (billing.*.paid, billing.refunds)"
    )
    assert message.last_error == reason
    assert reason in queues.why(message.pk).text
    assert QueuedMessage.objects.with_state().get().state == "held"


def test_it_is_dead_after_hold_for(settings: Any, ran: list[str]) -> None:
    settings.DJANGO_MQ = {"HOLD_FOR": 100}
    message = add(type="shop.orders.placed", handler="billing", held=-101)
    assert drain() == 0
    assert stored(message).dead_reason.startswith("held for too long: its type shop.orders.placed")
    assert ran == []


def test_it_runs_once_a_pattern_matches_again(ran: list[str]) -> None:
    message = add(type="shop.orders.placed", handler="billing")
    assert drain() == 0
    assert stored(message).held_since is not None
    with handlers.isolated():

        @handler("#", name="billing", queue="mail")
        def billing(delivery: Delivery) -> None:
            ran.append(delivery.type)

        due()  # at least a second later, if that has not passed yet
        assert drain() == 1
    assert ran == ["shop.orders.placed"]
    assert not QueuedMessage.objects.filter(pk=message.pk).exists()


def test_replay_goes_to_the_chosen_handler(ran: list[str]) -> None:
    add(type="shop.orders.placed", handler="billing", metadata={"mq.replay_of": 7})
    other = add(type="shop.orders.placed", handler="billing")
    assert drain() == 1
    assert ran == ["shop.orders.placed"]
    assert stored(other).held_since is not None


def test_a_task_runs_messages_of_its_own_type_alone(ran: list[str]) -> None:
    """It has no patterns, and no pattern matches the types of tasks."""
    billing = handlers.get("billing")
    assert billing is not None

    def run(delivery: Delivery) -> None:
        ran.append(delivery.type)

    task = replace(billing, name="shop.tasks.bill", patterns=(), aliases=())
    handlers.add(replace(task, function=run, call=run))
    own = add(type="tasks.shop.tasks.bill", handler="shop.tasks.bill")
    others = [
        add(type="tasks.shop.tasks.pay", handler="shop.tasks.bill"),
        add(type="billing.refunds", handler="shop.tasks.bill"),
        add(type="tasks.shop.tasks.bill", handler="billing"),
    ]
    assert drain() == 1
    assert ran == [own.type]
    assert [stored(each).last_error for each in others] == [
        "its type tasks.shop.tasks.pay is not that of task shop.tasks.bill",
        "its type billing.refunds is not that of task shop.tasks.bill",
        handlers.unsubscribed(billing, "tasks.shop.tasks.bill"),
    ]


def test_where_is_not_checked_again_on_delivery() -> None:
    """`where` routes; a routed copy is not checked again."""
    got = []

    @handler("a", name="gold", queue="mail", where={"tier": "gold"})
    def gold(delivery: Delivery) -> None:
        got.append(delivery.metadata)

    add(type="a", handler="gold", metadata={"tier": "tin"})
    assert drain() == 1
    assert got == [{"tier": "tin"}]


def test_mixed_types_for_one_handler_are_separated(ran: list[str]) -> None:
    types = ("billing.a.paid", "shop.a", "billing.b.paid", "billing.c", "billing.refunds")
    for n, type in enumerate(types):
        add(type=type, handler="billing", after=n - 60)
    assert drain() == 3
    assert ran == ["billing.a.paid", "billing.b.paid", "billing.refunds"]
    assert QueuedMessage.objects.filter(held_since__isnull=False).count() == 2


def test_a_reason_names_a_few_patterns() -> None:
    @handler(*(f"p{n}" for n in range(50)), name="many", queue="mail")
    def many(delivery: Delivery) -> None: ...

    message = add(type="a", handler="many")
    assert drain() == 0
    assert stored(message).last_error.endswith("(p0, p1, p2, p3, p4, ...)")
    assert PATTERNS_IN_ERROR == 5


def test_a_message_that_failed_before_its_pattern_went_keeps_its_attempts() -> None:
    message = add(type="shop.a", handler="billing", attempts=3)
    QueuedMessage.objects.update(processable_after=Now() - timedelta(seconds=1))
    assert drain() == 0
    assert stored(message).attempts == 3
    assert message.processable_after > timezone.now()
