"""Take over what lapsed, and bury those whose last attempt vanished with its worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_mq.messages import Delivery
from django_mq.outcomes import EXHAUSTED, DeadLettered, Failure
from django_mq.store import lapsed
from django_mq.worker import consequences, reporting
from django_mq.worker.ending import Ended, Settled, within_transaction

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow
    from django_mq.store import Cursor
    from django_mq.store.lapsed import Lapsed

VANISHED = DeadLettered(EXHAUSTED, Failure("WorkerVanished", "the lease lapsed"))


def take_over(
    cursor: Cursor,
    *,
    queues: Sequence[str],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    skip_dead: bool = False,
    admitted: bool = False,
) -> Lapsed:
    """Claim lapsed messages as `lapsed.claim_lapsed()` does, with what follows from a death."""
    with within_transaction(cursor):
        found = lapsed.claim_lapsed(
            cursor,
            queues=queues,
            claimer=claimer,
            lease=lease,
            limit=limit,
            max_bytes=max_bytes,
            skip_dead=skip_dead,
            admitted=admitted,
        )
        consequences.follow(cursor, list(map(_buried, found.dead)))
    return found


def say_dead(found: Lapsed) -> None:
    """Announce those that are dead by a take-over: after its commit."""
    for row in found.dead:
        reporting.one_ended(_buried(row))


def _buried(row: ClaimedRow) -> Ended:
    return Ended(Delivery(row), Settled.FAILED, outcome=VANISHED)
