"""Run one handler, cleanly: it inherits nothing from its neighbours and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from django.db import close_old_connections, connections, reset_queries

from django_mq.exceptions import HandlerBrokeTransaction, Reject, Retry, Snooze
from django_mq.executor import forks, replies
from django_mq.executor.tasks import Task
from django_mq.executor.thread_connections import clean_up, open_aliases
from django_mq.messages import Delivery, set_current
from django_mq.store.history_days import was_attached_meanwhile
from django_mq.values import short_repr

#: The SQLSTATEs of conflicts with other transactions: the same attempt runs again.
_CONFLICTS = frozenset({"40001", "40P01", "55P03"})

#: The types of objects whose code has not begun to run: a handler that returns one did nothing.
_UNRUN = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
#: The exceptions that end an attempt; a handler must raise them, not return them.
_RAISED = (Retry, Reject, Snooze)

#: Entered around each call of a handler, with its argument: a delivery, or a list of them.
surroundings: list[Callable[[Any], AbstractContextManager[object]]] = []


def call(
    function: Callable[[Any], Any],
    argument: Any,
    delivery: Delivery,
    *,
    alias: str,
    in_test: bool = False,
) -> tuple[Any, BaseException | None]:
    """Return the result and the error of `function(argument)`.

    A requested result is encoded; if that fails, the failure is the handler's error. The call runs
    in a copy of this thread's context: any translation, time zone or context variable that it sets
    ends with it, and the messages that it broadcasts name `delivery` as their cause. The settings
    of its sessions on aliases other than `alias` end with it, too, except `in_test`, where the
    connections are a test's. A transaction that it leaves open there is rolled back, and counts as
    an error.
    """
    process = forks.process
    others = len(connections.settings) > 1
    if others:  # not `alias`: looking at its connection would begin its lazy transaction
        before = {alias, *open_aliases(excluding=alias)} if in_test else {alias}
    result, error = copy_context().run(_call, function, argument, delivery, alias)
    if forks.process is not process:
        forks.leave(error)
    if others and (left := clean_up(excluding=before, resets=not in_test)) and error is None:
        error = HandlerBrokeTransaction(
            f"the handler left a transaction open on {' and '.join(left)}; it was rolled back"
        )
    return result, error


def _call(
    function: Callable[[Any], Any], argument: Any, delivery: Delivery, alias: str
) -> tuple[Any, BaseException | None]:
    set_current(delivery, alias)
    try:
        if surroundings:
            with surrounded(argument):
                result = function(argument)
        else:
            result = function(argument)
        if result is not None:
            check_result(result, argument)
        if argument is not delivery or delivery._row.wants_result:
            result = replies.encoded(result, argument)
        return result, None
    except BaseException as error:  # SystemExit too: a handler does not end the worker
        return None, error


def check_result(result: Any, argument: Any) -> None:
    """Raise TypeError for a result that shows a mistake: code that nobody runs, or a Reject.

    Most handlers return None; callers test that first, since this runs for each message.
    """
    kind = type(result)
    if kind in _UNRUN:
        raise _not_run(result)
    # Only such a list has one result per message.
    for each in result if kind in (list, tuple) and isinstance(argument, list) else (result,):
        _refuse_unraised(each)


def _refuse_unraised(result: Any) -> None:
    kind = type(result)  # not isinstance(), which reads the result's own `__class__`
    if issubclass(kind, _RAISED):
        shown = short_repr(result)
    elif issubclass(kind, type) and issubclass(result, _RAISED):
        shown = result.__name__
    else:
        return
    raise TypeError(f"the handler returned {shown}: raise it instead")


def _not_run(result: Any) -> TypeError:
    """Return the error of a handler that returned an object that nobody would run."""
    if type(result) is CoroutineType:
        result.close()
        return TypeError(
            "the handler returned a coroutine: put @handler on the async function itself,"
            " or write the function that wraps it as async def, with an await"
        )
    return TypeError(
        "the handler returned a generator, whose code nobody runs: remove the yield, or write the"
        " function that wraps it so that it iterates"
    )


@contextmanager
def surrounded(argument: Any) -> Iterator[None]:
    """Enter the `surroundings` for the duration of a call."""
    with ExitStack() as stack:
        for enter in surroundings:
            stack.enter_context(enter(argument))
        yield


def close_old() -> None:
    """Between deliveries: close connections that are old or broken, and empty query logs."""
    if len(connections.settings) > 1:
        close_old_connections()
    reset_queries()


def argument_of(tasks: Sequence[Task]) -> Any:
    """Return the argument of the handler of `tasks`: a delivery, or a list of them."""
    if tasks[0].handler.batch:
        return [task.delivery for task in tasks]
    return tasks[0].delivery


def is_conflict(error: BaseException | None) -> bool:
    """Return whether a conflict with another session caused `error`.

    That is a deadlock, a serialization failure, a lock timeout, or a partition of the history that
    was attached meanwhile. False if the handler caught the conflict and raised Retry, Snooze or
    Reject instead, or if an exception of the handler cannot be read.
    """
    try:
        return _is_conflict(error)
    except Exception:  # such as a `__getattr__` that calls itself: an error like any other
        return False


def _is_conflict(error: BaseException | None) -> bool:
    for _ in range(10):
        if error is None or isinstance(error, Retry | Snooze | Reject):
            return False
        if getattr(error, "sqlstate", None) in _CONFLICTS or was_attached_meanwhile(error):
            return True
        error = error.__cause__ or error.__context__
    return False
