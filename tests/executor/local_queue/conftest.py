"""A local queue with room for a hundred, and tasks for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Slice, Task
from django_mq.messages import ClaimedRow, Delivery
from tests.worker.conftest import Told

NOW = datetime(2030, 1, 1, tzinfo=UTC).timestamp()


def task(
    id: int, name: str = "h", *, suspect: bool = False, line: str | None = None, claim: int = 1
) -> Task:
    row = ClaimedRow(
        id=id, queue="mail", type="t", handler=name, schema_version=1, payload="{}",
        metadata="{}", priority=0, key=None, attempts=1, max_attempts=20, retry=None,
        claimed_by=f"me:{claim}", wants_result=False, suspect=suspect, held_for=None,
        created=NOW, claimed=NOW,
    )  # fmt: skip
    found = handlers.get(name)
    assert found is not None
    return Task(Delivery(row), found, 300.0, None if line is None else (line,))


@pytest.fixture(autouse=True)
def _handlers() -> None:
    for name, options in {
        "h": {},
        "i": {},
        "unbound": {"atomic": False},
        "batch": {"batch": True},
        "batch2": {"batch": True},
    }.items():

        def function(delivery: Any) -> None: ...

        handler(name, name=name, **options)(function)  # type: ignore[arg-type]

    async def coroutine(delivery: Any) -> None: ...

    handler("coroutine", name="coroutine")(coroutine)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def local_queue(told: Told) -> LocalQueue:
    return LocalQueue(batch=100, slice_size=100, poke=told, max_linger=3600.0, slots=Slots(100))


def take(local_queue: LocalQueue) -> list[int]:
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.done(slice_)
    return [each.delivery.id for each in slice_.tasks]


def start(local_queue: LocalQueue) -> Slice:
    """Take a slice that runs until `hand.done()`."""
    slice_ = local_queue.take()
    assert slice_ is not None
    return slice_


def dispatch(local_queue: LocalQueue, tasks: Iterable[Task]) -> list[Task]:
    """Put tasks, and return the coroutines that are to start, as the worker does."""
    local_queue.put(tasks)
    return local_queue.coroutines.take()


def dispatch_first(local_queue: LocalQueue, tasks: Iterable[Task]) -> list[Task]:
    """The same for tasks that go before all others."""
    local_queue.put_first(tasks)
    return local_queue.coroutines.take()


def ids(tasks: list[Task]) -> list[int]:
    return [each.delivery.id for each in tasks]


def lined(*names: str, handler: str = "h") -> list[Task]:
    """Return tasks with the ids 1, 2, 3... in the lines `names`; "-" means no line."""
    return [
        task(id, handler, line=None if name == "-" else name) for id, name in enumerate(names, 1)
    ]
