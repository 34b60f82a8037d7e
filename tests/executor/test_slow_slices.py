"""A slice that takes long keeps the messages that it has locked and not started."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from django_mq import handler
from django_mq.executor import slice_body, slices
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage
from tests.database import second_connection
from tests.worker.conftest import Bench, add_many, effect

pytestmark = pytest.mark.django_db(transaction=True)

MakeBench = Callable[..., Bench]


class Clock:
    """Stands in for the clock of leases; handlers move it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read, self.moved = slices.lease_clock, 0.0
        for module in slices, slice_body:
            monkeypatch.setattr(module, "lease_clock", self.read)

    def read(self) -> float:
        return self._read() + self.moved


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lapse(*ids: int) -> None:
    """Let the leases end now, before any renewal."""
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set leased_until = now() where id = any(%s)",
            [list(ids)],
        )


def is_leased(id: int) -> bool:
    until = QueuedMessage.objects.get(pk=id).leased_until
    return until is not None and until > timezone.now() + timedelta(minutes=1)


def test_a_slow_handler_does_not_cost_its_neighbours_their_leases(
    make_bench: MakeBench, clock: Clock
) -> None:
    """Renewals skip locked rows: a worker would take them over as soon as the slice ends."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        clock.moved += 300

    bench = make_bench(slice_seconds=0.0)
    first, *others = add_many(3, handler="h")
    tasks = bench.claim()
    lapse(*(each.pk for each in others))
    remainder = bench.run(tasks)
    assert bench.settled == [first.pk]
    assert [task.delivery.id for task in remainder.not_started] == [each.pk for each in others]
    assert [is_leased(each.pk) for each in others] == [True, True]


def test_a_slow_slice_that_is_rolled_back_keeps_them_too(
    make_bench: MakeBench, clock: Clock
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        clock.moved += 300
        with connection.cursor() as cursor:
            cursor.execute("rollback")

    bench = make_bench(slice_seconds=0.0)
    _, *others = add_many(3, handler="h")
    tasks = bench.claim()
    lapse(*(each.pk for each in others))
    bench.run(tasks)
    assert [is_leased(each.pk) for each in others] == [True, True]


def test_a_quick_slice_leaves_leases_to_the_renewals(make_bench: MakeBench, clock: Clock) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        clock.moved += 200

    bench = make_bench(slice_seconds=0.0)
    _, other = add_many(2, handler="h")
    tasks = bench.claim()
    lapse(other.pk)
    bench.run(tasks)
    assert not is_leased(other.pk)
