"""How many messages this process can take now, and where claimed rows go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from django_mq.executor.async_runner import AsyncRunner
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.slow_lines import SlowLines
from django_mq.handlers import Handler
from django_mq.messages import LONG_AGO, ClaimedRow
from django_mq.store import Cursor
from django_mq.worker.dispatch import Dispatch
from django_mq.worker.prefetch import Prefetch
from django_mq.worker.queue_backoff import BackoffLevels
from django_mq.worker.quota import Quota


class Intake:
    """The fetcher's view of the parts that run messages; used by the thread that claims.

    `threads` is the number of executors; `handlers_of(queue)` are those that a queue may have.
    """

    def __init__(
        self,
        *,
        local_queue: LocalQueue,
        runner: AsyncRunner,
        prefetch: Prefetch,
        quota: Quota,
        dispatch: Dispatch,
        backoffs: BackoffLevels,
        threads: int,
        handlers_of: Callable[[str], Iterable[Handler]],
    ) -> None:
        self._local_queue = local_queue
        self._runner = runner
        self._prefetch = prefetch
        self._quota = quota
        self._dispatch = dispatch
        self._backoffs = backoffs
        #: Limits what a claim takes of a line whose handler is slow.
        self.slow_lines = SlowLines(
            local_queue.paces,
            threads=threads,
            unused=local_queue.unused,
            handlers_of=handlers_of,
        )
        self._any_lists = False

    def room(self, kind: str, list_size: int = 1, *, ahead: bool = True) -> int:
        """Return how many messages to claim for executors of `kind` (sync, async or both).

        `list_size` is how many of the messages one call takes. Without `ahead`, coroutines are
        claimed only for free slots, if none waits.
        """
        rooms = []
        self._any_lists |= list_size > 1
        if kind != "async":
            rooms.append(self._local_room(list_size))
        if kind != "sync":
            room = self._local_queue.slots.to_claim(
                self._local_queue.coroutines.count(), ahead=ahead
            )
            never = self._local_queue.exclusive() or self._runner.blocked()
            rooms.append(0 if never else room)
        if self._quota.remaining is not None:
            rooms.append(self._quota.remaining)
        return min(rooms)

    def stuck(self, kind: str) -> bool:
        """Return whether messages for executors of `kind` would only wait here: none can start."""
        local_queue = self._local_queue
        if local_queue.suspended or local_queue.waits_for_suspect(coroutines=kind != "sync"):
            return True
        if local_queue.stuck() and (kind != "async" or local_queue.exclusive()):
            return True
        return kind != "sync" and self._runner.stuck()

    def waits_for_thread(self, kind: str) -> bool:
        """Return whether to claim from no queue with keys until a thread that runs them is free."""
        return kind != "async" and self.slow_lines.wait_for_thread()

    def take(
        self,
        cursor: Cursor,
        rows: list[ClaimedRow],
        *,
        taken_over: bool,
        list_size: int = 1,
        asked_at: float = LONG_AGO,
    ) -> None:
        """Dispatch claimed rows; those `taken_over`, because their leases lapsed, go first.

        `list_size` is as in the `room()` for which they were claimed. `asked_at` is when the claim
        was sent, by `lease_clock()`; it does not matter for rows taken over.
        """
        self._quota.claim(len(rows))
        self._prefetch.claimed(len(rows) // list_size)
        self._dispatch.take(cursor, rows, taken_over=taken_over, asked_at=asked_at)

    def drop(self, withdrawn: Collection[str], backing_off: Collection[str]) -> None:
        """Mark for release the waiting messages of `withdrawn` and of `backing_off` queues.

        The probe of a queue that backs off stays.
        """
        if withdrawn:
            self._local_queue.drop(withdrawn, keeping=())
        if backing_off:
            probes = {claimer for _, claimer in self._backoffs.probes()}
            self._local_queue.drop(backing_off, keeping=probes)

    def waiting(self) -> int:
        """The number of calls that wait for an executor: one per list and per other message."""
        return self._local_queue.calls() if self._any_lists else self._local_queue.waiting()

    def _local_room(self, list_size: int) -> int:
        local_queue, prefetch = self._local_queue, self._prefetch
        if local_queue.stuck():
            return 0
        room = prefetch.room(self.waiting())
        if not room:  # the executor that makes room pokes the loop, but only below this number
            local_queue.notify_below(prefetch.claim_below * list_size)
            room = prefetch.room(self.waiting())  # some messages may have started meanwhile
        if list_size == 1:
            return room
        return max(0, min(room * list_size, prefetch.maximum - local_queue.waiting()))
