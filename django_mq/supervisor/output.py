"""The standard streams of processes that run for weeks, and must not depend on a reader."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from django.core.management.base import OutputWrapper


def say(stdout: OutputWrapper, text: str) -> None:
    """Print a line of a command that must not depend on its output, if that is still open."""
    if sys.stdout is not None:
        with suppress(OSError):
            stdout.write(text)
        flush()


def flush(*, last: bool = False) -> None:
    """Write what was printed, whatever has happened to the reader.

    A pipe without a reader is replaced by the null device, so that the `print()` of a handler does
    not fail. On a full disk the text stays buffered; the `last` flush discards it, since otherwise
    the interpreter's own flush would fail, with exit code 120. Never raises, since a fork that is
    about to end must end.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # none, closed, or one of the project that fails in its own way
            try:
                stream.flush()
            except OSError as error:
                if last or isinstance(error, BrokenPipeError):
                    discard(stream)


def discard(stream: TextIO) -> None:
    """Connect `stream` to the null device, so that nothing in its buffer can fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
