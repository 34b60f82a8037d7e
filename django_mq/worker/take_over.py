"""Take over lapsed messages; dead-letter those whose last attempt vanished with its worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django_mq.executor import reports, settle_effects
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.statements import within_transaction
from django_mq.messages import ClaimedRow, Delivery
from django_mq.policy.error_text import Failure
from django_mq.policy.outcomes import EXHAUSTED, DeadLettered
from django_mq.store import Cursor, claim_keyed, claim_lapsed, refused_rows
from django_mq.store.claim import LANE_START
from django_mq.store.claim_lapsed import Lapsed, Mark
from django_mq.worker.claims import PLAIN, ClaimRouter
from django_mq.worker.queue_options import ClaimOptions

WORKER_VANISHED = DeadLettered(EXHAUSTED, Failure("WorkerVanished", "the lease lapsed"))


class LapsedRouter:
    """Takes over lapsed messages with the statement that each queue needs, like ClaimRouter."""

    def __init__(self, claims: ClaimRouter) -> None:
        self._claims = claims

    def statement_group(self, queue: str, options: ClaimOptions) -> str:
        """Return a text that is equal for queues which one statement can serve, as in `claims`."""
        return f"alone {queue}" if self._claims.facts.is_gated(queue, options) else PLAIN

    def take_over(
        self,
        cursor: Cursor,
        queues: Sequence[str],
        options: ClaimOptions,
        *,
        limit: int,
        marks: Mapping[str, Mark],
        suspects: bool,
    ) -> Lapsed:
        """Take over up to `limit` lapsed messages of `queues`, which make up one statement group.

        The scan of a queue begins behind its mark, if it has one. Without `suspects`, those are
        left out. A lapsed message of a queue that backs off becomes its probe: there may be no
        other.
        """
        if self._claims.stopped_queues:
            queues = [
                queue for queue in queues if not self._claims.stopped_queues.is_all_stopped(queue)
            ]
            if not queues:
                return claim_lapsed.NOTHING
        maximum = max(limit, options.batch_size, claim_keyed.WINDOW)
        rows = partial(refused_rows.lapsed, cursor, queues=queues, limit=maximum)
        take = partial(self._take_over, cursor, queues, options, limit, marks, suspects)
        found = self._claims.refused.claim_without_refused(cursor, take, rows)
        reports.all_ended(list(map(_died, found.dead)))  # after the commit
        return found

    def _take_over(
        self,
        cursor: Cursor,
        queues: Sequence[str],
        options: ClaimOptions,
        limit: int,
        marks: Mapping[str, Mark],
        suspects: bool,
    ) -> Lapsed:
        lined = options.ordered or any(map(self._claims.facts.has_keys, queues))
        take = partial(
            take_over,
            cursor,
            queues=queues,
            window=options.batch_size if lined else 0,
            skip_dead=options.skip_dead,
            marks=marks,
            suspects=suspects,
        )
        if not self._claims.facts.is_gated(queues[0], options):
            return take(**self._claims.arguments(options, self._claims.next_claimer(), limit))
        mark = marks.get(queues[0], LANE_START)
        with within_transaction(cursor):
            return self._take_over_gated(cursor, queues[0], options, limit, mark, take)

    def _take_over_gated(
        self,
        cursor: Cursor,
        queue: str,
        options: ClaimOptions,
        limit: int,
        mark: Mark,
        take: Callable[..., Lapsed],
    ) -> Lapsed:
        claimer = self._claims.next_claimer()
        gate = self._claims.enter_gate(cursor, queue, options)
        if (
            gate is None
            or gate.max_in_flight == 0
            or not claim_lapsed.any_lapsed(cursor, queue=queue, mark=mark)
        ):
            return claim_lapsed.NOTHING
        if gate.level == 0:
            return take(**self._claims.arguments(options, claimer, limit, admitted=True))
        if not self._claims.start_probe(cursor, queue, claimer, options):
            return claim_lapsed.NOTHING
        found = take(**self._claims.arguments(options, claimer, 1, admitted=True))
        self._claims.end_probe_claim(cursor, queue, claimer, found=bool(found.taken))
        return found


def take_over(cursor: Cursor, **arguments: Any) -> Lapsed:
    """Claim lapsed messages like `claim_lapsed()`, and apply the effects of those that died."""
    with within_transaction(cursor):
        found = claim_lapsed.claim_lapsed(cursor, **arguments)
        settle_effects.write_skipping_refused(cursor, list(map(_died, found.dead)))
    return found


def _died(row: ClaimedRow) -> Ended:
    return Ended(Delivery(row), Settled.FAILED, outcome=WORKER_VANISHED)
