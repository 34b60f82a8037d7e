"""The options of Worker are checked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_mq.worker import Worker

pytestmark = pytest.mark.django_db(transaction=True)


def test_one_queue_may_be_given_as_a_text() -> None:
    assert Worker("mail").queues == ("mail",)


@pytest.mark.parametrize("wrong", [{"threads": "2"}, {"threads": True}, {"batch_size": 10**9}])
def test_numbers_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        Worker(**wrong)


@pytest.mark.parametrize("name", ["max_messages", "max_seconds", "drain_seconds"])
@pytest.mark.parametrize("wrong", [-1, "3", float("nan"), True])
def test_limits_are_checked_before_anything_runs(name: str, wrong: Any) -> None:
    """A bad drain would otherwise be noticed when the worker is told to stop."""
    with pytest.raises(ValueError, match=name):
        Worker(**{name: wrong})


def test_durations_may_be_timedeltas() -> None:
    worker = Worker(max_seconds=timedelta(minutes=1), drain_seconds=timedelta(0))
    assert (worker.max_seconds, worker.drain_seconds) == (60, 0)
    assert worker.run(until_empty=True) is True
