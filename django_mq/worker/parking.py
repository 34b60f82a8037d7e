"""When a claim from queues with order keys parks the messages that it cannot take."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from django_mq.messages import ClaimedRow

#: The seconds for which claims do not park after one that took many messages of moving lines.
PAUSE_SECONDS = 0.02


class Parking:
    """Decides whether claims park, per statement group; times are in seconds on one clock.

    Parking writes to each row. It lets claims look behind lines that stand still, but it is wasted
    on lines whose handlers are fast: their messages are claimed sooner than they could be parked.
    So claims do not park for `PAUSE_SECONDS` after a claim of which at least half were further
    messages of lines that it took. Messages without a key, and the first ones of lines, do not
    count: they may lie between the messages of a line that stands still.
    """

    def __init__(self) -> None:
        self._paused_until: dict[str, float] = {}

    def keep(self, groups: Collection[str]) -> None:
        """Forget all groups but these."""
        self._paused_until = {
            group: until for group, until in self._paused_until.items() if group in groups
        }

    def seconds_left(self, group: str, now: float) -> float:
        """Return the seconds until claims of `group` park."""
        return max(0.0, self._paused_until.get(group, now) - now)

    def record_claim(
        self, group: str, now: float, rows: Sequence[ClaimedRow], *, room: int
    ) -> None:
        """Record that a claim of `group` took `rows`, of at most `room`."""
        lined = [(row.queue, row.handler, row.key) for row in rows if row.key is not None]
        further = len(lined) - len(set(lined))
        if further and 2 * further >= room:
            self._paused_until[group] = now + PAUSE_SECONDS
