"""The drain at the end of a run: it takes every step, even if an earlier one failed."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from django_mq.executor.deadline import Deadline
from django_mq.store import notify
from django_mq.store.server_errors import LOST
from django_mq.worker.dispatch import log_unreleased
from django_mq.worker.parts import Parts
from django_mq.worker.unstarted import Unstarted
from django_mq.worker.worker_options import WorkerOptions

#: Seconds, in a drain, between two renewals of the ordered queues whose messages still run.
RENEW_INTERVAL = 0.5
#: Seconds that the end of a drain waits for the recovery of dead siblings.
FINISH_RECOVERY_SECONDS = 5.0
#: Seconds that the server has to answer a statement once the worker drains, and once the drain is
#: over. A message that is released too late runs again when its lease lapses.
STATEMENT_SECONDS, LAST_STATEMENT_SECONDS = 5.0, 1.0


class Shutdown:
    """Finishes running messages, releases those that did not start, and leaves the fleet."""

    def __init__(self, worker: WorkerOptions, id: str, parts: Parts, unstarted: Unstarted) -> None:
        self.worker = worker
        self.id = id
        self.parts = parts
        self.unstarted = unstarted
        #: Whether everything that had started was finished.
        self.done = False

    def limit_waits(self) -> None:
        """Limit every wait for the server from now on. From any thread."""
        self.parts.watchdog.limit_waits(STATEMENT_SECONDS)
        self.parts.wakeup.poke()

    def run(self) -> None:
        """Take all steps in order; raise the error of the last one that failed, if any."""
        self._deadline = Deadline(self.worker.drain_seconds)
        steps = (
            self._begin,
            self._stop_listening,
            self._release,
            self._end_async,
            self._finish,
            self._give_up,
            self._release,
            self._report_unreleased,
            self._leave_queues,
            self._ring,
        )
        with ExitStack() as stack:
            for step in reversed(steps):
                stack.callback(step)

    def _begin(self) -> None:
        self.parts.ordered_queues.draining = True
        self.limit_waits()
        self.worker.orders.report(self.id)

    def _stop_listening(self) -> None:
        if self.parts.listener:
            self.parts.listener.stop()

    def _release(self) -> None:
        """Release messages that have not started, so that other workers may run them at once."""
        try:
            waiting = self.unstarted.take_back() if self.parts.runner.blocked() else []
            if self.parts.dispatch.release(waiting + self.parts.local_queue.close()):
                self._ring()
        except LOST:
            self.parts.statements.close()

    def _report_unreleased(self) -> None:
        if unreleased := self.parts.dispatch.unreleased:
            log_unreleased(len(unreleased))

    def _end_async(self) -> None:
        self.parts.runner.end(self._deadline.remaining())

    def _finish(self) -> None:
        """Wait for running messages, and then for the messages of dead siblings."""
        parts = self.parts
        for executor in parts.executors:
            self._join(executor)
        if parts.runner.is_alive():
            self._join(parts.runner)
        threads = (*parts.executors, parts.runner)
        self.done = not (parts.runner.cut_off or any(thread.is_alive() for thread in threads))
        if self.done:
            parts.recovery.finish(FINISH_RECOVERY_SECONDS)

    def _give_up(self) -> None:
        """Stop waiting, both for handlers and for a lost database."""
        self.parts.giving_up.set()
        self.parts.watchdog.limit_waits(LAST_STATEMENT_SECONDS)

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a thread until the drain is over; at least 0.5 s, since it may be idle."""
        left = self._deadline.remaining()
        deadline = Deadline(None if left is None else max(left, 0.5))
        while thread.is_alive() and not deadline.passed():
            self.parts.rounds += 1
            self.parts.runner.watch()
            if self.parts.runner.blocked():
                self._release()
            self._renew_ordered_queues()
            left = deadline.remaining()
            thread.join(RENEW_INTERVAL if left is None else min(left, RENEW_INTERVAL))

    def _renew_ordered_queues(self) -> None:
        """Renew the ordered queues whose messages still run, and disown the others.

        A new owner would wait for running messages, and end their transactions once the heartbeats
        stop.
        """
        parts = self.parts
        if not parts.ordered_queues.owned:
            return
        try:
            cursor = parts.statements.cursor()
            self.unstarted.disown_unused(cursor, parts.ordered_queues.owned)
            parts.ordered_queues.maintain(cursor)
        except LOST:
            parts.statements.close()

    def _leave_queues(self) -> None:
        """Release claims with a lost answer, write the last backoffs, disown the ordered queues."""
        parts = self.parts
        if not (
            self.unstarted.unconfirmed_due
            or parts.backoffs.has_pending()
            or parts.ordered_queues.owned
        ):
            return  # there may be no new connection
        try:
            cursor = parts.statements.cursor()
            if self.unstarted.unconfirmed_due:
                self.unstarted.release_unconfirmed(cursor)
            parts.backoffs.write(cursor)
            parts.ordered_queues.disown(cursor)
        except LOST:
            parts.statements.close()

    def _ring(self) -> None:
        """Wake the other workers: they may run the messages that were released or freed here."""
        statements = self.parts.statements
        if not statements.is_alive():
            return  # there may be no new connection
        try:
            notify.ring_if_room(statements.cursor())
        except LOST:
            statements.close()
