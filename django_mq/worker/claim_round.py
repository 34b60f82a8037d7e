"""The result of a claim, and the sums of one round of claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from django_mq.store.claim import Claim


class ClaimResult(NamedTuple):
    """The result of a claim.

    `at_limit`: the queue has as many messages in flight as it may, and more may wait.
    `contended`: another session is claiming from the queue at this moment.
    `size`: the bytes of all payloads. `scanned`: it looked for messages. `again_in`: the seconds
    until a claim may look behind the rows that this one left unparked; else None.
    """

    claim: Claim
    at_limit: bool = False
    contended: bool = False
    size: int = 0
    scanned: bool = True
    again_in: float | None = None


@dataclass(slots=True)
class ClaimRound:
    """The sums of one round of claims, one claim per group of lanes.

    `filled`: the kinds of executors for which more messages may be due. `no_room`: a group was
    skipped. `unfinished`: a claim stopped early. `at_limit`: a queue has as many messages in
    flight as it may. `contended`: another session was claiming from the queue. `again_in`: the
    seconds until a claim that found nothing may look further, from the front of its lanes instead
    of from marks, or behind messages that it parks; else None.
    """

    count: int = 0
    filled: set[str] = field(default_factory=set)
    no_room: bool = False
    unfinished: bool = False
    at_limit: bool = False
    contended: bool = False
    again_in: float | None = None

    def look_again(self, seconds: float) -> None:
        """Note that a claim may look further in `seconds`."""
        self.again_in = seconds if self.again_in is None else min(self.again_in, seconds)

    def is_filled(self, kind: str) -> bool:
        """Return whether a preferred group that uses executors of `kind` may have more messages."""
        return bool(self.filled) and ("both" in (kind, *self.filled) or kind in self.filled)
