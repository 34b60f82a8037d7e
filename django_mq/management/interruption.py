"""End a command by a signal, after its action has logged what it changed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from django_mq.supervisor import output
from django_mq.supervisor.stop_signals import leave_by

#: The signals that end a command besides Ctrl-C: from `kill`, and from a terminal that closes.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Interruption(KeyboardInterrupt):
    """A signal that ends the command; the driver cancels the running statement, as for Ctrl-C."""

    number = signal.SIGINT


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, Ctrl-C ends the process by its signal, without a traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        output.flush(last=True)
        leave_by(error.number if isinstance(error, Interruption) else signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Like `quiet()`; `SIGNALS` raise as Ctrl-C does, and end the process in the same way.

    Only in the main thread, and only if the process is the command.
    """
    # nohup ignores SIGHUP.
    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _interrupt)
    with quiet():
        try:
            yield
        finally:  # nobody catches what would be raised while the interpreter exits
            for number in ours:
                signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: object) -> None:
    error = Interruption()
    error.number = signal.Signals(number)
    raise error
