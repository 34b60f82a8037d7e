"""The deliveries claimed here and not yet settled: their leases are to be renewed."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from django_mq.messages import Delivery, PlainFence, fence_of


class Unsettled:
    """Holds deliveries from claim to settle. Thread-safe.

    A message may be claimed here again while an earlier claim of it waits or runs here: a process
    that was frozen takes over its own messages, and a failover may lose a claim. Only the latest
    claim is held; the fences of the others are `superseded` until they are removed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[int, Delivery] = {}
        #: Read without the lock: the fetcher alone adds, before it puts the later claim anywhere.
        #: Whoever has both claims finds the earlier one here, until that one is removed.
        self.superseded: set[PlainFence] = set()

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Add newly claimed deliveries."""
        added = {delivery._row.id: delivery for delivery in deliveries}
        with self._lock:
            for id in self._deliveries.keys() & added.keys():
                self.superseded.add(fence_of(self._deliveries[id]._row))
            self._deliveries.update(added)

    def remove(self, fences: Iterable[PlainFence]) -> None:
        """Remove the deliveries of these claims; a later claim of the same message stays."""
        with self._lock:
            for fence in fences:
                if self.superseded:
                    self.superseded.discard(fence)
                latest = self._deliveries.get(fence[0])
                if latest is not None and fence_of(latest._row) == fence:
                    del self._deliveries[fence[0]]

    def is_superseded(self, fence: PlainFence) -> bool:
        """Return whether the message of this claim, which is not removed, was claimed again."""
        return fence in self.superseded

    def all(self) -> list[Delivery]:
        """Return all of them."""
        with self._lock:
            return list(self._deliveries.values())

    def has_any(self, queue: str) -> bool:
        """Return whether any of them is of `queue`."""
        return any(delivery.queue == queue for delivery in self.all())
