"""Run one message, or a batch, behind a savepoint, and note how it ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor import reports
from django_mq.executor.calls import argument_of, call
from django_mq.executor.connections import DATABASE_ERRORS
from django_mq.executor.ended import ACKED, Ended, FailureEnd
from django_mq.executor.savepoint import LazySavepoint, TransactionEnded
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.slice_state import (
    MAX_SAVEPOINTS,
    Conflicts,
    NotLocked,
    RanDeliveries,
    SliceAborted,
    SliceState,
)
from django_mq.executor.tasks import Task
from django_mq.messages import fence_of
from django_mq.policy.queue_backoff import Step, step_of


@dataclass(slots=True)
class Attempts:
    """Runs handlers inside the atomic block of a slice.

    `failure_end` decides the outcome of a failure. `nested`: the transaction is a test's.
    `backoff_queues` are the queues with queue backoff: a failure in one of them keeps the rest of
    that queue in the slice from starting.
    """

    session: Session
    entries: ExecutorEntries
    conflicts: Conflicts
    failure_end: FailureEnd
    nested: bool
    backoff_queues: Collection[str]

    def run(
        self, tasks: list[Task], state: SliceState, *, locked: bool, until: float = 0.0
    ) -> None:
        """Run one message, or a batch, and add its end to `state`.

        `locked`: its row was locked before it started. If the message ends before `until`, another
        delivery of the slice follows. Raises SliceAborted if the handler ended the transaction.
        """
        savepoint, wrapper = self.session.savepoint, self.session.wrapper
        hooks, wrappers = len(wrapper.run_on_commit), len(wrapper.execute_wrappers)
        result, error, seconds = None, None, 0.0
        blocks = wrapper.savepoint_state
        self._record_start(tasks, state)
        self.session.link.in_handler = True
        try:
            if state.announcing:
                locked |= self._announce(tasks, state)
            began = perf_counter()
            if savepoint.refused is None:
                result, error = self._call(tasks)
            seconds = perf_counter() - began
            # `clean_savepoints()` sets the count back to zero.
            state.savepoints += max(0, wrapper.savepoint_state - blocks)
            if error is None:
                # The hooks of a batch belong to all of its messages, which must be acked together.
                binds = len(tasks) > 1 and not locked and hooks < len(wrapper.run_on_commit)
                more = monotonic() < until and state.savepoints + 1 < MAX_SAVEPOINTS
                error = _keep_writes(savepoint, more=more, binds=binds)
            state.savepoints += savepoint.opened
            if error is not None:
                savepoint.roll_back()
                del wrapper.run_on_commit[hooks:]
        except (TransactionEnded, *DATABASE_ERRORS) as raised:
            self._abort(tasks, error or _reported_error(raised), seconds, state)
            raise SliceAborted from raised
        finally:
            self.session.link.in_handler = False
            self.entries.end(len(tasks))
            del wrapper.execute_wrappers[wrappers:]
        part = state.bound if locked or savepoint.opened else state.unbound
        if savepoint.refused is not None:
            self._refused(tasks, savepoint.refused, seconds, state)
        elif error is not None:
            self._failed(tasks, error, seconds, state, part)
        else:
            self._succeeded(tasks, result, seconds, part, hooks)

    def _call(self, tasks: list[Task]) -> tuple[Any, BaseException | None]:
        """Call the handler behind its savepoint; return its result, or its error."""
        self.session.savepoint.arm()
        return call(
            tasks[0].handler.call,
            argument_of(tasks),
            tasks[0].delivery,
            alias=self.session.wrapper.alias,
            in_test=self.session.borrowed,
        )

    def _record_start(self, tasks: list[Task], state: SliceState) -> None:
        state.attempted, state.running = True, tasks
        began = monotonic()
        state.deadline = deadline = began + tasks[0].timeout
        if tasks[0].handler.batch:
            self.entries.start([task.delivery.fence for task in tasks], deadline, began)
        else:
            self.entries.start_one(fence_of(tasks[0].delivery._row), deadline, began)

    def _announce(self, tasks: list[Task], state: SliceState) -> bool:
        """Send `message_started`; return whether a receiver used the connection.

        Receivers run behind a savepoint of their own: their errors are not the handler's.
        """
        savepoint = self.session.savepoint
        savepoint.arm()
        for task in tasks:
            reports.started(task.delivery)
        if _keep_writes(savepoint) is not None:
            savepoint.roll_back()
        state.savepoints += savepoint.opened
        return savepoint.opened

    def _succeeded(
        self, tasks: list[Task], result: Any, seconds: float, part: RanDeliveries, hooks_before: int
    ) -> None:
        if not self.nested and hooks_before < len(self.session.wrapper.run_on_commit):
            part.hooks[tasks[0].delivery.id] = self.session.take_hooks(hooks_before)
        for task in tasks:
            part.tasks.append(task)
            part.ended.append(Ended(task.delivery, ACKED, result, seconds))

    def _failed(
        self,
        tasks: list[Task],
        error: BaseException,
        seconds: float,
        state: SliceState,
        part: RanDeliveries,
    ) -> None:
        state.halted_lines.update(task.line for task in tasks)
        if self.conflicts.may_repeat(tasks, error):
            state.to_rerun.extend(tasks)
            state.stopped = True
        elif len(tasks) > 1:
            state.to_rerun.extend(tasks)  # the messages of a failed batch run one by one
        else:
            ended = self.failure_end(tasks[0].delivery, error, seconds)
            part.tasks.append(tasks[0])
            part.ended.append(ended)
            queue = ended.delivery.queue
            if queue in self.backoff_queues and step_of(ended.outcome, ended.error) is Step.UP:
                state.backing_off.add(queue)

    def _refused(
        self, tasks: list[Task], error: BaseException, seconds: float, state: SliceState
    ) -> None:
        """Discard a run in which the handler could not use its connection, and repeat it."""
        state.stopped = True
        state.halted_lines.update(task.line for task in tasks)
        if isinstance(error, NotLocked):
            return
        if self.conflicts.count(tasks):
            # A batch stays together: it runs as one again, locked before it starts.
            (state.not_locked if len(tasks) > 1 else state.to_rerun).extend(tasks)
        else:
            self._failed(tasks, error, seconds, state, state.unbound)

    def _abort(
        self, tasks: list[Task], error: BaseException, seconds: float, state: SliceState
    ) -> None:
        state.aborted = True
        if len(tasks) > 1:
            state.to_rerun.extend(tasks)
        else:
            state.culprit = self.failure_end(tasks[0].delivery, error, seconds)


def _reported_error(raised: Exception) -> Exception:
    """Return `raised` as the row of its message reports it."""
    if isinstance(raised, TransactionEnded):
        return HandlerBrokeTransaction(f"the handler ended its transaction: {raised}")
    return raised


def _keep_writes(
    savepoint: LazySavepoint, *, more: bool = False, binds: bool = False
) -> BaseException | None:
    """Keep the handler's writes; return the error of a handler that spoiled its transaction.

    `binds`: the handler is bound to the transaction, even if it did not use its connection. Raises
    TransactionEnded if the handler ended the transaction.
    """
    try:
        if binds:
            savepoint.open()
        savepoint.keep(more=more)
    except TransactionEnded:
        raise
    except Exception as error:
        return error
    return None
