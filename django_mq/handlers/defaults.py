"""The options of a handler, with the settings' values for those it leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mq.handlers.registry import Handler
from django_mq.policy.backoff import RetryPolicy

if TYPE_CHECKING:
    from django_mq.conf import Settings


def queue_of(handler: Handler, settings: Settings) -> str:
    """Return the queue of this handler's messages unless the producer names another."""
    return settings.default_queue if handler.queue is None else handler.queue


def allowed_queues(handler: Handler, settings: Settings) -> tuple[str, ...]:
    """Return the queues that may hold this handler's messages: its own first, then `queues=`."""
    return tuple(dict.fromkeys((queue_of(handler, settings), *handler.queues)))


def retry_of(handler: Handler | None, queue: str, settings: Settings) -> RetryPolicy:
    """Return the policy of a message that carries none: the handler's, else the queue's."""
    if handler is not None and handler.retry is not None:
        return handler.retry
    return settings.queue(queue).retry


def timeout_of(handler: Handler, settings: Settings) -> float:
    """Return the seconds after which an attempt of this handler times out."""
    return settings.timeout if handler.timeout is None else handler.timeout
