"""Stopped queues: the messages that may no longer start, and those that may."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.executor.tasks import Line, Task
from django_mq.messages import ClaimedRow, Delivery

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(seconds=1)


@pytest.fixture(autouse=True)
def _handlers() -> None:
    @handler("t", name="h")
    def h(delivery: Any) -> None: ...


def delivery(
    id: int = 1, queue: str = "mail", *, at: datetime = NOON, suspect: bool = False
) -> Delivery:
    return Delivery(
        ClaimedRow(
            id=id, queue=queue, type="t", handler="h", schema_version=1, payload="{}",
            metadata="{}", priority=0, key=None, attempts=1, max_attempts=20, retry=None,
            claimed_by="me:1", wants_result=False, suspect=suspect, held_for=None,
            created=NOON.timestamp(), claimed=at.timestamp(),
        )
    )  # fmt: skip


def task(*given: Any, line: Line | None = None, **options: Any) -> Task:
    known = handlers.get("h")
    assert known is not None
    return Task(delivery(*given, **options), known, 300.0, line)


@pytest.fixture
def local_queue() -> LocalQueue:
    return LocalQueue(
        batch=100, slice_size=100, poke=lambda: None, max_linger=3600.0, slots=Slots(100)
    )


def given_back(local_queue: LocalQueue) -> list[int]:
    return [each.delivery.id for each in local_queue.take_to_release()]


def test_stop_applies_to_a_whole_queue_or_to_earlier_claims() -> None:
    stopped = StoppedQueues()
    assert not stopped
    assert not stopped.has(delivery())
    stopped["mail"] = None
    assert stopped
    assert stopped.has(delivery(at=LATER))
    assert not stopped.has(delivery(queue="other"))
    assert stopped.is_all_stopped("mail")
    assert not stopped.is_all_stopped("other")
    stopped["mail"] = LATER
    assert not stopped.is_all_stopped("mail")
    assert stopped.has(delivery(at=NOON))
    assert not stopped.has(delivery(at=LATER))


def test_waiting_tasks_are_released_and_new_ones_not_taken(local_queue: LocalQueue) -> None:
    """Those waiting for a turn, their line, or as a suspect; new ones, or back from a slice."""
    line = ("mail", "h", "k")
    local_queue.put([task(1, line=line)])
    assert local_queue.take() is not None
    local_queue.put([task(2, suspect=True), task(3), task(4, "other"), task(5, line=line)])
    local_queue.stop_queue("mail")
    assert sorted(given_back(local_queue)) == [2, 3, 5]
    local_queue.put([task(6), task(7, "other")])
    local_queue.put_first([task(8, at=LATER)])
    local_queue.put([task(9)])
    assert given_back(local_queue) == [6, 8, 9]
    assert local_queue.waiting() == 2
    assert local_queue.is_unwanted(task(10))
    assert not local_queue.is_unwanted(task(11, "other"))


def test_messages_claimed_after_the_change_may_start(local_queue: LocalQueue) -> None:
    """A probe; and, at full rate, every message."""
    local_queue.stop_queue("mail")
    local_queue.stop_queue("mail", LATER)
    local_queue.put([task(1), task(2, at=LATER)])
    assert given_back(local_queue) == [1]
    slice_ = local_queue.take()
    assert slice_ is not None
    assert [each.delivery.id for each in slice_.tasks] == [2]


def test_a_queue_is_dropped_but_for_some_claims(local_queue: LocalQueue) -> None:
    local_queue.put([task(1), task(2, "other")])
    local_queue.drop({"mail"}, keeping={"me:1"})
    assert given_back(local_queue) == []
    local_queue.drop({"mail"}, keeping=())
    assert given_back(local_queue) == [1]
    local_queue.put([task(3)])  # later ones are not affected
    assert local_queue.waiting() == 2
