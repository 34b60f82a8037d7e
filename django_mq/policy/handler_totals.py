"""Totals of handlers: the outcomes of their messages, and how long these waited and ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django_mq.policy.histogram import Durations, Histogram, checked_count


@dataclass(frozen=True, slots=True)
class HandlerTimings:
    """The timings of one handler, as users read its totals: attempts by outcome, and durations.

    After a `failed` attempt the message was `retried` or is dead; `dead` also counts messages that
    died without an attempt (expired, or held for too long). `waited`: from the due time to the
    claim, for first attempts only. `ran`: the time in the handler; a batch counts once per message.
    Both are None without data. `last_at`: when the last of these messages was claimed, by the
    database's clock.
    """

    handler: str
    acked: int
    failed: int
    retried: int
    snoozed: int
    dead: int
    last_at: datetime | None
    waited: Durations | None
    ran: Durations | None


@dataclass(slots=True)
class HandlerTotals:
    """The running totals of one handler."""

    acked: int = 0
    failed: int = 0
    retried: int = 0
    snoozed: int = 0
    dead: int = 0
    last_at: datetime | None = None
    waited: Histogram = field(default_factory=Histogram)
    ran: Histogram = field(default_factory=Histogram)

    @property
    def total(self) -> int:
        """The number of attempts counted, and of messages that died without one."""
        return self.acked + self.retried + self.snoozed + self.dead

    def merge(self, other: HandlerTotals) -> None:
        """Add the counts of another process, which count as earlier than this object's own."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.last_at is not None:
            self.last_at = max(self.last_at or other.last_at, other.last_at)
        self.waited.merge(other.waited)
        self.ran.merge(other.ran)

    def timings(self, handler: str) -> HandlerTimings:
        """Return the totals as users read them."""
        return HandlerTimings(
            handler,
            **{name: getattr(self, name) for name in _COUNTS},
            last_at=self.last_at,
            waited=self.waited.durations(),
            ran=self.ran.durations(),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the totals as JSON data for `from_json()`."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "last_at": self.last_at.isoformat() if self.last_at else None,
            "waited": self.waited.as_json(),
            "ran": self.ran.as_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> HandlerTotals:
        """Return the totals that `as_json()` wrote; raise ValueError for any other data.

        >>> totals = HandlerTotals(acked=2)
        >>> totals.ran.add([0.5, 0.7])
        >>> HandlerTotals.from_json(totals.as_json()) == totals
        True
        >>> HandlerTotals.from_json({"acked": -2})
        Traceback (most recent call last):
        ValueError: is not a count
        """
        if not isinstance(value, Mapping):
            raise ValueError("is not an object")
        counts = {name: checked_count(value.get(name)) for name in _COUNTS}
        at = value.get("last_at")
        if not isinstance(at, str | None):
            raise ValueError("has no moment of its last message")
        last_at = datetime.fromisoformat(at) if at else None
        if last_at and last_at.tzinfo is None:
            raise ValueError("has no moment of its last message")
        waited, ran = (Histogram.from_json(value.get(each)) for each in ("waited", "ran"))
        return cls(**counts, last_at=last_at, waited=waited, ran=ran)


_COUNTS = ("acked", "failed", "retried", "snoozed", "dead")
