"""Find the end that a handler chose in the exception group that its tasks raised."""

from __future__ import annotations

from django_mq.exceptions import Reject, Retry, Snooze

#: The exceptions by which a handler chooses how its attempt ends.
CHOSEN = (Retry, Snooze, Reject)

# A class may override the name; the descriptor of the base class reads the real value.
_get_parts = BaseExceptionGroup.__dict__["exceptions"].__get__


def chosen_end(error: BaseException) -> BaseException:
    """Return the Retry, Snooze or Reject that is the only exception in a group; else `error`.

    `asyncio.TaskGroup` wraps whatever its tasks raise in groups, which may be nested.

    >>> chosen_end(ExceptionGroup("tasks", [Reject("no")]))
    Reject('no')
    >>> chosen_end(ExceptionGroup("tasks", [Reject("no"), ValueError()]))
    ExceptionGroup('tasks', [Reject('no'), ValueError()])
    """
    inner = error
    # Not isinstance(): it reads `__class__`, and a handler's exception may refuse that.
    while issubclass(type(inner), BaseExceptionGroup):
        parts = _get_parts(inner)
        if len(parts) != 1:
            return error
        inner = parts[0]
    return inner if issubclass(type(inner), CHOSEN) else error
