"""A task with the options of a message, and the decorator that takes them on every Django."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from django_mq.contrib.tasks.compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_QUEUE_NAME,
    GenericTask,
    TaskContext,
    task_backends,
)
from django_mq.exceptions import When
from django_mq.policy.backoff import BackoffStrategy
from django_mq.policy.uniqueness import OnDuplicate

P = ParamSpec("P")
R = TypeVar("R")

#: A text, or a function from the task's arguments to a text; None is no key, or no id.
Named = str | Callable[..., str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTask(GenericTask[P, R], Generic[P, R]):
    """A Django task whose message has options; None is the backend's default.

    - `max_attempts`, `backoff`: retries, which a task does not have otherwise. `backoff` is
      `exponential()`, `fixed()` or `intervals()`.
    - `timeout`: seconds or a timedelta.
    - `key`: tasks of one function with the same key run one at a time, in order.
    - `unique_id`: while a task of this function with this id waits or runs, enqueueing another
      returns the result of that one. `on_duplicate` and `unique_for` are those of `broadcast()`.
    - `expires`: seconds, a timedelta or an aware datetime; no attempt starts later.
    - `atomic`: whether the task's writes and its end are one transaction; default True, but
      coroutines never are.

    `key` and `unique_id` may be functions, which are called with the arguments of the task.
    """

    max_attempts: int | None = None
    backoff: BackoffStrategy | None = None
    timeout: float | timedelta | None = None
    key: Named | None = None
    unique_id: Named | None = None
    on_duplicate: OnDuplicate | None = None
    unique_for: float | timedelta | None = None
    expires: When | None = None
    atomic: bool | None = None

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        max_attempts: int | None = None,
        backoff: BackoffStrategy | None = None,
        timeout: float | timedelta | None = None,
        key: Named | None = None,
        unique_id: Named | None = None,
        on_duplicate: OnDuplicate | None = None,
        unique_for: float | timedelta | None = None,
        expires: When | None = None,
        atomic: bool | None = None,
    ) -> MessageTask[P, R]:
        """Return this task with other options; None leaves one as it is."""
        given = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
            "max_attempts": max_attempts,
            "backoff": backoff,
            "timeout": timeout,
            "key": key,
            "unique_id": unique_id,
            "on_duplicate": on_duplicate,
            "unique_for": unique_for,
            "expires": expires,
            "atomic": atomic,
        }
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        return replace(self, **changes)


@overload
def task(function: Callable[P, R]) -> MessageTask[P, R]: ...
@overload
def task(
    *,
    priority: int = 0,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: Literal[True],
    max_attempts: int | None = None,
    backoff: BackoffStrategy | None = None,
    timeout: float | timedelta | None = None,
    key: Named | None = None,
    unique_id: Named | None = None,
    on_duplicate: OnDuplicate | None = None,
    unique_for: float | timedelta | None = None,
    expires: When | None = None,
    atomic: bool | None = None,
) -> Callable[[Callable[Concatenate[TaskContext[..., Any], P], R]], MessageTask[P, R]]: ...
@overload
def task(
    *,
    priority: int = 0,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: Literal[False] = False,
    max_attempts: int | None = None,
    backoff: BackoffStrategy | None = None,
    timeout: float | timedelta | None = None,
    key: Named | None = None,
    unique_id: Named | None = None,
    on_duplicate: OnDuplicate | None = None,
    unique_for: float | timedelta | None = None,
    expires: When | None = None,
    atomic: bool | None = None,
) -> Callable[[Callable[P, R]], MessageTask[P, R]]: ...
def task(
    function: Callable[..., Any] | None = None,
    *,
    priority: int = 0,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    max_attempts: int | None = None,
    backoff: BackoffStrategy | None = None,
    timeout: float | timedelta | None = None,
    key: Named | None = None,
    unique_id: Named | None = None,
    on_duplicate: OnDuplicate | None = None,
    unique_for: float | timedelta | None = None,
    expires: When | None = None,
    atomic: bool | None = None,
) -> Any:
    """Make a function a task; Django's decorator with the options of `MessageTask`.

    Django 6.0's own decorator takes no further options; that of 6.1 and the backport's do.
    """

    def wrapper(function: Callable[..., Any]) -> Any:
        return task_backends[backend].task_class(
            func=function,
            priority=priority,
            queue_name=queue_name,
            run_after=None,
            backend=backend,
            takes_context=takes_context,
            **{
                name: value
                for name, value in {
                    "max_attempts": max_attempts,
                    "backoff": backoff,
                    "timeout": timeout,
                    "key": key,
                    "unique_id": unique_id,
                    "on_duplicate": on_duplicate,
                    "unique_for": unique_for,
                    "expires": expires,
                    "atomic": atomic,
                }.items()
                if value is not None
            },
        )

    return wrapper if function is None else wrapper(function)
