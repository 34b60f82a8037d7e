"""The task backend: `enqueue()` stores a message, `get_result()` reads it or its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from typing import Any, Self

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.asyncio import async_unsafe
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import autodiscover_modules

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.conf.local_time import aware
from django_mq.contrib.tasks import finishing, results
from django_mq.contrib.tasks.compat import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    task_backends,
    task_enqueued,
)
from django_mq.contrib.tasks.json_values import as_json
from django_mq.contrib.tasks.message_task import MessageTask
from django_mq.contrib.tasks.options import (
    StoredOptions,
    backend_options,
    check_options,
    key_or_unique_id,
    option,
    policy_of,
)
from django_mq.contrib.tasks.registration import (
    atomic_of,
    declared,
    register,
    task_of,
    timeout_of,
)
from django_mq.exceptions import DuplicateMessage, MQError
from django_mq.executor import reports
from django_mq.messages import Message
from django_mq.outbox.send import queue_connection, send_to
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.column_bounds import id_of
from django_mq.policy.routing import TASKS
from django_mq.policy.similar_names import similar
from django_mq.store import kept_results
from django_mq.values import short_repr


class MessageQueueBackend(BaseTaskBackend):
    """Stores tasks as messages: in the caller's transaction, if one is open on their database."""

    task_class = MessageTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._options, self._errors = backend_options(alias, self.options)

    @property
    def database(self) -> str | None:
        """The alias of the database that stores the tasks; None: the one from the settings."""
        return self._options.database

    def validate_task(self, task: Task[..., Any]) -> None:
        """Raise InvalidTask if the task cannot be enqueued; else register it, so that it can run.

        Raises InvalidHandler if a handler has the task's path as its name.
        """
        if not isinstance(task.run_after, datetime | None):  # Django would call its utcoffset()
            raise InvalidTask(
                f"{task.module_path}: run_after must be an aware datetime, not"
                f" {short_repr(task.run_after)}"
            )
        self._check_queue(task.queue_name)
        super().validate_task(task)
        try:
            check_options(task, self._options.retry)
        except (MQError, ValueError) as error:
            raise InvalidTask(f"{task.module_path}: {error}") from error
        self._handler_of(task)

    def _check_queue(self, queue: str) -> None:
        """Raise Django's error for a queue that is not in QUEUES, with a hint."""
        if self.queues and queue not in self.queues:
            near = similar(str(queue), self.queues)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            raise InvalidTask(
                f"Queue '{queue}' is not valid for backend.{meant} TASKS[{self.alias!r}]['QUEUES']"
                " lists the valid ones."
            )

    @async_unsafe("enqueue() blocks, and a coroutine calls it: `await task.aenqueue(...)`")
    def enqueue(self, task: Task[..., Any], args: Any, kwargs: Any) -> Any:
        """Store the task in the open transaction, if there is one, else in one of its own.

        A duplicate of a task with a `unique_id` returns the result of the stored task. Unless that
        task got new arguments (`on_duplicate="update"` or `"replace"`), no signal is sent. Raises
        TypeError for arguments that are not JSON, DuplicateMessage for a duplicate while no task
        waits or runs (in the quiet time of the id) or with `on_duplicate="raise"`, and the other
        errors of `broadcast()`.
        """
        self.validate_task(task)
        args, kwargs = as_json(args, "args"), as_json(kwargs, "kwargs")
        handler, policy = self._handler_of(task), self._policy(task)
        carried = None if policy == handler.retry else policy
        message = self._message(task, args, kwargs, retry=carried)
        reserved = self._carried(task, handler).encode()
        receipt, stored_at = send_to(handler, message, using=self.database, reserved=reserved)
        [copy] = receipt.copies
        if copy.outcome in ("duplicate", "debounced"):
            return self._existing(message, copy.id)
        assert copy.id is not None  # noqa: S101  (only what is put aside has none)
        if stored_at is None:  # it was updated, and may have failed attempts
            result = self._stored(str(copy.id))
        else:
            result = results.enqueued(task, copy.id, args, kwargs, at=stored_at)
        task_enqueued.send(type(self), task_result=result)
        return result

    @async_unsafe(
        "reading a result blocks, and a coroutine does it: `await aget_result(id)` of the task or"
        " backend, or `await result.arefresh()`"
    )
    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return the result of a task of this backend; raises TaskResultDoesNotExist."""
        result = self._stored(result_id)
        if result.backend != self.alias:
            raise TaskResultDoesNotExist(
                f"{result_id} is the result of a task of backend {result.backend!r}"
            )
        return result

    def _stored(self, result_id: str) -> TaskResult[..., Any]:
        """Return the result of a task of any backend of this database."""
        id = _id_of(result_id)
        connection = queue_connection(self.database)
        with connection.cursor() as cursor:
            found = None if id is None else kept_results.find(cursor, id)
        if id is None:
            raise TaskResultDoesNotExist(
                f"{short_repr(result_id)} is not the id of a result, which is text such as '17'"
            )
        if found is None:
            raise TaskResultDoesNotExist(
                f"no task {result_id} is stored: it has ended, and result_retention is over, or its"
                " transaction is open or was rolled back"
            )
        task = task_of(handlers.get(found.handler))
        if task is None:
            raise TaskResultDoesNotExist(
                f"{result_id} is the result of {found.handler}, which is not registered here: it"
                " was renamed or removed, or its module is not imported (OPTIONS['modules'])"
            )
        result = results.stored(task, id, found)
        if result is None:
            raise TaskResultDoesNotExist(f"{result_id} has no arguments: no enqueue() wrote it")
        return result

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """E020: OPTIONS or settings are wrong, the app is missing, the database not PostgreSQL."""
        found = [(f"{error.where} {error.problem}", error.hint) for error in self._errors]
        if problem := self._problem():
            found.append((problem, None))
        return [checks.Error(text, hint=hint, id="django_mq.E020") for text, hint in found]

    @classmethod
    def load_tasks(cls) -> None:
        """Import the modules that declare tasks; the app calls this at start."""
        if finishing.announce_finished not in reports.django_task_observers:
            reports.django_task_observers.append(finishing.announce_finished)
        handlers.find_with(cls._find)
        autodiscover_modules("tasks")
        for backend in cls._all():
            for module in backend._options.modules:
                import_module(module)

    @classmethod
    def _all(cls) -> Iterator[Self]:
        """Yield the backends in TASKS that store tasks as messages."""
        for alias in task_backends:
            with suppress(ImproperlyConfigured):  # Django reports the error, and others may be fine
                backend = task_backends[alias]
                if isinstance(backend, cls):
                    yield backend

    @classmethod
    def _find(cls, path: str) -> handlers.Handler | None:
        """Register the task at `path` if it is declared for the backend of another package.

        `using(backend=...)` sends such a task here, perhaps in another process. So that all
        processes agree, it gets the options of the first backend of this class in TASKS.
        """
        if (task := declared(path)) is not None:
            for backend in cls._all():
                return backend._register(task)
        return None

    def _handler_of(self, task: Task[..., Any]) -> handlers.Handler:
        """Return the handler of the task's function; the first call registers it."""
        handlers.get(task.module_path)  # registers another package's task as a worker does
        return self._register(task)

    def _register(self, task: Task[..., Any]) -> handlers.Handler:
        return register(task, timeout=self._options.timeout, retry=self._policy(task))

    def _policy(self, task: Task[..., Any]) -> RetryPolicy:
        return policy_of(task, self._options.retry)

    def _message(
        self,
        task: Task[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        retry: RetryPolicy | None,
    ) -> Message:
        return Message(
            TASKS + task.module_path,
            {"args": args, "kwargs": kwargs},
            queue=task.queue_name,
            after=None if task.run_after is None else aware(task.run_after),
            expires=option(task, "expires"),
            priority=int(task.priority),
            key=key_or_unique_id(task, "key", args, kwargs),
            unique_id=(unique_id := key_or_unique_id(task, "unique_id", args, kwargs)),
            on_duplicate=(unique_id and option(task, "on_duplicate")) or "skip",
            unique_for=option(task, "unique_for") if unique_id is not None else None,
            retry=retry,
        )

    def _carried(self, task: Task[..., Any], handler: handlers.Handler) -> StoredOptions:
        timeout, atomic = timeout_of(task, self._options.timeout), atomic_of(task)
        if timeout is None and handler.timeout is not None:  # another backend's, or another task's
            timeout = get_settings().timeout
        return StoredOptions(
            backend=self.alias,
            run_after=None if task.run_after is None else aware(task.run_after),
            retention=self._options.result_retention,
            timeout=None if timeout == handler.timeout else timeout,
            atomic=None if atomic == handler.atomic else atomic,
        )

    def _existing(self, message: Message, id: int | None) -> TaskResult[..., Any]:
        """Return the result of the task that holds the unique id."""
        if id is None:
            raise DuplicateMessage(
                f"unique id {message.unique_id} of {message.type} in queue {message.queue} stays"
                " taken after a success, and no task waits or runs whose result could be returned"
            )
        return self._stored(str(id))

    def _problem(self) -> str:
        """Return what is wrong besides the options; empty if nothing is."""
        where, alias = f"TASKS[{self.alias!r}]", self.database
        if alias is not None and alias not in connections:
            return f"{where}['OPTIONS']['database'] is {alias!r}, which is not in DATABASES."
        try:
            get_settings()
        except ImproperlyConfigured:  # E001 lists what is wrong
            return f"{where}: DJANGO_MQ is wrong, see django_mq.E001."
        try:
            queue_connection(alias)
        except (ImproperlyConfigured, ConnectionDoesNotExist) as error:
            return f"{where}: {error}"
        return ""


def _id_of(result_id: object) -> int | None:
    """Return the id of a message; None unless `result_id` is spelled as `enqueue()` does.

    >>> _id_of("12"), _id_of("012"), _id_of(" 12"), _id_of("99999999999999999999"), _id_of(12)
    (12, None, None, None, None)
    """
    if not isinstance(result_id, str) or result_id.startswith("0"):
        return None
    return id_of(result_id)
