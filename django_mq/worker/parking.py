"""When a claim from queues with order keys parks the messages that it cannot take."""

from __future__ import annotations

from collections.abc import Sequence

from django_mq.messages import ClaimedRow

#: Seconds after a claim that took much, in which claims do not park.
PAUSE_SECONDS = 0.02


class Parking:
    """When claims park again, per statement group; times are in seconds on one clock.

    Parking writes to each row. It lets claims look behind lines that stand still; but lines whose
    handlers are fast are taken faster than they are parked. So claims do not park for a moment
    after one that took at least half of what there was room for as further messages of its lines.
    Others do not show that a line moves on: they may be all that there is between the messages of
    one that stands still.
    """

    def __init__(self) -> None:
        self._paused_until: dict[str, float] = {}

    def seconds_left(self, group: str, now: float) -> float:
        """Return the seconds until claims of `group` park."""
        return max(0.0, self._paused_until.get(group, now) - now)

    def record_claim(
        self, group: str, now: float, rows: Sequence[ClaimedRow], *, room: int
    ) -> None:
        """Note that a claim of `group` took `rows`, and could have taken `room`."""
        lined = [(row.queue, row.handler, row.key) for row in rows if row.key is not None]
        further = len(lined) - len(set(lined))
        if further and 2 * further >= room:
            self._paused_until[group] = now + PAUSE_SECONDS
