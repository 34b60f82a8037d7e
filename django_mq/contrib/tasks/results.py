"""Task results: for a task that was enqueued, that runs here, or that is stored in the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

from django_mq.conf import get_settings
from django_mq.contrib.tasks import errors
from django_mq.contrib.tasks.compat import (
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
    task_backends,
)
from django_mq.contrib.tasks.options import StoredOptions, stored_options
from django_mq.exceptions import UnreadablePayload
from django_mq.executor.connections import closed_if_opened
from django_mq.messages import Delivery, worker_of
from django_mq.outbox.send import queue_connection
from django_mq.policy.backoff import MAX_ATTEMPTS
from django_mq.policy.column_bounds import FIRST_TIME, LAST_TIME
from django_mq.store import kept_results
from django_mq.store.kept_results import StoredTask
from django_mq.store.results import UNANSWERED

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_FIRST, _LAST = FIRST_TIME.timestamp(), LAST_TIME.timestamp()


@dataclass(slots=True)
class TaskAttempts:
    """The attempts of a task so far, in order: their workers, and the errors of failed ones."""

    worker_ids: list[str] = field(default_factory=list)
    errors: list[TaskError] = field(default_factory=list)
    started_at: datetime | None = None
    last_attempted_at: datetime | None = None

    def add(self, worker: str, started: float | None) -> None:
        """Add an attempt of `worker`; `started` is in seconds since 1970."""
        self.worker_ids.append(worker)
        self.last_attempted_at = None if started is None else from_epoch(started)
        self.started_at = self.started_at or self.last_attempted_at


def enqueued(
    task: Task[..., Any], id: int, args: list[Any], kwargs: dict[str, Any], *, at: float
) -> TaskResult[..., Any]:
    """Return the result of a task that was stored just now, `at` seconds since 1970."""
    return _result(
        task,
        id,
        TaskResultStatus.READY,
        arguments=(args, kwargs),
        enqueued_at=from_epoch(at),
        attempts=TaskAttempts(),
    )


def running(task: Task[..., Any], delivery: Delivery) -> TaskResult[..., Any] | None:
    """Return the result of a task whose attempt starts here; None if it has no arguments."""
    arguments = arguments_of(delivery.payload)
    if arguments is None:
        return None
    attempts = failed_attempts(delivery, delivery.attempt - 1)
    # By the worker's clock, but not before the claim by the database's clock.
    attempts.add(worker_of(delivery._row.claimed_by), max(delivery._row.claimed, time()))
    return _result(
        _as_enqueued(task, delivery.queue, delivery.priority, stored_options(delivery.metadata)),
        delivery.id,
        TaskResultStatus.RUNNING,
        arguments=arguments,
        enqueued_at=from_epoch(delivery._row.created),
        attempts=attempts,
    )


def ended(
    task: Task[..., Any], delivery: Delivery, attempts: TaskAttempts, *, succeeded: bool, value: Any
) -> TaskResult[..., Any] | None:
    """Return the result of a task that has just ended; None if its payload has no arguments."""
    try:
        arguments, options = arguments_of(delivery.payload), stored_options(delivery.metadata)
    except UnreadablePayload:
        return None
    if arguments is None:
        return None
    result = _result(
        _as_enqueued(task, delivery.queue, delivery.priority, options),
        delivery.id,
        TaskResultStatus.SUCCESSFUL if succeeded else TaskResultStatus.FAILED,
        arguments=arguments,
        enqueued_at=from_epoch(delivery._row.created),
        attempts=attempts,
        finished_at=timezone.now(),
    )
    object.__setattr__(result, "_return_value", value)
    return result


def stored(task: Task[..., Any], id: int, found: StoredTask) -> TaskResult[..., Any] | None:
    """Return the result of a task as it is stored; None if it has no arguments."""
    arguments = arguments_of(_read(found.payload))
    if arguments is None:
        return None
    attempts = _attempts_of(found.attempts, found.used - (found.leased_until is not None))
    if found.leased_until is None:
        status = TaskResultStatus.READY
    else:
        status = TaskResultStatus.RUNNING
        lease = get_settings().queue(found.queue).lease
        attempts.add(found.worker or "", found.started or found.leased_until - lease)
    if found.error_class == UNANSWERED:
        attempts.errors.append(errors.unanswered(found.error_text))
    if found.ended is not None:
        failed = found.stored or found.error_class
        status = TaskResultStatus.FAILED if failed else TaskResultStatus.SUCCESSFUL
    result = _result(
        _as_enqueued(task, found.queue, found.priority, _options_of(found)),
        id,
        status,
        arguments=arguments,
        enqueued_at=from_epoch(found.enqueued),
        attempts=attempts,
        finished_at=None if found.ended is None else from_epoch(found.ended),
    )
    if status == TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", _read(found.value or "null"))
    return result


def _options_of(found: StoredTask) -> StoredOptions:
    """Return the options of a stored task; a duplicate or an operator may have moved its time."""
    options = stored_options(_read(found.metadata))
    if found.due is None or (options.run_after is None and found.due <= found.enqueued):
        return options
    return replace(options, run_after=datetime.fromtimestamp(found.due, UTC))


def sender_of(result: TaskResult[..., Any], registered: Task[..., Any]) -> type:
    """Return the sender of the signals about a result: the class of its backend."""
    try:
        return type(task_backends[result.backend])
    except ImproperlyConfigured:  # enqueued under an alias that is not in this process's TASKS
        return type(registered.get_backend())


def from_epoch(seconds: float) -> datetime:
    """Return seconds since 1970 as a datetime, naive in local time if USE_TZ is off."""
    at = datetime.fromtimestamp(seconds, UTC)
    return at if settings.USE_TZ else timezone.make_naive(at, timezone.get_default_timezone())


def arguments_of(payload: object) -> tuple[list[Any], dict[str, Any]] | None:
    """Return args and kwargs of a payload; None if it has none.

    >>> arguments_of({"args": [1], "kwargs": {}}), arguments_of([])
    (([1], {}), None)
    """
    if not isinstance(payload, Mapping):
        return None
    args, kwargs = payload.get("args"), payload.get("kwargs")
    return (args, kwargs) if isinstance(args, list) and isinstance(kwargs, dict) else None


def _result(
    task: Task[..., Any],
    id: int,
    status: TaskResultStatus,
    *,
    arguments: tuple[list[Any], dict[str, Any]],
    enqueued_at: datetime,
    attempts: TaskAttempts,
    finished_at: datetime | None = None,
) -> TaskResult[..., Any]:
    return TaskResult(
        task=task,
        id=str(id),
        status=status,
        enqueued_at=enqueued_at,
        started_at=attempts.started_at,
        finished_at=finished_at,
        last_attempted_at=attempts.last_attempted_at,
        args=arguments[0],
        kwargs=arguments[1],
        backend=task.backend,
        errors=attempts.errors,
        worker_ids=attempts.worker_ids,
    )


def _as_enqueued(
    task: Task[..., Any], queue: str, priority: int, options: StoredOptions
) -> Task[..., Any]:
    """Return the registered task as it was enqueued, without validating it: settings may change."""
    changes = {
        "queue_name": queue,
        "priority": priority,
        "backend": options.backend,
        "run_after": options.run_after and from_epoch(options.run_after.timestamp()),
    }
    if all(getattr(task, name) == value for name, value in changes.items()):
        return task
    made = object.__new__(type(task))
    for each in fields(task):
        object.__setattr__(made, each.name, changes.get(each.name, getattr(task, each.name)))
    return made


def failed_attempts(delivery: Delivery, count: int | None) -> TaskAttempts:
    """Return the recorded failed attempts of a delivery's message: the last `count`, or all."""
    if count == 0:
        return TaskAttempts()
    connection = _connection(delivery)
    with closed_if_opened(connection), connection.cursor() as cursor:
        return _attempts_of(kept_results.failed_attempts(cursor, delivery.id), count)


def _connection(delivery: Delivery) -> BaseDatabaseWrapper:
    try:
        backend = task_backends[stored_options(delivery.metadata).backend]
    except (ImproperlyConfigured, UnreadablePayload):
        backend = None
    return queue_connection(getattr(backend, "database", None))


def _attempts_of(text: str, count: int | None) -> TaskAttempts:
    """Read the last `count` attempts, or all; an attempt without a record has no worker.

    Another program may have written the records, and a count that no list can have.
    """
    attempts = TaskAttempts()
    found = _read(text)
    records = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    if count is not None:
        attempts.worker_ids += [""] * (min(count, MAX_ATTEMPTS) - len(records))
        records = records[max(len(records) - count, 0) :]
    for each in records:
        worker, error_class, traceback = (
            value if isinstance(value := each.get(name), str) else ""
            for name in ("worker", "error_class", "traceback")
        )
        attempts.add(worker, _time_in(each.get("started")))
        if error_class:
            attempts.errors.append(errors.failed(error_class, traceback))
    return attempts


def _time_in(value: object) -> float | None:
    """Return seconds since 1970, if `value` is a time that a column could have."""
    is_time = isinstance(value, int | float) and _FIRST <= value <= _LAST
    return float(value) if is_time else None  # type: ignore[arg-type]  # mypy does not see it


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
