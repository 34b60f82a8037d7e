"""One run of a worker: its start, the loop, and its end.

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
from time import monotonic

from django_mq.conf.error_logs import log_failure
from django_mq.executor.deadline import Deadline
from django_mq.executor.thread_connections import remembering_sessions
from django_mq.signals import announce_worker, worker_started, worker_stopped
from django_mq.store import Cursor, poll
from django_mq.store.server_errors import LOST, was_refused
from django_mq.worker.orders import LEAVE
from django_mq.worker.parts import Parts
from django_mq.worker.shutdown import Shutdown
from django_mq.worker.unstarted import Unstarted
from django_mq.worker.worker_options import WorkerOptions

#: Seconds until a backoff level is written again after another session had its row locked.
BACKOFF_RETRY_SECONDS = 0.25
#: Seconds until a worker with `until_empty` rechecks an ordered queue that is not empty.
RECHECK_SECONDS = 0.25
#: Seconds that a new process leaves to the first try to settle the messages of dead ones, before it
#: claims. If it dies of its first message, as they did, they would wait for the next process.
FIRST_TRY_SECONDS = 1.0
#: Seconds between two checks whether commits still hang.
HANG_RECHECK_SECONDS = 1.0


class Run:
    """The loop of one run of `worker`, over its parts."""

    def __init__(self, worker: WorkerOptions) -> None:
        self.worker = worker
        self.id = worker.given_id or secrets.token_hex(8)
        self.ended = threading.Event()
        self.parts = Parts(worker, self.id, on_order=self._apply_order)
        self.unstarted = Unstarted(self.id, self.parts)
        self._deadline = Deadline(worker.max_seconds)
        self.shutdown = Shutdown(worker, self.id, self.parts, self.unstarted)
        self._worked = self._announced = False
        self._fetched_at = monotonic()

    def run(self, until_empty: bool) -> bool:
        """Work, then drain; return whether everything that had started was finished."""
        with contextlib.ExitStack() as ends:
            ends.enter_context(remembering_sessions())
            ends.callback(self.parts.watchdog.end)
            self.parts.watchdog.start()
            self._check_tables()
            self._start(ends)
            self._loop(until_empty)
        return self.shutdown.done

    def _apply_order(self, order: str, by: str) -> None:
        """Carry out an operator's order; from any thread; never blocks."""
        self.worker.orders.record(order, by)
        if order == LEAVE:
            self.worker.stopping.set()
            self.shutdown.limit_waits()
        self.parts.wakeup.poke()
        self.parts.lease_keeper.request_heartbeat()  # the heartbeat shows that the order was obeyed

    def _check_tables(self) -> None:
        """Check that the tables can be used, before each thread reports that they cannot.

        A lost database raises one of LOST, except in a supervised process, which waits for it.
        """
        statements = self.parts.statements
        try:
            poll.check_tables(statements.cursor())
        except Exception as error:
            statements.close()
            if not (self.worker.given_id and isinstance(error, LOST)):
                raise

    # ---- the loop

    def _loop(self, until_empty: bool) -> None:
        parts = self.parts
        looked_after = -1
        if not self.worker.stopping.is_set():
            parts.recovery.wait_for_first_try(FIRST_TRY_SECONDS)
        while not self.worker.stopping.is_set() and not self._deadline.passed():
            try:
                sleep = self._fetch()
            except Exception as error:
                self._wait_out(error)
                continue
            used_up = parts.quota.remaining == 0
            done = used_up or (until_empty and parts.fetcher.empty)
            if done and self._busy():
                looked_after = -1  # what still runs may broadcast
            elif done:
                if used_up:
                    return
                if looked_after == parts.quota.claimed:
                    if not self._line_moves():
                        return
                    parts.wakeup.sleep(RECHECK_SECONDS)
                looked_after = parts.quota.claimed  # the last handlers may have broadcast
                parts.fetcher.on_freed()
                continue
            left = self._deadline.remaining()
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
            # The next connection may lead to another server, with lower ids and another clock.
            self.parts.ordered_queues.forget_marks()
            self.parts.claims.facts.lease_marks.clear()
            self.unstarted.add_unconfirmed(self.parts.claims.of_round, lost=lost)
        self.parts.fetcher.on_freed()  # the messages that it was about to claim are still due
        self.parts.outage.wait(error, logged=not lost)

    def _fetch(self) -> float:
        parts, orders = self.parts, self.worker.orders
        parts.rounds += 1
        parts.claims.begin_round()
        cursor, answers = parts.statements.cursor(), parts.statements.link.answers
        if parts.outage.lost:
            poll.check_writes(cursor)  # a standby answers reads, too
            if monotonic() - self._fetched_at > parts.lease_keeper.renew_interval:
                parts.fetcher.postpone_lapsed()
        if parts.lease_keeper.commits_hang:  # no living process can renew its leases
            parts.fetcher.postpone_lapsed()
        if parts.wakeup.take_ring():
            parts.fetcher.on_ring()
        urgent = parts.fetcher.urgent
        orders.report(self.id)
        sleep = self._suspend(cursor) if orders.quiet else self._claim(cursor)
        sleep = min(sleep, parts.scheduler.poll(cursor), parts.operation_runner.poll(cursor))
        sleep = min(sleep, parts.runner.watch())
        self._worked |= not urgent  # an urgent first fetch does not know any queue yet
        if parts.statements.link.answers > answers:
            parts.outage.record_answer()
        parts.lease_keeper.report()
        parts.answered_rounds += 1
        self._fetched_at = monotonic()
        return min(sleep, BACKOFF_RETRY_SECONDS) if parts.backoffs.has_pending() else sleep

    def _claim(self, cursor: Cursor) -> float:
        parts = self.parts
        if parts.local_queue.suspended:
            parts.local_queue.resume()
            parts.fetcher.on_freed()
        claims_first = parts.fetcher.urgent and parts.local_queue.idle()
        claims_first &= not parts.lease_keeper.commits_hang
        if self.unstarted.overdue or parts.backoffs.has_pending() or not claims_first:
            self.unstarted.start_or_release(cursor)
        if parts.lease_keeper.commits_hang:  # a claim would hang, too, and leave a connection
            return min(self.worker.settings.poll_interval, HANG_RECHECK_SECONDS)
        return min(parts.fetcher.fetch(cursor), parts.local_queue.coroutines.overdue_in())

    def _suspend(self, cursor: Cursor) -> float:
        """Release everything that has not started: an operator told this worker to be quiet."""
        self.unstarted.release_all(cursor)
        return min(self.worker.settings.poll_interval, self.parts.ordered_queues.next_turn_in())

    # ---- start and end

    def _start(self, ends: contextlib.ExitStack) -> None:
        """Start the parts; add the end of each to `ends` before it starts. The first ends last."""
        parts = self.parts
        ends.callback(self._announce_stopped)
        ends.callback(parts.statements.close)
        ends.callback(self._end_lease_keeper)
        parts.lease_keeper.start()
        for part in (parts.operation_runner, parts.scheduler, parts.maintenance):
            ends.callback(part.end)
            part.start()
        ends.callback(self.shutdown.run)
        parts.liveness.mark_ready()
        self.take_recoveries()
        if parts.listener:
            parts.listener.start()
        for executor in parts.executors:
            executor.start()
        self._announce_started()

    def take_recoveries(self) -> None:
        """Begin to settle messages of dead siblings once this run has started; from any thread.

        Those of the first death come first: if processes die one after another, each of them may
        live just long enough to settle one.
        """
        if not self.parts.liveness.is_ready:
            return
        with contextlib.suppress(IndexError):
            while True:
                self.parts.recovery.recover(*self.worker.to_recover.pop(0))

    def _end_lease_keeper(self) -> None:
        lease_keeper = self.parts.lease_keeper
        lease_keeper.end(leaves=not self.parts.scoreboard.running())
        if lease_keeper.is_alive():
            lease_keeper.join(5.0)
        lease_keeper.report()

    def _announce_started(self) -> None:
        queues, threads = self.worker.queues, self.worker.threads
        if self.worker.only_settles:
            does = "it only settles the messages of processes that ended"
        else:
            named = "all queues" if "#" in queues else f"queues {', '.join(queues)}"
            does = f"{named}, {threads} thread{'' if threads == 1 else 's'}"
        self._announced = True
        text = f"worker {self.id} started: {does}, process {os.getpid()}"
        announce_worker(worker_started, self.id, text, queues=queues)

    def _announce_stopped(self) -> None:
        if not self._announced:
            return
        done, text = self.shutdown.done, f"worker {self.id} stopped"
        if not done:  # some may be coroutines that have ended, because the drain cancelled them
            left = len(self.parts.scoreboard.running())
            unfinished = f"{left:,} message{'' if left == 1 else 's'} unfinished"
            text += f": its drain ran out of time with {unfinished}"
        announce_worker(worker_stopped, self.id, text, drained=done)
