"""A command that works in its own process, without a supervisor: its end, its probes, its unit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from django_mq.supervisor import output
from django_mq.supervisor.child import OUT_OF_TIME
from django_mq.supervisor.health import Endpoint, verdict
from django_mq.supervisor.ready import wait_ready
from django_mq.supervisor.service import Service
from django_mq.supervisor.stop_signals import StopSignals

logger = logging.getLogger("django_mq")

#: Seconds between two reports to the systemd unit; its watchdog should allow twice as much.
REPORT_SECONDS = 1.0


class Work(Protocol):
    """The work of the main thread. Its methods are called from another one."""

    @property
    def name(self) -> str:
        """The name of the inbox, for the log."""

    def stop(self) -> None:
        """Ask it to end soon."""

    def not_live(self) -> Sequence[str]:
        """Return what is stalled, so that a restart may help."""

    def not_ready(self) -> Sequence[str]:
        """Return why it takes no messages."""


@contextmanager
def attended(
    work: Work, *, seconds: float, health: Endpoint | None = None, service: Service | None = None
) -> Iterator[None]:
    """Within the block, stop signals stop `work`, and probes and systemd hear how it is.

    A second signal, or `seconds` without an end, ends the process: a broker or a database that
    hangs cannot keep it. The broker then delivers again whatever was not acked.
    """
    reader, writer = os.pipe()
    with StopSignals() as signals:
        attendant = _Attendant(work, signals, reader, seconds, health, service)
        attendant.start()
        try:
            yield
        finally:
            os.close(writer)
            attendant.join()
            os.close(reader)
            if health is not None:
                health.close()


class _Attendant(threading.Thread):
    """Waits for signals and clients until the other side of the pipe `end` is closed."""

    def __init__(
        self,
        work: Work,
        signals: StopSignals,
        end: int,
        seconds: float,
        health: Endpoint | None,
        service: Service | None,
    ) -> None:
        super().__init__(name="mq-attendant", daemon=True)
        self._work = work
        self._signals = signals
        self._end = end
        self._seconds = seconds
        self._health = health
        self._service = service
        self._until: float | None = None

    def run(self) -> None:
        while True:
            ready, _ = wait_ready(self._descriptors(), seconds=self._wait())
            if self._end in ready:
                if self._service is not None and self._until is None:
                    self._service.stopping()
                return
            self._obey(self._signals.read())
            if self._health is not None and self._health.fileno() in ready:
                self._health.answer(
                    {
                        "/livez": lambda: verdict(self._work.not_live()),
                        "/readyz": lambda: verdict(self._not_ready()),
                    }
                )
            if self._service is not None:
                self._service.report(self._work.not_live(), self._not_ready())

    def _descriptors(self) -> list[int]:
        descriptors = [self._signals.fileno(), self._end]
        if self._health is not None and not self._health.rests():
            descriptors.append(self._health.fileno())
        return descriptors

    def _wait(self) -> float | None:
        """Return the seconds until there is something to do without a signal or a client."""
        left = None if self._until is None else max(0.0, self._until - monotonic())
        if self._service is None and self._health is None:
            return left
        return REPORT_SECONDS if left is None else min(left, REPORT_SECONDS)

    def _not_ready(self) -> list[str]:
        if self._until is not None:
            return ["draining"]
        return [*self._work.not_live(), *self._work.not_ready()]

    def _obey(self, received: list[int]) -> None:
        if received and self._until is None:
            self._work.stop()
            self._until = monotonic() + self._seconds
            if self._service is not None:
                self._service.stopping()
            received.pop(0)
        if received:
            _leave(128 + received[0])
        if self._until is not None and monotonic() >= self._until:
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
