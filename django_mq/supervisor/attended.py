"""A command that works in its own process, without a supervisor: its end, its probes, its unit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from django_mq.executor.deadline import Deadline
from django_mq.supervisor import output
from django_mq.supervisor.child import OUT_OF_TIME
from django_mq.supervisor.descriptors import wait_ready
from django_mq.supervisor.reporter import Condition, Reporter
from django_mq.supervisor.stop_signals import StopSignals

logger = logging.getLogger("django_mq")

#: Seconds between two reports to the systemd unit; its watchdog should allow twice as much.
REPORT_SECONDS = 1.0


class Work(Condition, Protocol):
    """The work of the main thread. Its methods are called from another one."""

    @property
    def name(self) -> str:
        """The name of the inbox, for the log."""

    def stop(self) -> None:
        """Ask it to end soon."""


@contextmanager
def attended(work: Work, reporter: Reporter, *, seconds: float) -> Iterator[None]:
    """Within the block, stop signals stop `work`, and probes and systemd hear how it is.

    A second signal, or `seconds` without an end, ends the process: a broker or a database that
    hangs cannot keep it. The broker then delivers again whatever was not acked.
    """
    reader, writer = os.pipe()
    with StopSignals() as signals:
        attendant = _Attendant(work, signals, reader, seconds, reporter)
        attendant.start()
        try:
            yield
        finally:
            os.close(writer)
            attendant.join()
            os.close(reader)
            reporter.close()


class _Attendant(threading.Thread):
    """Waits for signals and clients until the other side of the pipe `end` is closed."""

    def __init__(
        self, work: Work, signals: StopSignals, end: int, seconds: float, reporter: Reporter
    ) -> None:
        super().__init__(name="mq-attendant", daemon=True)
        self._work = work
        self._signals = signals
        self._end = end
        self._seconds = seconds
        self._reporter = reporter
        self._deadline: Deadline | None = None

    def run(self) -> None:
        while True:
            descriptors = [self._signals.fileno(), self._end, *self._reporter.descriptors()]
            ready, _ = wait_ready(descriptors, seconds=self._wait())
            if self._end in ready:
                if self._deadline is None:
                    self._reporter.stopping()
                return
            self._obey(self._signals.read())
            self._reporter.answer(ready, self)
            self._reporter.report(self)

    def _wait(self) -> float:
        """Return the seconds until there is something to do without a signal or a client."""
        left = self._deadline.remaining() if self._deadline else None
        return REPORT_SECONDS if left is None else min(left, REPORT_SECONDS)

    def not_live(self) -> Sequence[str]:
        return self._work.not_live()

    def not_ready(self) -> list[str]:
        if self._deadline is not None:
            return ["draining"]
        return [*self._work.not_live(), *self._work.not_ready()]

    def _obey(self, received: list[int]) -> None:
        if received and self._deadline is None:
            self._work.stop()
            self._deadline = Deadline(self._seconds)
            self._reporter.stopping()
            received.pop(0)
        if received:
            _leave(128 + received[0])
        if self._deadline is not None and self._deadline.passed():
            logger.error(
                "inbox %s: not stopped within %g s; the broker delivers again what was not acked",
                self._work.name,
                self._seconds,
                extra={"event": "inbox_gave_up", "inbox": self._work.name},
            )
            _leave(OUT_OF_TIME)


def _leave(code: int) -> None:
    output.flush(last=True)
    os._exit(code)
