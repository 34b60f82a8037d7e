"""Facts about queues from the last poll: keys, limits in flight, pauses and backoffs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import monotonic

from django_mq.store.poll import PolledRow
from django_mq.worker.queue_options import ClaimOptions

#: Seconds after a key was last seen in a queue until the plain claim serves it again.
KEYS_TTL = 60.0


class QueueFacts:
    """The facts about queues that the last poll found; used by the thread that claims."""

    def __init__(self) -> None:
        self._gated: set[str] = set()
        self._limits: dict[str, int] = {}
        self._keyed: dict[str, float] = {}
        #: Queues from which messages were claimed under a limit of messages in flight.
        self.limited: set[str] = set()
        #: Queues whose waiting messages must not start here: the queue is paused, or its limit of
        #: messages in flight was lowered.
        self.withdrawn: set[str] = set()
        self.backing_off: set[str] = set()
        #: Where the next count of the messages in flight can begin, for queues with a limit.
        self.lease_marks: dict[str, float] = {}

    def update(self, seen: Sequence[PolledRow]) -> bool:
        """Take the facts from a poll; return whether a queue turned out to have keys."""
        now = monotonic()
        for queue in self.lease_marks.keys() - {each.queue for each in seen}:
            del self.lease_marks[queue]
        before, self._limits = (
            self._limits,
            {each.queue: each.number for each in seen if each.kind == "limited"},
        )
        self.backing_off = {each.queue for each in seen if each.kind == "backing_off"}
        self.withdrawn = {each.queue for each in seen if each.kind == "paused"}
        for queue, limit in self._limits.items():
            if limit == 0 or limit < before.get(queue, math.inf):
                self.withdrawn.add(queue)
        self._gated = {*self._limits, *self.backing_off}
        self.limited -= before.keys() - self._limits.keys()
        keyed = dict.fromkeys((each.queue for each in seen if each.kind == "keyed"), now)
        new = not self._keyed.keys() >= keyed.keys()
        kept = {queue: at for queue, at in self._keyed.items() if now - at < KEYS_TTL}
        self._keyed = {**kept, **keyed}
        return new

    def has_keys(self, queue: str) -> bool:
        """Return whether a message of `queue` had an order key recently."""
        return queue in self._keyed

    def is_gated(self, queue: str, options: ClaimOptions) -> bool:
        """Return whether `queue` has a limit in flight or backs off, so that one session claims."""
        return options.max_in_flight is not None or queue in self._gated
