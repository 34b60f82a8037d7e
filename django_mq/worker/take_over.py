"""Take over lapsed messages; dead-letter those whose last attempt vanished with its worker."""

from __future__ import annotations

from typing import Any

from django_mq.executor import reports, settle_effects
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.statements import within_transaction
from django_mq.messages import ClaimedRow, Delivery
from django_mq.policy.error_text import Failure
from django_mq.policy.outcomes import EXHAUSTED, DeadLettered
from django_mq.store import Cursor, claim_lapsed
from django_mq.store.claim_lapsed import Lapsed

WORKER_VANISHED = DeadLettered(EXHAUSTED, Failure("WorkerVanished", "the lease lapsed"))


def take_over(cursor: Cursor, **arguments: Any) -> Lapsed:
    """Claim lapsed messages like `claim_lapsed()`, and apply the effects of those that died."""
    with within_transaction(cursor):
        found = claim_lapsed.claim_lapsed(cursor, **arguments)
        settle_effects.write_skipping_refused(cursor, list(map(_died, found.dead)))
    return found


def announce_dead(found: Lapsed) -> None:
    """Announce the messages that a take-over dead-lettered, after its commit."""
    reports.all_ended(list(map(_died, found.dead)))


def _died(row: ClaimedRow) -> Ended:
    return Ended(Delivery(row), Settled.FAILED, outcome=WORKER_VANISHED)
