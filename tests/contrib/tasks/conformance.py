"""The promises of Django's tasks for any backend, tested only through their public API.

Mix `TaskBackendConformance` into a TransactionTestCase, and define how the backend runs its tasks.
Nothing in `jobs` is specific to a backend.
"""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import override_settings

from testproject.shop.models import Product
from tests.contrib.tasks import jobs

if django.VERSION >= (6, 0):
    from django.tasks import TaskResultStatus, default_task_backend, task_backends
    from django.tasks.exceptions import (
        InvalidTask,
        TaskResultDoesNotExist,
        TaskResultMismatch,
    )
    from django.tasks.signals import task_enqueued, task_finished, task_started

    LOGGER = "django.tasks"
else:
    from django_tasks import TaskResultStatus, default_task_backend, task_backends
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    from django_tasks.signals import task_enqueued, task_finished, task_started

    LOGGER = "django_tasks"

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
SUCCESSFUL, FAILED = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED


class TaskBackendConformance:
    """The behaviours; a failing test names the broken promise."""

    #: A second backend of TASKS, in which the queue "own" is the only one.
    second_backend = "second"

    def run_tasks(self) -> None:
        """Run due tasks until none is left."""
        raise NotImplementedError

    def setUp(self) -> None:
        super().setUp()
        jobs.ran.clear()
        jobs.gate.clear()
        jobs.started.clear()

    # ---- enqueue

    def test_enqueue_returns_a_ready_result(self) -> None:
        for result in (
            jobs.note.enqueue(1, two="2"),
            async_to_sync(jobs.note.aenqueue)(1, two="2"),
        ):
            assert isinstance(result.id, str)
            assert 0 < len(result.id) <= 64
            assert result.status == READY
            assert not result.is_finished
            assert result.task.func == jobs.note.func
            assert (result.args, result.kwargs) == ([1], {"two": "2"})
            assert result.backend == "default"
            assert result.attempts == 0
            assert result.enqueued_at is not None
            assert result.enqueued_at.tzinfo is not None
            assert (result.started_at, result.finished_at) == (None, None)
            assert result.last_attempted_at is None
            assert (result.errors, result.worker_ids) == ([], [])

    def test_arguments_become_json(self) -> None:
        result = jobs.note.enqueue((1, 2), pair=("a", "b"))
        assert (result.args, result.kwargs) == ([[1, 2]], {"pair": ["a", "b"]})
        self.run_tasks()
        assert jobs.ran == [(([1, 2],), {"pair": ["a", "b"]})]
        for odd in (object(), {1, 2}, datetime.now(UTC)):
            with pytest.raises((TypeError, ValueError)):
                jobs.note.enqueue(odd)

    def test_tasks_are_validated_by_using_and_by_enqueue(self) -> None:
        for options in (
            {"queue_name": "unknown"},
            {"priority": 101},
            {"priority": -101},
            {"priority": 1.5},
            {"run_after": datetime(2030, 1, 1)},
        ):
            with pytest.raises(InvalidTask):
                jobs.note.using(**options)

    def test_nested_functions_are_refused(self) -> None:
        def nested() -> None: ...

        with pytest.raises(InvalidTask):
            default_task_backend.task_class(
                func=nested,
                priority=0,
                backend="default",
                queue_name="default",
                run_after=None,
                takes_context=False,
            )

    def test_a_rollback_removes_the_task(self) -> None:
        with transaction.atomic():
            result = jobs.note.enqueue()
            transaction.set_rollback(True)
        with pytest.raises(TaskResultDoesNotExist):
            jobs.note.get_result(result.id)
        self.run_tasks()
        assert jobs.ran == []

    def test_a_commit_publishes_it(self) -> None:
        with transaction.atomic():
            result = jobs.note.enqueue()
            assert jobs.note.get_result(result.id).status == READY
        self.run_tasks()
        assert jobs.note.get_result(result.id).status == SUCCESSFUL

    def test_outside_a_transaction_it_commits_by_itself(self) -> None:
        assert not connection.in_atomic_block
        jobs.note.enqueue("alone")
        self.run_tasks()
        assert jobs.ran == [(("alone",), {})]

    # ---- results

    def test_results_are_found(self) -> None:
        result = jobs.note.enqueue(1, two=2)
        for found in (
            jobs.note.get_result(result.id),
            default_task_backend.get_result(result.id),
            async_to_sync(jobs.note.aget_result)(result.id),
            async_to_sync(default_task_backend.aget_result)(result.id),
        ):
            assert (found.id, found.status) == (result.id, READY)
            assert (found.args, found.kwargs) == ([1], {"two": 2})
            assert found.task.func == jobs.note.func

    def test_missing_and_malformed_ids(self) -> None:
        result = jobs.note.enqueue()
        ids = [
            "",
            "nothing",
            "123456789",
            f" {result.id}",
            f"0{result.id}",
            "9" * 64,
            "\0",
            "\u0663",
        ]
        for id in ids:
            with pytest.raises(TaskResultDoesNotExist):
                jobs.note.get_result(id)
            with pytest.raises(TaskResultDoesNotExist):
                async_to_sync(jobs.note.aget_result)(id)

    def test_the_result_of_another_task_is_a_mismatch(self) -> None:
        result = jobs.note.enqueue()
        with pytest.raises(TaskResultMismatch):
            jobs.fail.get_result(result.id)
        with pytest.raises(TaskResultMismatch):
            async_to_sync(jobs.fail.aget_result)(result.id)

    def test_refresh(self) -> None:
        for refresh in (lambda each: each.refresh(), lambda each: async_to_sync(each.arefresh)()):
            result = jobs.note.enqueue(3)
            with pytest.raises(ValueError, match="not finished"):
                _ = result.return_value
            self.run_tasks()
            assert result.status == READY
            refresh(result)
            assert result.status == SUCCESSFUL
            assert result.is_finished
            assert result.return_value == {"args": [3], "kwargs": {}}
            assert result.enqueued_at <= result.started_at <= result.finished_at
            assert result.last_attempted_at == result.started_at
            assert result.attempts == len(result.worker_ids) == 1
            assert all(result.worker_ids)
            assert result.errors == []

    def test_a_failed_task(self) -> None:
        result = jobs.fail.enqueue()
        self.run_tasks()
        result.refresh()
        assert result.status == FAILED
        assert result.is_finished
        with pytest.raises(ValueError, match="failed"):
            _ = result.return_value
        [error] = result.errors
        assert error.exception_class is ValueError
        assert error.traceback.startswith("Traceback (most recent call last):\n")
        assert error.traceback.endswith("ValueError: this task failed\n")
        assert result.finished_at >= result.last_attempted_at == result.started_at
        assert result.attempts == 1

    def test_its_writes_are_gone(self) -> None:
        result = jobs.write_and_fail.enqueue("ghost")
        self.run_tasks()
        assert jobs.write_and_fail.get_result(result.id).status == FAILED
        assert not Product.objects.filter(name="ghost").exists()

    def test_errors_beyond_exceptions(self) -> None:
        left, unstorable = jobs.leave.enqueue(), jobs.unstorable.enqueue()
        self.run_tasks()
        for result, error in ((left, SystemExit), (unstorable, TypeError)):
            result.refresh()
            assert result.status == FAILED
            assert [each.exception_class for each in result.errors] == [error]

    def test_an_error_whose_class_is_gone(self) -> None:
        result = jobs.fail_oddly.enqueue()
        self.run_tasks()
        result.refresh()
        [error] = result.errors
        assert error.exception_class is jobs.Odd
        kept, path = jobs.Odd, error.exception_class_path
        try:
            del jobs.Odd
            with pytest.raises(ImportError):
                _ = jobs.fail_oddly.get_result(result.id).errors[0].exception_class
        finally:
            jobs.Odd = kept
        assert path == "tests.contrib.tasks.jobs.Odd"

    # ---- the choice of task, time and place

    def test_coroutines(self) -> None:
        results = [
            jobs.coroutine.enqueue(7),
            jobs.coroutine_writes.enqueue("async"),
            jobs.coroutine_fails.enqueue(),
        ]
        self.run_tasks()
        for result in results:
            result.refresh()
        returned, wrote, failed = results
        assert returned.return_value == 7
        assert Product.objects.get(name="async").pk == wrote.return_value
        assert [each.exception_class for each in failed.errors] == [ValueError]

    def test_context(self) -> None:
        result = jobs.in_context.enqueue("a")
        self.run_tasks()
        result.refresh()
        assert result.return_value == {"id": result.id, "attempt": 1, "args": ["a"]}
        [within] = jobs.ran
        assert within.status == RUNNING
        assert within.attempts == 1
        assert within.worker_ids == result.worker_ids
        assert within.enqueued_at <= within.started_at

    def test_priorities_run_from_high_to_low(self) -> None:
        for priority in (0, -100, 100, 7):
            jobs.note.using(priority=priority).enqueue(priority)
        self.run_tasks()
        assert [args[0] for args, _ in jobs.ran] == [100, 7, 0, -100]

    def test_nothing_runs_early(self) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        result = jobs.note.using(run_after=later).enqueue()
        self.run_tasks()
        assert jobs.ran == []
        found = jobs.note.get_result(result.id)
        assert found.status == READY
        assert abs(found.task.run_after - later) < timedelta(milliseconds=1)
        past = datetime.now(UTC) - timedelta(hours=1)
        jobs.note.using(run_after=past).enqueue("past")
        self.run_tasks()
        assert jobs.ran == [(("past",), {})]

    def test_queues(self) -> None:
        result = jobs.elsewhere.enqueue(1)
        moved = jobs.elsewhere.using(queue_name="default", priority=9).enqueue(2)
        self.run_tasks()
        assert sorted(jobs.ran) == [1, 2]
        found, other = (default_task_backend.get_result(each.id) for each in (result, moved))
        assert (found.task.queue_name, found.task.priority) == ("second", 5)
        assert (other.task.queue_name, other.task.priority) == ("default", 9)

    def test_two_backends(self) -> None:
        own = jobs.note.using(backend=self.second_backend, queue_name="own").enqueue("own")
        assert own.backend == self.second_backend
        jobs.note.enqueue("default")
        self.run_tasks()
        assert sorted(args[0] for args, _ in jobs.ran) == ["default", "own"]
        assert task_backends[self.second_backend].get_result(own.id).status == SUCCESSFUL
        with pytest.raises(TaskResultDoesNotExist):
            default_task_backend.get_result(own.id)
        with pytest.raises(InvalidTask):
            jobs.note.using(backend=self.second_backend)

    def test_an_empty_list_of_queues_allows_all(self) -> None:
        params = {**default_params(), "QUEUES": []}
        with override_settings(TASKS={**all_params(), "default": params}):
            result = jobs.note.using(queue_name="any-name").enqueue("any")
            assert jobs.note.get_result(result.id).task.queue_name == "any-name"

    # ---- signals and logs

    def test_signals(self) -> None:
        heard: list[tuple[str, Any, str, Any]] = []

        def hear(name: str) -> Any:
            def receiver(sender: Any, task_result: Any, **kwargs: Any) -> None:
                heard.append((name, sender, task_result.id, task_result.status))

            return receiver

        signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
        receivers = {name: hear(name) for name in signals}
        for name, signal in signals.items():
            signal.connect(receivers[name])
        try:
            for task, end in (
                (jobs.note, SUCCESSFUL),
                (jobs.fail, FAILED),
                (jobs.coroutine_fails, FAILED),
            ):
                heard.clear()
                result = task.enqueue()
                self.run_tasks()
                sender = type(task_backends["default"])
                assert heard == [
                    ("enqueued", sender, result.id, READY),
                    ("started", sender, result.id, RUNNING),
                    ("finished", sender, result.id, end),
                ]
        finally:
            for name, signal in signals.items():
                signal.disconnect(receivers[name])

    def test_log_records(self) -> None:
        with self.assertLogs(LOGGER, "DEBUG") as logs:
            fine, bad = jobs.note.enqueue(), jobs.fail.enqueue()
            self.run_tasks()
        for result, texts, levels in (
            (fine, ["enqueued backend=default", "state=RUNNING", "state=SUCCESSFUL"], "DII"),
            (bad, ["enqueued backend=default", "state=RUNNING", "state=FAILED"], "DIE"),
        ):
            own = [each for each in logs.records if f"id={result.id} " in each.getMessage()]
            assert [text in each.getMessage() for each, text in zip(own, texts, strict=True)]
            assert "".join(each.levelname[0] for each in own) == levels
        [last] = [each for each in logs.records if each.levelname == "ERROR"]
        assert last.exc_info is not None
        assert isinstance(last.exc_info[1], ValueError)

    # ---- beyond one process

    def test_pickling(self) -> None:
        if django.VERSION < (6, 1):
            self.skipTest("tasks can be pickled from Django 6.1 on")
        task = jobs.note.using(priority=3)
        assert pickle.loads(pickle.dumps(task)) == task  # noqa: S301


def all_params() -> dict[str, Any]:
    from django.conf import settings

    return dict(settings.TASKS)


def default_params() -> dict[str, Any]:
    return dict(all_params()["default"])
