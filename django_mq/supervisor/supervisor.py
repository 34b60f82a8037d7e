"""Start worker processes, kill those past a timeout, replace dead ones, pass on their messages.

The supervisor has no database connection and no threads: it forks, and it must survive anything
that handlers do.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from time import monotonic

from django_mq.executor.deadline import Deadline
from django_mq.executor.scoreboard import Scoreboard
from django_mq.supervisor.child import BROKEN, DONE, OUT_OF_TIME, describe_exit, listed
from django_mq.supervisor.descriptors import wait_ready
from django_mq.supervisor.link_lines import FINISHED, UNFINISHED
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.supervisor.process_starter import ProcessStarter
from django_mq.supervisor.readiness import Readiness
from django_mq.supervisor.reporter import Reporter
from django_mq.supervisor.stop_signals import StopSignals, leave_by
from django_mq.worker import Worker
from django_mq.worker.recovery import DeadWorker

logger = logging.getLogger("django_mq")

#: Seconds between two looks at the running messages, and thus the precision of timeouts.
TICK = 0.2
#: Seconds after the drain time has run out until a child is killed.
DRAIN_GRACE_SECONDS = 2.0
#: Seconds between two starts in a slot whose processes grow too large.
RECYCLE_PAUSE = 1.0
#: Seconds that the last process has to settle the messages of dead ones.
LAST_RECOVERY_SECONDS = 10.0


class Supervisor:
    """Runs `processes` children until they are done, or until a stop signal.

    `make_worker` is that of `ProcessStarter`. `max_rss` is in megabytes.
    """

    def __init__(
        self,
        make_worker: Callable[[int, str, Scoreboard], Worker],
        *,
        processes: int,
        entries: int,
        drain_seconds: float,
        until_empty: bool,
        max_rss: int | None,
        reporter: Reporter,
    ) -> None:
        self._drain_seconds = drain_seconds
        self._max_rss = max_rss
        self._reporter = reporter
        self._slots = [ProcessSlot(Scoreboard(entries)) for _ in range(processes)]
        self._starter = ProcessStarter(
            make_worker, slots=self._slots, reporter=reporter, until_empty=until_empty
        )
        self._orphaned: dict[str, DeadWorker] = {}
        self._deadline: Deadline | None = None
        self._code = DONE

    def run(self) -> int:
        """Run to the end, and return the exit code.

        0: done or drained; 1: a child died while it drained; 5: the drain ran out of time.
        """
        with StopSignals(signal.SIGCHLD) as signals:
            self._signals = signals
            try:
                for slot in self._slots:
                    self._starter.start(slot, self._signals)
                while not all(slot.finished for slot in self._slots):
                    self._wait()
                    self._step()
                    self._reporter.report(Readiness(self._slots, self._deadline is not None))
                if self._deadline is None:
                    self._reporter.stopping()
                if self._orphaned:
                    self._settle_the_rest()
            finally:
                self._kill_all()
        return self._code

    def _wait(self) -> None:
        readers = [self._signals.fileno(), *self._reporter.descriptors()]
        readers += [slot.link.fileno() for slot in self._slots if slot.link is not None]
        writers = [slot.link.fileno() for slot in self._slots if slot.link and slot.to_send]
        readable, writable = wait_ready(readers, writers, seconds=TICK)
        readiness = Readiness(self._slots, self._deadline is not None)
        self._reporter.answer(readable, readiness, self._slots)
        for slot in self._slots:
            if slot.link is not None and slot.link.fileno() in writable:
                slot.to_send.send(slot.link)
            if slot.link is not None and slot.link.fileno() in readable:
                slot.read_link()
        for number in self._signals.read():
            self._stop(number)

    def _step(self) -> None:
        for slot in self._slots:
            if slot.pid:
                slot.kill_overrun()
                if self._max_rss is not None and self._deadline is None:
                    slot.recycle_large(self._max_rss)
                self._reap(slot)
        for slot in self._slots:
            if not slot.pid and not slot.finished:
                if self._deadline is not None:
                    slot.finished = True
                elif monotonic() >= slot.restart_at:
                    self._starter.start(slot, self._signals)
        self._pass_on()
        if self._deadline is not None and self._deadline.passed():
            for slot in self._slots:
                if slot.pid:
                    slot.signal(signal.SIGKILL)
                    self._reap(slot, wait=True)

    def _stop(self, number: int) -> None:
        if self._deadline is not None:
            # If a terminal closes, both its shell and the kernel send SIGHUP.
            if number != signal.SIGHUP:
                self._kill_all()
                leave_by(number)
            return
        self._reporter.stopping()
        self._deadline = Deadline(self._drain_seconds + DRAIN_GRACE_SECONDS)
        for slot in self._slots:
            slot.signal(signal.SIGTERM)
        logger.info(
            "%s: draining for at most %g s; SIGTERM or Ctrl-C now stops at once",
            signal.Signals(number).name,
            self._drain_seconds,
            extra={"event": "draining"},
        )

    def _reap(self, slot: ProcessSlot, *, wait: bool = False) -> None:
        pid = slot.pid
        status = slot.reap(wait=wait)
        if status is None:
            return
        self._orphaned.update(slot.recovering)
        slot.recovering = {}
        if slot.last_line == FINISHED:
            self._on_ended(slot)
        elif slot.last_line == UNFINISHED or wait:
            if slot.leaving or not slot.recycling or self._deadline is not None:
                self._code = OUT_OF_TIME
                slot.finished = True
            self._on_died(slot, self._out_of_time(slot), planned=True)
        elif slot.overran:
            ended = f"process {pid} was ended"
            because = f" because {slot.killed_because}" if slot.killed_because else ""
            self._on_died(slot, ended, lost=f"{ended}{because}")
        elif slot.failure:
            self._on_died(
                slot,
                f"process {pid} failed ({slot.failure})",
                lost=f"process {pid} failed ({slot.failure_class})",
            )
        else:
            self._on_died(slot, f"process {pid} {describe_exit(status)}")

    def _out_of_time(self, slot: ProcessSlot) -> str:
        """Say that the drain of a process ran out of time, and why it drained, if that is known."""
        out_of_time = "its drain ran out of time"
        if slot.too_large:
            why = "its process was replaced, since it used more memory than MAX_RSS allows"
        elif slot.leaving:
            why = "its worker left by order of an operator"
        elif self._deadline is not None:
            return "mq_worker was told to stop, and the drain ran out of time"
        elif slot.recycling:
            why = "its process was told to stop by a signal"
        else:
            return out_of_time
        return f"{why}, and {out_of_time}"

    def _on_ended(self, slot: ProcessSlot) -> None:
        if slot.recycling and not slot.leaving:
            pause = slot.started_at + RECYCLE_PAUSE
            slot.restart_at = max(pause, monotonic() + slot.restart_delay())
        elif slot.leaving or not self._orphaned:
            slot.finished = True

    def _on_died(
        self, slot: ProcessSlot, reason: str, lost: str = "", *, planned: bool = False
    ) -> None:
        """Log `reason`; its messages get `lost` as the reason, if given.

        An error text may quote a row, and the log lines of messages must not. The end of a process
        at a timeout, or by an operator, has a log line of its own.
        """
        ran = [entry.fence.id for entry in slot.scoreboard.read(slot.worker)]
        self._orphaned[slot.worker] = slot.dead_worker(lost or reason, planned=planned)
        if slot.finished or slot.leaving or self._deadline is not None:
            slot.finished = True
            self._code = max(self._code, BROKEN)
            then = ""
        else:
            delay = slot.restart_delay()
            slot.restart_at = monotonic() + delay
            then = f"; restarting in {delay:g} s" if delay else "; restarting now"
        logger.error(
            "worker %s: %s while it ran %s%s",
            slot.worker,
            reason,
            listed(ran),
            then,
            extra={"event": "worker_died", "worker": slot.worker},
        )

    def _pass_on(self) -> None:
        """Ask a live child to settle the messages of dead ones; it reports when that is done."""
        reachable = sorted(
            (slot for slot in self._slots if slot.link is not None),
            # The newest process is not stuck in a handler, unless processes die at their start.
            key=lambda slot: (not slot.scoreboard.stalled(), not slot.failures, slot.started_at),
        )
        for worker, dead in list(self._orphaned.items()):
            while reachable and not reachable[-1].send(dead):
                reachable.pop()  # unreachable for the rest of this turn
            if not reachable:
                return
            del self._orphaned[worker]

    def _settle_the_rest(self) -> None:
        """Start one more process, only to settle the messages of the last dead ones."""
        slot = self._slots[0]
        slot.finished = True
        self._starter.start(slot, self._signals, last=True)
        deadline = Deadline(LAST_RECOVERY_SECONDS)
        while slot.pid and not deadline.passed():
            self._pass_on()
            if slot.link is not None and not self._orphaned:
                slot.to_send.finish(slot.link)
            self._wait()
            self._reap(slot)

    def _kill_all(self) -> None:
        for slot in self._slots:
            slot.kill()
