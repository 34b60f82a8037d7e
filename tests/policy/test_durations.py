"""Durations as people read them."""

from __future__ import annotations

import pytest

from django_mq.policy.durations import precise_span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 ms"),
        (0.0, "0 ms"),
        (7.08e-6, "7.08 µs"),
        (0.0001, "100 µs"),
        (0.0123, "12.3 ms"),
        (0.99951, "1 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min"),
        (60, "1 min"),
        (287.1, "4 min 47 s"),
        (7200, "2 h"),
        (1e100, "999999999 d"),
    ],
)
def test_measured(seconds: float, text: str) -> None:
    """No unit is skipped: 287 s are not "4.79 min" beside "4 min 47 s"."""
    assert precise_span(seconds) == text
