"""The start of a running task: in its own context, and as another process sees it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from threading import Thread
from time import time
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_mq import queues
from django_mq.contrib.tasks import results
from django_mq.contrib.tasks.compat import TaskResultStatus, task_finished
from django_mq.models import FailedAttempt, QueuedMessage, WorkerHeartbeat
from django_mq.testing import drain
from django_mq.worker import Worker
from tests.contrib.tasks import jobs
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

CLOSE = timedelta(milliseconds=1)


def claim(result: Any, attempts: int = 1) -> None:
    """Like a worker that claimed it, and has just renewed the lease."""
    QueuedMessage.objects.filter(pk=int(result.id)).update(
        attempts=attempts, claimed_by="worker:1", leased_until=Now() + timedelta(seconds=30)
    )


def beat(last_seen: datetime, ran: object) -> None:
    WorkerHeartbeat.objects.update_or_create(
        pk="worker",
        defaults={
            "queues": [], "host": "h", "pid": 1, "version": "1", "wakeup": "poll", "running": [],
            "ran": ran, "last_seen": last_seen,
        },
    )  # fmt: skip


def test_start_of_a_task_is_read_from_the_heartbeat() -> None:
    result = jobs.note.enqueue()
    claim(result)
    seen = datetime.now(UTC) - timedelta(seconds=3)
    beat(seen, {result.id: 40.5})
    result.refresh()
    assert result.status == TaskResultStatus.RUNNING
    assert abs(result.started_at - (seen - timedelta(seconds=40.5))) < CLOSE
    assert result.last_attempted_at == result.started_at


@pytest.mark.parametrize(
    "ran",
    [{}, {"1": 5}, {"id": 0}, {"id": "5"}, {"id": -5}, {"id": -1e300}, {"id": None}],
)
def test_until_then_it_is_when_it_was_claimed(ran: Any) -> None:
    result = jobs.note.enqueue()
    if "id" in ran:
        ran = {result.id: ran["id"]}
    claim(result)
    beat(datetime.now(UTC), ran)
    result.refresh()
    leased_until = QueuedMessage.objects.get(pk=int(result.id)).leased_until
    assert result.started_at is not None
    assert timedelta() < leased_until - result.started_at <= timedelta(seconds=300)
    assert datetime.now(UTC) - result.started_at < timedelta(days=1)


def test_a_number_that_no_worker_writes() -> None:
    result = jobs.note.enqueue()
    claim(result)
    beat(datetime.now(UTC), {})
    with connection.cursor() as cursor:
        ran = json.dumps({result.id: 0})[:-2] + "1e300}"
        cursor.execute("update django_mq_workerheartbeat set ran = %s::jsonb", [ran])
    result.refresh()
    assert result.status == TaskResultStatus.RUNNING


def test_an_attempt_that_ended_is_not_this_one() -> None:
    """The same worker claimed the message again, and has not reported it yet."""
    result = jobs.note.enqueue()
    claim(result, attempts=2)
    now = datetime.now(UTC)
    FailedAttempt.objects.create(
        message_id=int(result.id), attempt=1, queue="default", type="t", handler="h",
        worker="worker", error_class="KeyError", error_text="", traceback="",
        started_at=now - timedelta(seconds=60), ended_at=now - timedelta(seconds=20),
    )  # fmt: skip
    beat(now - timedelta(seconds=30), {result.id: 30})
    result.refresh()
    assert abs(result.started_at - (now - timedelta(seconds=60))) < CLOSE
    assert result.last_attempted_at > now - timedelta(seconds=20)
    beat(now, {result.id: 5})
    result.refresh()
    assert abs(result.last_attempted_at - (now - timedelta(seconds=5))) < CLOSE


def test_a_task_that_waited_in_its_worker_started_when_it_was_called() -> None:
    """Both are claimed together; the context and other processes see when the second was called."""
    jobs.gate.clear()
    jobs.started.clear()
    first, second = jobs.wait.enqueue(), jobs.wait_in_context.enqueue()
    worker = Worker(max_seconds=60)
    thread = Thread(target=worker.run, kwargs={"until_empty": True})
    thread.start()
    try:
        assert jobs.started.wait(60)
        jobs.started.clear()
        called_after = datetime.now(UTC)
        jobs.gate.set()
        assert jobs.started.wait(60)
        second.refresh()
        queues.ask_stack(int(second.id))  # the answer comes with a heartbeat
        [within] = jobs.ran
        assert within.started_at >= called_after

        def is_seen() -> bool:
            second.refresh()
            return bool(abs(second.started_at - within.started_at) < timedelta(seconds=1))

        until(is_seen)
    finally:
        jobs.gate.set()
        jobs.second_gate.set()
        thread.join()
    first.refresh()
    second.refresh()
    assert first.last_attempted_at <= first.finished_at
    assert abs(second.started_at - within.started_at) < timedelta(seconds=1)


def test_no_task_starts_before_it_was_enqueued_where_the_clocks_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one of the worker is an hour behind that of the database."""
    made = jobs.in_context.enqueue()
    monkeypatch.setattr(results, "time", lambda: time() - 3600)
    drain()
    [within] = jobs.ran
    assert within.started_at >= within.enqueued_at
    assert within.id == made.id


def test_finished_signal_has_the_time_of_the_call() -> None:
    told: list[Any] = []

    def hear(sender: Any, task_result: Any, **kwargs: Any) -> None:
        told.append(task_result)

    task_finished.connect(hear)
    try:
        jobs.sleep.enqueue(0.1)
        drain()
    finally:
        task_finished.disconnect(hear)
    [result] = told
    assert result.finished_at - result.started_at >= timedelta(seconds=0.1)
