"""Queues of which nothing is to start here, since a message of them failed."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.messages import Delivery


class Shut:
    """Queues that back off, as the threads of one process know it between two messages.

    What was claimed before the last change of a queue's level is never to start: those claimed
    later are its probe, or came at full rate again. False while that is so of no queue.
    """

    def __init__(self) -> None:
        self._before: dict[str, datetime | None] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def queue(self, name: str, before: datetime | None = None) -> None:
        """Let nothing of queue `name` start that was claimed before then; None: nothing at all."""
        self._before[name] = before

    def whole(self, name: str) -> bool:
        """Say whether nothing at all of queue `name` is to start."""
        return name in self._before and self._before[name] is None

    def has(self, delivery: Delivery) -> bool:
        """Say whether `delivery` must not start."""
        if delivery.queue not in self._before:
            return False
        before = self._before[delivery.queue]
        return before is None or delivery._row.claimed_at < before
