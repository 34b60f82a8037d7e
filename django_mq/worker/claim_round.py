"""The result of a claim, and the sums of one round of claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from django_mq.store.claim import Claim


class ClaimResult(NamedTuple):
    """The result of a claim.

    `at_limit`: the queue has as many messages in flight as it may, and more may wait.
    `contended`: another session is claiming from the queue at this moment.
    `size`: the characters of all payloads.
    """

    claim: Claim
    at_limit: bool = False
    contended: bool = False
    size: int = 0


@dataclass(slots=True)
class ClaimRound:
    """The sums of one round of claims, one claim per group of lanes.

    `filled`: the kinds of executors for which more messages may be due. `no_room`: a group was
    skipped. `unfinished`: a claim stopped early. `contended`: another session was claiming from the
    queue.
    """

    count: int = 0
    filled: set[str] = field(default_factory=set)
    no_room: bool = False
    unfinished: bool = False
    contended: bool = False

    def is_filled(self, kind: str) -> bool:
        """Return whether a preferred group that uses executors of `kind` may have more messages."""
        return bool(self.filled) and ("both" in (kind, *self.filled) or kind in self.filled)
