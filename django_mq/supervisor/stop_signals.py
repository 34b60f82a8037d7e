"""Turn signals into bytes on a pipe: a signal handler must not lock, but a reading loop may."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import TracebackType

#: The first one drains, the second one ends the process.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Within the block, signals are queued; `fileno()` is readable when there are any.

    Only in the main thread. `extra` signals (SIGCHLD) only make the pipe readable.
    """

    def __init__(self, *extra: signal.Signals) -> None:
        self._extra = extra

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def install(self) -> None:
        """Begin to collect signals; a process that ends by `os._exit` need not `restore()`."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, _ignore)
            for number in (*STOP_SIGNALS, *self._extra)
            if not is_ignored_hangup(number)
        }

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Handle signals as before."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def read(self) -> list[int]:
        """Return the stop signals received since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._reader, 1024) if number in STOP_SIGNALS]
        return []


def is_ignored_hangup(number: int) -> bool:
    """Return whether `number` is the hangup of a terminal, which `nohup` makes a process ignore."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def leave_by(number: int) -> None:
    """End this process by signal `number`, with the default handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # process 1 of a container does not die from a signal


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block stop signals around a fork, so that each process receives its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the wakeup descriptor has already received the signal."""
