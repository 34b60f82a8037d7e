"""The deliveries claimed here and not yet settled: their leases are to be renewed."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from django_mq.messages import Delivery, PlainFence, fence_of


class Unsettled:
    """Holds deliveries from claim to settle. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[int, Delivery] = {}

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Add newly claimed deliveries."""
        with self._lock:
            self._deliveries.update([(delivery._row.id, delivery) for delivery in deliveries])

    def remove(self, fences: Iterable[PlainFence]) -> None:
        """Remove the deliveries of these claims; a later claim of the same message stays."""
        with self._lock:
            for fence in fences:
                latest = self._deliveries.get(fence[0])
                if latest is not None and fence_of(latest._row) == fence:
                    del self._deliveries[fence[0]]

    def all(self) -> list[Delivery]:
        """Return all of them."""
        with self._lock:
            return list(self._deliveries.values())

    def has_any(self, queue: str) -> bool:
        """Return whether any of them is of `queue`."""
        return any(delivery.queue == queue for delivery in self.all())
