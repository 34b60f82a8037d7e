"""Where threads are, read from what another process wrote."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.outcomes import TimedOut, decide
from django_mq.policy.stack import parse_dump, readable, running_in


def test_a_dump_of_this_process_is_read() -> None:
    found = {}

    def look() -> None:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            found.update(parse_dump(file.read().decode()))

    # A dump begins with the newest thread, and ends after a hundred of them.
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert "look" in [function for _, _, function in found[thread.ident]]


@pytest.mark.parametrize("dump", ["", "\x00\x00", "Thread 0x", "Thread 0x1 (most recent", "  File"])
def test_truncated_dump_is_read_without_an_error(dump: str) -> None:
    assert running_in(parse_dump(dump), 1) == []


@pytest.mark.parametrize("sent", [None, 7, "abc", {}, [[1, 2, 3]], [["a", "b", "c"]], [[]]])
def test_malformed_stack_reads_as_empty(sent: object) -> None:
    assert readable(sent) == []


def test_the_attempt_keeps_its_stack_within_bounds() -> None:
    error = TimedOut("late")
    error.stack = [(__file__, 1, "é" * 50)] * 1000
    outcome = decide(
        error, attempt=1, max_attempts=1, policy=RetryPolicy.never(), random=lambda: 0.5
    )
    kept = outcome.failure.traceback  # type: ignore[union-attr]
    assert "frames left out" in kept
    assert '"""Where threads are' in kept
    assert len(kept.encode()) <= 16 * 1024
