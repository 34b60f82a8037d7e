"""Statistics of many durations in constant memory.

They can be merged: the merged statistics of several processes equal those of one process that
measured every duration.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from django_mq.policy.column_bounds import MAX_FIGURE

#: The largest number of seconds accepted from a row.
MAX_SECONDS = 1e100
#: Ten buckets per power of ten, from a microsecond to a million seconds: the middle of a bucket is
#: within 13 % of each duration in it. The first and last buckets take everything beyond.
BOUNDS = tuple(10.0 ** (step / 10 - 6) for step in range(121))


@dataclass(frozen=True, slots=True)
class Durations:
    """Statistics of `count` durations, in seconds; `p50` (median), `p90` and `p99` within 13 %.

    The public statistics of totals, from a Histogram.
    """

    count: int
    last: float
    min: float
    max: float
    mean: float
    deviation: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Statistics of `count` durations, in seconds; the percentiles are accurate to 13 %.

    The public statistics of figures, of which only the counts by bucket are stored.
    """

    count: int
    p50: float
    p95: float
    p99: float


@dataclass(slots=True)
class Histogram:
    """The histogram; `squares` is the sum of the squared distances from the mean."""

    count: int = 0
    last: float = 0.0
    least: float = 0.0
    most: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def add(self, values: Sequence[float]) -> None:
        """Add durations in seconds, oldest first; a negative one counts as zero.

        In a large call, a duration takes a tenth of a microsecond.
        """
        if not values:
            return
        ordered = sorted(values)
        if ordered[0] < 0.0:
            ordered = sorted(max(0.0, value) for value in ordered)
        count = len(ordered)
        mean = math.fsum(ordered) / count
        other = Histogram(
            count=count,
            last=max(0.0, values[-1]),
            least=ordered[0],
            most=ordered[-1],
            mean=mean,
            squares=math.dist(ordered, [mean] * count) ** 2,
            buckets=[],
        )
        self._merge_moments(other)
        start = 0
        while start < count:
            bucket = bisect_right(BOUNDS, ordered[start])
            end = count
            if bucket < len(BOUNDS):
                end = bisect_left(ordered, BOUNDS[bucket], start)
            self.buckets[bucket] += end - start
            start = end

    def merge(self, other: Histogram) -> None:
        """Add the durations of another process as earlier ones: `last` stays, if it is set."""
        last = self.last if self.count else other.last
        self._merge_moments(other)
        self.last = last
        for bucket, count in enumerate(other.buckets):
            self.buckets[bucket] += count

    def _merge_moments(self, other: Histogram) -> None:
        """Add up count, extremes, mean and squares.

        Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise
        Algorithm for Computing Sample Variances", 1979.
        """
        if not other.count:
            return
        count = self.count + other.count
        apart = other.mean - self.mean
        self.least = min(self.least, other.least) if self.count else other.least
        self.most = max(self.most, other.most)
        self.mean += apart * other.count / count
        self.squares += other.squares + apart * apart * self.count * other.count / count
        self.count = count
        self.last = other.last

    def percentile(self, share: float) -> float:
        """Return the duration that the given share do not exceed: the middle of its bucket.

        >>> histogram = Histogram()
        >>> histogram.add([0.010] * 98 + [5.0, 7.0])
        >>> round(histogram.percentile(0.5), 4), round(histogram.percentile(0.99), 2)
        (0.0112, 4.47)
        """
        bucket = bucket_of_share(self.counts(), share)
        low = BOUNDS[bucket - 1] if bucket else 0.0
        high = BOUNDS[bucket] if bucket < len(BOUNDS) else self.most
        return min(max(math.sqrt(low * high), self.least), self.most)

    def durations(self) -> Durations | None:
        """Return the public statistics; None without data."""
        if not self.count:
            return None
        return Durations(
            count=self.count,
            last=self.last,
            min=self.least,
            max=self.most,
            mean=self.mean,
            deviation=math.sqrt(self.squares / self.count),
            p50=self.percentile(0.5),
            p90=self.percentile(0.9),
            p99=self.percentile(0.99),
        )

    def as_json(self) -> dict[str, Any]:
        """Return JSON data for `from_json()`, with the buckets from the first to the last used.

        >>> histogram = Histogram()
        >>> histogram.add([0.25, 0.25, 0.75])
        >>> histogram.as_json()["first"], histogram.as_json()["buckets"]
        (54, [2, 0, 0, 0, 0, 1])
        >>> Histogram.from_json(histogram.as_json()) == histogram
        True
        """
        used = [bucket for bucket, count in enumerate(self.buckets) if count]
        first, end = (used[0], used[-1] + 1) if used else (0, 0)
        moments = {name: getattr(self, name) for name in _MOMENTS}
        return {
            "count": self.count,
            **moments,
            "first": first,
            "buckets": self.buckets[first:end],
        }

    def counts(self) -> dict[int, int]:
        """Return the counts of the buckets in use, by number.

        >>> histogram = Histogram()
        >>> histogram.add([0.25, 0.25, 0.75])
        >>> histogram.counts()
        {54: 2, 59: 1}
        """
        return {bucket: count for bucket, count in enumerate(self.buckets) if count}

    @classmethod
    def from_json(cls, value: object) -> Histogram:
        """Return the histogram that `as_json()` wrote; raise ValueError for any other data."""
        if not isinstance(value, Mapping):
            raise ValueError("is not an object")
        counts = value.get("buckets")
        first = checked_count(value.get("first"))
        if not isinstance(counts, list) or first + len(counts) > len(BOUNDS) + 1:
            raise ValueError("has other buckets")
        histogram = cls(checked_count(value.get("count")))
        for each in _MOMENTS:
            setattr(histogram, each, _seconds(value.get(each)))
        histogram.buckets[first : first + len(counts)] = map(checked_count, counts)
        if sum(histogram.buckets) != histogram.count:
            raise ValueError("does not add up")
        return histogram


def bucket_of_share(counts: Mapping[int, int], share: float) -> int:
    """Return the bucket of the duration that the given share do not exceed.

    `counts` are counts of durations by bucket, at least one of them above 0.

    >>> bucket_of_share({40: 98, 67: 2}, 0.98), bucket_of_share({40: 98, 67: 2}, 0.99)
    (40, 67)
    """
    buckets = sorted(counts)
    wanted = max(1, math.ceil(sum(counts.values()) * share))
    return buckets[bisect_left(list(accumulate(counts[each] for each in buckets)), wanted)]


def latency(counts: Mapping[int, int]) -> Latency | None:
    """Return the statistics of a histogram, a count by bucket number; None if it is empty.

    >>> found = latency({40: 98, 67: 2})
    >>> found.count, round(found.p50, 4), round(found.p99, 2)
    (100, 0.0089, 4.47)
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    buckets = (bucket_of_share(counts, share) for share in (0.5, 0.95, 0.99))
    return Latency(total, *map(middle, buckets))


def middle(bucket: int) -> float:
    """Return the middle of a bucket, in seconds.

    >>> round(middle(54), 3), middle(0), middle(500)
    (0.224, 1e-06, 1000000.0)
    """
    low = BOUNDS[min(max(bucket - 1, 0), len(BOUNDS) - 1)]
    high = BOUNDS[min(bucket, len(BOUNDS) - 1)]
    return math.sqrt(low * high)


_MOMENTS = ("last", "least", "most", "mean", "squares")


def checked_count(value: object) -> int:
    """Return `value` if it is a count; raise ValueError otherwise."""
    if type(value) is not int or not 0 <= value <= MAX_FIGURE:
        raise ValueError("is not a count")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise ValueError("is not a duration")
    return float(value)
