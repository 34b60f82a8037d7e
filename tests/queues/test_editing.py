"""Editing a waiting message: payload, due time, priority, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

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


@pytest.mark.parametrize(
    "bad", [{"priority": 101}, {"payload": float("nan")}, {"payload": {"a": "\x00"}}]
)
def test_what_cannot_be_stored_is_refused(bad):
    row = add(payload={"n": 1})
    with pytest.raises((InvalidOption, InvalidPayload)):
        queues.edit(row.pk, **bad)
    assert stored(row).payload == {"n": 1}
