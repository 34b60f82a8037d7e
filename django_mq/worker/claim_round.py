"""The result of a claim, and the sums of one round of claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from django_mq.store.claim import Claim


class ClaimResult(NamedTuple):
    """The result of a claim.

    `at_limit`: the queue has as many messages in flight as it may, and more may wait.
    `contended`: another session is claiming from the queue at this moment.
    `size`: the bytes of all payloads. `scanned`: it looked for messages.
    """

    claim: Claim
    at_limit: bool = False
    contended: bool = False
    size: int = 0
    scanned: bool = True


@dataclass(slots=True)
class ClaimRound:
    """The sums of one round of claims, one claim per group of lanes.

    `filled`: the kinds of executors for which more messages may be due. `no_room`: a group was
    skipped. `unfinished`: a claim stopped early. `at_limit`: a queue has as many messages in
    flight as it may. `contended`: another session was claiming from the queue. `full_in`: the
    seconds until a group in which a scan from a mark found nothing may be scanned from the front;
    None if there is no such group.
    """

    count: int = 0
    filled: set[str] = field(default_factory=set)
    no_room: bool = False
    unfinished: bool = False
    at_limit: bool = False
    contended: bool = False
    full_in: float | None = None

    def note_mark(self, full_in: float) -> None:
        """Note that a scan from a mark found nothing, and when one from the front is allowed."""
        self.full_in = full_in if self.full_in is None else min(self.full_in, full_in)

    def is_filled(self, kind: str) -> bool:
        """Return whether a preferred group that uses executors of `kind` may have more messages."""
        return bool(self.filled) and ("both" in (kind, *self.filled) or kind in self.filled)
