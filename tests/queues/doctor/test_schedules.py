"""Findings about schedules: D018 and D019."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_mq.queues.doctor import examine
from tests.outbox.schedules.conftest import put
from tests.queues.doctor.examined import found, run_doctor
from tests.rows import beat

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


class TestSchedules:
    #: A month, and a delay that reads the same for half an hour of testing.
    MONTH = timedelta(days=30)

    LATE = -timedelta(days=2, hours=3, minutes=30).total_seconds()

    def told(self) -> list[tuple[str, str, str]]:
        ids = ("D018", "D019", "D020")
        return [(each.id, each.level, each.text) for each in examine() if each.id in ids]

    def test_d018_one_that_is_overdue(self) -> None:
        beat()
        put(due=-30)  # a deployment may last as long
        put("off", enabled=False, due=None)
        put("over", due=None)
        assert self.told() == []
        put("report", every=self.MONTH, due=self.LATE)
        assert self.told() == [("D018", "warning", "The schedule report is 2 d 3 h overdue.")]
        (text,) = found("D018")
        assert "Workers are alive" in text
        assert run_doctor()[0] == 1

    @pytest.mark.parametrize("use_tz", [True, False])
    def test_d018_is_an_error_once_a_whole_period_has_passed(
        self, use_tz: bool, settings: Any
    ) -> None:
        settings.USE_TZ = use_tz
        beat()
        put("report", cron="* * * * *", due=self.LATE)
        assert self.told() == [("D018", "error", "The schedule report is 2 d 3 h overdue.")]

    def test_d018_names_those_that_are_latest(self) -> None:
        beat()
        put("odd", cron="61 * * * *", due=self.LATE)  # its period is unknown
        for number in range(1, 5):
            put(f"s{number}", every=self.MONTH, due=self.LATE + 86400 + number)
            if number == 2:
                text = "3 schedules are overdue, by up to 2 d 3 h: odd, s1, s2."
                assert self.told() == [("D018", "warning", text)]
        text = "5 schedules are overdue, by up to 2 d 3 h: odd, s1, s2 and 2 more."
        assert self.told() == [("D018", "warning", text)]
        put("s5", cron="* * * * *", due=self.LATE + 86400 + 5)
        assert [each[:2] for each in self.told()] == [("D018", "error")]

    def test_d019_one_whose_last_broadcast_failed(self) -> None:
        beat()
        put("report", due=600, last_error="RoutingError: it cannot go to queue slow")
        put("off", enabled=False, due=None, last_error="full")
        (finding,) = [each for each in examine() if each.id == "D019"]
        assert finding.level == "warning"
        assert "report failed: RoutingError: it cannot go to queue slow" in finding.text
        assert "mq_schedule run report" in finding.hint

    def test_d019_is_an_error_if_the_schedule_does_not_continue(self) -> None:
        beat()
        put("full", due=self.LATE, last_error="BroadcastBusy: no room")
        put("stopped", due=None, last_error="InvalidOption: tz names the unknown time zone")
        assert [each[:2] for each in self.told()] == [("D019", "error"), ("D019", "error")]
        full, stopped = found("D019")
        assert "it is 2 d 3 h overdue" in full
        assert "mq_schedule enable stopped" in stopped
