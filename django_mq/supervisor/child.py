"""One child of the supervisor: a Worker, and a thread that listens to supervisor and signals."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial

from django_mq.conf.error_logs import log_failure
from django_mq.messages import Fence
from django_mq.policy.plain_text import one_line
from django_mq.supervisor.descriptors import wait_ready
from django_mq.supervisor.link_lines import (
    DECLARED,
    FAILED,
    FINISHED,
    ORDER,
    SIGNALLED,
    STOP,
    TOTALS,
    UNFINISHED,
    decode_dead,
)
from django_mq.supervisor.memory import frozen_heap
from django_mq.supervisor.slot_totals import REPORT_SECONDS, ChangedTotals
from django_mq.supervisor.stop_signals import StopSignals
from django_mq.worker import Worker
from django_mq.worker.orders import QUIET

logger = logging.getLogger("django_mq")

#: Seconds for the thread that asks to end this process to wait again. Then the supervisor asks for
#: a dump of the stacks; that of a running thread can crash the process before it wrote the others.
SENDER_SECONDS = 0.2

#: Several threads write to the link; a line must stay whole.
_sending = threading.Lock()

#: Exit codes of a child, and of the command.
DONE, BROKEN, OUT_OF_TIME = 0, 1, 5
#: The maximum number of ids in a log line.
MAX_IDS = 20


def run(
    worker: Worker,
    link: socket.socket,
    signals: StopSignals,
    *,
    until_empty: bool,
    last: bool = False,
    counts: bool = False,
    quiet: bool = False,
    declares: bool = True,
) -> int:
    """Run `worker` until it is done, told to stop, or its supervisor is gone.

    The `last` child of a supervisor only settles the dead workers that are named to it. With
    `counts` it reports the totals of its handlers. With `quiet` it claims nothing until an operator
    resumes it. Unless it `declares`, it leaves schedules that are stored as they are.
    """
    worker.supervised(
        partial(_ask_to_end, link),
        lambda order: _send(link, ORDER + order.encode()),
        partial(_send, link, DECLARED),
        declares=declares,
    )
    if quiet:
        worker.orders.record(QUIET)
    if last:
        worker.only_settles = True
        worker.ask_to_stop()
        for line in iter(link.makefile("rb").readline, b""):
            _recover(worker, link, line)
    else:
        threading.Thread(
            target=_listen, args=(worker, link, signals), name="mq-control", daemon=True
        ).start()
    with frozen_heap(), _reporting(worker, link) if counts else contextlib.nullcontext():
        done = worker.run(until_empty)
    _send(link, FINISHED if done else UNFINISHED)
    return DONE if done else OUT_OF_TIME


@contextlib.contextmanager
def _reporting(worker: Worker, link: socket.socket) -> Iterator[None]:
    """Report the totals of `worker`'s handlers, every few seconds and at the end of the block."""
    reports, enough = ChangedTotals(lambda: worker._totals.by_source()), threading.Event()

    def report() -> None:
        ended = False
        while not ended:
            ended = enough.wait(REPORT_SECONDS)
            for line in reports.changed():
                _send(link, TOTALS + line)

    thread = threading.Thread(target=report, name="mq-totals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(REPORT_SECONDS)


def _listen(worker: Worker, link: socket.socket, signals: StopSignals) -> None:
    """Carry out the supervisor's requests line by line; when it is gone, drain."""
    buffer = b""
    while True:
        ready, _ = wait_ready([link.fileno(), signals.fileno()])
        if signals.fileno() in ready and signals.read():
            _send(link, SIGNALLED)
            worker.ask_to_stop()
        if link.fileno() in ready:
            try:
                data = link.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                worker.ask_to_stop()
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                _recover(worker, link, line)


def _recover(worker: Worker, link: socket.socket, line: bytes) -> None:
    try:
        dead = decode_dead(line)
        worker.recover(dead, partial(_send, link, dead.worker.encode()))
    except Exception as error:  # the thread must also hear the next line, and the end
        text = "could not carry out a request: the messages of a dead worker wait for their leases"
        log_failure("recovery_failed", error, text)


def _ask_to_end(link: socket.socket, fence: Fence, by: str, after: float) -> None:
    """Ask the supervisor to end this process if `fence` still runs `after` seconds from now."""
    _send(link, STOP + json.dumps([fence, by, max(after, SENDER_SECONDS)]).encode())


def report_failure(link: socket.socket, error: BaseException) -> None:
    """Report the error that ends this process to the supervisor, for its log line."""
    text = one_line(f"{type(error).__name__}: {error}")
    _send(link, FAILED + text.encode(errors="replace"))


def _send(link: socket.socket, word: bytes) -> None:
    try:
        with _sending:
            link.sendall(word + b"\n")
    except OSError:
        logger.debug("the supervisor is gone")


def describe_exit(status: int) -> str:
    """Return how a process ended, from the status that `os.waitpid` returned.

    >>> describe_exit(9), describe_exit(256), describe_exit(40)
    ('was killed by SIGKILL', 'exited with code 1', 'was killed by signal 40')
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:  # a real-time signal
            return f"was killed by signal {number}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


def listed(ids: list[int]) -> str:
    """Return the ids of messages for a log line.

    >>> listed([7]), listed([7, 9]), listed([])
    ('message 7', 'messages 7, 9', 'nothing')
    """
    if not ids:
        return "nothing"
    more = ", ..." if len(ids) > MAX_IDS else ""
    return f"message{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:MAX_IDS]))}{more}"
