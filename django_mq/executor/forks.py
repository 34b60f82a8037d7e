"""End the processes that handlers fork: only the handler may run in them."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from django_mq.conf.error_logs import log_failure

#: Stands for this process; a fork has another object. Two calls of `os.getpid()` per message took
#: 1.4 of the 13 us of a no-op on a virtual machine.
process = object()


def _forked() -> None:
    global process
    process = object()


os.register_at_fork(after_in_child=_forked)


class ForkBarrier:
    """A block that no fork of this process leaves: the fork ends there instead."""

    __slots__ = ("_process",)

    def __enter__(self) -> None:
        self._process = process

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if process is not self._process:
            leave(error)


def leave(error: BaseException | None) -> NoReturn:
    """End this fork of a worker, in which a handler returned or raised `error`.

    The fork must not go on as a second worker on the same connections: the delivery belongs to its
    parent. The exit code is the interpreter's: that of `sys.exit()`, 1 for other errors. Exit hooks
    and buffers of connections belong to the parent.
    """
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = _code_of(error)
        elif error is not None:
            code = 1
            log_failure("fork_failed", error, "a process that a handler forked failed")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _code_of(error: SystemExit) -> int:
    """Return the exit code of a SystemExit.

    >>> [_code_of(SystemExit(code)) for code in (None, 0, 3, True, "no")]
    [0, 0, 3, 1, 1]
    """
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
