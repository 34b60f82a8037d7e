"""What ran without a transaction, when the one that was to settle it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.store import settle
from django_mq.worker import locking
from tests.database import second_connection
from tests.worker.conftest import Bench, add_many, effect, effects, pid_of, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

aloof = pytest.mark.parametrize("make_bench", ["aloof"], indirect=True)

TAKE = "update django_mq_queuedmessage set attempts = 2, claimed_by = 'x:1' where id = %s"
WAITS = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"


@pytest.fixture
def removing(other: psycopg.Connection[Any]) -> Iterator[Callable[[str], None]]:
    """Have the server run a text before it removes a message, until the test ends."""

    def removing(text: str) -> None:
        other.execute(
            "create function worker_removing() returns trigger language plpgsql as"
            f" $$ begin {text} return old; end $$;"
            "create trigger worker_removing before delete on django_mq_queuedmessage"
            " for each row execute function worker_removing()"
        )

    yield removing
    other.execute("drop function worker_removing cascade")


class Ran:
    """Messages with a hook each; `do` is called by the handler of the third, the first time."""

    def __init__(self, do: Callable[[Delivery], object], count: int = 4) -> None:
        self.all: list[int] = []
        self.hooks: list[int] = []

        @handler("#", queue="mail", name="h")
        def h(delivery: Delivery) -> None:
            place = self.ids.index(delivery.id)
            self.all.append(place)
            transaction.on_commit(lambda: self.hooks.append(place))
            if place == min(2, count - 1) and self.all.count(place) == 1:
                do(delivery)

        self.ids = [message.pk for message in add_many(count, handler="h", max_attempts=5)]

    def places(self, ids: Any) -> list[int]:
        """Return which of the messages these are."""
        return sorted(self.ids.index(id) for id in ids)


def nothing(delivery: Delivery) -> None: ...


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("code", ["55000", "57014", "55P03", "40001", "P0001"])
def test_a_settle_that_is_always_refused(
    bench: Bench, removing: Callable[[str], None], code: str, count: int
) -> None:
    """Guarantees 11 and 16, as where somebody's trigger fails: who cannot be settled has failed,
    after a while where it looks like a conflict, or as if the server were gone."""
    ran = Ran(nothing, count)
    bad = ran.ids[-1]
    removing(f"if old.id = {bad} then raise exception 'no' using errcode = '{code}'; end if;")
    bench.run_all(bench.claim())
    assert (waiting(), ran.places(set(bench.settled))) == ({bad}, list(range(count)))
    assert sorted(ran.hooks) == list(range(count - 1))
    assert list(FailedAttempt.objects.values_list("message_id", flat=True)) == [bad]


def test_a_failure_that_is_always_refused(bench: Bench, other: psycopg.Connection[Any]) -> None:
    """Of who ended its transaction, as if the server were gone: its lease lapses in the end."""
    other.execute(
        "create function worker_removing() returns trigger language plpgsql as"
        " $$ begin raise exception 'no' using errcode = '57014'; end $$;"
        "create trigger worker_removing before insert on django_mq_failedattempt"
        " for each row execute function worker_removing()"
    )
    try:
        ran = Ran(lambda delivery: connection.close())
        bench.run_all(bench.claim())
    finally:
        other.execute("drop function worker_removing cascade")
    assert (ran.places(waiting()), ran.places(bench.settled)) == ([2], [0, 1, 2, 3])
    assert sorted(ran.hooks) == [0, 1, 3]


@aloof
def test_a_settle_that_is_refused_where_the_first_was_cut(
    bench: Bench, removing: Callable[[str], None], other: psycopg.Connection[Any]
) -> None:
    """Nobody but the one it is about waits until its lease lapses."""
    ran = Ran(lambda delivery: other.execute("select pg_terminate_backend(%s, 10000)", [pid]))
    bad = ran.ids[1]
    removing(f"if old.id = {bad} then raise exception 'no' using errcode = 'P0001'; end if;")
    tasks = bench.claim()
    bench._know()
    pid = pid_of(bench)
    bench.run_all(tasks)
    assert (waiting(), ran.places(set(bench.settled))) == ({bad}, [0, 1, 2, 3])
    assert sorted(ran.hooks) == [0, 2, 3]
    assert list(FailedAttempt.objects.values_list("message_id", flat=True)) == [bad]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_servers_limits_hold_for_every_settle(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    other: psycopg.Connection[Any],
    elsewhere: bool,
) -> None:
    """Guarantee 6: who freezes, or is gone, between ack and commit does not keep the rows."""
    names = "idle_in_transaction_session_timeout", "client_connection_check_interval"
    seen: list[str] = []
    ack = settle.ack

    def spy(cursor: Any, fences: Any) -> Any:
        for name in names:
            cursor.execute("select current_setting(%(name)s)", {"name": name})
            seen.append(cursor.fetchone()[0])
        return ack(cursor, fences)

    monkeypatch.setattr(settle, "ack", spy)

    def cut(delivery: Delivery) -> None:
        if elsewhere:
            other.execute("select pg_terminate_backend(%s, 10000)", [pid_of(bench)])

    ran = Ran(cut, 3)
    bench.run_all(bench.claim())
    assert waiting() == set()
    assert "0" not in seen
    assert ran.places(bench.settled) == [0, 1, 2]


@aloof
@pytest.mark.parametrize("arrives", [True, False])
def test_the_second_settle_is_cut_too(
    make_bench: Callable[..., Bench],
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    arrives: bool,
) -> None:
    """What became of it is asked for, as of the first one."""
    bench = make_bench(port=proxy.port)

    def end_it(delivery: Delivery) -> None:
        connection.close()
        proxy.cut_at("COMMIT", arrives=arrives)

    ran = Ran(end_it)
    bench.run_all(bench.claim())
    assert proxy.cuts == 1
    assert (ran.all, ran.hooks) == ([0, 1, 2, 3], [0, 1, 3])
    assert (ran.places(waiting()), ran.places(bench.settled)) == ([2], [0, 1, 2, 3])
    assert "lease_lost" not in [getattr(r, "event", "") for r in caplog.records]


@aloof
def test_a_renewal_of_rows_whose_settle_was_cut_is_waited_for(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    """It takes a moment: nobody runs twice for that."""

    def cut(delivery: Delivery) -> None:
        other.execute("select pg_terminate_backend(%s, 10000)", [pid_of(bench)])
        other.execute("begin")
        other.execute("update django_mq_queuedmessage set leased_until = now() + interval '1 min'")
        thread.start()

    def commit_when_somebody_waits() -> None:
        waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        deadline = monotonic() + 30
        with second_connection() as watcher:
            while monotonic() < deadline and watcher.execute(waits).fetchone() == (0,):
                pass
        in_time.append(monotonic() < deadline)
        other.execute("commit")

    in_time: list[bool] = []
    thread = threading.Thread(target=commit_when_somebody_waits)
    ran = Ran(cut, 3)
    bench.run_all(bench.claim())
    thread.join()
    assert (in_time, ran.all, ran.hooks, waiting()) == ([True], [0, 1, 2], [0, 1, 2], set())


@aloof
def test_who_was_taken_over_while_it_ran_takes_nobody_along(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    """An operator removes one of several: the others are done, each with its hooks."""
    ran = Ran(lambda _: other.execute("delete from django_mq_queuedmessage where id = %s", [bad]))
    bad = ran.ids[1]
    bench.run_all(bench.claim())
    assert (ran.all, ran.hooks, waiting()) == ([0, 1, 2, 3], [0, 2, 3], set())
    assert ran.places(bench.settled) == [0, 1, 2, 3]


@aloof
def test_who_ended_its_transaction_and_was_taken_over_takes_nobody_along(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    def end_it(delivery: Delivery) -> None:
        connection.close()
        other.execute(TAKE, [delivery.id])

    ran = Ran(end_it)
    bench.run_all(bench.claim())
    assert (ran.all, ran.hooks, ran.places(waiting())) == ([0, 1, 2, 3], [0, 1, 3], [2])
    assert FailedAttempt.objects.count() == 0


@aloof
def test_who_is_not_locked_late_is_reported_once(
    bench: Bench, other: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the settle of the others is refused then, since an operator has one of them."""

    def use(delivery: Delivery) -> None:
        other.execute(TAKE, [delivery.id])
        other.execute("begin")
        other.execute("select from django_mq_queuedmessage where id = %s for update", ran.ids[:1])
        effect(delivery)

    ran = Ran(use)
    remainder = bench.run(bench.claim())
    assert [ran.places([t.delivery.id for t in tasks]) for tasks in vars_of(remainder)] == [
        [3],
        [],
        [0],
    ]
    other.execute("commit")
    bench.run_all([*remainder.locked, *remainder.left])
    assert (ran.places(bench.settled), effects()) == ([0, 1, 2, 3], set())
    assert [getattr(r, "event", "") for r in caplog.records].count("lease_lost") == 1


def vars_of(remainder: Any) -> tuple[Any, Any, Any]:
    return remainder.left, remainder.again, remainder.locked


@aloof
def test_nobody_is_overdue_who_waits_for_its_lock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process would be killed for that."""
    left: list[float] = []
    answers = locking._answers

    def watching(driver: Any) -> Any:
        left.extend(entry.deadline - monotonic() for entry in bench.board.read("bench"))
        return answers(driver)

    @handler("#", queue="mail", name="h", timeout=0.2)
    def h(delivery: Delivery) -> None:
        (entry,) = bench.board.read("bench")
        while monotonic() < entry.deadline:
            pass
        monkeypatch.setattr(locking, "_answers", watching)
        connection.cursor()
        monkeypatch.undo()

    add_many(1, handler="h")
    bench.run_all(bench.claim())
    assert len(left) == 1
    assert left[0] > settle.PATIENCE


@aloof
def test_an_operator_who_waits_for_us_is_not_the_victim(
    bench: Bench, other: psycopg.Connection[Any], removing: Callable[[str], None]
) -> None:
    """He has the last row of a slice, and waits for its first: we give up before the server looks
    for deadlocks."""
    ran = Ran(nothing, 3)
    removing("perform pg_advisory_xact_lock_shared(77);")
    tasks = bench.claim()
    bench._know()
    pid = pid_of(bench)
    said: list[str] = []

    def operate() -> None:
        with second_connection() as watcher:
            deadline = monotonic() + 30
            while monotonic() < deadline and watcher.execute(WAITS, [pid]).fetchone() != (True,):
                pass
        other.execute("select pg_advisory_unlock(77)")
        try:
            other.execute(
                "update django_mq_queuedmessage set suspect = suspect where id = %s", ran.ids[:1]
            )
        except psycopg.Error as error:
            said.append(type(error).__name__)
        other.execute("rollback")

    other.execute("select pg_advisory_lock(77)")  # holds up the settle at its first row
    other.execute("begin")
    other.execute("select from django_mq_queuedmessage where id = %s for update", ran.ids[2:])
    thread = threading.Thread(target=operate)
    thread.start()
    bench.run_all(tasks)
    thread.join()
    assert (said, waiting(), ran.places(set(bench.settled))) == ([], set(), [0, 1, 2])
