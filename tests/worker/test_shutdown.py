"""A draining worker finishes running messages, and releases the rest."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from django_mq import handler
from django_mq.executor.async_runner import AsyncRunner
from django_mq.executor.executor import Executor
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, WorkerHeartbeat
from django_mq.store import notify
from django_mq.worker.dispatch import Dispatch
from django_mq.worker.lease_keeper import LeaseKeeper
from django_mq.worker.listener import Listener
from django_mq.worker.maintenance import Maintenance
from django_mq.worker.operation_runner import OperationRunner
from django_mq.worker.recovery import Recovery
from django_mq.worker.scheduler import Scheduler
from tests.database import second_connection
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start, add_many, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)


def test_drain_finishes_running_messages_and_releases_the_rest(
    start: Start, said: Said, gate: threading.Event
) -> None:
    """KAF-7, NSQ-28, guarantee 3: refunded, and in their old place in line."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)
        effect(delivery)

    messages = add_many(30, handler="h")
    entries = {m.pk: m.processable_after for m in messages}
    running = start(threads=2)
    said.wait("message_started", 2)
    thread = threading.Thread(target=running.stop, daemon=True)
    thread.start()
    gate.set()
    assert running.join() is True
    started = set(said.ids("message_started"))
    assert effects() == started
    assert len(started) < 30
    left = QueuedMessage.objects.all()
    assert {m.pk for m in left} == {m.pk for m in messages} - started
    for message in left:
        assert (message.attempts, message.claimed_by, message.leased_until) == (0, None, None)
        assert message.processable_after == entries[message.pk]
    assert FailedAttempt.objects.count() == 0


def test_drain_also_releases_briefly_locked_rows(
    start: Start, said: Said, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal has rows locked while it runs, and a release skips what is locked."""
    from django_mq.store import settle

    released = settle.release
    calls: list[int] = []

    def release(cursor: Any, fences: Any) -> set[int]:
        calls.append(len(fences))
        if len(calls) > 1:
            return released(cursor, fences)
        with second_connection() as other, other.transaction():
            other.execute("select from django_mq_queuedmessage for update skip locked")
            return released(cursor, fences)

    monkeypatch.setattr(settle, "release", release)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    @handler("b", queue="mail", name="held")
    def held(delivery: Delivery) -> None: ...

    # Claimed with the first one, and behind it.
    message = add(handler="h", after=-100)
    add(handler="h", suspect=True, after=-90)
    running = start(batch_size=2)
    said.wait("message_started")
    claimed = QueuedMessage.objects.filter(claimed_by__isnull=False)
    while claimed.count() < 2 and not calls:
        add(handler="h")
    thread = threading.Thread(target=running.stop, daemon=True)
    thread.start()
    while not calls:
        pass
    gate.set()
    running.join()
    assert len(calls) >= 2
    assert message.pk not in waiting()
    assert not QueuedMessage.objects.exclude(claimed_by=None).exists()
    assert not QueuedMessage.objects.exclude(attempts=0).exists()


def test_drain_that_runs_out_of_time_is_reported(
    start: Start, said: Said, gate: threading.Event
) -> None:
    """KAF-7: drain_seconds in total, not per part."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        gate.wait(PATIENCE)

    add_many(2, handler="h")
    running = start(drain_seconds=0.05, threads=2)
    said.wait("message_started", 2)
    assert running.stop() is False
    assert said.all[-1][2]["drained"] is False
    assert waiting()


def threads() -> set[threading.Thread]:
    """Return the threads of workers."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("mq-")}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Listener, "stop"),
        (Dispatch, "release"),
        (AsyncRunner, "end"),
        (Recovery, "finish"),
        (notify, "ring_if_room"),
        (Maintenance, "end"),
        (Scheduler, "end"),
        (OperationRunner, "end"),
        (LeaseKeeper, "report"),
    ],
)
def test_an_error_in_the_drain_ends_the_other_parts_all_the_same(
    start: Start,
    said: Said,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> None:
    """No thread is left to renew a lease or a heartbeat; what did not start is given back."""
    before, real, draining = threads(), getattr(owner, name), threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    def fail(*args: Any, **kwargs: Any) -> Any:
        answer = real(*args, **kwargs)
        if draining.is_set():
            raise ZeroDivisionError
        return answer

    monkeypatch.setattr(owner, name, fail)
    add_many(3, handler="h")
    running = start()
    said.wait("message_started")
    draining.set()
    running.worker.ask_to_stop()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        running.join()
    until(lambda: threads() <= before)
    assert not WorkerHeartbeat.objects.exists()
    assert not QueuedMessage.objects.exclude(claimed_by=None).exists()
    assert said.count("worker_stopped") == 1


@pytest.mark.parametrize(
    "part", [Executor, LeaseKeeper, Listener, Maintenance, OperationRunner, Scheduler]
)
def test_a_part_that_cannot_start_leaves_no_other_running(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch, part: type[threading.Thread]
) -> None:
    """The system may refuse a thread."""
    before = threads()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(part, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        start().join()
    until(lambda: threads() <= before)
    assert not WorkerHeartbeat.objects.exists()
    assert (said.count("worker_started"), said.count("worker_stopped")) == (0, 0)
