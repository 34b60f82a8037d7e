"""A worker broadcasts schedules on time, however busy it is, and never twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_mq import handler, periodic
from django_mq.executor.statements import Statements
from django_mq.executor.watchdog import Link
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage, Schedule
from django_mq.store import schedules
from django_mq.store.limits import Limits
from django_mq.worker import Worker, scheduler
from django_mq.worker.scheduler import Scheduler
from tests.database import second_connection
from tests.outbox.schedules.conftest import HOUR, put, times
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


class Heard:
    """A handler that notes each message, and the scheduled time if a schedule broadcast it."""

    def __init__(self, queue: str = "mail") -> None:
        self.ids: list[int] = []
        self.times: list[datetime] = []
        self.gate = threading.Event()
        self.gate.set()
        handler("shop.ping", queue=queue, name="heard")(lambda delivery: self.hear(delivery))

    def hear(self, delivery: Delivery) -> None:
        assert self.gate.wait(PATIENCE)
        if delivery.id in self.ids:  # its settle was lost: the code runs again with the same time
            return
        if at := delivery.metadata.get("mq.scheduled_for"):
            self.times.append(datetime.fromisoformat(at))
        self.ids.append(delivery.id)

    def steps(self) -> set[timedelta]:
        """Return the steps from each time to the next: zero, if one came twice."""
        found = sorted(self.times)
        return {later - earlier for earlier, later in pairwise(found)}


def test_declared_schedule_is_stored_and_runs(start: Start) -> None:
    heard = Heard()
    periodic("hourly", "shop.ping", every=HOUR)
    start()
    until(lambda: Schedule.objects.filter(name="hourly").exists())
    assert not heard.ids
    Schedule.objects.update(next_at=Now())
    until(lambda: heard.ids)
    assert Schedule.objects.get().last_message == heard.ids[0]


def test_a_handler_with_a_clock_runs_by_it(start: Start) -> None:
    ran = threading.Event()

    @handler("shop.ping", queue="mail", name="h", every=1)
    def h(delivery: Delivery) -> None:
        assert delivery.metadata["mq.schedule"] == "h"
        ran.set()

    start()
    assert ran.wait(PATIENCE)


def test_a_schedule_that_is_missed_runs_before_an_empty_queue_ends_the_run() -> None:
    """This serves users who start `mq_worker --until-empty` from the system's own cron."""
    heard = Heard()
    put()
    assert Worker().run(until_empty=True)
    assert len(heard.ids) == 1
    assert Worker().run(until_empty=True)
    assert len(heard.ids) == 1


def test_a_schedule_that_is_declared_and_missed_as_well() -> None:
    heard = Heard()
    periodic("hourly", "shop.ping", every=HOUR)
    assert Worker().run(until_empty=True)
    Schedule.objects.update(next_at=Now() - timedelta(hours=3))
    assert Worker().run(until_empty=True)
    assert len(heard.ids) == 1


FORGOTTEN = {"source": "code", "declared_at": Now() - timedelta(days=30)}


def test_starting_worker_skips_a_schedule_undeclared_for_a_day() -> None:
    """Its code declares no schedule at all, and it may end before the hour is over."""
    put("of-an-operator")
    put("forgotten", **FORGOTTEN)
    assert Worker().run(until_empty=True)
    assert not times("forgotten")
    [forgotten] = Schedule.objects.filter(enabled=False)
    assert (forgotten.name, forgotten.next_at) == ("forgotten", None)
    assert len(times("of-an-operator")) == 1


def test_schedule_undeclared_for_a_day_is_disabled_before_it_is_due(start: Start) -> None:
    put("forgotten", due=3600, **FORGOTTEN)
    start()
    until(lambda: not Schedule.objects.get().enabled)


def test_a_schedule_whose_queue_is_full_does_not_keep_a_run_from_its_end(settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"full": {"max_backlog": 1}}}
    add("full", after=600)
    put(queue="full")
    assert Worker().run(until_empty=True)
    assert "BroadcastBusy" in Schedule.objects.get().last_error


def test_any_worker_does_it_whatever_its_queues(start: Start) -> None:
    put()
    start(queues=["another"])
    [message] = until(lambda: list(QueuedMessage.objects.all()))
    assert message.queue == "default"


def test_an_idle_worker_sleeps_until_the_next_time_and_not_to_the_next_poll(
    start: Start, settings: Any
) -> None:
    """The poll interval is far longer than the test."""
    settings.DJANGO_MQ = {"POLL_INTERVAL": 3600}
    put(due=1.5)
    start()
    until(lambda: times())
    assert Schedule.objects.get().last_at


def test_a_busy_worker_fires_on_time(start: Start) -> None:
    """Its only executor is occupied, and so is its local queue."""
    heard = Heard()
    heard.gate.clear()
    for _ in range(300):
        add(type="shop.ping", handler="heard")
    start(queues=["mail"])
    until(lambda: QueuedMessage.objects.filter(leased_until__isnull=False).exists())
    put(due=0)
    until(lambda: times())
    assert not heard.ids
    heard.gate.set()
    until(lambda: len(heard.ids) == 301)


def test_two_workers_broadcast_each_time_once_and_leave_none_out(start: Start) -> None:
    heard = Heard()
    put(every=timedelta(seconds=1), catch_up="all")
    start()
    start()
    until(lambda: len(heard.times) >= 4)
    assert heard.steps() == {timedelta(seconds=1)}


def test_schedule_made_due_is_seen_within_a_poll_interval(start: Start, settings: Any) -> None:
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.2}
    running = start()
    until(lambda: running.worker.sleeps > 2)
    put()
    until(lambda: times())


@pytest.fixture
def clock(transactional_db: None) -> Any:
    """The scheduler alone; the test takes its turns."""
    return make()


def make(*, declares: bool = True) -> Any:
    from django_mq.conf import get_settings

    fired: list[bool] = []
    declared: list[bool] = []
    made = Scheduler(
        "default",
        get_settings(),
        declares=declares,
        on_declared=lambda: declared.append(True),
        on_fired=lambda: fired.append(True),
        on_turn=lambda: None,
        link=Link(),
    )
    made.fired, made.declared = fired, declared  # type: ignore[attr-defined]
    return made


def test_the_part_alone_sleeps_until_something_is_due(clock: Any) -> None:
    statements = Statements("default")
    try:
        cursor = statements.cursor()
        assert 0 < clock.poll(cursor) <= 1.0
        assert not clock.busy()
        put(due=-1)
        clock._polled_at = float("-inf")
        assert 0 < clock.poll(cursor) <= 1.0
        assert clock.busy()
        clock._wake.clear()
        clock.take_turn()
        assert clock.fired
        assert clock.poll(cursor) > 0.5, "it looks anew, and the next time is in an hour"
        assert not clock.busy()
    finally:
        statements.close()


def test_between_turns_there_is_no_connection(clock: Any) -> None:
    put()
    before = sessions()
    clock.take_turn()
    assert times()
    assert sessions() == before


def test_a_read_only_server_is_reported_by_the_loop_alone(
    clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Django has no class of its own for the error, so none of a lost database."""
    put(due=-1)
    options = {
        **connection.settings_dict["OPTIONS"],
        "options": "-c default_transaction_read_only=on",
    }
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "OPTIONS", options)
        clock.take_turn()
    assert (clock.fired, caplog.text) == ([], "")
    clock.take_turn()
    assert clock.fired


def test_a_declaration_waits_for_a_read_only_server(
    clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As during a failover: the schedule is valid, and newer code still changes its timing."""
    put("daily", due=3600, every=timedelta(hours=24), source="code", declared_at=Now())
    periodic("daily", "shop.ping", every=HOUR)
    clock._declare_at, clock._to_store = 0.0, {"daily"}
    options = {
        **connection.settings_dict["OPTIONS"],
        "options": "-c default_transaction_read_only=on",
    }
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "OPTIONS", options)
        clock.take_turn()
    assert caplog.text == ""
    clock._declare_at = 0.0
    clock.take_turn()
    assert Schedule.objects.get().every == HOUR


def sessions() -> int:
    with second_connection() as other:
        row = other.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_lost_database_is_waited_out(start: Start, other: Any) -> None:
    """At any interruption by the server, each time is broadcast once, and none is left out."""
    heard = Heard()
    put(every=timedelta(seconds=1), catch_up="all")
    start()
    until(lambda: heard.times)
    for _ in range(3):
        other.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
            " and backend_type = 'client backend'"
        )
        connection.close()
        seen = len(heard.times)
        until(lambda seen=seen: len(heard.times) > seen)  # type: ignore[misc]
    assert heard.steps() == {timedelta(seconds=1)}


def test_unexpected_error_is_logged_and_followed_by_a_rest(
    clock: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put()

    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("django_mq.worker.scheduler.fire_due", broken)
    clock.take_turn()
    assert [each.event for each in caplog.records] == ["scheduler_failed"]
    statements = Statements("default")
    try:
        assert clock.poll(statements.cursor()) > 0
        assert not clock.busy()
    finally:
        statements.close()


def declare(clock: Any) -> None:
    """Take the turn of another hour."""
    clock._declare_at = 0.0
    clock.take_turn()


@pytest.fixture
def hourly(transactional_db: None) -> None:
    """The process of the test declares it; the stored one is from older code."""
    put(type="shop.old", due=600, declared_at=Now())
    periodic("hourly", "shop.ping", every=HOUR)


def stored_type() -> str:
    return Schedule.objects.get().type


def test_each_hour_it_is_declared_again_but_not_over_the_declaration_of_newer_code(
    hourly: None, clock: Any
) -> None:
    clock.take_turn()
    assert stored_type() == "shop.ping"
    assert 3000 < clock.next_turn_in() <= 3600 * 1.1
    Schedule.objects.update(payload="new", declared_at=Now() - timedelta(hours=2))
    declare(clock)
    assert Schedule.objects.get().payload == "new"
    assert Schedule.objects.filter(declared_at__gt=Now() - timedelta(hours=1)).exists()


def test_a_schedule_whose_type_a_vanished_version_has_changed_is_declared_again_after_a_day(
    hourly: None, clock: Any
) -> None:
    """No process that is left would broadcast it."""
    clock.take_turn()
    Schedule.objects.update(type="shop.new", declared_at=Now() - timedelta(hours=23))
    declare(clock)
    assert stored_type() == "shop.new"
    Schedule.objects.update(declared_at=Now() - timedelta(hours=25))
    declare(clock)
    assert stored_type() == "shop.ping"


def test_a_row_that_is_locked_is_declared_a_little_later(
    hourly: None, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_mq.worker.wakeable_thread.LIMITS", Limits(lock=0.05))
    monkeypatch.setattr("django_mq.worker.scheduler.RETRY_DELAY", 600.0)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_schedule for update")
        clock.take_turn()
    assert 300 < clock.next_turn_in() <= 600
    assert not clock.declared
    declare(clock)
    assert clock.declared
    assert stored_type() == "shop.ping"


def test_only_rows_that_were_locked_are_declared_again(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    """The others may have a newer declaration by now."""
    monkeypatch.setattr("django_mq.worker.wakeable_thread.LIMITS", Limits(lock=0.05))
    for name in ("free", "locked"):
        put(name, type="shop.old", due=600, declared_at=Now())
        periodic(name, "shop.ping", every=HOUR)
    clock = make()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_schedule where name = 'locked' for update")
        clock.take_turn()
    Schedule.objects.filter(name="free").update(type="shop.new")
    declare(clock)
    assert dict(Schedule.objects.values_list("name", "type")) == {
        "free": "shop.new",
        "locked": "shop.ping",
    }


def test_a_process_that_replaces_another_does_not_declare_over_newer_code(hourly: None) -> None:
    """Its worker started earlier; a schedule that is missing is stored."""
    periodic("missing", "shop.ping", every=HOUR)
    clock = make(declares=False)
    clock.take_turn()
    assert Schedule.objects.get(name="hourly").type == "shop.old"
    assert Schedule.objects.filter(name="missing").exists()


def test_an_idle_fleet_without_schedules_asks_one_question_per_poll(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = scheduler.monotonic()
    monkeypatch.setattr(scheduler, "monotonic", lambda: now)

    class Counting:
        asked = 0

        def execute(self, statement: str, params: Any = None) -> None:
            assert (statement, params) == (schedules.NEXT_DUE, {"cron": True})
            self.asked += 1

        def fetchone(self) -> None:
            return None

    cursor = Counting()
    for _ in range(100):
        clock.poll(cursor)
    assert cursor.asked == 1
