"""Fork a worker process, which keeps none of the supervisor's descriptors and signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from time import monotonic

from django_mq.executor.scoreboard import Scoreboard
from django_mq.supervisor import child, output
from django_mq.supervisor.fork_guard import ForkGuard
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.supervisor.reporter import Reporter
from django_mq.supervisor.stop_signals import STOP_SIGNALS, StopSignals, signals_held
from django_mq.worker import Worker

logger = logging.getLogger("django_mq")


class ProcessStarter:
    """Starts the processes of `slots`; `make_worker(number, id, scoreboard)` is called in each."""

    def __init__(
        self,
        make_worker: Callable[[int, str, Scoreboard], Worker],
        *,
        slots: Sequence[ProcessSlot],
        reporter: Reporter,
        until_empty: bool,
    ) -> None:
        self._make_worker = make_worker
        self._slots = slots
        self._reporter = reporter
        self._until_empty = until_empty
        self._fork_guard = ForkGuard()

    def start(self, slot: ProcessSlot, signals: StopSignals, *, last: bool = False) -> None:
        """Start a process, or let the slot try again later if the system refuses to fork.

        `signals` are the supervisor's. The `last` process only settles messages of dead ones.
        """
        slot.prepare()
        try:
            self._fork(slot, signals, last)
        except OSError as error:
            delay = slot.restart_delay()
            slot.restart_at = monotonic() + delay
            logger.error(
                "cannot start a worker process (%s); trying again in %g s",
                error,
                delay,
                extra={"event": "worker_not_started"},
            )

    def _fork(self, slot: ProcessSlot, signals: StopSignals, last: bool) -> None:
        self._fork_guard.prepare()
        output.flush()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with signals_held():
                    pid = os.fork()
                    if pid == 0:
                        self._become_child(slot, signals, ours, theirs, last)
            except OSError:
                ours.close()
                raise
        slot.assign(pid, ours)

    def _become_child(
        self,
        slot: ProcessSlot,
        inherited: StopSignals,
        ours: socket.socket,
        theirs: socket.socket,
        last: bool,
    ) -> None:
        code = child.BROKEN
        try:
            ours.close()
            self._leave_supervisor(inherited)
            signals = StopSignals()
            signals.install()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            slot.stacks.serve()
            number = self._slots.index(slot)
            worker = self._make_worker(number, slot.worker, slot.scoreboard)
            code = child.run(
                worker,
                theirs,
                signals,
                until_empty=self._until_empty,
                last=last,
                counts=self._reporter.counts,
                quiet=slot.quiet,
                declares=not slot.declared,
            )
        except BaseException as error:
            # The supervisor logs the error at each restart; one traceback is enough.
            level = logging.DEBUG if slot.failures else logging.ERROR
            logger.log(level, "worker failed", exc_info=True, extra={"event": "worker_failed"})
            child.report_failure(theirs, error)
        finally:
            output.flush()
            # Not sys.exit: threads may be stuck in handlers, and exit hooks belong to the parent.
            os._exit(code)

    def _leave_supervisor(self, signals: StopSignals) -> None:
        for slot in self._slots:
            if slot.link is not None:
                slot.link.close()
        self._reporter.close()
        signals.restore()
