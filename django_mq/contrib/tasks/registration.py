"""Each task is a handler without patterns, which runs its function and announces the start.

A row names the task of an imported module, never code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.signals import setting_changed

from django_mq import handlers
from django_mq.contrib.tasks import results
from django_mq.contrib.tasks.compat import (
    DEFAULT_TASK_QUEUE_NAME,
    Task,
    TaskContext,
    task_started,
)
from django_mq.contrib.tasks.errors import TaskInterrupted
from django_mq.contrib.tasks.json_values import as_json
from django_mq.contrib.tasks.options import option, stored_options
from django_mq.exceptions import Reject
from django_mq.executor.calls import check_result
from django_mq.handlers import Handler
from django_mq.messages import ClaimedRow, Delivery
from django_mq.policy.backoff import RetryPolicy
from django_mq.values import as_seconds


class TaskRunner:
    """The handler function of one task: `run` of a plain function, `arun` of a coroutine."""

    def __init__(self, task: Task[..., Any]) -> None:
        self.task = task

    def run(self, delivery: Delivery) -> Any:
        """Run one attempt; return its value, which is valid JSON."""
        args, kwargs = self._start(delivery)
        try:
            return _result(self.task.func(*args, **kwargs), delivery)
        except KeyboardInterrupt as interrupt:
            raise TaskInterrupted from interrupt

    async def arun(self, delivery: Delivery) -> Any:
        """Run one attempt of a coroutine; return its value, which is valid JSON."""
        args, kwargs = await sync_to_async(self._start)(delivery)
        try:
            return _result(await self.task.func(*args, **kwargs), delivery)
        except KeyboardInterrupt as interrupt:
            raise TaskInterrupted from interrupt

    def _start(self, delivery: Delivery) -> tuple[list[Any], dict[str, Any]]:
        """Announce that the attempt starts; return the arguments of the function."""
        found = results.running(self.task, delivery)
        if found is None:
            raise Reject("the payload has no args and kwargs, so no enqueue() wrote it")
        task_started.send_robust(results.sender_of(found, self.task), task_result=found)
        args = list(found.args)
        if self.task.takes_context:
            args.insert(0, TaskContext(task_result=found))
        return args, found.kwargs


def _result(value: Any, delivery: Delivery) -> Any:
    """Return a task's value as JSON; raises TypeError or ValueError if it is not JSON."""
    try:
        return as_json(value, "result")
    except TypeError:
        check_result(value, delivery)  # names a mistake, such as a Retry that should be raised
        raise


def register(task: Task[..., Any], *, timeout: float | None, retry: RetryPolicy) -> Handler:
    """Return the handler of the task's function; register it if that has not been done.

    The options of the first task of a function are those of the handler; messages of another task
    of that function carry their own. `timeout` is the backend's, in seconds; `retry` is the task's
    policy.
    """
    known = handlers.registered(task.module_path)
    if known is not None and (registered := task_of(known)) and registered.func is task.func:
        return known
    queues = _queues()
    run = _run_of(task)
    handler = Handler(
        function=run,
        call=run,
        name=task.module_path,
        patterns=(),
        queue=task.queue_name,
        queues=tuple(queues),
        where=None,
        match="all",
        aliases=(),
        schema_version=1,
        retry=retry,
        atomic=atomic_of(task),
        batch=False,
        timeout=timeout_of(task, timeout),
        is_async=iscoroutinefunction(task.func),
        any_queue=not all(queues.values()),
        of_row=_of_row,
    )
    handlers.add(handler)
    return handler


def declared(path: str) -> Task[..., Any] | None:
    """Return the task at `path`, whatever its backend, if its module has been imported."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), "__dict__", {}).get(name)  # runs no code
    return found if isinstance(found, Task) and found.module_path == path else None


def task_of(handler: Handler | None) -> Task[..., Any] | None:
    """Return the registered task of a handler; None if the handler is not a task's."""
    runner = getattr(handler.function, "__self__", None) if handler is not None else None
    return runner.task if isinstance(runner, TaskRunner) else None


def atomic_of(task: Task[..., Any]) -> bool:
    """Return whether the task runs in the transaction that settles it."""
    atomic = option(task, "atomic")
    return not iscoroutinefunction(task.func) and atomic is not False


def timeout_of(task: Task[..., Any], default: float | None) -> float | None:
    """Return the seconds that an attempt may take; None means the TIMEOUT setting."""
    timeout = option(task, "timeout")
    return default if timeout is None else as_seconds(timeout)


def _queues() -> dict[str, bool]:
    """Return the queues of all backends, each with False if its backend takes any queue."""
    found: dict[str, bool] = {}
    for params in getattr(settings, "TASKS", {}).values():
        queues = params.get("QUEUES", [DEFAULT_TASK_QUEUE_NAME])
        found.update(dict.fromkeys(queues or [DEFAULT_TASK_QUEUE_NAME], bool(queues)))
    return found


def _follow_settings(*, setting: str, **_: object) -> None:
    """Give the registered tasks the queues of settings that a test overrides."""
    if setting != "TASKS":
        return
    queues = _queues()
    for each in handlers.all_handlers():
        if (task := task_of(each)) is not None:
            run = _run_of(task)
            changed = replace(
                each,
                function=run,
                call=run,
                queues=tuple(queues),
                any_queue=not all(queues.values()),
            )
            handlers.add(changed)  # it replaces the handler of the same function


setting_changed.connect(_follow_settings, dispatch_uid="django_mq.contrib.tasks.registration")


def _run_of(task: Task[..., Any]) -> Callable[[Delivery], Any]:
    runner = TaskRunner(task)
    return runner.arun if iscoroutinefunction(task.func) else runner.run


def _of_row(row: ClaimedRow) -> Handler:
    """Return the handler of one row, with the options that the row carries."""
    handler = handlers.get(row.handler)
    assert handler is not None  # noqa: S101  (the resolver has just found it)
    if row.metadata == "{}":
        return handler
    try:
        found = stored_options(json.loads(row.metadata))
    except (ValueError, RecursionError):
        return handler
    if found.timeout is None and found.atomic is None:
        return handler
    return _variant(handler, found.timeout, found.atomic)


@lru_cache(maxsize=1024)
def _variant(handler: Handler, timeout: float | None, atomic: bool | None) -> Handler:
    return replace(
        handler,
        timeout=handler.timeout if timeout is None else timeout,
        atomic=handler.atomic if atomic is None else atomic and not handler.is_async,
    )
