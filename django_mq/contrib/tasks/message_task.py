"""A task with the options of a message, and the decorator that takes them on every Django."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from django_mq.contrib.tasks.compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_QUEUE_NAME,
    GenericTask,
    TaskContext,
    task_backends,
)
from django_mq.policy.backoff import BackoffStrategy
from django_mq.policy.uniqueness import OnDuplicate
from django_mq.values import When

P = ParamSpec("P")
R = TypeVar("R")

#: A text, or a function from the task's arguments to a text; None means no key or id.
Named = str | Callable[..., str | None]


class TaskOptions(TypedDict, total=False):
    """The options of `task()`: those of Django, and those of `MessageTask`."""

    priority: int | None
    queue_name: str | None
    backend: str | None
    max_attempts: int | None
    backoff: BackoffStrategy | None
    timeout: float | timedelta | None
    key: Named | None
    unique_id: Named | None
    on_duplicate: OnDuplicate | None
    unique_for: float | timedelta | None
    expires: When | None
    atomic: bool | None


class UsingOptions(TaskOptions, total=False):
    """The options of `MessageTask.using()`."""

    run_after: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTask(GenericTask[P, R], Generic[P, R]):
    """A Django task whose message has options; None means the backend's default.

    - `max_attempts`, `backoff`: retries, which a task has only with these. `backoff` is
      `exponential()`, `fixed()` or `intervals()`.
    - `timeout`: seconds or a timedelta.
    - `key`: tasks of one function with the same key run one at a time, in order.
    - `unique_id`: while a task of this function with this id waits or runs, enqueueing another
      returns the result of the first. `on_duplicate` and `unique_for` work as in `broadcast()`.
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

    def using(self, **options: Unpack[UsingOptions]) -> MessageTask[P, R]:
        """Return this task with other options; None leaves an option unchanged."""
        return replace(self, **_given(options, UsingOptions.__optional_keys__))


@overload
def task(function: Callable[P, R]) -> MessageTask[P, R]: ...
@overload
def task(
    *, takes_context: Literal[True], **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[TaskContext[..., Any], P], R]], MessageTask[P, R]]: ...
@overload
def task(
    *, takes_context: Literal[False] = False, **options: Unpack[TaskOptions]
) -> Callable[[Callable[P, R]], MessageTask[P, R]]: ...
def task(
    function: Callable[..., Any] | None = None,
    *,
    takes_context: bool = False,
    **options: Unpack[TaskOptions],
) -> Any:
    """Make a function a task; Django's decorator with the options of `MessageTask`.

    Django's own options are `priority`, `queue_name`, `backend` and `takes_context`. The decorator
    of Django 6.0 takes no others; those of 6.1 and of the backport do.
    """
    given = {**_DEFAULTS, **_given(options, TaskOptions.__optional_keys__, "takes_context")}

    def wrapper(function: Callable[..., Any]) -> Any:
        alias = given["backend"]
        task_class = task_backends[alias].task_class
        _check_known(given.keys(), task_class, alias)
        return task_class(func=function, run_after=None, takes_context=takes_context, **given)

    return wrapper if function is None else wrapper(function)


_DEFAULTS = {
    "priority": 0,
    "queue_name": DEFAULT_TASK_QUEUE_NAME,
    "backend": DEFAULT_TASK_BACKEND_ALIAS,
}


def _check_known(options: Set[str], task_class: type[Any], alias: str) -> None:
    """Raise TypeError if the tasks of a backend, perhaps another package's, lack an option."""
    if missing := options - {each.name for each in fields(task_class)}:
        backend = type(task_backends[alias])
        raise TypeError(
            f"the backend {alias!r} of TASKS is {backend.__module__}.{backend.__name__}, whose"
            f" tasks have no option {', '.join(sorted(missing))}: the options of django_mq need"
            " django_mq.contrib.tasks.MessageQueueBackend"
        )


def _given(options: Mapping[str, Any], known: Collection[str], *others: str) -> dict[str, Any]:
    """Return the options that are not None; raises TypeError for one that is not `known`.

    The error also lists `others`, options that the caller takes itself.
    """
    if unknown := options.keys() - known:
        usable = ", ".join(sorted([*known, *others]))
        raise TypeError(f"a task has no option {min(unknown)!r}: use {usable}")
    return {name: value for name, value in options.items() if value is not None}
