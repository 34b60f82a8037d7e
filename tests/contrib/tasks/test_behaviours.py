"""Behaviour that users of another database backend for Django's tasks rely on."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase, override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_mq.contrib.tasks.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
)
from django_mq.models import QueuedMessage
from django_mq.testing import drain, due
from django_mq.worker import Worker
from testproject.shop.models import Product
from tests.contrib.tasks import jobs
from tests.contrib.tasks.conftest import BACKEND, TASKS
from tests.database import second_connection
from tests.other_alias import _other_alias  # noqa: F401  (fixture)

pytestmark = pytest.mark.django_db(transaction=True)

READY, SUCCESSFUL = TaskResultStatus.READY, TaskResultStatus.SUCCESSFUL
FAILED = TaskResultStatus.FAILED


def work(*queues: str, **options: Any) -> None:
    assert Worker(queues, max_seconds=60, **options).run(until_empty=True)


def status(result: Any) -> TaskResultStatus:
    result.refresh()
    found: TaskResultStatus = result.status
    return found


# ---- enqueue, and its visibility to others


def test_others_see_a_task_after_the_commit() -> None:
    def seen() -> int:
        with second_connection() as other:
            [count] = other.execute("select count(*) from django_mq_queuedmessage").fetchone() or ()
            return int(count)

    with transaction.atomic():
        jobs.note.enqueue()
        assert QueuedMessage.objects.count() == 1
        assert seen() == 0
    assert seen() == 1


def test_a_task_is_validated_by_the_settings_of_the_moment(settings: Any) -> None:
    settings.TASKS = {"default": {**TASKS["default"], "QUEUES": ["was-allowed"]}}
    task = jobs.note.using(queue_name="was-allowed")
    settings.TASKS = TASKS
    for enqueue in (task.enqueue, async_to_sync(task.aenqueue)):
        with pytest.raises(InvalidTask, match="Queue 'was-allowed' is not valid"):
            enqueue()
    assert not QueuedMessage.objects.exists()


def test_in_a_coroutine_each_call_names_its_async_version() -> None:
    result = jobs.note.enqueue(1)
    calls: list[tuple[Callable[[], Any], str]] = [
        (jobs.note.enqueue, "await task.aenqueue("),
        (lambda: task_backends["default"].get_result(result.id), "await aget_result(id)"),
        (result.refresh, "await result.arefresh()"),
    ]

    async def view(call: Callable[[], Any]) -> None:
        call()

    for call, way in calls:
        with pytest.raises(SynchronousOnlyOperation, match=re.escape(way)):
            async_to_sync(view)(call)
    assert QueuedMessage.objects.count() == 1


def test_each_call_is_one_statement() -> None:
    for task in (jobs.note, jobs.coroutine):
        with transaction.atomic(), CaptureQueriesContext(connection) as enqueued:
            result = task.enqueue(1)
        with CaptureQueriesContext(connection) as found:
            task_backends["default"].get_result(result.id)
        with CaptureQueriesContext(connection) as refreshed:
            result.refresh()
        assert [len(each) for each in (enqueued, found, refreshed)] == [1, 1, 1]


@pytest.mark.parametrize("use_tz", [True, False])
def test_get_result_equals_the_enqueued_result(settings: Any, use_tz: bool) -> None:
    settings.USE_TZ = use_tz
    result = jobs.note.enqueue(1, two=[3])
    assert task_backends["default"].get_result(result.id) == result
    with transaction.atomic():
        result = async_to_sync(jobs.coroutine.aenqueue)(1)
        assert task_backends["default"].get_result(result.id) == result


def test_get_result_has_the_options_of_the_enqueued_task() -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    result = jobs.note.using(priority=7, run_after=later, key="k", expires=9000).enqueue(1, two=[3])
    found = task_backends["default"].get_result(result.id)
    for name in (
        "id", "status", "started_at", "finished_at", "last_attempted_at", "args", "kwargs",
        "backend", "errors", "worker_ids", "attempts", "is_finished", "enqueued_at",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(result, name), name
    assert (found.task.func, found.task.priority) == (result.task.func, 7)
    assert (found.task.queue_name, found.task.run_after) == ("default", later)


@pytest.mark.parametrize("use_tz", [True, False])
def test_times_are_as_use_tz_has_them(settings: Any, use_tz: bool) -> None:
    settings.USE_TZ = use_tz
    at_once = jobs.note.enqueue("at once")
    assert task_backends["default"].get_result(at_once.id).task.run_after is None
    later = timezone.now() + timedelta(hours=1)
    assert timezone.is_aware(later) is use_tz
    delayed = jobs.note.using(run_after=later).enqueue("later")
    work()
    assert jobs.ran == [(("at once",), {})]
    assert task_backends["default"].get_result(delayed.id).task.run_after == later
    assert status(at_once) == SUCCESSFUL
    for name in ("enqueued_at", "started_at", "finished_at", "last_attempted_at"):
        assert timezone.is_aware(getattr(at_once, name)) is use_tz, name
    assert at_once.enqueued_at <= at_once.started_at <= at_once.finished_at


# ---- the choice of task


def test_of_equal_priority_the_one_that_is_due_for_longest_runs_first() -> None:
    now = datetime.now(UTC)
    for name, priority, hours in (
        ("low", -2, -20), ("normal", 0, 0), ("due", 20, -2), ("long due", 20, -10),
        ("not due", 100, 1),
    ):  # fmt: skip
        run_after = now + timedelta(hours=hours)
        jobs.note.using(priority=priority, run_after=run_after).enqueue(name)
    work()
    assert [args[0] for args, _ in jobs.ran] == ["long due", "due", "normal", "low"]


def test_a_worker_takes_its_own_queues_only() -> None:
    here, there = jobs.note.enqueue("here"), jobs.elsewhere.enqueue("there")
    work("unheard-of")
    assert jobs.ran == []
    work("default")
    assert (status(here), status(there)) == (SUCCESSFUL, READY)
    work("#")
    assert status(there) == SUCCESSFUL


def test_locked_task_does_not_block_others() -> None:
    locked, free = jobs.note.enqueue("locked"), jobs.note.enqueue("free")
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [locked.id])
        assert Worker(max_seconds=60, max_messages=1).run()
        assert (status(locked), status(free)) == (READY, SUCCESSFUL)
    work()
    assert status(locked) == SUCCESSFUL


def test_worker_continues_after_any_error_of_a_task() -> None:
    results = [task.enqueue() for task in (jobs.leave, jobs.fail, jobs.nest, jobs.unstorable)]
    last = jobs.note.enqueue("last")
    work()
    assert [status(each) for each in results] == [FAILED] * 4
    assert status(last) == SUCCESSFUL


def test_a_row_names_a_task_and_never_code() -> None:
    """A function that is not a task is not run, even if it can be imported."""
    path = "subprocess.check_output"
    row = QueuedMessage.objects.create(
        queue="default", type=f"tasks.{path}", handler=path, wants_result=True, max_attempts=1,
        payload={"args": [["exit", "1"]], "kwargs": {}},
    )  # fmt: skip
    work()
    row.refresh_from_db()
    assert row.state == "held"
    with pytest.raises(TaskResultDoesNotExist, match="not registered here"):
        task_backends["default"].get_result(str(row.pk))


# ---- errors and values


def test_missing_result_raises_with_the_reason() -> None:
    """Mostly its transaction was rolled back, or its retention is over."""
    with transaction.atomic():
        result = jobs.note.enqueue()
        transaction.set_rollback(True)
    with pytest.raises(TaskResultDoesNotExist) as missing:
        result.refresh()
    assert str(missing.value) == (
        f"no task {result.id} is stored: it has ended, and result_retention is over, or its"
        " transaction is open or was rolled back"
    )
    with pytest.raises(TaskResultDoesNotExist, match="7 is not the id of a result, which is text"):
        jobs.note.get_result(7)  # type: ignore[arg-type]


def test_an_error_whose_arguments_are_objects() -> None:
    result = jobs.nest.enqueue()
    work()
    assert status(result) == FAILED
    [error] = result.errors
    assert error.exception_class is ValueError
    assert error.traceback.endswith("ValueError: inner\n")
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_value_that_is_not_json_fails_the_task() -> None:
    result = jobs.unstorable.enqueue()
    work()
    assert status(result) == FAILED
    assert result._return_value is None
    assert "TypeError: result['rows'][1]: Unsupported type: " in result.errors[0].traceback


def test_returned_retry_fails_the_task() -> None:
    result = jobs.return_a_retry.enqueue()
    work()
    assert status(result) == FAILED
    assert "the handler returned Retry(" in result.errors[0].traceback
    assert "raise it instead" in result.errors[0].traceback


@pytest.mark.parametrize(
    ("args", "kwargs", "place"),
    [
        ((1, {2}), {}, "args[1]"),
        (([0, {"at": datetime(2030, 1, 1)}],), {}, "args[0][1]['at']"),
        ((), {"product": Product(pk=7)}, "kwargs['product']"),
        ((b"\xff",), {}, "args[0]"),
    ],
)
def test_an_argument_that_is_not_json_is_named(
    args: tuple[object, ...], kwargs: dict[str, object], place: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        jobs.note.enqueue(*args, **kwargs)
    assert str(refused.value).startswith(f"{place}: Unsupported ")
    assert "the pk of an object" in str(refused.value)
    assert not QueuedMessage.objects.exists()


# ---- another database


class OtherDatabaseTest(TransactionTestCase):
    databases = {"default", "other"}

    def test_a_task_belongs_to_the_transaction_of_its_own_database(self) -> None:
        there = {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": "other"}}
        with override_settings(TASKS={**TASKS, "default": there}):
            with transaction.atomic():
                kept = jobs.note.enqueue("kept")
                transaction.set_rollback(True)
            with transaction.atomic(using="other"):
                gone = jobs.note.enqueue("gone")
                transaction.set_rollback(True, using="other")
            assert status(kept) == READY
            with pytest.raises(TaskResultDoesNotExist):
                jobs.note.get_result(gone.id)
            work(using="other")
            assert status(kept) == SUCCESSFUL
            assert jobs.ran == [(("kept",), {})]


class OtherDatabaseInATestCase(TestCase):
    """Both databases are in a transaction of the test, and nothing is committed."""

    databases = {"default", "other"}

    def test_every_helper_uses_the_database_it_is_given(self) -> None:
        there = {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": "other"}}
        with override_settings(TASKS={**TASKS, "default": there}):
            now = jobs.note.enqueue("now")
            later = jobs.note.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("later")
            assert drain() == 0
            assert drain(using="other") == 1
            assert (status(now), status(later)) == (SUCCESSFUL, READY)
            due(until=timedelta(hours=2))
            assert drain(using="other") == 0
            due(until=timedelta(hours=2), using="other")
            assert drain(using="other") == 1
            assert status(later) == SUCCESSFUL
