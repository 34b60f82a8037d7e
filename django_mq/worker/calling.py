"""Run one handler, cleanly: it inherits nothing from its neighbours and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from django.db import close_old_connections, connections, reset_queries

from django_mq.exceptions import Reject, Retry, Snooze
from django_mq.messages import Delivery, current_delivery
from django_mq.worker import answers

if TYPE_CHECKING:
    from django_mq.worker.tasks import Task

#: PostgreSQL's words for "others stood in the way": the same attempt may simply run again.
_CONFLICTS = frozenset({"40001", "40P01", "55P03"})


def call(
    function: Callable[[Any], Any], argument: Any, delivery: Delivery
) -> tuple[Any, BaseException | None]:
    """Return what `function(argument)` returned, and what it raised, if it raised.

    Where somebody asked, what it returned is encoded already, and what cannot be is its error.
    It runs in a copy of this thread's context, so translation, time zone and context variables
    that it sets end with it; what it broadcasts meanwhile is caused by `delivery`.
    """
    return copy_context().run(_call, function, argument, delivery)


def _call(
    function: Callable[[Any], Any], argument: Any, delivery: Delivery
) -> tuple[Any, BaseException | None]:
    current_delivery.set(delivery)
    try:
        result = function(argument)
        if type(result) is CoroutineType:
            result.close()
            raise TypeError(
                "the handler returned a coroutine: put @handler on the async function itself,"
                " or write the function that wraps it as async def"
            )
        if argument is not delivery or delivery._row.wants_result:
            result = answers.encoded(result, argument)
        return result, None
    except BaseException as error:  # SystemExit too: a handler does not end the worker
        return None, error


def tidy_up() -> None:
    """Between deliveries: connections that aged or broke are closed, query logs emptied."""
    if len(connections.settings) > 1:
        close_old_connections()
    reset_queries()


def argument_of(tasks: Sequence[Task]) -> Any:
    """Return what the handler of `tasks` is called with: a delivery, or a list of them."""
    if tasks[0].handler.batch:
        return [task.delivery for task in tasks]
    return tasks[0].delivery


def is_conflict(error: BaseException | None) -> bool:
    """Say whether `error` comes of a deadlock, a serialization failure or a lock timeout.

    Not if the handler caught it and says itself what is to become of the message.
    """
    for _ in range(10):
        if error is None or isinstance(error, Retry | Snooze | Reject):
            return False
        if getattr(error, "sqlstate", None) in _CONFLICTS:
            return True
        error = error.__cause__ or error.__context__
    return False
