"""The sums of one round of claims."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ClaimRound:
    """The sums of one round of claims, one claim per group of lanes.

    `filled`: the kinds of executors for which more may be due. `no_room`: a group was skipped.
    `unfinished`: a claim stopped early. `contended`: another session was claiming from the queue.
    """

    count: int = 0
    filled: set[str] = field(default_factory=set)
    no_room: bool = False
    unfinished: bool = False
    contended: bool = False

    def is_filled(self, kind: str) -> bool:
        """Return whether a preferred group that uses executors of `kind` may have more messages."""
        return bool(self.filled) and ("both" in (kind, *self.filled) or kind in self.filled)
