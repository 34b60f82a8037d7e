"""Errors in log lines: their names and stacks, and their texts if LOG_ERROR_TEXTS allows."""

from __future__ import annotations

import logging

from django_mq.conf import get_settings
from django_mq.exceptions import Reject, Retry, Snooze
from django_mq.policy.error_text import describe, source_line
from django_mq.policy.missing_right import is_missing_right
from django_mq.policy.plain_text import one_line
from django_mq.policy.redacted_error import HIDDEN, HIDDEN_EVERYWHERE, redacted

logger = logging.getLogger("django_mq")


def error_name(error: BaseException) -> str:
    """Return how a log line names an exception: its class, and where it was raised.

    The text may contain data of the payload, so it is included only with LOG_ERROR_TEXTS, or if it
    is the server's about a missing right: that names the table, and quotes nothing.
    """
    failure = describe(error)
    if get_settings().log_error_texts:
        return failure.summary
    if is_missing_right(error):
        return f"{failure.error_class}: {one_line(str(error))}"
    where = source_line(error)
    return f"{failure.error_class} at {where}" if where else failure.error_class


def traced(error: BaseException | None, text: str = HIDDEN) -> BaseException | None:
    """Return the `exc_info` of a log line, so that log handlers and error trackers have the stack.

    Without LOG_ERROR_TEXTS the exception has `text` instead of its own text. None for the
    exceptions that a handler raises on purpose: Retry, Snooze and Reject.
    """
    # Not isinstance(): it reads `__class__`, and a handler's exception may refuse that.
    if error is None or issubclass(type(error), Retry | Snooze | Reject):
        return None
    return error if get_settings().log_error_texts else redacted(error, text)


def log_failure(
    event: str, error: BaseException, text: str, *args: object, **extra: object
) -> None:
    """Log an error in django_mq's own code: `text % args`, and the name and stack of the error."""
    logger.error(
        f"{text}: %s",
        *args,
        error_name(error),
        exc_info=traced(error, HIDDEN_EVERYWHERE),
        extra={"event": event, **extra},
    )
