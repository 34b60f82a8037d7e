"""The level of a queue and its probe: every state of the row against every change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from django_mq.models import QueueState
from django_mq.store import queue_backoff
from django_mq.store.queue_backoff import LevelChange
from tests.database import second_connection
from tests.rows import add, decide, stored

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
WAITS = [2.0, 4.0, 8.0, 10.0]


def now(cursor: Cursor) -> datetime:
    """Return the time of a claim made now."""
    cursor.execute("select statement_timestamp()")
    row = cursor.fetchone()
    assert row is not None
    found: datetime = row[0]
    return found


def fail(cursor: Cursor, claimed_at: datetime | None = None) -> LevelChange | None:
    at = claimed_at or now(cursor)
    return queue_backoff.raise_level(cursor, queue="mail", claimed_at=at, wait=WAITS[0])


def end(cursor: Cursor, step: int, claimer: str = "worker:1") -> LevelChange | None:
    return queue_backoff.end_probe(cursor, queue="mail", claimer=claimer, step=step, waits=WAITS)


def start(cursor: Cursor, claimer: str = "worker:1") -> bool:
    return queue_backoff.start_probe(cursor, queue="mail", claimer=claimer, lease=30.0)


def probing(level: int, **given: Any) -> QueueState:
    """A queue whose wait is over and whose message probes."""
    return decide(
        **{
            "backoff_level": level,
            "backoff": -1,
            "probe_by": "worker:1",
            "backoff_changed_at": PAST,
        }
        | given
    )


PAST = datetime.fromisoformat("2020-01-01T00:00Z")


def left(cursor: Cursor, until: datetime | None) -> float:
    assert until is not None
    return (until - now(cursor)).total_seconds()


def is_set_since(before: datetime, until: datetime | None, seconds: float, cursor: Cursor) -> bool:
    """Say whether a statement after `before` set `until` to `seconds` from then."""
    assert until is not None
    return before <= until - timedelta(seconds=seconds) <= now(cursor)


def lock(other: psycopg.Connection[Any]) -> None:
    other.execute("select from django_mq_queuestate where queue = 'mail' for update")


class TestRaising:
    def test_first_failure_adds_the_row_of_the_queue(self, cursor: Cursor) -> None:
        """NSQ-5, NSQ-16."""
        before = now(cursor)
        moved = fail(cursor)
        state = QueueState.objects.get()
        assert moved == LevelChange(0, 1, state.backoff_until)
        assert is_set_since(before, state.backoff_until, 2, cursor)
        assert state.backoff_level == 1
        assert state.backoff_changed_at is not None

    def test_a_queue_about_which_something_is_decided(self, cursor: Cursor) -> None:
        before = decide(paused=-1, max_in_flight=5)
        assert fail(cursor) is not None
        state = QueueState.objects.get()
        assert (state.backoff_level, state.max_in_flight) == (1, 5)
        assert state.paused_at == before.paused_at

    def test_earlier_claims_raise_the_level_only_once(self, cursor: Cursor) -> None:
        """64 messages in flight fail together: one level, not 64."""
        claimed_at = now(cursor)
        assert fail(cursor, claimed_at) is not None
        assert [fail(cursor, claimed_at) for _ in range(63)] == [None] * 63
        assert QueueState.objects.get().backoff_level == 1

    def test_only_a_probe_moves_a_queue_that_backs_off(self, cursor: Cursor) -> None:
        """A claim that began while the change was being committed has not seen it."""
        fail(cursor)
        assert fail(cursor) is None
        assert QueueState.objects.get().backoff_level == 1

    def test_claims_from_before_a_fall_do_not_count(self, cursor: Cursor) -> None:
        claimed_at = now(cursor)
        probing(1)
        assert end(cursor, -1) == LevelChange(1, 0, None)
        assert fail(cursor, claimed_at) is None
        assert fail(cursor) is not None

    def test_two_failures_at_the_same_moment(
        self, cursor: Cursor, other: psycopg.Connection[Any]
    ) -> None:
        claimed_at = now(cursor)
        decide()
        assert fail(other.cursor(), claimed_at) is not None  # not committed yet
        cursor.execute("set statement_timeout = '60s'")
        assert fail(cursor, claimed_at) is None  # skipped without a wait
        other.commit()
        assert fail(cursor, claimed_at) is None
        assert QueueState.objects.get().backoff_level == 1


class TestProbes:
    def test_one_at_a_time_after_the_wait(self, cursor: Cursor) -> None:
        """NSQ-7."""
        state = decide(backoff_level=2, backoff=60)
        assert not start(cursor)
        before = now(cursor)
        QueueState.objects.update(backoff_until=before)
        assert start(cursor)
        assert not start(cursor, "worker:2")
        assert not start(cursor, "other:1")
        assert stored(state).probe_by == "worker:1"
        assert is_set_since(before, state.probe_until, 30, cursor)

    def test_no_probe_at_full_rate(self, cursor: Cursor) -> None:
        assert not start(cursor)
        decide(backoff=-1)
        assert not start(cursor)
        assert not QueueState.objects.exclude(probe_by=None).exists()

    @pytest.mark.parametrize(
        ("until", "may"), [({}, False), ({"until": 60}, False), ({"until": -1}, True)]
    )
    def test_a_paused_queue_has_none(
        self, cursor: Cursor, until: dict[str, int], may: bool
    ) -> None:
        decide(backoff_level=1, backoff=-1, paused=-5, **until)
        assert start(cursor) is may

    def test_a_probe_that_lapsed_is_replaced_and_does_not_count(self, cursor: Cursor) -> None:
        """A worker that is lost without a report keeps it only for its lease."""
        probing(2, probe_until=now(cursor) - timedelta(seconds=1))
        assert start(cursor, "other:1")
        assert end(cursor, 1) is None
        assert end(cursor, -1, "other:1") is not None
        assert QueueState.objects.get().backoff_level == 1

    def test_two_that_ask_at_the_same_moment(
        self, cursor: Cursor, other: psycopg.Connection[Any]
    ) -> None:
        decide(backoff_level=1, backoff=-1)
        assert start(other.cursor())
        cursor.execute("set statement_timeout = '60s'")
        assert not start(cursor, "worker:2")
        other.commit()
        assert not start(cursor, "worker:2")

    @pytest.mark.parametrize(
        ("level", "step", "then"),
        [(1, 1, 2), (2, 1, 3), (4, 1, 4), (3, 0, 3), (3, -1, 2), (4, -1, 3)],
    )
    def test_end_of_a_probe_moves_the_level_and_starts_a_wait(
        self, cursor: Cursor, level: int, step: int, then: int
    ) -> None:
        """NSQ-5, NSQ-8: at any step; longer after a failure, shorter after a success."""
        before, began = probing(level), now(cursor)
        moved = end(cursor, step)
        state = QueueState.objects.get()
        assert moved == LevelChange(level, then, state.backoff_until)
        assert is_set_since(began, state.backoff_until, WAITS[then - 1], cursor)
        assert (state.backoff_level, state.probe_by, state.probe_until) == (then, None, None)
        assert (state.backoff_changed_at == before.backoff_changed_at) is (level == then)
        assert end(cursor, step) is None

    def test_the_last_step_down_ends_it(self, cursor: Cursor) -> None:
        """NSQ-4."""
        probing(1)
        assert end(cursor, -1) == LevelChange(1, 0, None)
        state = QueueState.objects.get()
        assert (state.backoff_level, state.backoff_until, state.probe_by) == (0, None, None)
        assert not start(cursor)

    def test_a_level_beyond_the_top_comes_down_to_it(self, cursor: Cursor) -> None:
        """An operator lowered the maximum."""
        probing(9)
        before = now(cursor)
        moved = end(cursor, 0)
        assert moved is not None
        assert moved.level == 4
        assert is_set_since(before, moved.until, 10, cursor)

    def test_only_its_claimer_ends_a_probe(self, cursor: Cursor) -> None:
        probing(2)
        before = QueueState.objects.values().get()
        assert [end(cursor, 1, claimer) for claimer in ("worker:2", "other:1", "")] == [None] * 3
        assert QueueState.objects.values().get() == before

    def test_probe_that_found_no_message_is_cancelled(self, cursor: Cursor) -> None:
        before = probing(2)
        queue_backoff.cancel_probe(cursor, queue="mail", claimer="other:1")
        assert stored(before).probe_by == "worker:1"
        queue_backoff.cancel_probe(cursor, queue="mail", claimer="worker:1")
        assert start(cursor, "other:1")
        assert QueueState.objects.get().backoff_level == 2

    def test_it_is_renewed_while_its_message_is_claimed(self, cursor: Cursor) -> None:
        """It is never shortened; a probe that is not ended lapses."""
        state = probing(2, probe_until=now(cursor) + timedelta(seconds=5))

        def renew(lease: float, claimer: str = "worker:1") -> float:
            queue_backoff.renew_probe(cursor, queue="mail", claimer=claimer, lease=lease)
            return left(cursor, stored(state).probe_until)

        assert renew(60.0) < 6
        add("other", leased=5)
        assert renew(60.0) < 6
        message = add(leased=-5, attempts=1)
        assert renew(60.0, "worker:2") < 6
        assert 50 < renew(60.0) <= 60
        assert renew(5.0) > 50
        message.delete()
        assert renew(90.0) < 60

    def test_a_dead_worker_does_not_keep_its_probes(self, cursor: Cursor) -> None:
        """Found by the worker's whole id, and only by that."""
        claimers = ("dead:1", "dead:22", "deadly:1", "dead_:1", "dead", "x:dead:1")
        for queue, claimer in zip("abcdef", claimers, strict=True):
            decide(queue, backoff_level=1, backoff=-1, probe_by=claimer)
        assert queue_backoff.drop_probes_of(cursor, worker="dead", excluded=["dead:22"]) == {"a"}
        assert queue_backoff.drop_probes_of(cursor, worker="dead") == {"b"}
        assert queue_backoff.drop_probes_of(cursor, worker="dead") == set()
        assert QueueState.objects.filter(probe_by=None).count() == 2
        assert set(QueueState.objects.values_list("backoff_level", flat=True)) == {1}


@pytest.mark.parametrize(
    "change",
    [
        fail,
        lambda cursor: end(cursor, -1),
        start,
        lambda cursor: queue_backoff.cancel_probe(cursor, queue="mail", claimer="worker:1"),
        lambda cursor: queue_backoff.renew_probe(
            cursor, queue="mail", claimer="worker:1", lease=9.0
        ),
        lambda cursor: queue_backoff.drop_probes_of(cursor, worker="worker"),
    ],
    ids=["fail", "end", "start", "cancel", "renew", "drop"],
)
@pytest.mark.parametrize("level", [0, 1])
def test_locked_row_is_not_waited_for(
    cursor: Cursor, other: psycopg.Connection[Any], change: Callable[[Cursor], Any], level: int
) -> None:
    """A worker's loop does not wait for locks; it tries again later."""
    state = probing(level)
    add(leased=5)
    lock(other)
    cursor.execute("set statement_timeout = '60s'")
    assert not change(cursor)
    other.rollback()
    before = QueueState.objects.values().get()
    assert before["backoff_level"] == state.backoff_level
    assert before["probe_by"] == "worker:1"


def test_standings(cursor: Cursor) -> None:
    state = probing(2)
    decide("other")
    found = queue_backoff.backoff_states(cursor, ["mail", "nowhere"])
    assert found == {"mail": (2, state.backoff_changed_at, "worker:1")}


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ({"backoff_level": 3, "backoff": 60}, 3),
        ({"backoff_level": 1, "backoff": -1}, 1),
        ({"backoff": 60}, 0),  # written by another client: the queue counts as paused
        ({}, None),
    ],
)
def test_an_operator_ends_it(cursor: Cursor, given: dict[str, Any], ended: int | None) -> None:
    claimed_at = now(cursor)
    decide(probe_by="worker:1", paused=-1, **given)
    moved = queue_backoff.end_backoff(cursor, queue="mail")
    assert moved == (None if ended is None else LevelChange(ended, 0, None))
    if ended is not None:
        state = QueueState.objects.get()
        assert (state.backoff_level, state.backoff_until, state.probe_by) == (0, None, None)
        assert state.paused_at is not None
        assert end(cursor, 1) is None
        assert fail(cursor, claimed_at) is None  # claimed before the operator decided


def test_one_level_for_all_connections(cursor: Cursor) -> None:
    """NSQ-1: zero at first, whichever connection signals."""
    claimed_at = now(cursor)
    assert queue_backoff.backoff_states(cursor, ["mail"]) == {}
    for _ in range(3):
        with second_connection() as worker:
            fail(worker.cursor(), claimed_at)
    assert queue_backoff.backoff_states(cursor, ["mail"])["mail"].level == 1
