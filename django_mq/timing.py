"""What each handler did: counts of how its messages ended, and how long they took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django_mq.spread import Durations, Spread, whole


@dataclass(frozen=True, slots=True)
class HandlerTimings:
    """What one handler did: attempts by their ends, and how long its messages took.

    `failed` attempts were `retried`, or their messages are dead; `dead` counts also messages
    that died without an attempt (expired, or held for too long). `waited` is from the broadcast
    of a message to its claim, so with the delay that it was given, of first attempts only; `ran`
    is what the handler itself took, and of a batch counts for each of its messages. Either is
    None while there is none. `last_at` is when the last of these messages was claimed, by the
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
class Tally:
    """What one handler did, added up."""

    acked: int = 0
    failed: int = 0
    retried: int = 0
    snoozed: int = 0
    dead: int = 0
    last_at: datetime | None = None
    waited: Spread = field(default_factory=Spread)
    ran: Spread = field(default_factory=Spread)

    @property
    def total(self) -> int:
        """How many ends of messages were counted; of a message that was retried, each."""
        return self.acked + self.retried + self.snoozed + self.dead

    def merge(self, other: Tally) -> None:
        """Add what another process counted; what is here is the later."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.last_at is not None:
            self.last_at = max(self.last_at or other.last_at, other.last_at)
        self.waited.merge(other.waited)
        self.ran.merge(other.ran)

    def timings(self, handler: str) -> HandlerTimings:
        """Return what people read."""
        return HandlerTimings(
            handler,
            **{name: getattr(self, name) for name in _COUNTS},
            last_at=self.last_at,
            waited=self.waited.durations(),
            ran=self.ran.durations(),
        )

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json()` reads."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "last_at": self.last_at.isoformat() if self.last_at else None,
            "waited": self.waited.as_json(),
            "ran": self.ran.as_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> Tally:
        """Return what was written; raise ValueError for what nobody here would write.

        >>> tally = Tally(acked=2)
        >>> tally.ran.add([0.5, 0.7])
        >>> Tally.from_json(tally.as_json()) == tally
        True
        >>> Tally.from_json({"acked": -2})
        Traceback (most recent call last):
        ValueError: is no count
        """
        if not isinstance(value, Mapping):
            raise ValueError("is no object")
        counts = {name: whole(value.get(name)) for name in _COUNTS}
        at = value.get("last_at")
        if not isinstance(at, str | None):
            raise ValueError("has no moment of its last message")
        last_at = datetime.fromisoformat(at) if at else None
        if last_at and last_at.tzinfo is None:
            raise ValueError("has no moment of its last message")
        waited, ran = (Spread.from_json(value.get(each)) for each in ("waited", "ran"))
        return cls(**counts, last_at=last_at, waited=waited, ran=ran)


_COUNTS = ("acked", "failed", "retried", "snoozed", "dead")
