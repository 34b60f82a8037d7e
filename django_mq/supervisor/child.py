"""One child of the supervisor: a Worker, and a thread that listens to supervisor and signals."""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from django_mq.messages import Fence
from django_mq.policy.error_text import one_line
from django_mq.worker.recovery import DeadWorker

if TYPE_CHECKING:
    from django_mq.supervisor.stop_signals import StopSignals
    from django_mq.worker import Worker

logger = logging.getLogger("django_mq")

#: Exit codes of a child, and of the command.
DONE, BROKEN, OUT_OF_TIME = 0, 1, 5
#: The last word of a child when nothing is left, and when something still runs: its exit code alone
#: could come from a handler.
GOODBYE, GAVE_UP = b".", b"!"
#: The first byte of the line in which a child names the error that ends it.
FAILED = b"?"


def run(
    worker: Worker,
    link: socket.socket,
    signals: StopSignals,
    *,
    until_empty: bool,
    last: bool = False,
) -> int:
    """Run `worker` until it is done, told to stop, or its supervisor is gone.

    The `last` child of all only settles the dead workers that its supervisor names.
    """
    # All objects loaded so far stay. Without a freeze the collector walks them again and again: two
    # of the thirteen microseconds that a no-op message takes.
    gc.collect()
    gc.freeze()
    if last:
        worker.ask_to_stop()
        for line in iter(link.makefile("rb").readline, b""):
            _recover(worker, link, line)
    else:
        threading.Thread(
            target=_listen, args=(worker, link, signals), name="mq-control", daemon=True
        ).start()
    done = worker.run(until_empty)
    _send(link, GOODBYE if done else GAVE_UP)
    return DONE if done else OUT_OF_TIME


def _listen(worker: Worker, link: socket.socket, signals: StopSignals) -> None:
    """Obey the supervisor line by line; when it is gone, drain."""
    buffer = b""
    while True:
        readable = select.select([link.fileno(), signals.fileno()], [], [])[0]
        if signals.fileno() in readable and signals.read():
            worker.ask_to_stop()
        if link.fileno() in readable:
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
    dead = decode(line)
    worker.recover(dead, partial(_send, link, dead.worker.encode()))


def report_failure(link: socket.socket, error: BaseException) -> None:
    """Tell the supervisor which error ends this process, for its log line."""
    text = one_line(f"{type(error).__name__}: {error}")
    _send(link, FAILED + text.encode(errors="replace"))


def _send(link: socket.socket, word: bytes) -> None:
    try:
        link.sendall(word + b"\n")
    except OSError:
        logger.debug("the supervisor is gone")


def encode(dead: DeadWorker) -> bytes:
    """Return `dead` as one line for a child."""
    return (
        json.dumps(
            {
                "worker": dead.worker,
                "reason": dead.reason,
                "timed_out": dead.timed_out,
                "lost": dead.lost,
            }
        ).encode()
        + b"\n"
    )


def decode(line: bytes) -> DeadWorker:
    """Return the DeadWorker that `encode` made `line` from."""
    data: dict[str, Any] = json.loads(line)
    return DeadWorker(
        worker=data["worker"],
        reason=data["reason"],
        timed_out=[Fence(*fence) for fence in data["timed_out"]],
        lost=[Fence(*fence) for fence in data["lost"]],
    )


def describe_exit(status: int) -> str:
    """Return how a process ended, from the status that `os.waitpid` gave.

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
