"""How ends of deliveries move the level of a queue: threads note them, the loop writes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from django_mq import queues, signals
from django_mq.conf import get_settings
from django_mq.exceptions import Reject, Retry, Snooze, UnreadablePayload
from django_mq.executor.connections import Outage
from django_mq.executor.ended import Ended, Settled, end
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.statements import Statements
from django_mq.messages import ClaimedRow, Delivery
from django_mq.models import QueueState
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.outcomes import TimedOut
from django_mq.store import queue_backoff as store
from django_mq.worker.lease_keeper import LeaseKeeper
from django_mq.worker.queue_backoff import QueueBackoffs
from django_mq.worker.recovery import DeadWorker, Recovery
from tests.database import second_connection
from tests.rows import add, decide, stored

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
FAR = timedelta(days=1000)


@pytest.fixture(autouse=True)
def _settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "QUEUES": {
            "mail": {"backoff": {}},
            "never": {"backoff": {"maximum": 0}},
            "mixed": {},
        }
    }


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[Cursor]:
    with second_connection() as own, own.cursor() as cursor:
        yield cursor


@pytest.fixture
def heard() -> Iterator[list[tuple[str, int]]]:
    """Hear of every change: the signal's name and the new level."""
    found: list[tuple[str, int]] = []
    receivers: list[Callable[..., None]] = []
    for name in ("backoff_started", "backoff_changed", "backoff_ended"):

        def receive(
            sender: str, queue: str, level: int, until: Any, name: str = name, **more: Any
        ) -> None:
            assert sender == queue == "mail"
            assert (until is None) is (level == 0)
            found.append((name, level))

        getattr(signals, name).connect(receive)
        receivers.append(receive)
    yield found
    for name, receive in zip(
        ("backoff_started", "backoff_changed", "backoff_ended"), receivers, strict=True
    ):
        getattr(signals, name).disconnect(receive)


def now(cursor: Cursor) -> datetime:
    cursor.execute("select statement_timestamp()")
    found: datetime = cursor.fetchall()[0][0]
    return found


class Fleet:
    """Workers that share a database, and a clock that jumps to the end of each wait."""

    def __init__(self, cursor: Cursor, size: int = 3) -> None:
        self.cursor = cursor
        self.workers = [
            QueueBackoffs(
                get_settings(),
                stopped=lambda queue, before, n=n: self.stopped.update({(n, queue): before}),
                random=random.Random(n).random,
            )
            for n in range(size)
        ]
        #: By worker and queue: what was claimed before then must not start; None: nothing.
        self.stopped: dict[tuple[int, str], datetime | None] = {}
        self.seconds = 0.0
        self.longest = 0.0
        self._claims = 0

    def claim(self, queue: str = "mail", worker: int = 0) -> Delivery:
        """Return what a claim of now would give to a handler."""
        self._claims += 1
        at = now(self.cursor)
        return Delivery(
            ClaimedRow(
                id=self._claims, queue=queue, type="t", handler="h", schema_version=1,
                payload="{}", metadata="{}", priority=0, key=None, attempts=1, max_attempts=20,
                retry=None, claimed_by=f"w{worker}:{self._claims}", wants_result=False,
                suspect=False, held_for=None, created=at.timestamp(), claimed=at.timestamp(),
            )
        )  # fmt: skip

    def end(self, delivery: Delivery, error: BaseException | None, worker: int = 0) -> bool:
        """Let the handler of `delivery` end; return whether there is something to write."""
        return self.workers[worker].note([ended(delivery, error)])

    def write(self, worker: int = 0) -> set[str]:
        return self.workers[worker].write(self.cursor)

    @property
    def state(self) -> QueueState:
        return QueueState.objects.get(queue="mail")

    @property
    def allowance(self) -> str:
        """How many messages of the queue the fleet may have in flight: all, one, none."""
        stand = store.standings(self.cursor, ["mail"]).get("mail")
        if stand is None or stand.level == 0:
            return "all"
        may = store.start_probe(self.cursor, queue="mail", claimer="ask:1", lease=30.0)
        store.cancel_probe(self.cursor, queue="mail", claimer="ask:1")
        return "one" if may else "none"

    def wait(self) -> None:
        """Let the wait of the queue pass."""
        until = self.state.backoff_until
        assert until is not None
        waited = (until - now(self.cursor)).total_seconds()
        assert waited > 0
        self.longest = max(self.longest, waited)
        self.seconds += waited
        QueueState.objects.filter(queue="mail").update(backoff_until=now(self.cursor))

    def probe(self, error: BaseException | None, worker: int = 0) -> int:
        """One worker gets the probe, the others none; return the level after it ended."""
        delivery = self.claim(worker=worker)
        claimer = delivery._row.claimed_by
        assert store.start_probe(self.cursor, queue="mail", claimer=claimer, lease=30.0)
        for other in range(len(self.workers)):
            assert not store.start_probe(
                self.cursor, queue="mail", claimer=f"w{other}:0", lease=30.0
            )
        self.workers[worker].probe_started("mail", claimer)
        assert self.end(delivery, error, worker)
        self.write(worker)
        return self.state.backoff_level


def ended(delivery: Delivery, error: BaseException | None) -> Ended:
    if error is None:
        return Ended(delivery, Settled.ACKED)
    return end(delivery, RetryPolicy(), error, seconds=0.0)


@pytest.fixture
def fleet(cursor: Cursor) -> Fleet:
    return Fleet(cursor)


def test_a_failure_lets_the_queue_back_off(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    """NSQ-5, NSQ-16: waiting messages are to be released, and it is announced once."""
    delivery = fleet.claim()
    assert fleet.end(delivery, KeyError("host"))
    assert fleet.stopped == {(0, "mail"): None}
    assert fleet.write() == {"mail"}
    assert fleet.stopped == {(0, "mail"): fleet.state.backoff_changed_at}
    assert fleet.allowance == "none"
    assert heard == [("backoff_started", 1)]
    assert fleet.write() == set()


@pytest.mark.parametrize(
    "error", [None, Retry(), Retry(5), Snooze(5), Reject("no"), TimedOut("slow"),
              UnreadablePayload("deep")], ids=lambda error: type(error).__name__
)  # fmt: skip
def test_at_full_rate_nothing_else_is_noted(fleet: Fleet, error: BaseException | None) -> None:
    """NSQ-2, NSQ-11, NSQ-12, NSQ-14, NSQ-20: at zero a success changes, and writes, nothing."""
    assert not fleet.end(fleet.claim(), error)
    assert fleet.write() == set()
    assert not QueueState.objects.exists()


@pytest.mark.parametrize("queue", ["never", "mixed", "unlisted"])
def test_queues_without_backoff_are_none_of_its_business(
    fleet: Fleet, queue: str, settings: Any
) -> None:
    """NSQ-3: a maximum of zero is never in backoff mode."""
    assert not fleet.end(fleet.claim(queue), KeyError("host"))
    assert fleet.write() == set()
    assert fleet.workers[0].queues == {"mail"}
    settings.DJANGO_MQ = {"QUEUES": {"never": {"backoff": {"maximum": 0}}, "mixed": {}}}
    assert not Fleet(fleet.cursor, 1).workers[0].active
    assert not QueueState.objects.exists()


@pytest.mark.parametrize("error", [None, KeyError("host"), Retry()])
def test_a_backoff_that_the_settings_no_longer_know_ends_with_a_probe(
    fleet: Fleet, settings: Any, error: BaseException | None, heard: list[tuple[str, int]]
) -> None:
    """Else the queue would stay where it is for ever."""
    settings.DJANGO_MQ = {}
    fleet = Fleet(fleet.cursor)
    decide(backoff_level=3, backoff=-1, backoff_changed_at=now(fleet.cursor))
    assert not fleet.workers[0].active
    assert fleet.probe(error) == 0
    assert not fleet.workers[0].active
    assert heard == [("backoff_ended", 0)]


def test_the_sequence_of_failures_and_successes(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    """NSQ-4, NSQ-7, NSQ-8, NSQ-9, NSQ-11: all, none, one, none, one, none, one, all."""
    assert not fleet.end(fleet.claim(), None)
    assert fleet.allowance == "all"
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    for error, level in ((KeyError("host"), 2), (None, 1), (None, 0)):
        assert fleet.allowance == "none"
        fleet.wait()
        assert fleet.allowance == "one"
        assert fleet.probe(error) == level
    assert fleet.allowance == "all"
    assert heard == [
        ("backoff_started", 1),
        ("backoff_changed", 2),
        ("backoff_changed", 1),
        ("backoff_ended", 0),
    ]


@pytest.mark.parametrize(
    "error",
    [Retry(), Snooze(5), TimedOut("slow"), UnreadablePayload("deep")],
    ids=lambda error: type(error).__name__,
)
def test_a_probe_that_says_nothing_lets_it_wait_again(
    fleet: Fleet, heard: list[tuple[str, int]], error: BaseException
) -> None:
    """NSQ-5, NSQ-12, NSQ-20: the same level, a new wait."""
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    assert fleet.probe(error) == 1
    assert fleet.allowance == "none"
    assert heard == [("backoff_started", 1)]


def test_a_rejected_probe_is_a_handler_that_works(fleet: Fleet) -> None:
    """NSQ-14."""
    fleet.end(fleet.claim(), Retry(60, backoff=True))  # NSQ-13
    fleet.write()
    fleet.wait()
    assert fleet.probe(Reject("no such user")) == 0


@pytest.mark.parametrize("error", [None, KeyError("host")], ids=["success", "failure"])
def test_what_was_in_flight_moves_nothing(fleet: Fleet, error: BaseException | None) -> None:
    early = [fleet.claim(worker=n % 3) for n in range(20)]
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    until = fleet.state.backoff_until
    for n, delivery in enumerate(early):
        fleet.end(delivery, error, n % 3)
        assert fleet.write(n % 3) <= {"mail"}
    assert (fleet.state.backoff_level, fleet.state.backoff_until) == (1, until)


def test_after_the_way_back_a_straggler_moves_nothing(fleet: Fleet) -> None:
    straggler = fleet.claim(worker=1)
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    assert fleet.probe(None) == 0
    fleet.end(straggler, KeyError("host"), 1)
    assert fleet.write(1) == set()
    assert fleet.allowance == "all"


def test_a_worker_learns_what_another_wrote(
    fleet: Fleet, cursor: Cursor, heard: list[tuple[str, int]]
) -> None:
    """It gives back what it holds though it changed nothing; and says nothing."""
    deliveries = [fleet.claim(worker=1) for _ in range(5)]
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    assert fleet.end(deliveries[0], KeyError("host"), 1)
    assert fleet.write(1) == {"mail"}
    assert fleet.stopped[1, "mail"] == fleet.state.backoff_changed_at
    assert not fleet.end(deliveries[1], KeyError("host"), 1)  # known to be older by now
    assert heard == [("backoff_started", 1)]


def test_what_cannot_be_written_is_kept(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    """A lost database; then a session that has the row locked, for which nothing waits."""
    fleet.end(fleet.claim(), KeyError("host"))
    with second_connection() as lost:
        gone = lost.cursor()
    with pytest.raises(psycopg.OperationalError):
        fleet.workers[0].write(gone)
    decide()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate for update")
        assert fleet.write() == set()
    assert heard == []
    assert fleet.workers[0].noted()
    assert fleet.stopped == {(0, "mail"): None}
    assert fleet.write() == {"mail"}
    assert heard == [("backoff_started", 1)]
    assert not fleet.workers[0].noted()
    assert fleet.stopped == {(0, "mail"): fleet.state.backoff_changed_at}


def test_the_end_of_a_probe_is_kept_too(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    with second_connection() as other, second_connection() as lost:
        gone = lost.cursor()
        lost.close()
        delivery = fleet.claim()
        claimer = delivery._row.claimed_by
        store.start_probe(fleet.cursor, queue="mail", claimer=claimer, lease=30.0)
        fleet.workers[0].probe_started("mail", claimer)
        fleet.end(delivery, None)
        with pytest.raises(psycopg.OperationalError):
            fleet.workers[0].write(gone)
        with other.transaction():
            other.execute("select from django_mq_queuestate for update")
            fleet.write()
    assert heard == [("backoff_started", 1)]
    assert fleet.workers[0].probes() == [("mail", claimer)]
    assert fleet.write() == set()
    assert heard[1:] == [("backoff_ended", 0)]
    assert fleet.workers[0].probes() == []


def test_a_probe_that_found_nothing_is_given_back(fleet: Fleet) -> None:
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    store.start_probe(fleet.cursor, queue="mail", claimer="w0:9", lease=30.0)
    fleet.workers[0].probe_started("mail", "w0:9")
    assert fleet.allowance == "none"
    fleet.workers[0].cancel_probe(fleet.cursor, "mail", "w0:9")
    assert fleet.workers[0].probes() == []
    assert fleet.allowance == "one"


def test_a_fleet_that_fails_together_backs_off_once(
    fleet: Fleet, heard: list[tuple[str, int]]
) -> None:
    """64 failures at once, then the service is back: full rate within 5 minutes (here: 3 s)."""
    deliveries = [fleet.claim(worker=n % 3) for n in range(64)]
    threads = [
        threading.Thread(target=fleet.end, args=(each, KeyError("host"), n % 3))
        for n, each in enumerate(deliveries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in range(3):
        assert fleet.write(worker) == {"mail"}
    assert fleet.state.backoff_level == 1
    fleet.wait()
    assert fleet.probe(None) == 0
    assert fleet.seconds < 3
    assert [name for name, _ in heard] == ["backoff_started", "backoff_ended"]


def test_after_a_long_outage_it_is_at_full_rate_within_five_minutes(fleet: Fleet) -> None:
    """NSQ-6, NSQ-8: 64 failing probes; the way back from the top level takes 246 s and jitter."""
    chance = random.Random(64)
    fleet.end(fleet.claim(), ConnectionError("refused"))
    fleet.write()
    for _ in range(64):
        fleet.wait()
        fleet.probe(ConnectionError("refused"), chance.randrange(3))
    assert fleet.state.backoff_level == 7
    assert fleet.longest <= 132
    fleet.seconds = 0.0
    levels = []
    while not levels or levels[-1]:
        fleet.wait()
        levels.append(fleet.probe(None, chance.randrange(3)))
    assert levels == [6, 5, 4, 3, 2, 1, 0]
    assert 240 * 0.9 < fleet.seconds < 300


def test_queues_that_fail_together_do_not_probe_together(cursor: Cursor, settings: Any) -> None:
    """NSQ-6 as changed: jitter."""
    names = [f"q{n}" for n in range(20)]
    settings.DJANGO_MQ = {"QUEUES": {name: {"backoff": {"multiplier": 60}} for name in names}}
    fleet = Fleet(cursor, 1)
    for name in names:
        fleet.end(fleet.claim(name), KeyError("host"))
    fleet.write()
    ends = [state.backoff_until for state in QueueState.objects.all() if state.backoff_until]
    assert len(ends) == 20
    assert max(ends) - min(ends) > timedelta(seconds=5)


def test_a_pause_and_a_limit_let_nothing_through(fleet: Fleet) -> None:
    """NSQ-10: what is decided about the queue meanwhile changes nothing in its backoff."""
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    before = fleet.state
    queues.pause("mail")
    queues.limit("mail", 500)
    queues.resume("mail")
    after = fleet.state
    assert fleet.allowance == "none"
    assert (after.backoff_level, after.backoff_until) == (1, before.backoff_until)


def test_a_change_is_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "django_mq"):
        fleet.end(fleet.claim(), KeyError("host"))
        fleet.write()
    [record] = caplog.records
    found = vars(record)
    assert (found["event"], found["queue"], found["level"]) == ("backoff_started", "mail", 1)
    assert record.levelname == "WARNING"


class Told:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def freed() -> Told:
    return Told()


@pytest.fixture
def keeper(transactional_db: None) -> Iterator[LeaseKeeper]:
    """A lease keeper in the thread of the test: its process runs the probe `w:1` of mail."""
    keeper = LeaseKeeper(
        alias="default",
        local_queue=LocalQueue(batch=1, most=1, on_room=lambda: None),
        lease=lambda queue: 30.0,
        shortest_lease=30.0,
        heartbeat=dict,
        on_heartbeat=lambda since: None,
        probes=lambda: [("mail", "w:1")],
    )
    yield keeper
    keeper._statements.close()


@pytest.fixture
def statements(transactional_db: None) -> Iterator[Statements]:
    statements = Statements("default")
    yield statements
    statements.close()


def test_a_dying_worker_does_not_keep_its_probe(
    statements: Statements, freed: Told, cursor: Cursor
) -> None:
    """Its sibling, which settles what it held, gives the probe back, and looks for messages."""
    decide(backoff_level=1, backoff=-1, probe_by="dead:1", probe_until=now(cursor) + FAR)
    decide("other", backoff_level=1, backoff=-1, probe_by="alive:1", probe_until=now(cursor) + FAR)
    recovery = Recovery(
        "default",
        outage=Outage(threading.Event()),
        policy=lambda row: RetryPolicy(),
        on_freed=freed,
    )
    recovery.settle(statements, DeadWorker("dead", "killed"))
    assert freed.count == 1
    assert dict(QueueState.objects.values_list("queue", "probe_by")) == {
        "mail": None,
        "other": "alive:1",
    }
    assert store.start_probe(cursor, queue="mail", claimer="alive:2", lease=30.0)
    recovery.settle(statements, DeadWorker("dead", "killed"))
    assert freed.count == 1


def test_a_probe_that_runs_long_is_renewed(keeper: LeaseKeeper, cursor: Cursor) -> None:
    """With the lease of its message: a handler may run longer than a lease."""
    soon = now(cursor) + timedelta(seconds=5)
    mine = decide(backoff_level=1, backoff=-1, probe_by="w:1", probe_until=soon)
    other = decide("other", backoff_level=1, backoff=-1, probe_by="x:1", probe_until=soon)
    add(leased=5, claimed_by="w:1", attempts=1)
    add("other", leased=5, claimed_by="x:1", attempts=1)
    keeper._renew()
    until = stored(mine).probe_until
    assert until is not None
    assert until - soon > timedelta(seconds=20)
    assert stored(other).probe_until == soon
