"""Workers of two versions of the code run at the same time, as in a rolling deployment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_mq import handler
from django_mq.conf import get_settings
from django_mq.handlers import isolated
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage, Schedule
from django_mq.outbox.schedules.declaring import declare_all, own_types
from django_mq.store import schedules
from django_mq.testing import drain
from django_mq.worker import Worker
from tests.database import second_connection
from tests.outbox.schedules.conftest import HOUR, block, put, times, turn

pytestmark = pytest.mark.django_db(transaction=True)


def declare(ran: list[int], type: str = "shop.reports.due", **given: Any) -> None:
    """Declare a handler with a schedule, as one version of the code does."""

    @handler(type, queue="reports", name="reports", every=60, **given)
    def reports(delivery: Delivery) -> None:
        ran.append(delivery.id)


def start(version: Callable[[], None]) -> None:
    """Start a worker of a version; its schedules are then due."""
    with isolated():
        version()
        declare_all(block, get_settings())
    Schedule.objects.update(next_at=Now() - timedelta(seconds=1))


def test_a_worker_of_old_code_leaves_a_new_schedule_to_workers_that_have_its_handler() -> None:
    ran: list[int] = []
    start(lambda: declare(ran))
    with isolated():
        assert turn() == 0
    with isolated():
        declare(ran)
        assert turn() == 1
        drain()
    assert len(ran) == 1


def test_a_schedule_whose_type_changed_is_for_workers_that_declare_it_with_that_type() -> None:
    start(lambda: declare([], "shop.reports.monthly"))
    with isolated():
        declare([])
        assert turn() == 0
    with isolated():
        declare([], "shop.reports.monthly")
        assert turn() == 1


def test_a_schedule_that_the_code_dropped_is_not_broadcast_any_more() -> None:
    start(lambda: declare([]))
    with isolated():
        assert turn() == 0
    assert not QueuedMessage.objects.exists()


def test_a_schedule_of_other_code_is_not_locked_and_takes_no_place_of_another() -> None:
    put("of-other-code", due=-60, source="code", declared_at=Now())
    put("of-an-operator")
    with block() as cursor:
        [row] = schedules.take_due(cursor, limit=1, own=own_types())
        assert row.name == "of-an-operator"
        with second_connection() as other:
            other.execute("set lock_timeout = 50")
            other.execute("select from django_mq_schedule where name = 'of-other-code' for update")


def test_a_loop_sleeps_past_a_schedule_of_other_code() -> None:
    put("of-other-code", source="code", declared_at=Now())
    put("of-an-operator", due=600)
    with connection.cursor() as cursor:
        wait = schedules.next_due(cursor, own=own_types())
        assert wait is not None
        assert 500 < wait <= 600
        Schedule.objects.filter(name="of-an-operator").delete()
        assert schedules.next_due(cursor, own=own_types()) is None
        assert (schedules.next_due(cursor) or 0.0) < 0


@pytest.mark.parametrize("has_schedules", [True, False])
def test_a_schedule_of_other_code_does_not_keep_a_run_from_its_end(has_schedules: bool) -> None:
    put("of-other-code", source="code", declared_at=Now(), every=HOUR)
    with isolated():
        if has_schedules:
            declare([])
        assert Worker().run(until_empty=True)
    assert not times("of-other-code")
    assert Schedule.objects.get(name="of-other-code").enabled
