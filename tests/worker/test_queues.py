"""The queues of a worker: preference, patterns, pauses."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import handler
from django_mq.messages import Delivery
from tests.database import second_connection
from tests.rows import add, decide
from tests.worker.conftest import Said, Start, add_many, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)


def test_queues_in_strict_preference(start: Start, settings: Any) -> None:
    """In the given order, whatever patterns each has; within a queue by priority, due time, id."""
    settings.DJANGO_MQ = {"QUEUES": {"second": {"lease": 99}}}
    ran: list[str] = []

    @handler("#", queue="first", queues=("second", "third"), name="h")
    def h(delivery: Delivery) -> None:
        ran.append(f"{delivery.queue} {delivery.priority}")

    for queue in ("third", "second", "first"):
        for priority in (0, 9):
            add(queue, handler="h", priority=priority)
    add("other", handler="h")
    start(until_empty=True, queues=["first", "second", "third"], batch_size=1).join()
    assert ran == ["first 9", "first 0", "second 9", "second 0", "third 9", "third 0"]
    assert len(waiting()) == 1


def test_patterns_of_queues(start: Start) -> None:
    @handler("#", queue="mail.a", queues=("mail.b", "post"), name="h")
    def h(delivery: Delivery) -> None: ...

    add("mail.a", handler="h")
    add("mail.b", handler="h")
    left = add("post", handler="h")
    start(until_empty=True, queues=["mail.*"]).join()
    assert waiting() == {left.pk}


def test_a_paused_queue_rests(start: Start, said: Said) -> None:
    """This includes its lapsed messages: it may be paused because they kill workers."""

    @handler("#", queue="mail", queues=("post",), name="h")
    def h(delivery: Delivery) -> None: ...

    decide("mail", paused=-1)
    due = add(handler="h")
    lapsed = add(handler="h", leased=-1)
    add("post", handler="h")
    assert start(until_empty=True).join()
    assert waiting() == {due.pk, lapsed.pk}
    with second_connection() as other:
        other.execute("update django_mq_queuestate set paused_until = now() where queue = 'mail'")
    assert start(until_empty=True).join()
    assert waiting() == set()


def test_another_message_is_not_run_while_its_row_is_locked(start: Start, said: Said) -> None:
    """Guarantee 13 from the worker's side, NSQ-23: skipped without a wait."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    locked, free = add_many(2, handler="h")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [locked.pk])
        assert start(until_empty=True).join()
        assert effects() == {free.pk}
    assert start(until_empty=True).join()
    assert effects() == {locked.pk, free.pk}
