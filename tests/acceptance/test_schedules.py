"""Despite crashes at any moment, each time is broadcast once, and none is left out."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from django.db.models.functions import Now

from django_mq.models import QueuedMessage, Schedule
from tests.acceptance.processes import Worker

SECOND = timedelta(seconds=1)


def times() -> list[datetime]:
    """Return the times that were broadcast; the messages are not handled."""
    found = QueuedMessage.objects.values_list("metadata", flat=True)
    return sorted(datetime.fromisoformat(each["mq.scheduled_for"]) for each in found)


def steps() -> set[timedelta]:
    return {later - earlier for earlier, later in pairwise(times())}


@pytest.mark.thorough
def test_processes_are_killed(start: Callable[..., Worker], empty_tables: None) -> None:
    Schedule.objects.create(
        name="second", type="acceptance.nobody", every=SECOND, next_at=Now(), catch_up="all"
    )
    worker = start("--processes", 2, "--queue", "another")
    worker.has_started(2)
    for number in range(4):
        before = len(times())
        worker.until(lambda before=before: len(times()) > before, "one more")  # type: ignore[misc]
        worker.kill_child(number)
        worker.has_started(3 + number)
    assert steps() == {SECOND}
    worker.tell_all(signal.SIGKILL)
    worker.ends()
    before = len(times())
    again = start("--queue", "another")
    again.until(lambda: len(times()) > before + 1, "another host goes on")
    assert steps() == {SECOND}


def test_a_drain_leaves_the_clock_to_others(
    start: Callable[..., Worker], empty_tables: None
) -> None:
    Schedule.objects.create(
        name="second", type="acceptance.nobody", every=SECOND, next_at=Now(), catch_up="all"
    )
    first, second = (start("--queue", "another") for _ in range(2))
    for worker in (first, second):
        worker.has_started(1)
    first.until(times, "the first time")
    first.tell(signal.SIGTERM)
    assert first.ends() == 0
    before = len(times())
    second.until(lambda: len(times()) > before, "the other one goes on")
    assert steps() == {SECOND}
    second.tell(signal.SIGTERM)
    assert second.ends() == 0
    assert "Traceback" not in first.said() + second.said()
