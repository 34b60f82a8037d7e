"""What happened, said once: receivers are called robustly, and the log has a line.

Signals of messages carry `delivery`, and where it applies `queued_for` (seconds until the first
claim; None of a later attempt), `duration` (seconds that the handler ran), `error` (the
exception) and `after` (seconds or datetime). They are sent by the worker,
after the commit that made them true; `sender` is the handler's name. Signals of queues carry
`queue`, which is their `sender` too; those of a backoff `level`, and `until` when nothing is
claimed (a datetime; None when it ended). The log's records carry the signal's name as `event`,
with ids and names only: never a payload.
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
    """Say whether anybody listens to `signal` or reads its log lines: the hot path asks first."""
    return bool(signal.receivers) or logger.isEnabledFor(_LEVELS[signal])


def announce(signal: Signal, delivery: Delivery, text: str, **data: Any) -> None:
    """Say what became of `delivery`; a receiver that raises is logged and changes nothing."""
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
    """Say what became of worker process `worker`."""
    _send(signal, worker, worker=worker, **data)
    logger.log(
        _LEVELS[signal], "%s", text, extra={"event": _NAMES[signal], "worker": worker, **data}
    )


def announce_queue(signal: Signal, queue: str, text: str, **data: Any) -> None:
    """Say what became of `queue`."""
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
