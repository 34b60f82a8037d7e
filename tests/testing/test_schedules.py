"""`due(until=...)`: a test moves the clock, and schedules with it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_mq import Delivery, RoutingError, broadcast, handler, periodic
from django_mq.models import QueuedMessage, Schedule
from django_mq.testing import assert_broadcast, capture_broadcasts, drain, due

DAY = timedelta(days=1)


class DueUntilTest(TestCase):
    def setUp(self) -> None:
        self.ran: list[tuple[str, Any]] = []

        @handler("shop.#", queue="mail", name="h")
        def h(delivery: Delivery) -> None:
            self.ran.append((delivery.type, delivery.metadata.get("mq.scheduled_for")))

    def test_a_schedule_falls_due(self) -> None:
        periodic("daily", "shop.reports.daily", {"n": 1}, every=DAY)
        assert due(until=timedelta(hours=23)) == 0
        assert due(until=DAY) == 1
        assert_broadcast("shop.reports.daily", {"n": 1}, times=1)
        assert drain() == 1
        assert due(until=DAY) == 0, "a time comes once"
        assert due(until=3 * DAY) == 2

    def test_each_time_until_then_in_order(self) -> None:
        periodic("morning", "shop.morning", cron="0 6 * * *")
        periodic("evening", "shop.evening", cron="0 18 * * *")
        now = datetime.now(UTC)
        assert due(until=now + 2 * DAY) == 4
        drain()
        types = [type for type, _ in self.ran]
        assert types[:2] == types[2:]
        assert set(types) == {"shop.morning", "shop.evening"}
        times = [datetime.fromisoformat(at) for _, at in self.ran]
        assert times == sorted(times)

    def test_only_messages_due_by_then_run(self) -> None:
        with transaction.atomic():
            broadcast("shop.soon", after=60)
            broadcast("shop.later", after=3 * DAY)
        assert due(until=3600) == 1
        drain()
        assert self.ran == [("shop.soon", None)]
        assert due() == 1

    def test_without_until_schedules_stay(self) -> None:
        periodic("often", "shop.often", every=1)
        assert due() == 0
        assert not Schedule.objects.exists()

    def test_a_disabled_schedule_stays(self) -> None:
        periodic("off", "shop.off", every=60, enabled=False)
        assert due(until=DAY) == 0

    def test_overlap_skips(self) -> None:
        periodic("hourly", "shop.hourly", every=3600, overlap="skip")
        assert due(until=DAY) == 1

    def test_a_broadcast_that_fails_fails_the_test(self) -> None:
        periodic("bad", "shop.bad", every=60, queue="nowhere")
        with pytest.raises(RoutingError):
            due(until=DAY)
        assert not QueuedMessage.objects.exists()

    def test_a_schedule_moves_once_however_often_it_is_due(self) -> None:
        """In one transaction each version of its row slows down the next search."""
        periodic("often", "shop.often", every=60)
        due(until=0)
        with CaptureQueriesContext(connection) as seen:
            assert due(until=3600) == 60
        assert len([each for each in seen if "update django_mq_schedule" in each["sql"]]) == 1
        schedule = Schedule.objects.get()
        assert schedule.last_at
        assert schedule.next_at == schedule.last_at + timedelta(minutes=1)
        assert schedule.last_message == QueuedMessage.objects.latest("id").pk

    def test_one_schedule_alone(self) -> None:
        periodic("often", "shop.often", every=5)
        periodic("nightly", "shop.nightly", every=DAY)
        with transaction.atomic():
            broadcast("shop.later", after=3600)
        assert due(until=2 * DAY, schedule="nightly") == 3
        assert due(until=5) == 1, "the others stay"
        drain()
        assert [type for type, _ in self.ran].count("shop.nightly") == 2

    def test_one_schedule_that_there_is_not(self) -> None:
        periodic("nightly", "shop.nightly", every=DAY, enabled=False)
        assert due(until=DAY, schedule="nightly") == 0
        with pytest.raises(ValueError, match="no schedule nihgtly: did you mean nightly"):
            due(until=DAY, schedule="nihgtly")
        with pytest.raises(ValueError, match="until="):
            due(schedule="nightly")

    def test_broadcasts_of_schedules_are_captured(self) -> None:
        periodic("hourly", "shop.hourly", every=3600)
        with capture_broadcasts() as broadcasts:
            due(until=3700)
        assert [each.metadata["mq.schedule"] for each in broadcasts] == ["hourly"]

    def test_a_time_that_cannot_be(self) -> None:
        for wrong in (-1, datetime(2026, 1, 1), "tomorrow", 10**30, timedelta.max):
            with pytest.raises(ValueError, match="seconds"):
                due(until=wrong)  # type: ignore[arg-type]
