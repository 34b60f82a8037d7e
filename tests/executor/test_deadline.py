"""Moments by the process's clock, until which threads wait."""

from __future__ import annotations

import threading
from time import monotonic

from django_mq.executor.deadline import Deadline


def test_never() -> None:
    never = Deadline(None)
    assert (never.seconds, never.remaining(), never.passed()) == (None, None, False)


def test_past() -> None:
    past = Deadline(-1)
    assert (past.remaining(), past.passed()) == (0.0, True)


def test_later() -> None:
    began = monotonic()
    later = Deadline(60)
    left = later.remaining()
    assert left is not None
    assert 60 - (monotonic() - began) <= left <= 60
    assert not later.passed()


def test_remaining_time_is_never_too_long_for_a_wait() -> None:
    """`join()` and its kin raise OverflowError beyond TIMEOUT_MAX, some 292 years."""
    left = Deadline(1e300).remaining()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(left)
    assert not thread.is_alive()
