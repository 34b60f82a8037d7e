"""The last start of each lane: by slices, by coroutines, and in ordered queues."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.executor import last_starts as last_starts_module
from django_mq.executor.async_slots import Slots
from django_mq.executor.last_starts import LastStarts
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Task
from django_mq.messages import ClaimedRow, Delivery

NEVER = float("-inf")


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later: 1, 2, 3..."""
    monkeypatch.setattr(last_starts_module, "monotonic", itertools.count(1).__next__)


@pytest.fixture(autouse=True)
def _handlers() -> None:
    def function(delivery: Any) -> None: ...

    async def coroutine(delivery: Any) -> None: ...

    handler("h", name="h")(function)
    handler("coroutine", name="coroutine")(coroutine)


@pytest.fixture
def local_queue() -> LocalQueue:
    return LocalQueue(
        batch=100, slice_size=100, poke=lambda: None, max_linger=3600.0, slots=Slots(100)
    )


ids = itertools.count(1)


def task(queue: str, priority: int = 0, *, name: str = "h", **columns: Any) -> Task:
    row = ClaimedRow(
        id=next(ids), queue=queue, type="t", handler=name, schema_version=1, payload="{}",
        metadata="{}", priority=priority, key=None, attempts=1, max_attempts=20, retry=None,
        claimed_by="me:1", wants_result=False, held_for=None, created=0.0, claimed=0.0,
        suspect=columns.pop("suspect", False), **columns,
    )  # fmt: skip
    found = handlers.get(name)
    assert found is not None
    return Task(Delivery(row), found, 300.0)


def test_every_slice_counts_for_each_of_its_lanes(local_queue: LocalQueue) -> None:
    local_queue.paces.of(task("mail").handler).limit = 10
    local_queue.put([task("mail"), task("post", 5), task("mail", 9)])
    assert local_queue.last_starts.at(("mail", 0)) == NEVER
    taken = local_queue.take()
    assert taken is not None
    assert len(taken.tasks) == 3
    at = local_queue.last_starts.at
    assert [at(("mail", 0)), at(("post", 5)), at(("mail", 9))] == [1, 1, 1]
    local_queue.put([task("post", 5)])
    local_queue.take()
    assert [at(("mail", 0)), at(("post", 5)), at(("post", 0))] == [1, 2, NEVER]


@pytest.mark.parametrize("name", ["h", "coroutine"])
def test_a_suspect_that_runs_alone_counts(local_queue: LocalQueue, name: str) -> None:
    local_queue.put([task("mail", name=name, suspect=True)])
    assert local_queue.coroutines.take() if name == "coroutine" else local_queue.take()
    assert local_queue.last_starts.at(("mail", 0)) == 1


def test_coroutines_count_when_they_get_a_slot(local_queue: LocalQueue) -> None:
    local_queue.slots.take(99)
    local_queue.put([task("mail", name="coroutine"), task("post", name="coroutine")])
    assert len(local_queue.coroutines.take()) == 1
    at = local_queue.last_starts.at
    assert [at(("mail", 0)), at(("post", 0))] == [1, NEVER]


def test_starts_of_an_ordered_queue_count_for_all_its_lanes() -> None:
    """It is claimed by id: a claim from the lane of one priority takes messages of another."""
    starts = LastStarts()
    starts.record([task("mail", ordered=True)])
    assert [starts.at(("mail", 9)), starts.at(("mail", 0)), starts.at(("post", 0))] == [1, 1, NEVER]


def test_lanes_that_are_gone_are_forgotten() -> None:
    starts = LastStarts()
    starts.record([task("mail"), task("mail", 9), task("line", ordered=True), task("gone")])
    starts.record([task("other", ordered=True)])
    starts.keep([("mail", 0), ("line", 0)])
    lanes = [("mail", 0), ("mail", 9), ("line", 0), ("gone", 0), ("other", 0)]
    assert [starts.at(lane) for lane in lanes] == [1, NEVER, 1, NEVER, NEVER]
