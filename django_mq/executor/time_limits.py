"""The time limit of a task, or of a row that another process ran."""

from __future__ import annotations

from collections.abc import Callable

from django_mq import handlers
from django_mq.conf import Settings
from django_mq.handlers import Handler
from django_mq.messages import ClaimedRow
from django_mq.policy.time_limits import TimeLimit


def time_limit(handler: Handler, seconds: float) -> TimeLimit:
    """Return the limit of `handler`, whose timeout is after `seconds`."""
    return TimeLimit(seconds, handler.timeout is not None, not handler.atomic)


def time_limits(settings: Settings) -> Callable[[ClaimedRow], TimeLimit | None]:
    """Return the function from a row to its time limit; None if its handler is not here."""

    def limit_of(row: ClaimedRow) -> TimeLimit | None:
        handler = handlers.get(row.handler)
        if handler is None:
            return None
        if handler.of_row is not None:
            handler = handler.of_row(row)
        return time_limit(handler, handlers.timeout_of(handler, settings))

    return limit_of
