"""When a claim from queues with order keys parks the messages that it cannot take."""

from __future__ import annotations

#: Seconds after a claim that took much, in which claims do not park.
PAUSE_SECONDS = 0.02


class Parking:
    """When claims park again, per statement group; times are in seconds on one clock.

    Parking writes to each row. It lets claims look behind lines that stand still; but lines whose
    handlers are fast are taken faster than they are parked. So claims do not park for a moment
    after one that took at least half of what there was room for.

    >>> parking = Parking()
    >>> parking.seconds_left("keyed", 5.0)
    0.0
    >>> parking.record_claim("keyed", 5.0, taken=49, room=100)
    >>> parking.seconds_left("keyed", 5.0)
    0.0
    >>> parking.record_claim("keyed", 5.0, taken=50, room=100)
    >>> parking.seconds_left("keyed", 5.0 + PAUSE_SECONDS / 2) > 0
    True
    >>> parking.seconds_left("keyed", 5.0 + PAUSE_SECONDS), parking.seconds_left("alone mail", 5.0)
    (0.0, 0.0)
    """

    def __init__(self) -> None:
        self._paused_until: dict[str, float] = {}

    def seconds_left(self, group: str, now: float) -> float:
        """Return the seconds until claims of `group` park."""
        return max(0.0, self._paused_until.get(group, now) - now)

    def record_claim(self, group: str, now: float, *, taken: int, room: int) -> None:
        """Note that a claim of `group` took `taken` messages, and could have taken `room`."""
        if taken and 2 * taken >= room:
            self._paused_until[group] = now + PAUSE_SECONDS
