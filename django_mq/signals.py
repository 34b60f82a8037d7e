"""Signals for messages, workers and queues; each is also logged. Receivers are called robustly.

Workers send the signals of messages after the commit; `sender` is the handler's name. They carry
`delivery` and, where they apply, `queued_for` (seconds until the first claim; None for later
attempts), `duration` (seconds that the handler ran), `error` (the exception) and `after` (seconds
or a datetime). Signals of queues carry `queue`, which is also their `sender`; those of a backoff
also carry `level` and `until` (the datetime until which nothing is claimed; None once it ended).
Log records carry the signal's name as `event`, and ids and names only: never a payload.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

if TYPE_CHECKING:
    from django_mq.messages import Delivery

logger = logging.getLogger("django_mq")

message_started = Signal()
message_acked = Signal()
message_retried = Signal()
message_dead = Signal()
worker_started = Signal()
worker_stopped = Signal()
backoff_started = Signal()
backoff_changed = Signal()
backoff_ended = Signal()
queue_assigned = Signal()
queue_unassigned = Signal()
queue_caught_up = Signal()
queue_deep = Signal()

_NAMES = {
    message_started: "message_started",
    message_acked: "message_acked",
    message_retried: "message_retried",
    message_dead: "message_dead",
    worker_started: "worker_started",
    worker_stopped: "worker_stopped",
    backoff_started: "backoff_started",
    backoff_changed: "backoff_changed",
    backoff_ended: "backoff_ended",
    queue_assigned: "queue_assigned",
    queue_unassigned: "queue_unassigned",
    queue_caught_up: "queue_caught_up",
    queue_deep: "queue_deep",
}
_LEVELS = {
    message_started: logging.DEBUG,
    message_acked: logging.DEBUG,
    message_retried: logging.WARNING,
    message_dead: logging.ERROR,
    worker_started: logging.INFO,
    worker_stopped: logging.INFO,
    backoff_started: logging.WARNING,
    backoff_changed: logging.INFO,
    backoff_ended: logging.INFO,
    queue_assigned: logging.INFO,
    queue_unassigned: logging.INFO,
    queue_caught_up: logging.INFO,
    queue_deep: logging.WARNING,
}


def wanted(signal: Signal) -> bool:
    """Return whether `signal` has receivers or its log line is enabled; the hot path checks."""
    return bool(signal.receivers) or logger.isEnabledFor(_LEVELS[signal])


def announce(signal: Signal, delivery: Delivery, text: str, **data: Any) -> None:
    """Send and log what became of `delivery`; a receiver's exception is only logged."""
    _send(signal, delivery.handler, delivery=delivery, **data)
    logger.log(
        _LEVELS[signal],
        "message %s (%s, queue %s, handler %s, attempt %s of %s) %s",
        delivery.id,
        delivery.type,
        delivery.queue,
        delivery.handler or "none",
        delivery.attempt,
        delivery.max_attempts,
        text,
        extra={
            "event": _NAMES[signal],
            "message_id": delivery.id,
            "queue": delivery.queue,
            "type": delivery.type,
            "handler": delivery.handler,
            "attempt": delivery.attempt,
            "duration": data.get("duration"),
            "queued_for": data.get("queued_for"),
        },
    )


def announce_worker(signal: Signal, worker: str, text: str, **data: Any) -> None:
    """Send and log what became of worker process `worker`."""
    _send(signal, worker, worker=worker, **data)
    logger.log(
        _LEVELS[signal], "%s", text, extra={"event": _NAMES[signal], "worker": worker, **data}
    )


def announce_queue(signal: Signal, queue: str, text: str, **data: Any) -> None:
    """Send and log what became of `queue`."""
    _send(signal, queue, queue=queue, **data)
    logger.log(
        _LEVELS[signal],
        "queue %s %s",
        queue,
        text,
        extra={"event": _NAMES[signal], "queue": queue, **data},
    )


def _send(signal: Signal, sender: str, **data: Any) -> None:
    for receiver, answer in signal.send_robust(sender=sender, **data):
        if isinstance(answer, Exception):
            logger.error(
                "receiver %r of %s raised %s",
                receiver,
                _NAMES[signal],
                type(answer).__name__,
                exc_info=answer,
                extra={"event": "receiver_failed"},
            )
