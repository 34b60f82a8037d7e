"""The errors of tasks that ended without an exception, and class names in Django's spelling."""

from __future__ import annotations

import builtins

from django_mq.contrib.tasks.compat import TaskError
from django_mq.exceptions import MQError, Snooze, Unanswered
from django_mq.policy.outcomes import WorkerLost


class TaskCancelled(MQError):
    """The task was cancelled while it waited."""


class TaskDiscarded(MQError):
    """The task was dead and an operator discarded it, or it was purged."""


class TaskExpired(MQError):
    """The task waited beyond its `expires`, so it never started."""


class TaskInterrupted(Snooze, KeyboardInterrupt):
    """A task was interrupted: its attempt does not count, and it runs again."""

    def __init__(self) -> None:
        super().__init__(0, reason="the task raised KeyboardInterrupt")


#: By the reason (up to a colon) with which an unanswered message ended.
_UNANSWERED: dict[str, type[Exception]] = {
    "cancelled": TaskCancelled,
    "discarded": TaskDiscarded,
    "purged": TaskDiscarded,
    "expired": TaskExpired,
}


def unanswered(reason: str) -> TaskError:
    """Return the error of a task that ended for `reason`, without a failed attempt.

    >>> unanswered("expired").exception_class_path
    'django_mq.contrib.tasks.errors.TaskExpired'
    """
    found = _UNANSWERED.get(reason.partition(":")[0], Unanswered)
    return TaskError(exception_class_path=_path_of(found), traceback=reason)


def failed(error_class: str, traceback: str) -> TaskError:
    """Return the error of a failed attempt, with the class in Django's spelling.

    >>> failed("KeyError", "").exception_class_path, failed("shop.Oops", "").exception_class_path
    ('builtins.KeyError', 'shop.Oops')
    """
    path = error_class
    if "." not in error_class:
        # The claim that takes over a message records a vanished worker, whose name is not a class.
        known = hasattr(builtins, error_class)
        path = f"builtins.{error_class}" if known else _path_of(WorkerLost)
    return TaskError(exception_class_path=path, traceback=traceback)


def _path_of(error: type[BaseException]) -> str:
    return f"{error.__module__}.{error.__qualname__}"
