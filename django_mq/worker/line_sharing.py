"""Hand ordered queues over to processes with unused threads.

The first process that starts owns all ordered queues. Once more of them have due messages than it
has threads, processes beside it would be idle: with six queues and three processes of two threads,
messages took three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from django_mq.executor.tasks import Task
from django_mq.policy.line_shares import LineShares, UnusedWorker
from django_mq.store import Cursor, unused_workers
from django_mq.worker.ordered_queues import TURN_SECONDS
from django_mq.worker.parts import Parts


class LineSharing:
    """Hands over queues of the process `worker`; used by the thread that claims.

    `release` releases tasks.
    """

    def __init__(self, worker: str, parts: Parts, *, release: Callable[[list[Task]], None]) -> None:
        self._worker = worker
        self._parts = parts
        self._release = release
        self._look_at = float("-inf")
        self._shares = LineShares()

    def hand_over(self, cursor: Cursor) -> None:
        """If more owned queues have due messages than there are threads, hand some over."""
        local_queue, ordered_queues = self._parts.local_queue, self._parts.ordered_queues
        threads = len(self._parts.executors)
        if len(ordered_queues.owned) <= threads or local_queue.free.count:
            return
        now = monotonic()
        most = len(self._moving()) - threads
        if now < self._look_at or most <= 0:
            return
        self._look_at = now + TURN_SECONDS
        waiting = sorted(local_queue.waiting_queues() & ordered_queues.owned.keys())
        workers = unused_workers.find(cursor, worker=self._worker, silent=ordered_queues.silent)
        for queue, worker in self._shares.choose(waiting, workers, most=most):
            self._hand_over(cursor, queue, worker)

    def _moving(self) -> set[str]:
        """Return the owned queues that have due messages, here or in their tables."""
        parts = self._parts
        owned, unsettled = parts.ordered_queues.owned, parts.local_queue.unsettled
        return {
            queue
            for queue in owned
            if queue in parts.fetcher.due_queues or unsettled.has_any(queue)
        }

    def _hand_over(self, cursor: Cursor, queue: str, worker: UnusedWorker) -> None:
        local_queue = self._parts.local_queue
        local_queue.drop([queue], keeping=())
        self._release(local_queue.take_to_release())
        if not local_queue.unsettled.has_any(queue):  # else a row was locked
            self._shares.record(queue, worker)
            self._parts.ordered_queues.hand_over(cursor, queue, to=worker.id)
