"""Inside the atomic block of a slice: which deliveries start, and which rows are locked first."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from time import monotonic

from django_mq.executor import locks
from django_mq.executor.attempts import Attempts
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.slice_state import MAX_SAVEPOINTS, NotLocked, SliceState
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.executor.tasks import Task, has_expired, may_start_unlocked
from django_mq.messages import fence_of, worker_of
from django_mq.store.row_locks import LockResult

#: Reads this of every task of a slice, at the speed of C.
_ordered = attrgetter("delivery._row.ordered")


@dataclass(slots=True)
class SliceBody:
    """Runs the deliveries of a slice in order, until its time is over.

    A delivery starts without a lock if its claim or renewal was requested less than `unlocked_for`
    seconds ago: no other worker can have taken the message by then. A batch starts without locks if
    each of its deliveries may. No delivery that `stopped_queues` has starts. On the connection
    of a test, each row is locked first.
    """

    session: Session
    entries: ExecutorEntries
    attempts: Attempts
    stopped_queues: StoppedQueues
    unlocked_for: float

    def run(self, state: SliceState) -> None:
        """Run the deliveries of `state`. Raises SliceAborted if one ended the transaction."""
        savepoint, batch = self.session.savepoint, state.tasks[0].handler.batch
        if not self.session.borrowed and any(map(_ordered, state.tasks)):
            self.session.record_session(worker_of(state.tasks[0].delivery.fence.claimed_by))
        savepoint.start(
            state.settings,
            own_session=not self.session.borrowed,
            begin=lambda: self._begin_for_handler(state),
        )
        began = monotonic()
        try:
            if batch:
                self._run_batch(state)
            else:
                self._run_each(state)
        finally:
            state.seconds = monotonic() - began
        savepoint.leave()

    def _leased_since(self) -> float:
        """Return when a claim or renewal was requested, at the earliest, that needs no lock now.

        Asked before every start: the machine may sleep while a handler runs.
        """
        if self.session.borrowed:
            return float("inf")
        return lease_clock() - self.unlocked_for

    def _run_each(self, state: SliceState) -> None:
        tasks, until = state.tasks, state.until
        last = len(tasks) - 1
        for index, task in enumerate(tasks):
            if index and (
                state.stopped or state.savepoints >= MAX_SAVEPOINTS or monotonic() >= until
            ):
                state.left += tasks[index:]
                return
            state.current = index
            must_check = state.halted_lines or state.backing_off or self.stopped_queues
            if must_check and not self._may_start(task, state):
                state.left.append(task)
                continue
            row = task.delivery._row
            lock = not may_start_unlocked(task, self._leased_since())
            if lock and not state.begun:
                self._begin(state)
            if (state.missing or state.expired or row.expires_in is not None) and (
                self._cannot_start(task, state)
            ):
                continue
            self.attempts.run([task], state, locked=lock, until=0.0 if index == last else until)
            state.stopped = state.stopped or (row.wants_result and not row.is_django_task)

    def _run_batch(self, state: SliceState) -> None:
        leased_since = self._leased_since()
        lock = not all(may_start_unlocked(task, leased_since) for task in state.tasks)
        if lock:
            self._begin(state)
        free: list[Task] = []
        for task in state.tasks:
            if not self._may_start(task, state):
                state.left.append(task)
            elif not self._cannot_start(task, state):
                free.append(task)
        if free:
            self.attempts.run(free, state, locked=lock)

    def _may_start(self, task: Task, state: SliceState) -> bool:
        """Return whether nothing before it in its line failed, and its queue does not back off."""
        if task.line is not None and task.line in state.halted_lines:
            return False
        stopped, delivery = self.stopped_queues, task.delivery
        return not (delivery.queue in state.backing_off or (stopped and stopped.has(delivery)))

    def _cannot_start(self, task: Task, state: SliceState) -> bool:
        """Return whether no attempt may start: its row could not be locked, or it has expired."""
        delivery = task.delivery
        if delivery.id in state.missing:
            state.not_locked.append(task)
        elif delivery.id in state.expired or has_expired(delivery):
            part = state.bound if delivery.id in state.expired else state.unbound
            part.tasks.append(task)
            part.ended.append(Ended(delivery, Settled.DEAD_UNSTARTED, reason="expired"))
        else:
            return False
        state.halted_lines.add(task.line)
        return True

    def _begin(self, state: SliceState) -> None:
        """Begin the transaction before a handler starts; lock the rows that have not started."""
        _locked(state, self._lock(state, savepoint=False))
        self.session.savepoint.begun()

    def _begin_for_handler(self, state: SliceState) -> None:
        """Begin the transaction for a handler that uses its connection; stop its timeout meanwhile.

        The handler's messages stay on the scoreboard: if the process is ended now, they are
        charged.
        """
        running, began = state.running, monotonic()
        self.entries.set_deadline(float("inf"), len(running))
        self.session.link.in_handler = False
        try:
            locked = self._lock(state, savepoint=True)
            _locked(state, self._wait_for_locks(state, locked) if locked.missing else locked)
        finally:
            self.session.link.in_handler = True
            state.deadline += monotonic() - began
            self.entries.set_deadline(state.deadline, len(running))

    def _lock(self, state: SliceState, *, savepoint: bool) -> LockResult:
        return locks.begin(
            state.driver,
            _fences(state),
            state.settings,
            own_session=not self.session.borrowed,
            savepoint=savepoint,
        )

    def _wait_for_locks(self, state: SliceState, locked: LockResult) -> LockResult:
        """Lock the missing rows whose handler is running, since it cannot go on without them."""
        running = [
            fence_of(task.delivery._row)
            for task in state.running
            if task.delivery.id in locked.missing
        ]
        if not running:
            return locked
        xid = locks.wait_for(state.driver, running, state.settings)
        if xid is None:
            state.not_locked.extend(state.running)
            raise NotLocked(
                "another session has locked or removed a message of this call: nothing that the"
                " call writes is kept, and what is still there runs again later"
            )
        missing = locked.missing.difference(fence[0] for fence in running)
        return LockResult(missing, locked.expired, xid)


def _locked(state: SliceState, locked: LockResult) -> None:
    state.begun = True
    state.missing, state.expired, state.xid = locked


def _fences(state: SliceState) -> list[tuple[int, int, str]]:
    """Return the fences of the current delivery and of the deliveries after it."""
    return [fence_of(task.delivery._row) for task in state.tasks[state.current :]]
