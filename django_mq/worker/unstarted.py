"""Between claims, start messages that may start now, and release those that will not soon."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import monotonic

from django_mq.executor.tasks import Task
from django_mq.executor.watchdog import STALL_MARGIN
from django_mq.store import Cursor, notify, queue_backoff
from django_mq.store.limits import STATEMENT_SECONDS
from django_mq.worker.line_sharing import LineSharing
from django_mq.worker.parts import Parts
from django_mq.worker.releasing import release_skipping_refused

#: Seconds for which a claim whose connection was lost may still run on the server, and commit.
UNCONFIRMED_SECONDS = STATEMENT_SECONDS + STALL_MARGIN
#: Seconds between two looks for messages of such a claim.
LOOK_INTERVAL = 1.0


class Unstarted:
    """Messages claimed but not started: in the local queue, or by a claim whose answer was lost."""

    def __init__(self, worker_id: str, parts: Parts) -> None:
        self._worker_id = worker_id
        self._parts = parts
        # The claims whose answers were lost, each with the time after which it cannot commit.
        self._unconfirmed: dict[str, float] = {}
        self._look_at = float("-inf")
        self._sharing = LineSharing(worker_id, parts, release=self._release)

    def add_unconfirmed(self, claimers: Sequence[str], *, lost: bool) -> None:
        """Record claims whose answers were lost: they may have been committed, or will be.

        If the connection was `lost`, earlier ones, too: a COMMIT that waits for a synchronous
        standby waits as long as this one.
        """
        until = monotonic() + UNCONFIRMED_SECONDS
        earlier = dict.fromkeys(self._unconfirmed, until) if lost else self._unconfirmed
        self._unconfirmed = {**earlier, **dict.fromkeys(claimers, until)}
        self._look_at = float("-inf")

    @property
    def unconfirmed_due(self) -> bool:
        """Whether to look for the messages of claims whose answers were lost."""
        return bool(self._unconfirmed) and monotonic() >= self._look_at

    @property
    def overdue(self) -> bool:
        """Whether a release must be tried again, or messages of lost claims looked for."""
        return self._release_due or self.unconfirmed_due

    @property
    def _release_due(self) -> bool:
        dispatch = self._parts.dispatch
        return bool(dispatch.unreleased) and not dispatch.resting

    def start_or_release(self, cursor: Cursor) -> None:
        """Start messages that may start now; release those that must not start, or cannot soon."""
        parts = self._parts
        if self._release_due and parts.dispatch.release([]):
            parts.fetcher.on_released()
        if self.unconfirmed_due:
            self.release_unconfirmed(cursor)
        parts.dispatch.dispatch_pending(cursor)
        stuck = parts.local_queue.waiting() and parts.local_queue.stuck()
        waiting, taken = parts.intake.waiting(), parts.local_queue.running.taken
        if parts.prefetch.holds_too_much(waiting, taken) or stuck:
            # Elsewhere a suspect would begin anew to wait until nothing else runs.
            takes_turns = parts.local_queue.suspect_takes_turns()
            self._release_waiting(cursor, suspects=bool(stuck) and not takes_turns)
        if parts.runner.blocked():
            self._leave_to_siblings(cursor, self.take_back())
        self._leave_lines(cursor)
        if parts.backoffs.has_pending():
            parts.backoffs.write(cursor)
            if not parts.backoffs.has_pending():
                parts.fetcher.on_freed()  # with another level, the queue is due at another time
        if to_release := parts.local_queue.take_to_release():
            self._release(to_release)
        parts.dispatch.start_coroutines()
        parts.local_queue.coroutines.release(overdue=True)  # the rest, in the next round

    def release_all(self, cursor: Cursor) -> None:
        """Release what has not started, and the ordered queues with nothing running here."""
        parts = self._parts
        waiting = self.take_back() if parts.runner.blocked() else []
        waiting += parts.local_queue.take_to_release() + parts.local_queue.suspend()
        rests = parts.dispatch.resting and not waiting
        released = not rests and parts.dispatch.release(waiting)
        if self.unconfirmed_due:
            self.release_unconfirmed(cursor)
        parts.prefetch.reset()
        disowned = self.disown_unused(cursor, parts.ordered_queues.owned)
        if released or disowned:
            notify.ring_if_room(cursor)
        if parts.backoffs.has_pending():
            parts.backoffs.write(cursor)
        parts.ordered_queues.maintain(cursor)

    def _release_waiting(self, cursor: Cursor, *, suspects: bool) -> None:
        if waiting := self._parts.local_queue.take_waiting(suspects=suspects):
            self._parts.prefetch.reset()
            self._leave_to_siblings(cursor, waiting)

    def _leave_to_siblings(self, cursor: Cursor, tasks: list[Task]) -> None:
        """Release `tasks`, and their ordered queues, so that siblings can have them."""
        if tasks:
            self._release(tasks)
            self.disown_unused(cursor, {task.delivery.queue for task in tasks})
            notify.ring_if_room(cursor)

    def take_back(self) -> list[Task]:
        """Remove and return the coroutines that have not begun, and those that wait behind them."""
        local_queue = self._parts.local_queue
        local_queue.coroutines.release(overdue=False)
        if handed := self._parts.runner.take_back():
            local_queue.cancel_start(handed)
        local_queue.slots.reset()
        return handed + local_queue.take_to_release()

    def _leave_lines(self, cursor: Cursor) -> None:
        """Leave ordered queues to siblings if their due messages cannot start here, or not soon."""
        parts = self._parts
        if self.disown_unused(cursor, parts.ordered_queues.stuck(parts.fetcher.due_queues)):
            notify.ring_if_room(cursor)
        self._sharing.hand_over(cursor)

    def disown_unused(self, cursor: Cursor, queues: Collection[str]) -> bool:
        """Disown the `queues` without an unsettled message here; return whether there was one."""
        ordered_queues, unsettled = self._parts.ordered_queues, self._parts.local_queue.unsettled
        owned = filter(ordered_queues.owned.__contains__, queues)
        unused = [each for each in owned if not unsettled.has_any(each)]
        if unused:
            ordered_queues.disown(cursor, unused)
        return bool(unused)

    def _release(self, tasks: list[Task]) -> None:
        """Release tasks that were claimed and did not start."""
        self._parts.dispatch.release(tasks)
        self._parts.fetcher.on_released()

    def release_unconfirmed(self, cursor: Cursor) -> None:
        """Release the rows of claims that were committed but whose answers were lost.

        The server may still run such a claim, as when it waits for a table that a migration has
        locked, so this is repeated until the claim's time is over.
        """
        parts, now = self._parts, monotonic()
        known = [delivery.fence for delivery in parts.local_queue.unsettled.all()]
        if release_skipping_refused(
            cursor,
            worker=self._worker_id,
            kept=[fence.id for fence in known],
            claimers=list(self._unconfirmed),
        ):
            parts.fetcher.on_freed()
        if parts.backoffs.active:
            claimers = {fence.claimed_by for fence in known}
            queue_backoff.drop_probes_of(cursor, worker=self._worker_id, excluded=claimers)
        if parts.lease_keeper.commits_hang:  # a COMMIT that waits for a standby has no limit
            self._unconfirmed = dict.fromkeys(self._unconfirmed, now + UNCONFIRMED_SECONDS)
        self._unconfirmed = {name: at for name, at in self._unconfirmed.items() if at > now}
        self._look_at = now + LOOK_INTERVAL
