"""The OPTIONS of a backend and of a task, checked; and those that a task's message carries."""
# ruff: noqa: RUF009  (`readers.option` is `dataclasses.field`)

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_mq.conf import get_settings, readers
from django_mq.conf.local_time import aware
from django_mq.conf.readers import (
    SettingError,
    duration,
    optional,
    read_fields,
    retry_policy,
    text,
)
from django_mq.contrib.tasks.compat import DEFAULT_TASK_BACKEND_ALIAS, InvalidTask, Task
from django_mq.contrib.tasks.message_task import Named
from django_mq.exceptions import InvalidName, MQError
from django_mq.messages import Message
from django_mq.outbox.options import check_unique
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.column_bounds import FIRST_TIME
from django_mq.policy.names import check_key, check_name
from django_mq.policy.routing import TASKS
from django_mq.store.kept_results import OPTIONS
from django_mq.values import as_seconds, checked_when, short_repr

NEVER = RetryPolicy.never()
#: The values of `on_duplicate` that a task may have.
DUPLICATE_OPTIONS = ("skip", "raise", "update", "debounce", "replace")


def _modules(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError("must be a list of dotted module paths")
    return tuple(value)


def _stored_policy(value: object) -> RetryPolicy:
    policy: RetryPolicy = retry_policy(value)
    try:
        policy.to_data()
    except MQError as error:
        raise ValueError(str(error)) from None
    return policy


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The OPTIONS of a backend; `timeout` and `result_retention` are seconds."""

    database: str | None = readers.option(optional(text), None)
    retry: RetryPolicy = readers.option(_stored_policy, NEVER)
    timeout: float | None = readers.option(optional(duration()), None)
    result_retention: float | None = readers.option(optional(duration()), None)
    modules: tuple[str, ...] = readers.option(_modules, ())


def backend_options(alias: str, raw: object) -> tuple[BackendOptions, list[SettingError]]:
    """Return the OPTIONS of backend `alias`, with defaults for bad ones, and their errors."""
    where = f"TASKS[{alias!r}]['OPTIONS']"
    if not isinstance(raw, Mapping):
        error = SettingError(where, f"is {short_repr(raw)}: must be a dict.")
        return BackendOptions(), [error]
    errors: list[SettingError] = []
    values = read_fields(BackendOptions, raw, str, where, errors)
    return BackendOptions(**values), errors


def option(task: Task[..., Any], name: str) -> Any:
    """Return an option of a MessageTask; None for a task that another backend's class created."""
    return getattr(task, name, None)


def check_options(task: Task[..., Any], retry: RetryPolicy) -> None:
    """Raise ValueError, or an MQError, if the task cannot be stored with its options.

    `retry` is the policy of the task's backend.
    """
    check_name(TASKS + task.module_path, "the task's path, as a type,")
    check_name(task.queue_name, "queue")
    policy_of(task, retry)
    atomic, timeout = option(task, "atomic"), option(task, "timeout")
    if atomic is not None and type(atomic) is not bool:
        raise ValueError(f"atomic= must be True or False, not {short_repr(atomic)}")
    if atomic and iscoroutinefunction(task.func):
        raise ValueError("a coroutine cannot be atomic: Django has no async transactions")
    if timeout is not None and not as_seconds(timeout):
        raise ValueError(
            f"timeout= must be seconds above zero or a timedelta, not {short_repr(timeout)}"
        )
    _check_times(task)
    key = option(task, "key")
    if key is not None and not callable(key):
        check_key(key, "key")
    _check_unique(task)


def _check_times(task: Task[..., Any]) -> None:
    now, ahead = datetime.now(UTC), None
    if (expires := option(task, "expires")) is not None:
        try:
            end = checked_when(expires)
        except ValueError as error:
            raise ValueError(f"expires= {error}") from error
        ahead = (end - now).total_seconds() if isinstance(end, datetime) else end
        _check_ahead("expires", expires, ahead)
    if task.run_after is None:
        return
    start = aware(task.run_after)
    if start < FIRST_TIME:
        raise ValueError(
            f"run_after ({task.run_after}) cannot be stored: give a time from {FIRST_TIME:%Y} on"
        )
    _check_ahead("run_after", task.run_after, (start - now).total_seconds())
    # A time that has passed is not a mistake in the declaration: enqueue() refuses it.
    if ahead is not None and ahead <= (start - now).total_seconds() and start > now:
        raise ValueError(
            f"expires ({expires}) is not later than run_after ({task.run_after}):"
            " no attempt could ever start"
        )


def _check_ahead(name: str, value: object, seconds: float) -> None:
    try:
        maximum = get_settings().max_delay
    except ImproperlyConfigured:  # E001 says so: an error here would keep checks from running
        return
    if seconds > maximum:
        raise ValueError(f"{name} ({value}) is more than {maximum:,.0f} s ahead (MAX_DELAY)")


def _check_unique(task: Task[..., Any]) -> None:
    unique_id, way = option(task, "unique_id"), option(task, "on_duplicate")
    for name in ("on_duplicate", "unique_for"):
        if option(task, name) is not None and unique_id is None:
            raise ValueError(f"{name}= does nothing without unique_id=")
    if way in ("requeue", "rerun"):
        raise ValueError(
            f"on_duplicate={way!r} stores a message that has no id yet, so there would be no"
            " result to return"
        )
    if way is not None and way not in DUPLICATE_OPTIONS:
        raise ValueError(
            f"on_duplicate must be one of {', '.join(DUPLICATE_OPTIONS)}, not {short_repr(way)}"
        )
    if unique_id is not None:
        stored = "any" if callable(unique_id) else unique_id
        message = Message("task", unique_id=stored, unique_for=option(task, "unique_for"))
        try:
            max_delay = get_settings().max_delay
        except ImproperlyConfigured:  # E001 says so: an error here would keep checks from running
            return
        check_unique(message, max_delay)


def policy_of(task: Task[..., Any], default: RetryPolicy) -> RetryPolicy:
    """Return the retry policy of `task`: `default`, with its own attempts and backoff."""
    attempts, backoff = option(task, "max_attempts"), option(task, "backoff")
    if attempts is None and backoff is None:
        return default
    if attempts is None and default.max_attempts == 1:
        raise ValueError("backoff= does nothing without max_attempts=")
    policy = RetryPolicy(
        default.max_attempts if attempts is None else attempts,
        default.backoff if backoff is None else backoff,
    )
    policy.to_data()
    return policy


def key_or_unique_id(
    task: Task[..., Any], name: str, args: list[Any], kwargs: dict[str, Any]
) -> str | None:
    """Return the task's `key` or `unique_id`: the text, or the function's result.

    Raises InvalidTask if the result is not a text that can be used.
    """
    value: Named | None = option(task, name)
    if not callable(value):
        return value
    try:
        found = value(*args, **kwargs)
        return None if found is None else check_key(found, name.replace("_", " "))
    except InvalidName as error:
        raise InvalidTask(f"{task.module_path}: {name}= returned it: {error}") from error
    except TypeError as error:
        error.add_note(
            f"raised by {name}= of {task.module_path}, which gets the arguments of the task"
        )
        raise


@dataclass(frozen=True, slots=True)
class StoredOptions:
    """The options of a task that its message carries in its metadata.

    `timeout` and `atomic` are None if those of the task apply, `retention` if the setting applies.
    """

    backend: str = DEFAULT_TASK_BACKEND_ALIAS
    run_after: datetime | None = None
    retention: float | None = None
    timeout: float | None = None
    atomic: bool | None = None

    def encode(self) -> str:
        """Return the metadata as JSON text; most tasks have none.

        >>> StoredOptions().encode(), StoredOptions(timeout=5.0).encode()
        ('{}', '{"mq.task": {"timeout": 5.0}}')
        """
        found: dict[str, Any] = {
            "retention": self.retention,
            "timeout": self.timeout,
            "atomic": self.atomic,
        }
        if self.backend != DEFAULT_TASK_BACKEND_ALIAS:
            found["backend"] = self.backend
        if self.run_after is not None:
            found["run_after"] = self.run_after.timestamp()
        found = {name: value for name, value in found.items() if value is not None}
        return json.dumps({OPTIONS: found}) if found else "{}"


def stored_options(metadata: object) -> StoredOptions:
    """Return the options in the metadata of a message, without values of a wrong type.

    The retention is left out, since only the statements that keep results read it.

    >>> stored_options({"mq.task": {"timeout": 5, "atomic": "no"}}).timeout
    5.0
    >>> stored_options({"mq.task": {"atomic": "no"}}) == stored_options([]) == StoredOptions()
    True
    """
    found = metadata.get(OPTIONS) if isinstance(metadata, dict) else None
    if not isinstance(found, dict):
        return StoredOptions()
    backend, atomic = found.get("backend"), found.get("atomic")
    timeout, after = as_seconds(found.get("timeout")), as_seconds(found.get("run_after"))
    try:
        run_after = None if after is None else datetime.fromtimestamp(after, UTC)
    except (ValueError, OverflowError, OSError):
        run_after = None
    return StoredOptions(
        backend=backend if isinstance(backend, str) else DEFAULT_TASK_BACKEND_ALIAS,
        run_after=run_after,
        timeout=timeout or None,
        atomic=atomic if isinstance(atomic, bool) else None,
    )
