"""What of a queue is not to start any more, and what is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.messages import ClaimedRow, Delivery
from django_mq.worker.hand import Hand
from django_mq.worker.shut import Shut
from django_mq.worker.tasks import Line, Task

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
def hand() -> Hand:
    return Hand(batch=100, most=100, on_room=lambda: None)


def given_back(hand: Hand) -> list[int]:
    return [each.delivery.id for each in hand.take_given_back()]


def test_all_of_a_queue_or_what_was_claimed_before() -> None:
    shut = Shut()
    assert not shut
    assert not shut.has(delivery())
    shut.queue("mail")
    assert shut
    assert shut.has(delivery(at=LATER))
    assert not shut.has(delivery(queue="other"))
    assert shut.whole("mail")
    assert not shut.whole("other")
    shut.queue("mail", LATER)
    assert not shut.whole("mail")
    assert shut.has(delivery(at=NOON))
    assert not shut.has(delivery(at=LATER))


def test_what_waits_is_given_back_and_what_comes_is_not_taken(hand: Hand) -> None:
    """Waiting for a turn, for its line, or as a suspect; new, or back from a slice."""
    line = ("mail", "h", "k")
    hand.put([task(1, line=line)])
    assert hand.take() is not None
    hand.put([task(2, suspect=True), task(3), task(4, "other"), task(5, line=line)])
    hand.shut("mail")
    assert sorted(given_back(hand)) == [2, 3, 5]
    hand.put([task(6), task(7, "other")])
    hand.put_back([task(8, at=LATER)])
    assert not hand.admit(task(9))
    assert given_back(hand) == [6, 8, 9]
    assert hand.waiting() == 2
    assert hand.is_unwanted(task(10))
    assert not hand.is_unwanted(task(11, "other"))


def test_what_was_claimed_after_the_change_may_start(hand: Hand) -> None:
    """A probe; and everything at full rate."""
    hand.shut("mail")
    hand.shut("mail", LATER)
    hand.put([task(1), task(2, at=LATER)])
    assert given_back(hand) == [1]
    slice_ = hand.take()
    assert slice_ is not None
    assert [each.delivery.id for each in slice_.tasks] == [2]


def test_a_queue_is_dropped_but_for_some_claims(hand: Hand) -> None:
    hand.put([task(1), task(2, "other")])
    hand.drop({"mail"}, keeping={"me:1"})
    assert given_back(hand) == []
    hand.drop({"mail"}, keeping=())
    assert given_back(hand) == [1]
    hand.put([task(3)])  # later ones are not concerned
    assert hand.waiting() == 2
