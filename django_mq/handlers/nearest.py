"""Suggest known types and handlers for an unknown one."""

from __future__ import annotations

import logging
from functools import lru_cache

from django_mq.handlers.registry import all_handlers, get, is_subscribed
from django_mq.policy.routing import TASKS, plain_types
from django_mq.policy.similar_names import CUTOFF, MAX_SUGGESTIONS, similar

logger = logging.getLogger("django_mq")

#: How similar a name must be to be a typo, not another word: moved and removed are at 0.83.
TYPO = 0.85
#: How many types a process compares with those that it knows, which takes a millisecond each.
MAX_COMPARED = 256
_compared: set[str] = set()
IN_HANDLERS = "handlers are looked for in handlers.py of each installed app"
OTHERWISE = " (handlers here take it only from other queues or with other metadata)"
NAMELESS_TASK = " (only enqueue() writes rows that run this task)"
IN_TASKS = "tasks are looked for in tasks.py of each installed app and in OPTIONS['modules']"


def has_subscriber(type: str) -> bool:
    """Return whether a handler here takes `type`, if the metadata meet its `where`."""
    if type.startswith(TASKS):  # only the handler of this name, which may have yet to be found
        found = get(type.removeprefix(TASKS))
        return found is not None and is_subscribed(found, type)
    return any(is_subscribed(each, type) for each in all_handlers())


def probable_types(type: str, cutoff: float = CUTOFF) -> list[str]:
    """Return the types that were probably meant, the most similar first.

    If `type` is the name of a handler, these are types of that handler, or the call that enqueues
    the task. Returns none if `type` has a subscriber.
    """
    return [] if has_subscriber(type) else _named(type) or similar(type, _known_types(type), cutoff)


def warn_of_typo(type: str) -> None:
    """Log, once, that no handler here takes `type`, if it is probably misspelt."""
    if type in _compared or len(_compared) >= MAX_COMPARED:
        return
    _compared.add(type)
    if found := probable_types(type, TYPO):
        logger.warning(
            "no handler here takes the type %s, which was broadcast: did you mean %s?",
            type,
            " or ".join(found),
            extra={"event": "probable_typo"},
        )


def nearest_types(type: str) -> str:
    """Return a remark: similar types that handlers here take, and where handlers are looked for.

    A type that handlers here take by name is spelled well, so nothing else was meant.
    """
    known = _known_types(type)
    if type in known:
        return NAMELESS_TASK if type.startswith(TASKS) else OTHERWISE
    if meant := _named(type):
        return f" (that is the name of a handler: did you mean {' or '.join(meant)}?)"
    return _suggestion(type, known, IN_TASKS if type.startswith(TASKS) else IN_HANDLERS)


def _named(name: str) -> list[str]:
    """Return types of the handler `name`, or how to enqueue the task; empty if there is none."""
    found = next((each for each in all_handlers() if each.name == name), None)
    if found is None:
        return []
    types = plain_types(found.patterns) or found.patterns or (f"{name}.enqueue()",)
    return list(types[:MAX_SUGGESTIONS])


def _known_types(type: str) -> tuple[str, ...]:
    """Return the types that handlers here take by name; if `type` is a task's, those of tasks."""
    if type.startswith(TASKS):
        return tuple(sorted(TASKS + name for name in _names(tasks=True)))
    patterns = {pattern for each in all_handlers() for pattern in each.patterns}
    return tuple(sorted(plain_types(patterns)))


def nearest_handlers(name: str, type: str | None = None) -> str:
    """Return which handlers here have names similar to `name`, and where handlers are looked for.

    `type` is the type of the message that names the handler, which shows whether it is a task. If
    it is None, tasks and other handlers are considered.
    """
    if type is None:
        others, tasks = _names(tasks=False), _names(tasks=True)
        searched = f"{IN_HANDLERS}; {IN_TASKS}" if tasks else IN_HANDLERS
        return _suggestion(name, (*others, *tasks), searched)
    is_django_task = type.startswith(TASKS)
    return _suggestion(
        name, tuple(_names(tasks=is_django_task)), IN_TASKS if is_django_task else IN_HANDLERS
    )


def _names(*, tasks: bool) -> list[str]:
    """Return the names of the tasks, or of the other handlers: a task has no patterns."""
    return sorted(each.name for each in all_handlers() if tasks is not bool(each.patterns))


@lru_cache(maxsize=256)
def _suggestion(name: str, known: tuple[str, ...], searched: str = IN_HANDLERS) -> str:
    """Return a remark to append to the name.

    >>> _suggestion("shop.order.placed", ("shop.orders.placed", "mail.sent")) == (
    ...     f" (did you mean shop.orders.placed? {IN_HANDLERS})"
    ... )
    True
    >>> _suggestion("x", ()) == f" ({IN_HANDLERS})"
    True
    """
    found = similar(name, known)
    return f" (did you mean {' or '.join(found)}? {searched})" if found else f" ({searched})"
