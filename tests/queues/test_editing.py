"""Editing a waiting message: payload, due time, priority, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from django.forms import model_to_dict

from django_mq import message, queues, upcast
from django_mq.exceptions import InvalidOption, InvalidPayload, NotWaiting
from django_mq.messages import classes
from tests.rows import add, stored

pytestmark = pytest.mark.django_db

WAITING = ({}, {"after": 60}, {"held": -1}, {"key": "k", "blocked_by": 1}, {"expires": -1})


@pytest.mark.parametrize("given", WAITING)
def test_nothing_else_of_a_waiting_message_changes(given, rings):
    row = add(payload={"n": 1}, **given)
    before = model_to_dict(row)
    due = row.processable_after - timedelta(hours=2)
    queues.edit(row.pk, payload=[1, None], due=due, priority=-3)
    changed = {"payload": [1, None], "processable_after": due, "priority": -3}
    assert model_to_dict(stored(row)) == {**before, **changed}
    queues.edit(row.pk)
    queues.edit(row.pk, payload=None)
    assert stored(row).payload is None
    assert len(rings) == 3


@pytest.mark.parametrize(
    "payload", [None, ["a"], {"n": 1}, {"args": ["a"]}, {"args": "a", "kwargs": {}}]
)
def test_the_payload_of_a_task_keeps_its_form(payload):
    """Otherwise the task would be rejected, and its result could not be read."""
    row = add(type="tasks.shop.tasks.write", payload={"args": [1], "kwargs": {}})
    with pytest.raises(
        InvalidPayload, match="of a task is an object with args, a list, and kwargs"
    ):
        queues.edit(row.pk, payload=payload)
    queues.edit(row.pk, payload={"args": [], "kwargs": {"a": 2}})
    assert stored(row).payload == {"args": [], "kwargs": {"a": 2}}


@pytest.mark.parametrize("given", [{"leased": 60}, {"leased": -60}, {"dead": -1}])
def test_no_other_message_is_edited(given):
    row = add(**given)
    with pytest.raises(NotWaiting, match="in flight, dead or gone"):
        queues.edit(row.pk, priority=1)
    assert stored(row).priority == 0
    with pytest.raises(NotWaiting):
        queues.edit(row.pk + 1, priority=1)


def test_it_may_not_come_after_its_end(rings):
    row = add(expires=60)
    with pytest.raises(InvalidOption, match="expires before"):
        queues.edit(row.pk, due=row.expires_at)
    queues.edit(row.pk, due=row.expires_at - timedelta(seconds=1))


def test_a_payload_must_fit_the_class_of_its_version(rings):
    with classes.isolated():

        @message("shop.orders.paid", version=2)
        @dataclass
        class Paid:
            order: int

        upcast("shop.orders.paid", 1)(lambda old: {"order": old["id"]})
        first, second, newer = (add(type="shop.orders.paid", schema_version=n) for n in (1, 2, 3))
        queues.edit(first.pk, payload={"id": 7})
        queues.edit(second.pk, payload={"order": 7})
        queues.edit(newer.pk, payload={"anything": 7})
        for row, payload in ((first, {"id": "x"}), (second, {"id": 7})):
            with pytest.raises(InvalidPayload, match="order"):
                queues.edit(row.pk, payload=payload)


def test_a_payload_is_checked_as_it_is_stored(rings):
    """The encoder writes times and decimals as the text that the class reads."""
    with classes.isolated():

        @message("shop.orders.paid")
        @dataclass
        class Paid:
            at: datetime
            total: Decimal

        row = add(type="shop.orders.paid")
        queues.edit(row.pk, payload={"at": datetime(2026, 1, 1, tzinfo=UTC), "total": Decimal(7)})
        assert stored(row).payload == {"at": "2026-01-01T00:00:00Z", "total": "7"}
        with pytest.raises(InvalidPayload, match=r"Paid: at must be .*; got text"):
            queues.edit(row.pk, payload={"at": date(2026, 1, 1), "total": Decimal(7)})


@pytest.mark.parametrize(
    "due",
    [10, 0, 1.5, True, timedelta(days=3), "2026-01-01T00:00Z", datetime(2026, 1, 1), date.max],
)
def test_the_due_time_is_an_aware_datetime(due, django_assert_num_queries):
    """A duration would not say from when it counts: from now, or from the due time so far."""
    row = add()
    with (
        django_assert_num_queries(0),
        pytest.raises(InvalidOption, match="due must be an aware datetime"),
    ):
        queues.edit(row.pk, due=due)


@pytest.mark.parametrize(
    "bad", [{"priority": 101}, {"payload": float("nan")}, {"payload": {"a": "\x00"}}]
)
def test_invalid_value_is_refused(bad):
    row = add(payload={"n": 1})
    with pytest.raises((InvalidOption, InvalidPayload)):
        queues.edit(row.pk, **bad)
    assert stored(row).payload == {"n": 1}
