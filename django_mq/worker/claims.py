"""Choose the statement that claims from a queue: plain, keyed, ordered, or behind a gate.

From a queue that backs off it claims only the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from operator import attrgetter

from django_mq.executor.statements import within_transaction
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.policy.line_marks import LineMarks
from django_mq.store import (
    Cursor,
    claim,
    claim_keyed,
    claim_lapsed,
    ordered_queues,
    refused_rows,
)
from django_mq.store.claim import LANE_START, NOTHING, Claim, Lane
from django_mq.store.claim_lapsed import Lapsed, Mark
from django_mq.worker.claim_round import ClaimResult
from django_mq.worker.gatekeeper import Gatekeeper
from django_mq.worker.queue_facts import QueueFacts
from django_mq.worker.queue_options import ClaimArguments, ClaimOptions
from django_mq.worker.refused_rows import RefusedRows
from django_mq.worker.take_over import announce_dead, take_over

#: The maximum number of batches that one statement claims.
MAX_BATCHES = 4
#: The statement groups of queues without and with keys. Each other group is one queue, which is
#: claimed alone.
PLAIN, KEYED = "plain", "keyed"
#: A claim that had no reason, or no right, to look for messages.
NOT_SCANNED = ClaimResult(NOTHING, scanned=False)


class ClaimRouter:
    """Claims for worker process `worker` with the statement that each queue needs.

    `facts` are from the last poll. `owned` are the ordered queues that this process owns, with the
    marks of their lines, which claims move. `has_any(queue)` says whether it has an unsettled
    message of the queue; `probing(queue, claimer)` is called for a claim that is the probe of its
    queue. Nothing is claimed from `stopped_queues`: it would be released at once.
    """

    def __init__(
        self,
        *,
        worker: str,
        owned: MutableMapping[str, LineMarks],
        stopped_queues: StoppedQueues,
        has_any: Callable[[str], bool] = lambda queue: False,
        probing: Callable[[str, str], None] = lambda queue, claimer: None,
    ) -> None:
        self._worker = worker
        self._numbers = count(1)
        self._owned = owned
        self._has_any = has_any
        self._stopped_queues = stopped_queues
        self.facts = QueueFacts()
        self._gatekeeper = Gatekeeper(self.facts, probing)
        # How many messages of the last claim's average size fit into `batch_bytes`.
        self._rows_per_batch_bytes = 0
        self.refused = RefusedRows()
        #: The names of the claims in this round of the loop.
        self.of_round: list[str] = []

    def begin_round(self) -> None:
        """Forget the names of earlier claims: each was answered, or its loss was recorded."""
        self.of_round.clear()

    def next_claimer(self) -> str:
        """Return the name of the next claim, which its rows carry."""
        self.of_round.append(f"{self._worker}:{next(self._numbers)}")
        return self.of_round[-1]

    def statement_group(self, queue: str, options: ClaimOptions) -> str:
        """Return a text that is equal for queues which one claim can serve, given equal options."""
        if options.ordered or self.facts.is_gated(queue, options):
            return f"alone {queue}"
        return KEYED if self.facts.has_keys(queue) else PLAIN

    def lapsed_statement_group(self, queue: str, options: ClaimOptions) -> str:
        """Return the same as `statement_group()`, but for a claim of lapsed messages."""
        return f"alone {queue}" if self.facts.is_gated(queue, options) else PLAIN

    def max_per_claim(self, queue: str, options: ClaimOptions) -> int:
        """Return the maximum number of messages of `queue` to claim with one statement."""
        if self.facts.is_gated(queue, options):
            return options.batch_size
        # The statement reads all rows before `batch_bytes` cuts them, so claim no more than
        # recently fitted.
        fitting = min(MAX_BATCHES * options.batch_size, self._rows_per_batch_bytes)
        return max(options.batch_size, fitting)

    def claim(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        *,
        limit: int,
        from_marks: bool = False,
    ) -> ClaimResult:
        """Claim up to `limit` messages of `lanes`, which have the same options and statement group.

        A claimer gets at most a batch: a larger limit makes several claims in one statement. With
        `from_marks` all scans begin at marks; only then, a queue with keys returns new ones.
        """
        if self._stopped_queues:
            lanes = [lane for lane in lanes if not self._stopped_queues.is_all_stopped(lane.queue)]
            if not lanes:
                return NOT_SCANNED
        waiting = partial(
            refused_rows.waiting,
            cursor,
            lanes=lanes,
            limit=max(limit, claim_keyed.WINDOW),
            admitted=self.facts.is_gated(lanes[0].queue, options),
        )
        take = partial(self._claim, cursor, lanes, options, limit, from_marks)
        return self.refused.claim_without_refused(cursor, take, waiting)

    def _claim(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        limit: int,
        from_marks: bool,
    ) -> ClaimResult:
        queue = lanes[0].queue
        if options.ordered and (queue not in self._owned or self._has_any(queue)):
            return NOT_SCANNED
        is_plain = self.statement_group(queue, options) == PLAIN
        with nullcontext() if is_plain else within_transaction(cursor):
            take = partial(self._claim_lanes, cursor, lanes, options, from_marks)
            if self.facts.is_gated(queue, options):
                return self._claim_gated(cursor, queue, options, limit, from_marks, take)
            arguments = self._arguments(options, self.next_claimer(), limit)
            more = [self.next_claimer() for _ in range((limit - 1) // options.batch_size)]
            return self._measured(options, take(arguments, more))

    def take_over(
        self,
        cursor: Cursor,
        queues: Sequence[str],
        options: ClaimOptions,
        *,
        limit: int,
        marks: Mapping[str, Mark],
    ) -> Lapsed:
        """Take over up to `limit` lapsed messages of `queues`, which make up one statement group.

        The scan of a queue begins behind its mark, if it has one. A lapsed message of a queue that
        backs off becomes its probe: there may be no other.
        """
        if self._stopped_queues:
            queues = [queue for queue in queues if not self._stopped_queues.is_all_stopped(queue)]
            if not queues:
                return claim_lapsed.NOTHING
        maximum = max(limit, options.batch_size, claim_keyed.WINDOW)
        rows = partial(refused_rows.lapsed, cursor, queues=queues, limit=maximum)
        take = partial(self._take_over, cursor, queues, options, limit, marks)
        found = self.refused.claim_without_refused(cursor, take, rows)
        announce_dead(found)
        return found

    def _take_over(
        self,
        cursor: Cursor,
        queues: Sequence[str],
        options: ClaimOptions,
        limit: int,
        marks: Mapping[str, Mark],
    ) -> Lapsed:
        lined = options.ordered or any(map(self.facts.has_keys, queues))
        take = partial(
            take_over,
            cursor,
            queues=queues,
            window=options.batch_size if lined else 0,
            skip_dead=options.skip_dead,
            marks=marks,
        )
        if not self.facts.is_gated(queues[0], options):
            return take(**self._arguments(options, self.next_claimer(), limit))
        mark = marks.get(queues[0], LANE_START)
        with within_transaction(cursor):
            return self._take_over_gated(cursor, queues[0], options, limit, mark, take)

    def _arguments(
        self, options: ClaimOptions, claimer: str, limit: int, *, admitted: bool = False
    ) -> ClaimArguments:
        return {
            "claimer": claimer,
            "lease": options.lease,
            "limit": limit,
            "max_bytes": options.batch_bytes,
            "admitted": admitted,
            "excluded": self.refused.ids(),
        }

    def _measured(self, options: ClaimOptions, taken: Claim) -> ClaimResult:
        """Record from `taken` how large messages are."""
        size = sum(map(len, map(attrgetter("payload"), taken.rows)))
        if size:
            self._rows_per_batch_bytes = options.batch_bytes * len(taken.rows) // size
        return ClaimResult(taken, size=size)

    def _claim_gated(
        self,
        cursor: Cursor,
        queue: str,
        options: ClaimOptions,
        limit: int,
        from_marks: bool,
        take: Callable[[ClaimArguments], Claim],
    ) -> ClaimResult:
        claimer = self.next_claimer()
        gate = self._gatekeeper.enter(cursor, queue, options, from_mark=from_marks)
        if gate is None:
            return NOT_SCANNED._replace(contended=True)
        if gate.max_in_flight is not None:
            self.facts.limited.add(queue)
        if gate.room == 0:
            return ClaimResult(NOTHING, at_limit=bool(gate.max_in_flight))
        limit = limit if gate.room is None else min(limit, gate.room)
        if gate.level == 0:
            taken = take(self._arguments(options, claimer, limit, admitted=True))
            return self._measured(options, taken)._replace(at_limit=len(taken.rows) == gate.room)
        if not self._gatekeeper.start_probe(cursor, queue, claimer, options):
            return NOT_SCANNED
        taken = take(self._arguments(options, claimer, 1, admitted=True))
        self._gatekeeper.end_probe_claim(cursor, queue, claimer, found=bool(taken.rows))
        return self._measured(options, taken)

    def _take_over_gated(
        self,
        cursor: Cursor,
        queue: str,
        options: ClaimOptions,
        limit: int,
        mark: Mark,
        take: Callable[..., Lapsed],
    ) -> Lapsed:
        claimer = self.next_claimer()
        gate = self._gatekeeper.enter(cursor, queue, options)
        if (
            gate is None
            or gate.max_in_flight == 0
            or not claim_lapsed.any_lapsed(cursor, queue=queue, mark=mark)
        ):
            return claim_lapsed.NOTHING
        if gate.level == 0:
            return take(**self._arguments(options, claimer, limit, admitted=True))
        if not self._gatekeeper.start_probe(cursor, queue, claimer, options):
            return claim_lapsed.NOTHING
        found = take(**self._arguments(options, claimer, 1, admitted=True))
        self._gatekeeper.end_probe_claim(cursor, queue, claimer, found=bool(found.taken))
        return found

    def _claim_lanes(
        self,
        cursor: Cursor,
        lanes: Sequence[Lane],
        options: ClaimOptions,
        from_marks: bool,
        arguments: ClaimArguments,
        more_claimers: Sequence[str] = (),
    ) -> Claim:
        queue, skip_dead = lanes[0].queue, options.skip_dead
        if options.ordered:
            rows, self._owned[queue] = ordered_queues.claim(
                cursor,
                queue=queue,
                worker=self._worker,
                skip_dead=skip_dead,
                more_claimers=more_claimers,
                marks=self._owned[queue],
                from_front=not from_marks,
                **arguments,
            )
            return Claim(rows, {})
        if self.facts.has_keys(queue):
            return claim_keyed.claim(
                cursor,
                lanes=lanes,
                skip_dead=skip_dead,
                more_claimers=more_claimers,
                with_marks=from_marks,
                **arguments,
            )
        return claim.claim(cursor, lanes=lanes, more_claimers=more_claimers, **arguments)
