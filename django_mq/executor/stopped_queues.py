"""Queues that back off, and which of their messages may not start here."""

from __future__ import annotations

from datetime import datetime

from django_mq.messages import Delivery


class StoppedQueues:
    """Queues that back off, as the threads of one process see them between two messages.

    A delivery that was claimed before the last change of its queue's backoff level never starts:
    later claims are the probe, or were made at full rate again. False while no queue is stopped.
    """

    def __init__(self) -> None:
        self._before: dict[str, datetime | None] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def stop(self, name: str, before: datetime | None = None) -> None:
        """Start nothing of queue `name` that was claimed before `before` (None: nothing at all)."""
        self._before[name] = before

    def is_all_stopped(self, name: str) -> bool:
        """Return whether nothing at all of queue `name` may start."""
        return name in self._before and self._before[name] is None

    def has(self, delivery: Delivery) -> bool:
        """Return whether `delivery` must not start."""
        if delivery.queue not in self._before:
            return False
        before = self._before[delivery.queue]
        return before is None or delivery._row.claimed_at < before
