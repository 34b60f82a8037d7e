"""Ends of tasks other than by returning or raising, and the retention of their results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Thread
from traceback import extract_tb
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_mq import RetryPolicy, cancel, fixed, handlers, queues
from django_mq.conf import get_settings
from django_mq.contrib.tasks import TaskCancelled, TaskDiscarded, TaskExpired, results
from django_mq.contrib.tasks.compat import TaskResultDoesNotExist, TaskResultStatus, task_finished
from django_mq.contrib.tasks.options import StoredOptions, stored_options
from django_mq.models import FailedAttempt, QueuedMessage, QueueState, Result
from django_mq.policy.backoff import MAX_ATTEMPTS
from django_mq.policy.outcomes import WorkerLost
from django_mq.testing import drain, due
from django_mq.worker import Worker, chores
from tests.contrib.tasks import jobs, own_jobs
from tests.contrib.tasks.conftest import BACKEND, TASKS
from tests.database import second_connection
from tests.rows import delivery

pytestmark = pytest.mark.django_db(transaction=True)

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


def run_chores() -> None:
    QueueState.objects.filter(pk=":").delete()  # whichever process had the turn
    with second_connection() as other:
        assert chores.run(other.cursor(), get_settings())


class Announced:
    """The results of which `task_finished` was sent, and the files in the traceback of the last."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.files: list[str] = []

    def hear(self, sender: Any, task_result: Any, **kwargs: Any) -> None:
        self.results.append(task_result)
        self.files = [frame.filename for frame in extract_tb(sys.exc_info()[2])]


@pytest.fixture
def announced() -> Iterator[Announced]:
    found = Announced()
    task_finished.connect(found.hear)
    yield found
    task_finished.disconnect(found.hear)


def errors_of(result: Any) -> list[type[BaseException]]:
    result.refresh()
    assert result.status == FAILED
    assert result.finished_at is not None
    return [each.exception_class for each in result.errors]


# ---- removed by hand


def test_a_cancelled_task() -> None:
    one, two = jobs.note.enqueue(1), jobs.note.enqueue(2)
    assert queues.cancel(int(one.id))
    assert cancel(id=int(two.id))
    for result in (one, two):
        assert errors_of(result) == [TaskCancelled]
        assert (result.attempts, result.worker_ids) == (0, [])
        assert result.args in ([1], [2])
        assert result.started_at is None


def test_a_purged_task() -> None:
    result = jobs.note.enqueue()
    assert queues.purge("default", waiting=True)
    assert errors_of(result) == [TaskDiscarded]


def test_a_discarded_task_keeps_the_errors_of_its_attempts() -> None:
    result = jobs.fail.using(max_attempts=2, backoff=fixed(0)).enqueue()
    drain(errors="keep")
    assert errors_of(result) == [ValueError, ValueError]
    workers = result.worker_ids
    assert queues.discard(int(result.id))
    FailedAttempt.objects.all().delete()
    assert errors_of(result) == [ValueError, ValueError, TaskDiscarded]
    assert result.worker_ids == workers
    assert len(workers) == 2


def test_a_replayed_task_has_a_result(settings: Any, announced: Announced) -> None:
    """Its copy is a task like the original, whose end is announced."""
    settings.DJANGO_MQ = {"QUEUES": {"default": {"history": 60, "history_payload": True}}}
    original = jobs.note.enqueue(1, 2)
    drain()
    queues.replay(ids=int(original.id))
    [copy] = QueuedMessage.objects.all()
    result = jobs.note.get_result(str(copy.pk))
    assert result.status == READY
    drain()
    result.refresh()
    assert (result.status, result.return_value) == (SUCCESSFUL, {"args": [1, 2], "kwargs": {}})
    assert [each.id for each in announced.results] == [original.id, result.id]


def test_replayed_task_has_the_declared_retry_policy(settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"default": {"history": 60, "history_payload": True}}}
    original = own_jobs.steady.enqueue()
    drain()
    queues.replay(ids=int(original.id))
    copy = QueuedMessage.objects.get()
    registered = handlers.get(copy.handler)
    assert registered is not None
    assert (copy.max_attempts, copy.retry) == (3, None)
    assert registered.retry == RetryPolicy(3, fixed(60))


def test_a_task_that_is_requeued_is_ready_and_can_be_cancelled() -> None:
    """The attempt is the only trace of its death."""
    result = jobs.fail.enqueue()
    drain(errors="keep")
    assert queues.requeue(int(result.id))
    result.refresh()
    assert (result.status, result.finished_at, result.attempts) == (READY, None, 1)
    assert queues.cancel(int(result.id))
    assert errors_of(result) == [ValueError, TaskCancelled]


# ---- not run in time


def test_an_expired_task_that_is_requeued_has_no_error() -> None:
    """It has not run, and may run at any time from then on."""
    result = jobs.note.using(expires=60).enqueue()
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    drain()
    assert errors_of(result) == [TaskExpired]
    assert queues.requeue(int(result.id))
    result.refresh()
    assert (result.status, result.finished_at, result.attempts) == (READY, None, 0)
    assert result.errors == []
    drain()
    result.refresh()
    assert (result.status, result.errors, result.attempts) == (SUCCESSFUL, [], 1)


def test_an_expired_task(announced: Announced) -> None:
    """Either the claim ends it, or the chore, while the task waits."""
    met = jobs.note.using(expires=60).enqueue()
    waiting = jobs.note.using(
        expires=timedelta(minutes=2), run_after=met.enqueued_at + timedelta(minutes=1)
    ).enqueue()
    expired = Now() - timedelta(seconds=1)
    QueuedMessage.objects.filter(pk=met.id).update(expires_at=expired)
    drain()
    QueuedMessage.objects.filter(pk=waiting.id).update(expires_at=expired)
    run_chores()
    assert [each.id for each in announced.results] == [met.id, waiting.id]
    for told in announced.results:
        assert told.status == FAILED
        assert [each.exception_class for each in told.errors] == [TaskExpired]
        assert told.worker_ids == []
    for result in (met, waiting):
        assert errors_of(result) == [TaskExpired]
        assert result.attempts == 0
        queues.discard(int(result.id))
        assert result.status == FAILED


def test_a_task_that_no_worker_knows_is_held_and_then_dead() -> None:
    result = jobs.note.enqueue()
    with handlers.isolated():
        assert drain() == 0
        why = queues.why(int(result.id))
        assert "no handler named tests.contrib.tasks.jobs.note is registered here" in why.text
        with pytest.raises(TaskResultDoesNotExist, match="not registered here"):
            jobs.note.get_backend().get_result(result.id)
        QueuedMessage.objects.update(held_since=Now() - timedelta(days=2))
        due()
        QueuedMessage.objects.update(held_since=Now() - timedelta(days=2))
        drain()
    result.refresh()
    [error] = result.errors
    assert error.exception_class_path == "django_mq.exceptions.Unanswered"
    assert "held for too long" in error.traceback


# ---- attempts without an end


def test_a_worker_that_vanished() -> None:
    result = jobs.note.enqueue()
    QueuedMessage.objects.update(
        attempts=1, claimed_by="gone:1", leased_until=Now() - timedelta(seconds=1)
    )
    assert Worker(max_seconds=60).run(until_empty=True)
    assert errors_of(result) == [WorkerLost]
    assert result.worker_ids == ["gone"]
    assert jobs.ran == []


def test_a_claimed_task_is_running() -> None:
    result = jobs.note.enqueue()
    QueuedMessage.objects.update(
        attempts=1, claimed_by="worker:1", leased_until=Now() + timedelta(seconds=30)
    )
    result.refresh()
    assert (result.status, result.attempts, result.worker_ids) == (RUNNING, 1, ["worker"])
    assert result.enqueued_at <= result.started_at == result.last_attempted_at
    assert result.finished_at is None


@pytest.mark.parametrize("task", [jobs.interrupt, jobs.coroutine_interrupts])
def test_an_interrupt_is_no_failure_and_no_attempt(task: Any) -> None:
    result = task.enqueue()
    with pytest.raises(KeyboardInterrupt):
        drain()
    result.refresh()
    assert (result.status, result.attempts, result.errors) == (READY, 0, [])
    assert not FailedAttempt.objects.exists()


def test_interrupted_task_runs_again() -> None:
    result = jobs.interrupt.enqueue()
    Worker(max_messages=2).run()
    assert jobs.ran == ["interrupted", "interrupted"]
    result.refresh()
    assert (result.status, result.attempts, result.errors) == (READY, 0, [])
    # One that does so every time would run for ever, without a word.
    assert "raised KeyboardInterrupt" in queues.why(int(result.id)).error


def test_an_attempt_whose_record_is_deleted_counts(announced: Announced) -> None:
    result = jobs.fail.using(max_attempts=2, backoff=fixed(600)).enqueue()
    drain(errors="keep")
    FailedAttempt.objects.all().delete()
    result.refresh()
    assert (result.attempts, result.worker_ids, result.errors) == (1, [""], [])
    due()
    drain(errors="keep")
    [told] = announced.results
    assert (told.attempts, len(told.errors)) == (2, 1)


def test_the_traceback_of_an_announced_error_is_that_of_the_task(announced: Announced) -> None:
    jobs.fail.enqueue()
    drain(errors="keep")
    assert announced.files
    assert not any("finishing" in each for each in announced.files)


def test_looking_for_earlier_attempts_leaves_no_connection_open() -> None:
    """The thread that starts or announces a task may have no other use for one."""

    def look() -> None:
        results.failed_attempts(delivery(attempts=2), 1)
        open_ones.append(connection.connection)

    open_ones: list[Any] = []
    thread = Thread(target=look)
    thread.start()
    thread.join()
    assert open_ones == [None]


# ---- rows that another program has written


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("attempts", None),
        ("attempts", "[" + "1" * 5000 + "]"),
        ("attempts", '[7, {"worker": 7, "started": "x", "error_class": 5}]'),
        ("attempts", '[{"started": 1e300, "error_class": "ValueError", "traceback": []}]'),
        ("attempts", '[{"started": -1e18}]'),
        ("metadata", None),
        ("enqueued_at", None),
        ("priority", None),
    ],
)
def test_a_result_is_read_with_defaults(column: str, value: str | None) -> None:
    """Guarantee 24."""
    result = jobs.note.enqueue("read")
    drain()
    with connection.cursor() as cursor:
        cursor.execute(f"update django_mq_result set {column} = %s", [value])
    found = jobs.note.get_result(result.id)
    assert (found.status, found.args) == (SUCCESSFUL, ["read"])
    assert all(isinstance(each, str) for each in found.worker_ids)
    assert all(isinstance(each.traceback, str) for each in found.errors)


def test_more_attempts_than_any_policy_has_need_no_list_of_that_length() -> None:
    """A message with the most attempts that its column takes needed 17 GB, on each attempt."""
    result = jobs.note.enqueue()
    QueuedMessage.objects.update(attempts=2**31 - 2)
    result.refresh()
    assert (result.status, result.attempts) == (READY, MAX_ATTEMPTS)


# ---- retention


def test_results_are_kept_for_the_retention_of_their_backend(settings: Any) -> None:
    settings.TASKS = {
        **TASKS,
        "default": {"BACKEND": BACKEND, "OPTIONS": {"result_retention": timedelta(days=7)}},
    }
    week = jobs.note.enqueue()
    day = jobs.note.using(backend="second", queue_name="own").enqueue()
    cancelled = jobs.note.enqueue()
    queues.cancel(int(cancelled.id))
    drain()
    two_days_ago = Now() - timedelta(days=2)
    Result.objects.update(created_at=two_days_ago)
    run_chores()
    assert set(Result.objects.values_list("pk", flat=True)) == {int(week.id), int(cancelled.id)}
    with pytest.raises(TaskResultDoesNotExist):
        day.refresh()
    Result.objects.update(keep_until=two_days_ago)
    run_chores()
    assert not Result.objects.exists()


def test_a_dead_task_has_failed_although_its_result_is_deleted() -> None:
    result = jobs.fail.enqueue()
    drain(errors="keep")
    Result.objects.all().delete()
    assert errors_of(result) == [ValueError]


def test_a_result_has_all_that_it_shows() -> None:
    """Once its message and the records of its attempts are deleted."""
    task = jobs.second_time_lucky.using(
        max_attempts=2, backoff=fixed(0), priority=9, queue_name="second", run_after=later(-60)
    )
    result = task.enqueue()
    drain(errors="keep")
    result.refresh()
    assert (result.status, result.attempts) == (SUCCESSFUL, 2)
    FailedAttempt.objects.all().delete()
    assert not QueuedMessage.objects.exists()
    found = task.get_result(result.id)
    assert replace(found, task=task) == replace(result, task=task)
    assert (found.task.priority, found.task.queue_name) == (9, "second")
    assert found.task.run_after == task.run_after
    assert found.enqueued_at == result.enqueued_at


@pytest.mark.parametrize("unique_id", [None, "once"])
def test_enqueue_and_get_result_agree(unique_id: str | None) -> None:
    task = jobs.note.using(unique_id=unique_id) if unique_id else jobs.note
    result = task.enqueue(1)
    assert replace(task.get_result(result.id), task=task) == replace(result, task=task)


def test_malformed_task_has_no_result() -> None:
    results = [jobs.note.enqueue() for _ in range(4)]
    payloads = ("[]", '{"args": 1, "kwargs": {}}', '{"args": []}', '"text"')
    with connection.cursor() as cursor:
        for result, payload in zip(results, payloads, strict=True):
            cursor.execute(
                "update django_mq_queuedmessage set payload = %s, metadata = %s where id = %s",
                [payload, '{"mq.task": {"retention": "long", "timeout": -1}}', result.id],
            )
    backend = jobs.note.get_backend()
    for result in results[:2]:
        with pytest.raises(TaskResultDoesNotExist, match="no arguments"):
            backend.get_result(result.id)
    drain()
    assert list(QueuedMessage.objects.values_list("dead_reason", flat=True).distinct()) == [
        "the payload has no args and kwargs, so no enqueue() wrote it"
    ]
    assert queues.discard([int(each.id) for each in results]).skipped == 0
    assert jobs.ran == []


@pytest.mark.parametrize(
    "unreadable", ["1" * 5000, "[" * 5000 + "]" * 5000], ids=["digits", "depth"]
)
@pytest.mark.parametrize("column", ["payload", "metadata"])
def test_undecodable_task_does_not_affect_other_tasks(
    column: str, unreadable: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = [jobs.note.enqueue(n) for n in range(3)]
    with connection.cursor() as cursor:
        cursor.execute(
            f"update django_mq_queuedmessage set {column} = %s::jsonb where id < %s",
            [f'{{"x": {unreadable}}}', results[2].id],
        )
    QueuedMessage.objects.filter(pk=results[0].id).update(expires_at=Now() - timedelta(seconds=1))
    drain(errors="keep")
    results[2].refresh()
    assert results[2].status == SUCCESSFUL
    assert "receiver_failed" not in [getattr(each, "event", "") for each in caplog.records]


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_task_of_a_backend_that_is_not_configured_here_runs(settings: Any, attempts: int) -> None:
    """Its enqueuer has another TASKS."""
    task = jobs.note if attempts == 1 else jobs.second_time_lucky
    made = task.using(backend="other", max_attempts=attempts, backoff=fixed(0)).enqueue()
    settings.TASKS = {"default": TASKS["default"]}
    drain(errors="keep")
    [kept] = Result.objects.all()
    assert (kept.pk, kept.error_class, len(jobs.ran)) == (int(made.id), "", attempts)


def test_options_that_no_enqueue_wrote() -> None:
    def read(**options: Any) -> StoredOptions:
        return stored_options({"mq.task": options})

    assert read(run_after=1e300, timeout=0) == StoredOptions()
    made = jobs.coroutine.enqueue(1)
    QueuedMessage.objects.update(metadata={"mq.task": {"atomic": True, "timeout": 0}})
    drain()
    made.refresh()
    assert made.return_value == 1


def later(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
