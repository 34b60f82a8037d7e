"""Signals for messages, workers and queues; each is also logged. Errors of receivers are contained.

Workers send the signals of messages after the commit; `sender` is the handler's name. They carry
`delivery` and, where they apply, `queued_for` (seconds until the first claim; None for later
attempts), `duration` (seconds that the handler ran), `error` (the exception) and `after` (seconds
or a datetime). Signals of queues carry `queue`, which is also their `sender`; signals of a backoff
also carry `level` and `until` (the datetime until which nothing is claimed; None once it has
ended). Log records carry the signal's name as `event`, ids and names, and the stack of a failure,
but never a payload; and the text of an exception only if LOG_ERROR_TEXTS is on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from inspect import isawaitable
from typing import Any

from django.dispatch import Signal

from django_mq.conf.error_logs import error_name, log_failure, traced
from django_mq.messages import Delivery

logger = logging.getLogger("django_mq")


class LoggedSignal(Signal):
    """A signal that is also logged: `name` is the record's `event`."""

    def __init__(self, name: str, level: int = logging.INFO) -> None:
        super().__init__()
        self.name = name
        self.level = level

    def _log_robust_failure(self, receiver: Callable[..., Any], err: Exception) -> None:
        """Do nothing: `_report()` logs it. Django's fails for receivers without `__qualname__`."""

    async def send_on_loop(self, sender: str, **data: Any) -> list[tuple[Any, Any]]:
        """Like `send_robust()`, which must not be called where an event loop runs.

        Plain receivers are called here, since in another thread they might wait for this one.
        """
        plain, awaited = self._live_receivers(sender)
        answers: list[tuple[Any, Any]] = []
        for receiver in (*plain, *awaited):
            try:
                answer = receiver(signal=self, sender=sender, **data)
                answers.append((receiver, await answer if isawaitable(answer) else answer))
            except (Exception, SystemExit) as error:
                answers.append((receiver, error))
        return answers


message_started = LoggedSignal("message_started", logging.DEBUG)
message_acked = LoggedSignal("message_acked", logging.DEBUG)
message_retried = LoggedSignal("message_retried", logging.WARNING)
message_dead = LoggedSignal("message_dead", logging.ERROR)
worker_started = LoggedSignal("worker_started")
worker_stopped = LoggedSignal("worker_stopped")
backoff_started = LoggedSignal("backoff_started", logging.WARNING)
backoff_changed = LoggedSignal("backoff_changed")
backoff_ended = LoggedSignal("backoff_ended")
queue_assigned = LoggedSignal("queue_assigned")
queue_unassigned = LoggedSignal("queue_unassigned")
queue_caught_up = LoggedSignal("queue_caught_up")
queue_deep = LoggedSignal("queue_deep", logging.WARNING)


def is_observed(signal: LoggedSignal) -> bool:
    """Return whether `signal` has receivers or its log line is enabled; the hot path checks."""
    return bool(signal.receivers) or logger.isEnabledFor(signal.level)


def announce(
    signal: LoggedSignal, delivery: Delivery, text: str, *, started: bool = True, **data: Any
) -> None:
    """Send and log an event of `delivery`; a receiver's exception is only logged.

    If the delivery never `started`, the log names no attempt: none was used.
    """
    _send(signal, delivery.handler, delivery=delivery, **data)
    _log(signal, delivery, text, data, started=started)


async def announce_on_loop(
    signal: LoggedSignal, delivery: Delivery, text: str, **data: Any
) -> None:
    """Like `announce()`, on a thread that runs an event loop."""
    answers = await signal.send_on_loop(delivery.handler, delivery=delivery, **data)
    _report(signal, answers)
    _log(signal, delivery, text, data)


def _log(
    signal: LoggedSignal,
    delivery: Delivery,
    text: str,
    data: dict[str, Any],
    *,
    started: bool = True,
) -> None:
    logger.log(
        signal.level,
        "message %s (%s, queue %s, handler %s%s) %s",
        delivery.id,
        delivery.type,
        delivery.queue,
        delivery.handler or "none",
        f", attempt {delivery.attempt} of {delivery.max_attempts}" if started else "",
        text,
        exc_info=traced(data.get("error")),
        extra={
            "event": signal.name,
            "message_id": delivery.id,
            "queue": delivery.queue,
            "type": delivery.type,
            "handler": delivery.handler,
            "attempt": delivery.attempt if started else None,
            "duration": data.get("duration"),
            "queued_for": data.get("queued_for"),
        },
    )


def announce_worker(signal: LoggedSignal, worker: str, text: str, **data: Any) -> None:
    """Send and log an event of worker process `worker`."""
    _send(signal, worker, worker=worker, **data)
    logger.log(signal.level, "%s", text, extra={"event": signal.name, "worker": worker, **data})


def announce_queue(signal: LoggedSignal, queue: str, text: str, **data: Any) -> None:
    """Send and log an event of `queue`."""
    _send(signal, queue, queue=queue, **data)
    logger.log(
        signal.level,
        "queue %s %s",
        queue,
        text,
        extra={
            "event": signal.name,
            "queue": queue,
            # As text, so that a formatter may write every field as JSON.
            **{n: v.isoformat() if isinstance(v, datetime) else v for n, v in data.items()},
        },
    )


def _send(signal: LoggedSignal, sender: str, **data: Any) -> None:
    try:
        answers = signal.send_robust(sender=sender, **data)
    except (Exception, SystemExit) as error:  # a receiver does not end a thread of the worker
        log_failure(
            "receiver_failed", error, "a receiver of %s kept the others from running", signal.name
        )
        return
    _report(signal, answers)


def _report(signal: LoggedSignal, answers: Sequence[tuple[Any, Any]]) -> None:
    for receiver, answer in answers:
        if isinstance(answer, Exception | SystemExit):
            logger.error(
                "receiver %r of %s raised %s",
                receiver,
                signal.name,
                error_name(answer),
                exc_info=traced(answer),
                extra={"event": "receiver_failed"},
            )
