"""Two queues with backlogs of long handlers on one worker: both move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_mq import handler
from django_mq.executor import local_queue
from django_mq.models import QueuedMessage
from django_mq.worker.dispatch import Dispatch
from tests.waiting import until
from tests.worker.conftest import Running, add_many

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


class Gated:
    """A handler whose calls wait, each at a gate of its own."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._gates: list[threading.Event] = []
        self._all = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, delivery: Any) -> None:
        gate = threading.Event()
        with self._lock:
            self._gates.append(gate)
            self.began.append(delivery.queue)
        until(lambda: gate.is_set() or self._all.is_set())

    def open(self, number: int) -> None:
        self._gates[number].set()

    def open_all(self) -> None:
        self._all.set()


@pytest.fixture
def gated() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    gated.open_all()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queues of released messages."""
    released: list[str] = []
    release = Dispatch.release

    def recording(self: Dispatch, tasks: Any) -> bool:
        done = release(self, tasks)
        released.extend(task.delivery.queue for task in tasks)
        return done

    monkeypatch.setattr(Dispatch, "release", recording)
    return released


@pytest.mark.slow
def test_queues_alternate_although_prefetched_messages_are_released(
    start: Start,
    gated: Gated,
    released: list[str],
    never_stuck: None,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> None:
    """Each call is so long that the message claimed behind it goes back to its queue."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "POLL_INTERVAL": 0.1}
    for queue in "mail", "post":
        handler("#", queue=queue, name=queue)(lambda delivery: gated(delivery))
        add_many(10, queue=queue, handler=queue)
    start(threads=1, drain_seconds=0.0)
    for number in range(4):
        until(lambda number=number: len(gated.began) > number)  # type: ignore[misc]
        until(lambda: QueuedMessage.objects.filter(leased_until__isnull=False).count() == 2)
        with monkeypatch.context() as stuck:
            stuck.setattr(local_queue, "STUCK_AFTER", 0.0)
            until(lambda number=number: len(released) > number)  # type: ignore[misc]
            gated.open(number)
            until(lambda number=number: len(gated.began) > number + 1)  # type: ignore[misc]
    assert gated.began[:4] in (["mail", "post"] * 2, ["post", "mail"] * 2)
