"""The sleep of the loop, and the events that end it."""

from __future__ import annotations

import threading
from time import monotonic

from django_mq.worker.wakeup import Wakeup


def test_pokes_are_kept_until_seen_and_many_are_as_good_as_one() -> None:
    """PMQ-62, PMQ-64: nothing is lost between looking and sleeping."""
    wakeup = Wakeup()
    wakeup.poke()
    wakeup.poke()
    began = monotonic()
    wakeup.sleep(60)
    assert monotonic() - began < 30
    assert wakeup.take_ring() is False
    assert not wakeup._quiet.acquire(blocking=False)  # the next sleep would not end at once
    wakeup.sleep(0.001)  # returns because the time is over


def test_a_ring_is_seen_once() -> None:
    wakeup = Wakeup()
    wakeup.ring()
    wakeup.sleep(60)
    assert wakeup.take_ring() is True
    assert wakeup.take_ring() is False


def test_a_sleeper_is_woken_by_another_thread() -> None:
    wakeup = Wakeup()
    woken = threading.Event()

    def sleep() -> None:
        wakeup.sleep(60)
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert not woken.is_set()
    wakeup.ring()
    assert woken.wait(30)


def test_a_time_that_is_past_is_no_sleep() -> None:
    Wakeup().sleep(-5)
