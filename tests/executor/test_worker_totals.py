"""Handler counts: tallies of a worker, in its heartbeat and in signals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_mq import Reject, Retry, RetryPolicy, Snooze, fixed, handler, queues, signals
from django_mq.executor import worker_totals
from django_mq.executor.ended import Ended, Settled
from django_mq.messages import ClaimedRow, Delivery
from django_mq.models import WorkerHeartbeat
from django_mq.policy.error_text import Failure
from django_mq.policy.outcomes import DeadLettered, Retried, Snoozed
from django_mq.worker import Worker
from django_mq.worker import lease_keeper as keeping
from tests.rows import add
from tests.worker.conftest import PATIENCE, Running, Said

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FAILURE = Failure("ValueError", "no")
Start = Callable[..., Running]


def ended(
    settled: Settled = Settled.ACKED,
    seconds: float = 0.25,
    *,
    name: str = "h",
    attempt: int = 1,
    age: float = 2.0,
    claimed_by: str = "me:1",
    at: datetime = NOW,
    outcome: Any = None,
) -> Ended:
    row = ClaimedRow(
        id=1, queue="mail", type="t", handler=name, schema_version=1, payload="{}",
        metadata="{}", priority=0, key=None, attempts=attempt, max_attempts=20, retry=None,
        claimed_by=claimed_by, wants_result=False, suspect=False, held_for=None,
        created=at.timestamp() - age, claimed=at.timestamp(), waited=age,
    )  # fmt: skip
    return Ended(Delivery(row), settled, seconds=seconds, outcome=outcome)


@pytest.fixture
def _known() -> None:
    for name in ("h", "i"):
        handler(name, name=name)(lambda delivery: None)


def counted(timings: worker_totals.WorkerTotals, name: str = "h") -> tuple[int, ...]:
    found = timings.read()[name]
    return (found.acked, found.failed, found.retried, found.snoozed, found.dead)


@pytest.mark.parametrize(
    ("settled", "outcome", "counts"),
    [
        (Settled.ACKED, None, (1, 0, 0, 0, 0)),
        (Settled.FINISHED, None, (1, 0, 0, 0, 0)),
        (Settled.FAILED, Retried(1.0, FAILURE, False), (0, 1, 1, 0, 0)),
        (Settled.FAILED, DeadLettered("exhausted", FAILURE), (0, 1, 0, 0, 1)),
        (Settled.SNOOZED, Snoozed(1.0), (0, 0, 0, 1, 0)),
        (Settled.DEAD_UNSTARTED, None, (0, 0, 0, 0, 1)),
        (Settled.HELD, None, (0, 0, 0, 0, 0)),
    ],
)
@pytest.mark.usefixtures("_known")
def test_each_end_is_counted(settled: Settled, outcome: Any, counts: tuple[int, ...]) -> None:
    """CAR-42, NSQ-34."""
    these = worker_totals.WorkerTotals()
    these.add([ended(settled, outcome=outcome)])
    assert counted(these) == counts


@pytest.mark.usefixtures("_known")
def test_only_first_attempts_count_as_waits() -> None:
    """CAR-42: a later one waits for its backoff."""
    these = worker_totals.WorkerTotals()
    these.add([ended(age=2.0), ended(attempt=2, age=60.0), ended(attempt=3, age=600.0)])
    found = these.read()["h"].timings("h")
    assert found.waited is not None
    assert found.ran is not None
    assert (found.waited.count, found.waited.max, found.ran.count) == (1, 2.0, 3)


@pytest.mark.usefixtures("_known")
def test_messages_that_did_not_run_here_took_no_time() -> None:
    these = worker_totals.WorkerTotals()
    these.add([ended(Settled.DEAD_UNSTARTED, 0.0), ended(Settled.FAILED, 0.0)])
    found = these.read()["h"].timings("h")
    assert (found.dead, found.waited, found.ran) == (2, None, None)


@pytest.mark.usefixtures("_known")
def test_handlers_are_counted_apart_and_the_last_is_remembered() -> None:
    """NSQ-34: the time of the last message."""
    these = worker_totals.WorkerTotals()
    later = NOW + timedelta(seconds=9)
    these.add([ended(name="h", at=later), ended(name="i", seconds=0.5), ended(name="h")])
    h, i = (these.read()[name].timings(name) for name in ("h", "i"))
    assert (h.acked, i.acked) == (2, 1)
    assert h.ran is not None
    assert i.ran is not None
    assert (h.ran.max, i.ran.max) == (0.25, 0.5)
    these.add([ended(name="h", at=later)])
    these.add([ended(name="h")])
    assert these.read()["h"].last_at == later


@pytest.mark.usefixtures("_known")
def test_names_that_only_rows_know_do_not_pile_up() -> None:
    """S27: labels come from registered handlers, not from rows."""
    these = worker_totals.WorkerTotals()
    these.add([ended(Settled.DEAD_UNSTARTED, 0.0, name=f"made-up-{n}") for n in range(50)])
    assert list(these.read()) == [""]
    assert counted(these, "") == (0, 0, 0, 0, 50)


def test_an_old_name_counts_for_its_handler() -> None:
    handler("t", name="new", aliases=("old",))(lambda delivery: None)
    these = worker_totals.WorkerTotals()
    these.add([ended(name="old"), ended(name="new")])
    assert list(these.read()) == ["new"]
    assert counted(these, "new")[0] == 2


def test_heartbeat_has_a_maximum_of_handlers() -> None:
    these = worker_totals.WorkerTotals()
    for n in range(worker_totals.MAX_HANDLERS + 5):
        handler("t", name=f"h{n}")(lambda delivery: None)
        these.add([ended(name=f"h{n}")] * (1 if n < 5 else 2))
    told = these.snapshot()
    assert len(told) == worker_totals.MAX_HANDLERS
    assert not told.keys() & {f"h{n}" for n in range(5)}
    json.dumps(told)


@pytest.mark.usefixtures("_known")
def test_each_worker_of_a_process_counts_its_own() -> None:
    mine, other = worker_totals.begin("me"), worker_totals.begin("other")
    try:
        worker_totals.count([ended(claimed_by="other:7"), ended(claimed_by="other:7")])
        worker_totals.count([ended(claimed_by="me:1")])
        worker_totals.count([])
        assert (counted(mine)[0], counted(other)[0]) == (1, 2)
        # No worker claimed it: it expired, or its worker died. Once is enough.
        worker_totals.count([ended(Settled.DEAD_UNSTARTED, 0.0, claimed_by="")])
        assert counted(mine)[4] + counted(other)[4] == 1
    finally:
        worker_totals.end("me")
        worker_totals.end("other")
    worker_totals.count([ended(claimed_by="me:1")])
    assert counted(mine)[0] == 1


# ---- in a worker


@pytest.mark.django_db(transaction=True)
def test_a_worker_can_be_read(start: Start, said: Said) -> None:
    """CAR-42: name, whether it runs, options, and its handlers' counts."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        what = delivery.payload.get("what")
        if what == "fail" and delivery.attempt == 1:
            raise ValueError("no")
        if what == "reject":
            raise Reject("no")

    @handler("#", queue="post", name="i")
    def i(delivery: Delivery) -> None:
        raise Snooze(3600)

    for what in (None, None, "fail", "reject"):
        add(handler="h", payload={"what": what})
    add("post", handler="i")
    add("post", handler="i", expires=-1)
    running = start(until_empty=True, queues=["mail", "post"], threads=2)
    said.wait("message_acked", 3)
    assert running.join()
    worker = running.worker
    assert (worker.running, worker.id, worker.sleeps) == (False, "", 0)
    assert (worker.queues, worker.threads) == (("mail", "post"), 2)
    found = worker.timings()
    first, second = found["h"], found["i"]
    assert (first.acked, first.failed, first.retried, first.dead) == (3, 2, 1, 1)
    assert (second.snoozed, second.acked, second.failed, second.dead) == (1, 0, 0, 1)
    assert first.waited is not None
    assert first.ran is not None
    assert (first.waited.count, first.ran.count) == (4, 5)
    assert 0 < first.ran.min <= first.ran.p50 <= first.ran.max < PATIENCE


@pytest.mark.django_db(transaction=True)
def test_a_batch_counts_for_each_of_its_messages(start: Start) -> None:
    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None: ...

    for _ in range(3):
        add(handler="h")
    running = start(until_empty=True)
    assert running.join()
    assert running.worker.timings()["h"].acked == 3


@pytest.mark.django_db(transaction=True)
def test_coroutines_are_counted_too(start: Start) -> None:
    @handler("#", queue="mail", name="h")
    async def h(delivery: Delivery) -> None: ...

    for _ in range(3):
        add(handler="h")
    running = start(until_empty=True)
    assert running.join()
    found = running.worker.timings()["h"]
    assert found.ran is not None
    assert (found.acked, found.ran.count) == (3, 3)


@pytest.mark.django_db(transaction=True)
def test_heartbeat_shows_the_counts_to_the_fleet(
    start: Start, said: Said, gate: threading.Event, monkeypatch: Any
) -> None:
    """CAR-42, NSQ-34: while it works, everybody can see its counts."""
    monkeypatch.setattr(keeping, "HEARTBEAT_SECONDS", 0.02)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload:
            assert gate.wait(PATIENCE)

    add(handler="h")
    running = start()
    said.wait("message_acked")
    assert running.worker.running
    add(handler="h", payload={"wait": True}, after=-30)
    said.wait("message_started", 2)
    seen = queues.timings()
    for _ in range(1000):
        if "h" in (seen := queues.timings()):
            break
        threading.Event().wait(0.02)
    assert seen["h"].acked == 1
    assert queues.timings(worker=running.worker.id) == seen
    assert queues.timings(worker="nobody") == {}
    gate.set()
    running.stop()
    assert queues.timings() == {}
    assert not WorkerHeartbeat.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "not atomic"])
def test_signals_carry_how_long_it_took(start: Start, said: Said, options: dict[str, Any]) -> None:
    """KAF-17: time in queue; the handler's start, end and exception, with its duration."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=2), **options)
    def h(delivery: Delivery) -> None:
        if delivery.attempt == 1 and delivery.payload:
            raise Retry(after=0) if delivery.payload["again"] else ValueError("no")

    plain = add(handler="h", created=-5)
    again = add(handler="h", created=-7, payload={"again": True}, max_attempts=2)
    last = add(handler="h", created=-9, payload={"again": False}, max_attempts=1)
    running = start(until_empty=True)
    said.wait("message_acked", 2)
    assert running.join()

    def told(name: str) -> dict[tuple[int, int], dict[str, Any]]:
        return {
            (delivery.id, delivery.attempt): data
            for each, delivery, data in said.all
            if each == name
        }

    started, acked = told("message_started"), told("message_acked")
    assert started.keys() == {(plain.pk, 1), (again.pk, 1), (again.pk, 2), (last.pk, 1)}
    for message, age in ((plain, 5), (again, 7), (last, 9)):
        assert age <= started[message.pk, 1]["queued_for"] < age + PATIENCE
    assert started[again.pk, 2]["queued_for"] is None
    assert acked.keys() == {(plain.pk, 1), (again.pk, 2)}
    assert 5 <= acked[plain.pk, 1]["queued_for"] < 5 + PATIENCE
    assert all(0 < data["duration"] < PATIENCE for data in acked.values())
    [retried] = told("message_retried").values()
    [dead] = told("message_dead").values()
    assert isinstance(retried["error"], Retry)
    assert isinstance(dead["error"], ValueError)
    assert 7 <= retried["queued_for"] < 7 + PATIENCE
    assert 9 <= dead["queued_for"] < 9 + PATIENCE
    assert retried["duration"] > 0
    assert dead["duration"] > 0


@pytest.mark.django_db(transaction=True)
def test_without_receivers_no_signal_is_sent(start: Start, caplog: Any, monkeypatch: Any) -> None:
    """KAF-17: signals without a receiver cost nothing."""
    caplog.set_level("INFO", "django_mq")
    said: list[Any] = []
    monkeypatch.setattr(signals, "announce", lambda *args, **data: said.append(args))

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    running = start(until_empty=True)
    assert running.join()
    assert running.worker.timings()["h"].acked == 1
    assert said == []


def test_an_idle_worker_can_be_read_too() -> None:
    """CAR-34: it starts on request, not when it is created."""
    worker = Worker(queues=["mail"])
    assert (worker.id, worker.running, worker.sleeps, worker.timings()) == ("", False, 0, {})
