"""Suspects, renewed leases, and the messages of a dead sibling."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor.watchdog import Link
from django_mq.messages import Delivery, Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.policy.durations import precise_span
from django_mq.worker import DeadWorker, Worker, recovery, run
from django_mq.worker.recovery import Recovery
from tests.database import second_connection
from tests.rows import add, stored
from tests.waiting import until
from tests.worker.conftest import (
    PATIENCE,
    Running,
    Said,
    ShortOutage,
    Start,
    add_many,
    attempts_of,
    effect,
    effects,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


# ---- suspects


def test_suspects_run_alone(start: Start, said: Said) -> None:
    """Guarantee 3: a message that kills its process costs no other message an attempt."""
    running: set[int] = set()
    beside: list[set[int]] = []
    lock = threading.Lock()

    def note(delivery: Delivery) -> None:
        with lock:
            running.add(delivery.id)
            if delivery.payload == "suspect":
                beside.append(set(running))
        for _ in range(200):
            with lock:
                if delivery.payload == "suspect":
                    beside.append(set(running))
        with lock:
            running.discard(delivery.id)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        note(delivery)

    @handler("#", queue="mail", name="async")
    async def ah(delivery: Delivery) -> None:
        await asyncio.to_thread(note, delivery)

    suspects = set()
    for n in range(40):
        add(handler="h" if n % 2 else "async", payload="plain", after=-60 + n / 100)
        if n % 8 == 0:
            name = "async" if n % 16 else "h"
            suspects.add(add(handler=name, payload="suspect", suspect=True, after=-60 + n / 100).pk)
    assert start(until_empty=True, threads=3).join()
    assert waiting() == set()
    assert {id for ids in beside for id in ids} == suspects
    assert all(len(ids) == 1 for ids in beside)


def test_a_message_of_a_lost_host_that_is_released_unstarted_is_no_suspect(
    start: Start, said: Said, gate: threading.Event
) -> None:
    """Only a lease that lapses twice makes one; this one has not run since the first time."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    for _ in range(5):
        add(handler="h", leased=-1, attempts=1, claimed_by="gone:1")
    running = start(threads=1)
    said.wait("message_started")
    released = QueuedMessage.objects.filter(leased_until=None)
    until(released.exists)  # on a busy machine it may have taken over fewer than all
    running.worker.ask_to_stop()  # it starts none of them once it has room
    gate.set()
    running.stop()
    assert set(released.values_list("attempts", "suspect")) == {(1, False)}


# ---- leases, recovery


def alone() -> Recovery:
    """Return a recovery without the rest of a worker."""
    return Recovery(
        "default",
        outage=ShortOutage(threading.Event()),
        policy_of=lambda row: RetryPolicy(),
        limit_of=lambda row: None,
        on_freed=lambda: None,
        on_charged=lambda: None,
        link=Link(),
    )


def test_leases_are_renewed_in_hand_and_while_it_runs(
    start: Start, said: Said, gate: threading.Event, settings: Any
) -> None:
    """Guarantee 6: also those of a queue whose lease is shorter than the others'."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"lease": 0.3}}}

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)
        with delivery.finish():  # type: ignore[attr-defined]
            effect(delivery)

    messages = add_many(3, handler="h")
    running = start(threads=2)
    said.wait("message_started", 2)
    leases = stored(messages[0]).leased_until
    assert leases is not None
    # Several leases later it is still ours.
    until(lambda: stored(messages[0]).leased_until > leases + timedelta(seconds=1))
    gate.set()
    said.wait("message_acked", 3)
    running.stop()
    assert effects() == {m.pk for m in messages}
    assert FailedAttempt.objects.count() == 0


def test_messages_of_a_dead_sibling_are_recovered(start: Start, said: Said) -> None:
    """Guarantee 3: the running one is charged and suspect, the rest refunded, in their places."""
    attempts: dict[int, int] = {}

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        attempts[delivery.id] = delivery.attempt

    ran, overran, waited = (
        add(handler="h", leased=600, claimed_by="dead:4", attempts=1) for _ in range(3)
    )
    other = add(handler="h", leased=600, claimed_by="deadly:4", attempts=1)
    running = start()
    said.wait("worker_started")
    done = threading.Event()
    running.worker.recover(
        DeadWorker(
            worker="dead",
            reason="was killed by SIGKILL",
            timed_out=[Fence(overran.pk, 1, "dead:4")],
            lost=[Fence(ran.pk, 1, "dead:4")],
        ),
        done.set,
    )
    assert done.wait(PATIENCE)
    said.wait("message_acked", 3)
    running.stop()
    assert attempts == {ran.pk: 2, overran.pk: 2, waited.pk: 1}
    assert waiting() == {other.pk}
    assert attempts_of(ran) == ["django_mq.policy.outcomes.WorkerLost"]
    assert attempts_of(overran) == ["django_mq.policy.outcomes.TimedOut"]
    assert attempts_of(waited) == []


@pytest.mark.parametrize("planned", [False, True])
def test_a_planned_end_charges_a_message_but_makes_no_suspect(start: Start, planned: bool) -> None:
    """Nothing that ran is the cause: a hundred suspects would run one after another."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(3600)))
    def h(delivery: Delivery) -> None: ...

    message = add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    lost = [Fence(message.pk, 1, "dead:4")]
    running = start()
    done = threading.Event()
    running.worker.recover(DeadWorker("dead", "why", lost=lost, planned=planned), done.set)
    assert done.wait(PATIENCE)
    running.stop()
    assert attempts_of(message) == ["django_mq.policy.outcomes.WorkerLost"]
    assert (stored(message).attempts, stored(message).suspect) == (1, not planned)


@pytest.mark.parametrize(
    ("timeout", "atomic", "ran", "limit"),
    [
        (2, True, 2.3, "the option timeout, 2 s"),
        (None, True, 90.0, "the setting TIMEOUT, 1 min 30 s"),
        (2, False, 2.3, "the option timeout, 2 s"),
        (2, False, 80.0, "the option timeout, 2 s, or a later extend()"),
        (300, False, 5.0, "the option timeout, 5 min, or a later extend()"),
    ],
)
def test_a_timeout_names_its_limit(
    start: Start,
    settings: Any,
    timeout: float | None,
    atomic: bool,
    ran: float,
    limit: str,
) -> None:
    settings.DJANGO_MQ = {"TIMEOUT": 90}
    retry = RetryPolicy(backoff=fixed(3600))

    @handler("#", queue="mail", name="h", retry=retry, timeout=timeout, atomic=atomic)
    def h(delivery: Delivery) -> None: ...

    message = add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    running = start()
    done = threading.Event()
    late = [Fence(message.pk, 1, "dead:4")]
    dead = DeadWorker("dead", "killed", timed_out=late, ran={message.pk: ran})
    running.worker.recover(dead, done.set)
    assert done.wait(PATIENCE)
    running.stop()
    text = FailedAttempt.objects.get().error_text
    assert text == f"the handler ran for {precise_span(ran)}, past its timeout: {limit}"


def test_a_claim_that_commits_after_the_recovery_costs_no_attempt(start: Start, said: Said) -> None:
    """A claim may hang in the server for a while after its process was killed."""
    attempts: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)

    running = start()
    said.wait("worker_started")
    done = threading.Event()
    running.worker.recover(DeadWorker("dead", "was killed by SIGKILL"), done.set)
    assert done.wait(PATIENCE)
    add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    said.wait("message_acked")
    running.stop()
    assert attempts == [1]


def test_a_worker_that_ends_waits_a_moment_for_a_late_claim(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its messages would wait until their leases lapse, if no other worker is there."""
    looked, done = threading.Event(), threading.Event()
    settle = Recovery.settle

    def look(self: Recovery, dead: DeadWorker) -> bool:
        settled = settle(self, dead)
        looked.set()
        return settled

    monkeypatch.setattr(Recovery, "settle", look)
    monkeypatch.setattr(recovery, "LATE_CLAIM", PATIENCE)
    recovers = alone()
    recovers.recover(DeadWorker("dead", "was killed by SIGKILL"), done.set)
    recovers.finish(0.0)
    assert looked.wait(PATIENCE)
    message = add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    until(lambda: stored(message).leased_until is None, "it is released")
    assert stored(message).attempts == 0
    monkeypatch.setattr(recovery, "LATE_CLAIM", 0.0)
    assert done.wait(PATIENCE)
    recovers.finish(PATIENCE)


def test_a_process_that_died_long_ago_has_no_late_claim(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While processes die one after another, each would begin the wait for it anew."""
    monkeypatch.setattr(recovery, "LATE_CLAIM", 3600.0)
    message = add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    running = start()
    done = threading.Event()
    died_at = monotonic() - 3601
    running.worker.recover(DeadWorker("dead", "was killed", died_at=died_at), done.set)
    assert done.wait(PATIENCE)
    running.stop()
    assert stored(message).leased_until is None


def test_the_process_that_died_first_is_settled_first(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, while processes die one after another, none would come to the first one."""
    settled: list[str] = []
    settle = Recovery.settle

    def recorded(self: Recovery, dead: DeadWorker) -> bool:
        settled.append(dead.worker)
        return settle(self, dead)

    monkeypatch.setattr(Recovery, "settle", recorded)
    names = [f"dead{n}" for n in range(5)]
    ended = [threading.Event() for _ in names]
    worker = Worker()
    for name, done in zip(names, ended, strict=True):
        worker.recover(DeadWorker(name, "was killed", died_at=monotonic() - 60), done.set)
    running = Running(worker, until_empty=False)
    assert all(done.wait(PATIENCE) for done in ended)
    running.stop()
    assert settled == names


def test_a_process_that_died_meanwhile_is_settled_without_a_pause(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    settle = Recovery.settle

    def look(self: Recovery, dead: DeadWorker) -> bool:
        if dead.worker == "first":
            self.recover(DeadWorker("second", "was killed", died_at=0.0), done.set)
        return settle(self, dead)

    monkeypatch.setattr(Recovery, "settle", look)
    monkeypatch.setattr(recovery, "RETRY_PAUSE", 2 * PATIENCE)
    recovers = alone()
    recovers.recover(DeadWorker("first", "was killed", died_at=0.0), lambda: None)
    assert done.wait(PATIENCE)
    recovers.finish(PATIENCE)


def test_a_new_process_tries_to_settle_dead_ones_before_it_claims(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first message may kill it, too: those of its predecessors would wait for the next one."""
    order: list[str] = []
    ran = threading.Event()
    settle = Recovery.settle

    def look(self: Recovery, dead: DeadWorker) -> bool:
        ran.wait(0.3)  # time for a worker that does not wait to run the message
        settled = settle(self, dead)
        order.append("settled")
        return settled

    monkeypatch.setattr(Recovery, "settle", look)
    monkeypatch.setattr(run, "FIRST_TRY_SECONDS", PATIENCE)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        order.append("ran")
        ran.set()

    add(handler="h")
    worker = Worker()
    worker.recover(DeadWorker("dead", "was killed by SIGKILL"), lambda: None)
    assert Running(worker, until_empty=True).join()
    assert order[:2] == ["settled", "ran"]


REFUSE = """
create function refuse() returns trigger language plpgsql as
$$ begin raise exception 'the disk is full' using errcode = 'disk_full'; end $$;
create trigger refuse before update on django_mq_queuedmessage
   for each row when (old.claimed_by = 'dead:4') execute function refuse()
"""


def test_accepted_recovery_statement_is_logged(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ends then, and gets no later answer."""
    caplog.set_level("INFO", logger="django_mq")

    def logged() -> list[str]:
        return [getattr(record, "event", "") for record in caplog.records]

    add(handler="h", leased=600, claimed_by="dead:4", attempts=1)
    running = start()
    said.wait("worker_started")
    done = threading.Event()
    with second_connection() as admin:
        admin.execute(REFUSE)
        try:
            running.worker.recover(DeadWorker("dead", "was killed by SIGKILL"), done.set)
            until(lambda: "statement_refused" in logged())
        finally:
            admin.execute("drop trigger refuse on django_mq_queuedmessage; drop function refuse")
    assert done.wait(PATIENCE)
    assert logged().count("statement_accepted") == 1
    running.stop()


def test_a_recovery_waits_until_the_tables_have_proved_usable(
    start: Start,
) -> None:
    """Guarantee 16: if they are unusable, the worker has one error, and another one recovers."""
    settled = threading.Event()
    with second_connection() as admin:
        admin.execute("begin; alter table django_mq_queuedmessage rename to mq_away")
        try:
            running = start()
            until(lambda: is_locked_out(admin))
            running.worker.recover(DeadWorker("gone", "it died"), settled.set)
            assert "mq-recovery" not in [thread.name for thread in threading.enumerate()]
            admin.execute("commit")
            with pytest.raises(psycopg.errors.UndefinedTable):
                running.join()
        finally:
            admin.execute(
                "rollback; alter table if exists mq_away rename to django_mq_queuedmessage"
            )
    assert not settled.is_set()


def is_locked_out(admin: psycopg.Connection[Any]) -> bool:
    """Say whether a session waits for the table that `admin` has locked."""
    waits = "select from pg_locks where relation = 'mq_away'::regclass and not granted"
    return bool(admin.execute(waits).fetchall())
