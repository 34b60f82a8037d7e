"""One run of a worker: the loop, and the drain that ends it.

The loop fetches, then sleeps on the wakeup. Executors and the async runner take the messages that
the fetcher put into the local queue. The lease keeper renews the leases of unsettled messages,
maintenance does the chores, the scheduler broadcasts schedules, and the operation runner carries
out operations: each on a thread and a connection of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading

from django_mq.executor.connections import LOST, was_refused
from django_mq.signals import announce_worker, log_failure, worker_started, worker_stopped
from django_mq.store import Cursor, look, notify
from django_mq.worker.orders import LEAVE
from django_mq.worker.parts import Parts
from django_mq.worker.unstarted import Unstarted
from django_mq.worker.wakeup import Deadline
from django_mq.worker.worker_options import WorkerOptions

#: Seconds until a backoff level is written again after another session had its row locked.
WRITE_AGAIN = 0.25
#: Seconds until a worker with `until_empty` rechecks an ordered queue that is not empty.
LINE_AGAIN = 0.25
#: Seconds, in a drain, between two renewals of the ordered queues whose messages still run.
KEEP_EVERY = 0.5
#: Seconds that the end of a drain waits for the recovery of dead siblings.
LAST_RECOVERY = 5.0
#: Seconds that the server has to answer a statement once the worker drains, and once the drain is
#: over. A message that is released too late runs again when its lease lapses.
HURRY, LAST_HURRY = 5.0, 1.0


class Run:
    """The loop of one run of `worker`, over its parts."""

    def __init__(self, worker: WorkerOptions) -> None:
        self.worker = worker
        self.id = worker.given_id or secrets.token_hex(8)
        self.ended = threading.Event()
        self.parts = Parts(worker, self.id, obey=self._obey)
        self.unstarted = Unstarted(self.id, self.parts)
        self._deadline = Deadline(worker.max_seconds)
        self._worked = False

    def run(self, until_empty: bool) -> bool:
        """Work, then drain; return whether everything that had started was finished."""
        self.parts.watchdog.start()
        try:
            self._check_tables()
            self._start()
            try:
                self._loop(until_empty)
            finally:
                done = self._drain()
        finally:
            self.parts.watchdog.end()
        return done

    def hurry(self) -> None:
        """Limit every wait for the server from now on. From any thread."""
        self.parts.watchdog.hurry(HURRY)
        self.parts.wakeup.poke()

    def _obey(self, order: str, by: str) -> None:
        """Carry out an order of an operator; from any thread, and never blocks."""
        self.worker.orders.give(order, by)
        if order == LEAVE:
            self.worker.stopping.set()
            self.hurry()
        self.parts.wakeup.poke()
        self.parts.lease_keeper.hurry()  # the heartbeat shows that it was obeyed

    def _check_tables(self) -> None:
        """Check that the tables can be used, before every thread reports that it cannot use them.

        A lost database raises one of LOST, except in a supervised process, which waits for it.
        """
        statements = self.parts.statements
        try:
            look.prove(statements.cursor())
        except Exception as error:
            statements.close()
            if not (self.worker.given_id and isinstance(error, LOST)):
                raise

    # ---- the loop

    def _loop(self, until_empty: bool) -> None:
        parts = self.parts
        looked_after = -1
        while not self.worker.stopping.is_set() and not self._deadline.passed():
            try:
                sleep = self._fetch()
            except Exception as error:
                self._wait_out(error)
                continue
            used_up = parts.quota.left == 0
            done = used_up or (until_empty and parts.fetcher.empty)
            if done and not self._busy():
                if used_up:
                    return
                if looked_after == parts.quota.claimed:
                    if not self._line_moves():
                        return
                    parts.wakeup.sleep(LINE_AGAIN)
                looked_after = parts.quota.claimed  # the last handlers may have broadcast
                parts.fetcher.on_freed()
                continue
            left = self._deadline.left()
            parts.wakeup.sleep(sleep if left is None else min(sleep, left))

    def _line_moves(self) -> bool:
        """Return whether a message is due in an ordered queue that may still be ours to run."""
        parts = self.parts
        try:
            return parts.ordered_queues.any_moves(
                parts.statements.cursor(),
                parts.fetcher.due_queues - parts.claims.refused.queues(),
                lambda queue: parts.options.of(queue).skip_dead,
            )
        except Exception as error:
            self._wait_out(error)
            return True

    def _busy(self) -> bool:
        """Return whether a part of this process still runs, settles or broadcasts messages."""
        parts = self.parts
        idle = parts.local_queue.idle() and not parts.recovery.recovering()
        return not idle or parts.scheduler.busy() or parts.operation_runner.busy()

    def _wait_out(self, error: Exception) -> None:
        lost = isinstance(error, LOST)
        if not (lost or self._worked):
            raise error  # tables are missing or forbidden: trying again would not help
        if not lost:
            log_failure("loop_failed", error, "worker loop failed")
        statements = self.parts.statements
        if not (was_refused(error) and statements.is_idle()):
            statements.close()
            self.unstarted.in_doubt = True
        self.parts.fetcher.on_freed()  # the messages that it was about to claim are still due
        self.parts.outage.wait(error, logged=not lost)

    def _fetch(self) -> float:
        parts, orders = self.parts, self.worker.orders
        parts.rounds += 1
        cursor, answers = parts.statements.cursor(), parts.statements.link.answers
        if parts.wakeup.take_ring():
            parts.fetcher.on_ring()
        orders.report(self.id)
        sleep = self._suspend(cursor) if orders.quiet else self._claim(cursor)
        sleep = min(sleep, parts.scheduler.tend(cursor), parts.operation_runner.tend(cursor))
        self._worked = True
        if parts.statements.link.answers > answers:
            parts.outage.over()
        parts.lease_keeper.report()
        return min(sleep, WRITE_AGAIN) if parts.backoffs.noted() else sleep

    def _claim(self, cursor: Cursor) -> float:
        parts = self.parts
        if parts.local_queue.suspended:
            parts.local_queue.resume()
            parts.fetcher.on_freed()
        claims_first = parts.fetcher.urgent and parts.local_queue.idle()
        if self.unstarted.in_doubt or parts.backoffs.noted() or not claims_first:
            self.unstarted.tend(cursor)
        return parts.fetcher.fetch(cursor)

    def _suspend(self, cursor: Cursor) -> float:
        """Hold nothing that does not run; an operator told this worker to be quiet."""
        self.unstarted.let_go(cursor)
        return min(self.worker.settings.poll_interval, self.parts.ordered_queues.turn_in())

    # ---- start and drain

    def _start(self) -> None:
        parts = self.parts
        parts.lease_keeper.start()
        parts.maintenance.start()
        parts.scheduler.start()
        parts.operation_runner.start()
        parts.liveness.proved()
        self.take_recoveries()
        if parts.listener:
            parts.listener.start()
        for executor in parts.executors:
            executor.start()
        queues = self.worker.queues
        named = "all queues" if "#" in queues else f"queues {', '.join(queues)}"
        announce_worker(
            worker_started,
            self.id,
            f"worker {self.id} started: {named}, {self.worker.threads} thread(s),"
            f" process {os.getpid()}",
            queues=queues,
        )

    def take_recoveries(self) -> None:
        """Begin to settle messages of dead siblings, once this run has started; from any thread."""
        if not self.parts.liveness.usable:
            return
        with contextlib.suppress(IndexError):
            while True:
                self.parts.recovery.recover(*self.worker.to_recover.pop())

    def _drain(self) -> bool:
        """Finish running messages, release those that did not start, and leave the fleet."""
        parts = self.parts
        deadline = Deadline(self.worker.drain_seconds)
        parts.draining = True
        self.worker.orders.report(self.id)
        self.hurry()
        if parts.listener:
            parts.listener.stop()
        if parts.dispatch.release(parts.local_queue.close()):
            self._ring()
        parts.runner.end(deadline.left())
        for executor in parts.executors:
            self._join(executor, deadline)
        if parts.runner.is_alive():
            self._join(parts.runner, deadline)
        threads = (*parts.executors, parts.runner)
        done = not (parts.runner.cut_off or any(thread.is_alive() for thread in threads))
        if done:
            parts.recovery.finish(LAST_RECOVERY)
        parts.giving_up.set()
        parts.watchdog.hurry(LAST_HURRY)
        parts.dispatch.release(parts.local_queue.close())
        self._leave_queues()
        self._ring()
        parts.maintenance.end()
        parts.scheduler.end()
        parts.operation_runner.end()
        parts.lease_keeper.end()
        parts.lease_keeper.join(5.0)
        parts.lease_keeper.report()
        parts.statements.close()
        announce_worker(
            worker_stopped,
            self.id,
            f"worker {self.id} stopped"
            + ("" if done else f": {len(parts.scoreboard.running())} message(s) still ran"),
            drained=done,
        )
        return done

    def _join(self, thread: threading.Thread, drain: Deadline) -> None:
        """Wait for a thread until the drain is over; at least 0.5 s, since it may be idle."""
        left = drain.left()
        deadline = Deadline(None if left is None else max(left, 0.5))
        while thread.is_alive() and not deadline.passed():
            self.parts.rounds += 1
            self._keep_ordered_queues()
            left = deadline.left()
            thread.join(KEEP_EVERY if left is None else min(left, KEEP_EVERY))

    def _keep_ordered_queues(self) -> None:
        """Renew the ordered queues whose messages still run, and disown the others.

        A new owner would end the transactions of running messages.
        """
        parts = self.parts
        if not parts.ordered_queues.owned:
            return
        try:
            cursor = parts.statements.cursor()
            if free := self.unstarted.unused(parts.ordered_queues.owned):
                parts.ordered_queues.disown(cursor, free)
            parts.ordered_queues.tend(cursor)
        except LOST:
            parts.statements.close()

    def _leave_queues(self) -> None:
        """Write the last backoffs, disown the ordered queues, release claims with a lost answer."""
        parts = self.parts
        if not (self.unstarted.in_doubt or parts.backoffs.noted() or parts.ordered_queues.owned):
            return  # a new connection might not come
        try:
            cursor = parts.statements.cursor()
            if self.unstarted.in_doubt:
                self.unstarted.release_unanswered(cursor)
            parts.backoffs.write(cursor)
            parts.ordered_queues.disown(cursor)
        except LOST:
            parts.statements.close()

    def _ring(self) -> None:
        """Wake the other workers: messages that were released or freed here are for them."""
        statements = self.parts.statements
        if not statements.is_alive():
            return  # a new connection might not come
        try:
            notify.ring(statements.cursor())
        except LOST:
            statements.close()
