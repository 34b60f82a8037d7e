"""The options of Worker are checked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_mq import InvalidName
from django_mq.worker import Worker

pytestmark = pytest.mark.django_db(transaction=True)


def test_one_queue_may_be_given_as_a_text() -> None:
    assert Worker("mail").queues == ("mail",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": "2"},
        {"threads": True},
        {"threads": 10**5000},
        {"batch_size": 10**9},
        {"max_messages": -1},
        {"max_messages": True},
        {"max_messages": 1.5},
    ],
    ids=["text", "bool", "digits", "large", "negative", "bool-messages", "half"],
)
def test_numbers_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        Worker(**wrong)


@pytest.mark.parametrize("wrong", [None, 5, True], ids=repr)
def test_invalid_list_of_queues_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidName, match=rf"queues must be a list of names .* not {wrong}: leave"):
        Worker(queues=wrong)
    with pytest.raises(InvalidName, match="is not a pattern"):
        Worker(queues=["mail", wrong])


@pytest.mark.parametrize("wrong", [-1, True, "5", float("nan"), timedelta(seconds=-1)])
def test_durations_are_checked(wrong: Any) -> None:
    for option in ("max_seconds", "drain_seconds"):
        with pytest.raises(ValueError, match="must be seconds or a timedelta"):
            Worker(**{option: wrong})
    with pytest.raises(ValueError, match="must be seconds or a timedelta"):
        Worker().stop(wrong)


def test_durations_are_seconds_or_timedeltas() -> None:
    worker = Worker(max_seconds=timedelta(minutes=1), drain_seconds=timedelta(seconds=2))
    assert (worker.max_seconds, worker.drain_seconds) == (60.0, 2.0)
    assert worker.stop(timedelta(seconds=1)) is False
