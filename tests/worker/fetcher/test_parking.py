"""Claims do not park while the lines move on quickly."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
from django.db.models.functions import Now

from django_mq.messages import ClaimedRow
from django_mq.models import QueuedMessage
from django_mq.store.claim_keyed import WINDOW
from django_mq.worker.parking import PAUSE_SECONDS, Parking
from tests.rows import add
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)


def line(count: int) -> None:
    """Store a line of `count` messages."""
    for _ in range(count):
        add(handler="h", key="k", after=-60)


def parked() -> int:
    return QueuedMessage.objects.filter(blocked_by__isnull=False).count()


def end_claimed(rig: Rig) -> None:
    """Let the claimed messages end, as an executor does."""
    QueuedMessage.objects.filter(pk__in=rig.ids()).delete()
    rig.fetcher.on_next_in_line()
    rig.rooms["sync"] = 100


def test_line_that_moves_on_quickly_is_not_parked(rig: Rig) -> None:
    line(WINDOW + 400)
    rig.make()
    rig.rooms["sync"] = 100
    rig.fetcher.fetch(rig.cursor)  # the first claim parks: nothing tells it how fast the line is
    for _ in range(4):
        before = parked()
        end_claimed(rig)
        rig.clock.now += PAUSE_SECONDS / 2
        rig.fetcher.fetch(rig.cursor)
        assert len(rig.taken) == 100
        assert parked() <= before


def test_limit_in_flight_below_the_room_of_the_process_also_shows_that_a_line_moves_on(
    rig: Rig,
) -> None:
    line(3 * WINDOW)
    rig.options["mail"] = rig.default._replace(max_in_flight=20)
    rig.make()
    rig.rooms["sync"] = 100
    rig.fetcher.fetch(rig.cursor)
    for _ in range(4):
        end_claimed(rig)
        head = QueuedMessage.objects.earliest("pk")
        QueuedMessage.objects.filter(pk=head.pk).update(blocked_by=None)  # as an ack does
        before = parked()
        rig.clock.now += PAUSE_SECONDS / 2
        rig.fetcher.fetch(rig.cursor)
        assert len(rig.taken) == 20
        assert parked() <= before


def test_pauses_of_groups_without_lanes_are_forgotten() -> None:
    rows = [cast(ClaimedRow, SimpleNamespace(queue="mail", handler="h", key="k"))] * 2
    parking = Parking()
    for group in ("a", "b"):
        parking.record_claim(group, 1.0, rows, room=2)
    parking.keep({"b"})
    assert parking.seconds_left("a", 1.0) == 0
    assert parking.seconds_left("b", 1.0) > 0


@pytest.mark.parametrize("gated", [False, True])
def test_message_behind_a_line_that_stands_still_is_found_after_the_pause(
    rig: Rig, gated: bool
) -> None:
    line(2 * WINDOW)
    other = add(handler="h", key="other", after=-1)
    if gated:
        rig.options["mail"] = rig.default._replace(max_in_flight=150)
    rig.make()
    rig.rooms["sync"] = 100
    rig.fetcher.fetch(rig.cursor)
    QueuedMessage.objects.update(blocked_by=None)
    rig.ids()
    rig.rooms["sync"] = 100
    began = rig.clock.now
    rig.fetcher.on_next_in_line()
    sleep = rig.fetcher.fetch(rig.cursor)
    assert (rig.ids(), parked()) == ([], 0)
    assert 0 < sleep <= PAUSE_SECONDS
    rig.settle()
    assert rig.ids() == [other.pk]
    assert rig.clock.now - began < 2 * PAUSE_SECONDS + 0.05


def test_free_messages_between_those_of_a_line_that_stands_still_do_not_pause_parking(
    rig: Rig,
) -> None:
    """All that a window holds of them may be half of a small room, but no line moved on."""
    head = add(handler="h", key="held", after=-90)
    QueuedMessage.objects.filter(pk=head.pk).update(
        leased_until=Now() + timedelta(hours=1), claimed_by="other:1", attempts=1
    )
    for number in range(2 * WINDOW):
        add(handler="h", key=None if number % 10 == 0 else "held", after=-60)
    rig.make()
    rig.rooms["sync"] = 10
    rig.fetcher.fetch(rig.cursor)
    assert len(rig.ids()) == 10
    before = parked()
    rig.fetcher.on_next_in_line()
    rig.rooms["sync"] = 100
    rig.fetcher.fetch(rig.cursor)
    assert parked() > before


def test_line_that_stands_still_is_parked_after_the_pause_while_another_kind_has_no_room(
    rig: Rig,
) -> None:
    line(2 * WINDOW)
    add("post", after=-1)
    rig.options["post"] = rig.default._replace(kind="async")
    rig.make(poll=600.0)
    rig.rooms.update({"sync": 100, "async": 0})
    rig.fetcher.fetch(rig.cursor)
    QueuedMessage.objects.update(blocked_by=None)
    rig.rooms["sync"] = 100
    rig.fetcher.on_next_in_line()
    assert 0 < rig.fetcher.fetch(rig.cursor) <= PAUSE_SECONDS
