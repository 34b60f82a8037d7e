"""The worker: one process that claims, runs and settles messages until it is told to stop.

Users and commands hold a `Worker`; `run` has the loop, and `parts` builds the parts that it uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from django_mq.executor import worker_totals
from django_mq.executor.worker_totals import WorkerTotals
from django_mq.policy.handler_totals import HandlerTimings
from django_mq.worker.commands import EndProcess
from django_mq.worker.orders import Orders
from django_mq.worker.recovery import DeadWorker
from django_mq.worker.run import Run
from django_mq.worker.worker_options import WorkerOptions, seconds_or

__all__ = ["DeadWorker", "Worker"]


class Worker(WorkerOptions):
    """Runs messages in threads of this process, until it is told to stop.

    `queues` are names or patterns (`mail.*`, `#` for all, the default), in strict preference.
    Other options default to the settings. A worker started here cannot end a sync handler that runs
    past its timeout: only the supervisor of `manage.py mq_worker` can.

        worker = Worker(queues=["mail"])
        worker.run(until_empty=True)
    """

    _run: Run | None = None
    _thread = 0  # the identifier of the thread of this run
    _totals = WorkerTotals()  # empty until a run has its own

    @property
    def id(self) -> str:
        """The random id of this run, as in `claimed_by` and the heartbeat; empty when idle."""
        run = self._run  # read once: the run may end meanwhile
        return run.id if run else ""

    @property
    def running(self) -> bool:
        """Whether the worker runs now; from any thread."""
        return self._run is not None

    @property
    def running_messages(self) -> list[int]:
        """The ids of the messages whose handlers run now; from any thread."""
        run = self._run
        return run.parts.scoreboard.running() if run else []

    @property
    def sleeps(self) -> int:
        """How often this run has slept for lack of work; 0 when idle."""
        run = self._run
        return run.parts.wakeup.sleeps if run else 0

    def timings(self) -> dict[str, HandlerTimings]:
        """Return the timings of each handler in this run, or in the last; from any thread.

        At most 100 handlers, starting with those that ended most messages.
        `django_mq.queues.timings()` sums the whole fleet.
        """
        return {name: total.timings(name) for name, total in self._totals.read().items()}

    def run(self, until_empty: bool = False) -> bool:
        """Work until told to stop or, with `until_empty`, until nothing is due; blocks.

        Returns True if every message that started was finished, False if `drain_seconds` ran out
        first. Raises RuntimeError if the worker is running already or in a transaction, and the
        database's own error if it cannot be reached at the start.
        """
        with self.lock:
            if self._run is not None:
                raise RuntimeError("this worker is already running")
            self.refuse_transaction()
            self._thread = threading.get_ident()
            try:
                run = self._run = Run(self)
            except BaseException:
                self._thread = 0
                raise
            self._totals = worker_totals.begin(run.id)
        try:
            return run.run(until_empty)
        finally:
            worker_totals.end(run.id)
            with self.lock:
                self._run = None
                self._thread = 0  # a stop from now on must not reach the next run
                self.stopping.clear()  # cleared at the end, since a stop may come before the run
                self.orders = Orders()
            run.ended.set()

    def stop(self, timeout: float | timedelta | None = None) -> bool:
        """Drain: start nothing more, and finish what runs. From any thread or signal handler.

        Waits up to `timeout`, seconds or a timedelta (None: as long as it takes), and returns
        whether the run ended; also returns False if nothing was running. In the thread of `run()`,
        where signal handlers usually run, it does not wait: it returns False, and `run()` drains.
        """
        wait = seconds_or(None, "timeout", timeout)
        if threading.get_ident() == self._thread:
            # The code that a signal handler interrupts may hold a lock that stopping needs.
            threading.Thread(target=self.stop, args=(0,), name="mq-stop", daemon=True).start()
            return False
        with self.lock:
            if (run := self._run) is None:
                return False
            self.ask_to_stop()
        return run.ended.wait(None if wait is None else min(wait, threading.TIMEOUT_MAX))

    def ask_to_stop(self) -> None:
        """Begin to drain, from any thread. If no run has begun, the next one ends at once."""
        self.stopping.set()
        if (run := self._run) is not None:
            run.shutdown.limit_waits()

    def recover(self, dead: DeadWorker, done: Callable[[], None]) -> None:
        """Begin to settle what a dead sibling held; call `done` at the end. For the supervisor."""
        self.to_recover.append((dead, done))
        if (run := self._run) is not None:
            run.take_recoveries()

    def supervised(
        self,
        end_process: EndProcess,
        pass_on: Callable[[str], None],
        on_declared: Callable[[], None],
        *,
        declares: bool,
    ) -> None:
        """Set the functions by which the next run reaches its supervisor.

        `end_process` asks the supervisor to end this process, which runs a message that an operator
        stopped. `pass_on` is called with each operator's order that was carried out, `on_declared`
        when the schedules of the code are stored. If an earlier process of the supervisor has
        stored them, this one no longer `declares` them over those of newer code.
        """
        self.end_process = end_process
        self.declares, self.on_declared = declares, on_declared
        self.orders.supervised(pass_on)
