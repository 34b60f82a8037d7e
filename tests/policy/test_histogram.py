"""Durations in constant memory: exact where that is free, within 13 % elsewhere."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mq.policy.histogram import Histogram

durations = st.floats(1e-6, 1e6) | st.sampled_from([1e-6, 0.001, 1.0, 10.0, 1e6])


def histogram_of(values: list[float], *, piece: int = 0) -> Histogram:
    histogram = Histogram()
    for start in range(0, len(values), piece or len(values)):
        histogram.add(values[start : start + (piece or len(values))])
    return histogram


@given(st.lists(durations, min_size=1, max_size=60), st.integers(1, 7))
def test_the_numbers_of_many_durations(values: list[float], piece: int) -> None:
    """CAR-42: last, min, max, mean, deviation, percentiles; in any order of merging."""
    found = histogram_of(values, piece=piece).durations()
    assert found is not None
    assert (found.count, found.last) == (len(values), values[-1])
    assert (found.min, found.max) == (min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.deviation == pytest.approx(
        statistics.pstdev(values), rel=1e-6, abs=1e-6 * max(values)
    )
    ordered = sorted(values)
    for share, told in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        true = ordered[math.ceil(share * len(values)) - 1]
        assert true / 1.13 <= told <= true * 1.13


@given(st.lists(st.lists(durations, max_size=20), min_size=1, max_size=4))
def test_several_processes_add_up(parts: list[list[float]]) -> None:
    histograms = [histogram_of(part) if part else Histogram() for part in parts]
    added = Histogram()
    for histogram in histograms:
        added.merge(histogram)
    alone = Histogram()
    for part in reversed(parts):  # the existing part is the later one
        alone.add(part)
    assert added.buckets == alone.buckets
    assert (added.count, added.least, added.most) == (alone.count, alone.least, alone.most)
    assert added.last == alone.last
    assert added.mean == pytest.approx(alone.mean)
    assert added.squares == pytest.approx(alone.squares, rel=1e-6, abs=1e-3)


def test_nothing_has_no_numbers() -> None:
    histogram = Histogram()
    histogram.add([])
    histogram.merge(Histogram())
    assert histogram.durations() is None


@pytest.mark.parametrize("value", [0.0, 1e-9, 5e7])
def test_beyond_the_buckets(value: float) -> None:
    found = histogram_of([value]).durations()
    assert found is not None
    assert (found.min, found.p50, found.p99) == (value, value, value)


def test_negative_duration_counts_as_zero() -> None:
    """Somebody wrote a row dated tomorrow."""
    found = histogram_of([0.5, -3.0]).durations()
    assert found is not None
    assert (found.min, found.max, found.last, found.mean) == (0.0, 0.5, 0.0, 0.25)


@given(st.lists(durations, max_size=40))
def test_written_histogram_reads_back_the_same(values: list[float]) -> None:
    histogram = histogram_of(values) if values else Histogram()
    text = json.dumps(histogram.as_json())
    assert Histogram.from_json(json.loads(text)) == histogram
    assert len(text) < 1200


GOOD: dict[str, Any] = histogram_of([0.5, 2.0]).as_json()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {**GOOD, "count": True},
        {**GOOD, "count": -1},
        {**GOOD, "count": 3},
        {**GOOD, "count": 10**400},
        {**GOOD, "mean": 10**400},
        {**GOOD, "mean": "0.5"},
        {**GOOD, "least": -0.5},
        {**GOOD, "squares": math.nan},
        {**GOOD, "first": 122},
        {**GOOD, "first": None},
        {**GOOD, "buckets": {"60": 2}},
        {**GOOD, "buckets": [1.0, 1.0]},
        {**GOOD, "buckets": [0] * 10_000},
    ],
)
def test_malformed_histogram_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"is no|has other|add up"):
        Histogram.from_json(bad)
