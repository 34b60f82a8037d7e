"""Figures over time: counts and durations per step of a span, for charts and rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from django_mq.policy.histogram import Latency, latency


@dataclass(frozen=True, slots=True)
class Span:
    """How far back figures go, and the length of a step, in seconds."""

    name: str
    seconds: int
    step: int

    def starts(self, now: float) -> list[int]:
        """Return when each step begins, in seconds since 1970; the last one contains `now`.

        >>> starts = SPANS["hour"].starts(7265.0)
        >>> len(starts), starts[0], starts[-1]
        (60, 3720, 7260)
        """
        last = int(now // self.step) * self.step
        return list(range(last - self.seconds + self.step, last + 1, self.step))


SPANS = {
    each.name: each
    for each in (
        Span("hour", 3600, 60),
        Span("day", 24 * 3600, 3600),
        Span("week", 7 * 24 * 3600, 3 * 3600),
    )
}


@dataclass(slots=True)
class Counted:
    """Sums of figures. `failed` counts attempts; `dead` messages, some of which had none.

    `broadcast` counts a message when its first attempt ends, at the time of its creation.
    """

    acked: int = 0
    failed: int = 0
    retried: int = 0
    dead: int = 0
    broadcast: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)

    @property
    def waited(self) -> Latency | None:
        """How long messages were due before they were claimed; first attempts only."""
        return latency(self.waits)

    @property
    def ran(self) -> Latency | None:
        """How long handlers ran; a batch counts once per message."""
        return latency(self.runs)

    def add(self, other: Counted) -> None:
        """Add the figures of another step, queue or handler.

        >>> sums = Counted(acked=1, runs={40: 1})
        >>> sums.add(Counted(acked=2, runs={40: 1, 41: 5}))
        >>> sums.acked, sums.runs
        (3, {40: 2, 41: 5})
        """
        self.acked += other.acked
        self.failed += other.failed
        self.retried += other.retried
        self.dead += other.dead
        self.broadcast += other.broadcast
        for mine, more in ((self.waits, other.waits), (self.runs, other.runs)):
            for bucket, count in more.items():
                mine[bucket] = mine.get(bucket, 0) + count


def summed(parts: Iterable[Counted]) -> Counted:
    """Return the sum of `parts`."""
    sums = Counted()
    for each in parts:
        sums.add(each)
    return sums
