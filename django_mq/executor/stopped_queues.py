"""Queues that back off, and which of their messages may not start here."""

from __future__ import annotations

from datetime import datetime

from django_mq.messages import Delivery


class StoppedQueues(dict[str, datetime | None]):
    """Queues that back off, as the threads of one process see them between two messages.

    A delivery that was claimed before the last change of its queue's backoff level never starts:
    later claims are the probe, or were made at full rate again. The value of a queue is the time of
    that change, or None if no message of the queue may start at all.
    """

    def is_all_stopped(self, name: str) -> bool:
        """Return whether nothing at all of queue `name` may start."""
        return name in self and self[name] is None

    def has(self, delivery: Delivery) -> bool:
        """Return whether `delivery` must not start."""
        if delivery.queue not in self:
            return False
        before = self[delivery.queue]
        return before is None or delivery._row.claimed_at < before
