"""Tests of the output, which survives broken and odd streams."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from django_mq.supervisor import output


class Tee:
    """A stream of a project: it has no descriptor, and fails in its own way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "stream",
    [None, Tee(BrokenPipeError()), Tee(OSError()), Tee(RuntimeError())],
    ids=["none", "broken", "full", "odd"],
)
def test_no_stream_keeps_a_process_from_going_on(
    monkeypatch: pytest.MonkeyPatch, stream: Any, last: bool
) -> None:
    """The supervisor flushes before a fork, and its child before it leaves."""
    flushed = []

    class Stream:
        def flush(self) -> None:
            flushed.append(self)

    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", Stream())
    output.flush(last=last)
    assert len(flushed) == 1
